"""What a person sets in `$PACELINE_HOME/config.toml`: tables `[trust]`, `[kv]`, `[pipeline]` and `[pipeline.host]`.

Law: nothing is guessed. A key that does not exist, a value of another type or out of its range is a `ConfigError` that names file and key
and says what is allowed; no file means the defaults. docs/reference/configuration.md has the table.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.core.errors import ConfigError
from paceline.core.ids import Trust
from paceline.core.model import ActivationDtype
from paceline.fleet.eligibility import TrustPolicy
from paceline.fleet.plan import PlanRequest
from paceline.machine.settings import PrefillRole
from paceline.store.home import Home

CONFIG_FILE = "config.toml"

_WORD: Final = Field(strict=False)
"""An enumeration, written as text."""


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TrustSettings(_Table):
    """`[trust]`: what machines of the fleet may see and supply. `min_host_trust` and `min_caller_trust` say it of layers."""

    min_answer_trust: Annotated[Trust, _WORD] = Trust.MEMBER
    """Machines below it get no requests and draft for none: they would see prompts, and decide answers."""
    min_source_trust: Annotated[Trust, _WORD] = Trust.MEMBER
    """Machines below it give no models to this one."""
    min_taker_trust: Annotated[Trust, _WORD] = Trust.MEMBER
    """Machines below it get no models from this one."""
    min_kv_trust: Annotated[Trust | None, _WORD] = None
    """Machines below it get no KV from this one and give it none: they would learn how prompts here begin, and decide answers. None: that of
    `min_answer_trust`, and never below a member."""
    min_outside_trust: Annotated[Trust, _WORD] = Trust.MEMBER
    """Machines below it reach no engine outside of the home network through this one: its owner may pay for what they ask."""


class KvSettings(_Table):
    """`[kv]`: KV that this machine and others share."""

    role: Annotated[PrefillRole, _WORD] = PrefillRole.BOTH
    """Whether this machine computes prompts for others, has its own computed by them, or both, where that is measured to be faster."""
    nixl: bool = True
    """Whether nodes of one user on one host read KV out of one another's memory, where NIXL is installed. Changes no byte."""
    spot_check_every: Annotated[int, Field(ge=0, le=1_000_000)] = 512
    """Of KV blocks that other machines gave, one in so many is computed again and compared; 0: none. Lowering it: a machine that lies is found
    sooner, and more is computed twice."""


class HostSettings(_Table):
    """`[pipeline.host]`: layers of models that this machine runs for others."""

    serve_shards: bool = False
    shard_eviction_idle_seconds: Annotated[float, Field(ge=1, le=604800)] = 600
    """Layers that were not used for so long are unloaded. Raising it: a pipeline opens at once for longer, and memory is kept for longer."""
    shard_max_memory_mb: Annotated[int, Field(ge=16, le=1 << 24)] | None = None
    """MiB for layers and their KV; None: a share of what is measured free."""
    max_concurrent_streams: Annotated[int, Field(ge=1, le=256)] = 4
    """Sessions of a shard. Raising it: more pipelines side by side, each with less KV and less of the machine."""
    min_caller_trust: Annotated[Trust, _WORD] = Trust.MEMBER
    """Callers below it are refused: a node that runs layers for them sees their activations, and gives them its time."""


class PlanSettings(_Table):
    """`[plan]`: constraints of every plan."""

    exact: bool = False
    """Only machines that compute the same bytes may share a model or continue one another's answers."""


class PipelineSettings(_Table):
    """`[pipeline]`: models that this machine runs together with others."""

    enabled: bool = True
    """Whether the plan may spread models over other machines."""
    max_shards_per_request: Annotated[int, Field(ge=1, le=256)] = 16
    shard_health_timeout_seconds: Annotated[float, Field(ge=1, le=3600)] = 30
    """A quarter of how old what a shard says of itself may be: three reports may be lost. Raising it: shards that are gone are tried for longer."""
    stall_seconds: Annotated[float, Field(ge=0.05, le=300)] = 2.0
    """A stage that answers and does no work for so long is lost. Raising it: a stalled answer goes on later; lowering it: slow is taken
    for stalled."""
    fallback_to_local: bool | None = None
    """Whether this machine alone goes on with a model of the same digest when no machines cover all layers. None: where the plan may run it alone."""
    fallback_to_local_after_failures: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Ends the search for other machines after so many losses; None: it lasts `search_seconds`."""
    activation_dtype: Annotated[ActivationDtype, _WORD] = ActivationDtype.BF16
    """fp16 and fp32 are outside the promise that bytes are the same everywhere."""
    allow_self_as_shard: bool = True
    max_concurrent_pipelines: Annotated[int, Field(ge=1, le=1024)] = 4
    min_host_trust: Annotated[Trust, _WORD] = Trust.MEMBER
    """Machines below it hold no layers for this one: they would see its activations."""
    spot_check_every: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """One batch in so many is computed by a second holder of its layers too, and compared; 0: none. Lowering it: tampering is found sooner,
    and the second holder works more."""
    search_seconds: Annotated[float, Field(ge=0, le=86400)] = 30
    """How long other machines are looked for after a loss, or may load no further byte, before requests fail."""
    keep_spares: bool = True
    """Machines outside a pipeline load spans of it where they have the memory, so that a loss costs no load."""
    report_ms: Annotated[int, Field(ge=10, le=10_000)] = 100
    """How often a stage says how far it is. Raising it: a stall is known later; lowering it: more small messages."""
    tensor_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Of activations, at every machine that takes part; 0: any free one."""
    host: HostSettings = HostSettings()

    @property
    def shard_age_s(self) -> float:
        """What a card says of loaded layers is not believed when it is older."""
        return 4 * self.shard_health_timeout_seconds

    def constrained(self, request: PlanRequest) -> PlanRequest:
        """Return a plan request with what these settings say of the machines that may run layers."""
        return replace(request, min_host_trust=self.min_host_trust, max_shards=self.max_shards_per_request)

    def overridden(
        self,
        *,
        enabled: bool | None = None,
        serve_shards: bool | None = None,
        fallback_to_local: bool | None = None,
    ) -> PipelineSettings:
        """With what the command line says in place of the file; None: nothing."""
        host = self.host if serve_shards is None else self.host.model_copy(update={"serve_shards": serve_shards})
        said = {"enabled": enabled, "fallback_to_local": fallback_to_local}
        return self.model_copy(update={"host": host, **{key: value for key, value in said.items() if value is not None}})


