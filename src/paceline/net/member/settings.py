"""How a person sets a node's part in its fleet. Imports nothing heavy: the CLI reads it for `--help`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from paceline.core.errors import ConfigError
from paceline.fleet import presets
from paceline.fleet.eligibility import TrustPolicy
from paceline.fleet.presets import Preset
from paceline.net.card_codec import MAX_TTL_S

FLEET_PORT = 8154
PRESETS = {"desk": presets.desk, "lan": presets.lan, "simulation": presets.simulation}
DEFAULT_PRESET = "lan"
"""All nodes of a fleet want the same."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """One node's part in its fleet."""

    port: int = FLEET_PORT
    """Of the node's gRPC services; 0: any free one."""
    host: str = ""
    """Address to listen on; empty: all of this machine's. Only members of the fleet are answered, whatever else can reach it."""
    peers: tuple[str, ...] = ()
    """host:port of other nodes, beside those found by mDNS and those remembered."""
    mdns: bool = True
    preset: Preset = presets.lan()  # noqa: RUF009 - frozen
    max_revocation_age_s: float | None = None
    """Other nodes are refused where what this one knows of revocations is older; None: never."""
    tensor_port: int = 0
    """Of activations between machines that share a model; 0: any free one. On `host` too."""
    trust: TrustPolicy = TrustPolicy()  # noqa: RUF009 - frozen


def parse_preset(text: str) -> Preset:
    """A preset by name, and what is to differ from it: `desk`, or `desk,ttl_s=10,exchange_s=1`.

    Raises:
        ConfigError: no such preset or field, or no number.
    """
    name, *changes = [part.strip() for part in text.split(",")]
    make = PRESETS.get(name)
    if make is None:
        raise ConfigError(f"There is no fleet preset {name!r}", f"One of: {', '.join(PRESETS)}.")
    preset = make()
    kinds = {field.name: type(getattr(preset, field.name)) for field in fields(preset) if field.name != "bounds"}
    for change in changes:
        field, equals, value = change.partition("=")
        if not equals or field not in kinds:
            raise ConfigError(f"A fleet preset has no field {field!r}", f"It has: {', '.join(kinds)}.")
        try:
            number = kinds[field](value)
        except ValueError as error:
            raise ConfigError(f"{field}={value} is not a number", f"Such as {field}={getattr(preset, field)}.") from error
        if not 0 <= number < float("inf"):
            raise ConfigError(f"{field} can't be {value}", "It is 0 or more.")
        preset = replace(preset, **{field: number})
    if preset.exchange_s <= 0 or preset.rpc_timeout_s <= 0 or not preset.restamp_s < preset.ttl_s <= MAX_TTL_S:
        raise ConfigError(
            f"The preset {text!r} can't work",
            f"exchange_s and rpc_timeout_s are above 0, and ttl_s is above restamp_s, {MAX_TTL_S} at most.",
        )
    return preset
