"""What the issuer keeps on disk (issuer.json): its tokens, and to whom ids were issued."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from paceline.core.errors import IdentityError
from paceline.core.ids import NodeId
from paceline.core.trust import Trust
from paceline.net.trust.folder import FleetFolder

JOIN_PORT = 8155
KEEP_EXPIRED_S = 7 * 86400
"""So long an expired token is told from one that never was."""


@dataclass(slots=True)
class HeldToken:
    """A token, with what makes it one."""

    token_id: str
    secret: str
    expires_at: float
    uses_left: int
    nonces: list[str]
    trust: Trust
    """Of those who join by it."""
    voided: bool = False


@dataclass(slots=True)
class Issued:
    """To whom an id was given."""

    key: str
    """SHA-256 of the public key."""
    at: int
    token: str = ""
    """By which it came; empty for the machine that began the fleet."""
    trust: Trust | None = None
    """That it was given last; None where it is not known."""


@dataclass(slots=True)
class IssuerState:
    """All of it."""

    tokens: dict[str, HeldToken]
    issued: dict[NodeId, Issued]
    join_port: int


def read_state(folder: FleetFolder) -> IssuerState:
    """What was kept; nothing issued yet where nothing was.

    Raises:
        IdentityError: it is damaged.
    """
    kept = folder.issuer_state()
    try:
        tokens = {
            token_id: HeldToken(
                token_id,
                str(one["secret"]),
                float(one["expires_at"]),
                int(one["uses_left"]),
                list(map(str, one["nonces"])),
                Trust(one["trust"]),
                bool(one["voided"]),
            )
            for token_id, one in dict[str, Any](kept.get("tokens", {})).items()
        }
        issued = {
            NodeId(node_id): Issued(
                str(one["key"]), int(one["at"]), str(one["token"]), None if one.get("trust") is None else Trust(one["trust"])
            )
            for node_id, one in dict[str, Any](kept.get("issued", {})).items()
        }
        return IssuerState(tokens, issued, int(kept.get("join_port", JOIN_PORT)))
    except (KeyError, TypeError, ValueError) as error:
        raise IdentityError("The issuer's state (issuer.json) is damaged", "Remove it; tokens handed out so far are void then") from error


def keep_state(folder: FleetFolder, state: IssuerState, now: float) -> None:
    """Write it, without tokens that expired long before `now`.

    Raises:
        IdentityError: it can't be written.
    """
    folder.keep_issuer_state(
        {
            "join_port": state.join_port,
            "tokens": {
                token_id: {name: value for name, value in asdict(token).items() if name != "token_id"}
                for token_id, token in state.tokens.items()
                if token.expires_at > now - KEEP_EXPIRED_S
            },
            "issued": {node_id: asdict(one) for node_id, one in sorted(state.issued.items())},
        }
    )
