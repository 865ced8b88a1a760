"""The CA for processes that serve others: each signature is made by a process of its own, which alone reads the key and ends with it.

Law: what serves strangers, parses models and speaks HTTP never has the key in its memory. Strangers start no process: a join's proof and a
member's certificate are checked before anything is to be signed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from base64 import b64decode, b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import IdentityError, NotTrusted, PacelineError
from paceline.core.ids import NodeId, Trust
from paceline.net.trust.authority import Authority
from paceline.net.trust.certificates import FleetRoot
from paceline.net.trust.identity import read_secret
from paceline.net.trust.signing import SignedKind

BOUND_S = 60.0
"""Of one signature, on a machine that is busy."""


@dataclass(frozen=True, slots=True)
class AuthorityProcess:
    """The CA whose key is in a file. A `CertificateAuthority`."""

    file: Path
    root: FleetRoot

    def issue(self, request: bytes, node_id: NodeId, now: float, *, after: int = 0, trust: Trust = Trust.MEMBER) -> bytes:
        """As `Authority.issue`."""
        return self._ask("issue", request, now, node_id=node_id, after=after, trust=str(trust))

    def issue_to_join_port(self, request: bytes, now: float) -> bytes:
        """As `Authority.issue_to_join_port`."""
        return self._ask("issue_to_join_port", request, now)

    def sign(self, kind: SignedKind, data: bytes) -> bytes:
        """As `Authority.sign`."""
        return self._ask("sign", data, 0.0, kind=kind.name)

    def _ask(self, what: str, data: bytes, now: float, **more: str | int) -> bytes:
        asked = json.dumps({"what": what, "data": b64encode(data).decode(), "now": now, **more})
        # Without the folder it is started in among the places that modules come from.
        command = [sys.executable, "-P", "-m", __name__, str(self.file)]
        try:
            done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=BOUND_S, check=True)  # noqa: S603  our own
            said: dict[str, str] = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise IdentityError(
                f"The process that signs for the fleet's CA failed ({type(error).__name__})", "See whether this machine has memory left"
            ) from error
        if "signed" in said:
            return b64decode(said["signed"])
        if "who" in said:
            raise NotTrusted(said["message"], said["hint"], who=said["who"])
        raise IdentityError(said["message"], said["hint"])


def answer(authority: Authority, asked: dict[str, Any]) -> bytes:
    """Sign what was asked for."""
    data, now = b64decode(asked["data"]), float(asked["now"])
    match asked["what"]:
        case "issue":
            return authority.issue(data, NodeId(asked["node_id"]), now, after=int(asked["after"]), trust=Trust(asked["trust"]))
        case "issue_to_join_port":
            return authority.issue_to_join_port(data, now)
        case _:
            return authority.sign(SignedKind[asked["kind"]], data)


def main() -> None:
    """One request from standard input, one answer to standard output."""
    try:
        signed = answer(Authority.from_pem(read_secret(Path(sys.argv[1]))), json.loads(sys.stdin.read()))
        said = {"signed": b64encode(signed).decode()}
    except PacelineError as error:
        said = {"message": error.message, "hint": error.hint}
        if isinstance(error, NotTrusted):
            said["who"] = error.who
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main()