class Settings(_Table):
    """All of the file."""

    trust: TrustSettings = TrustSettings()
    kv: KvSettings = KvSettings()
    plan: PlanSettings = PlanSettings()
    pipeline: PipelineSettings = PipelineSettings()

    @property
    def policy(self) -> TrustPolicy:
        """The least trust for each use."""
        return TrustPolicy(
            answer=self.trust.min_answer_trust,
            host=self.pipeline.min_host_trust,
            source=self.trust.min_source_trust,
            taker=self.trust.min_taker_trust,
            caller=self.pipeline.host.min_caller_trust,
            kv=self.trust.min_kv_trust,
            outside=self.trust.min_outside_trust,
        )


def read_pipeline_settings(home: Home) -> PipelineSettings:
    """What the home's file says of pipelines. Raises ConfigError as `read_settings`."""
    return read_settings(home).pipeline


def read_trust_policy(home: Home) -> TrustPolicy:
    """What the home's file says of trust. Raises ConfigError as `read_settings`."""
    return read_settings(home).policy


def read_settings(home: Home) -> Settings:
    """What the home's file says; the defaults where there is none.

    Raises:
        ConfigError: it can't be read, or says what can't be.
    """
    path = home.root / CONFIG_FILE
    try:
        said = tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError:
        return Settings()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path} can't be read: {reason}", "Make it readable, or remove it for the defaults.") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {error}", "docs/reference/configuration.md has an example.") from error
    unknown = sorted(said.keys() - Settings.model_fields.keys())
    if unknown:
        tables = ", ".join(f"[{table}]" for table in TABLES if "." not in table)
        raise ConfigError(f"{path} has a table or key {unknown[0]!r}, which does not exist", f"There are: {tables}.")
    try:
        return Settings.model_validate(said)
    except ValidationError as error:
        raise _explained(path, error) from error


TABLES: Final[dict[str, type[BaseModel]]] = {
    "trust": TrustSettings,
    "kv": KvSettings,
    "plan": PlanSettings,
    "pipeline": PipelineSettings,
    "pipeline.host": HostSettings,
}


def _explained(path: Path, error: ValidationError) -> ConfigError:
    """The first thing that is wrong, as a person can mend it."""
    first = error.errors(include_url=False, include_context=False)[0]
    *within, key = map(str, first["loc"])
    table = TABLES.get(".".join(within), PipelineSettings)
    if not within or first["type"] == "model_type":
        return ConfigError(f"{path}: {'.'.join([*within, key])} is no table", f"Write it as [{'.'.join([*within, key])}].")
    where = f"{path}: [{'.'.join(within)}] {key}"
    if first["type"] == "extra_forbidden":
        return ConfigError(f"{where} does not exist", f"There are: {', '.join(table.model_fields)}.")
    return ConfigError(f"{where} can't be {first['input']!r:.100}", f"It is {allowed(table, key)}.")


def allowed(table: type[BaseModel], key: str) -> str:
    """What a key may be, in words."""
    schema = table.model_json_schema()
    said: dict[str, Any] = schema["properties"][key]
    said = next((each for each in said.get("anyOf", ()) if each.get("type") != "null"), said)
    if "$ref" in said:
        said = schema["$defs"][said["$ref"].rpartition("/")[2]]
    if "enum" in said:
        *others, last = (f'"{each}"' for each in said["enum"])
        return f"{', '.join(others)} or {last}"
    if said["type"] == "boolean":
        return "true or false"
    if said["type"] == "integer":
        return f"a whole number from {said['minimum']} to {said['maximum']}"
    return f"a number from {said['minimum']:g} to {said['maximum']:g}"
