"""Two machines become a fleet by what a person types, as real processes."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from paceline.core.trust import Trust
from paceline.transport.trust.folder import FleetFolder

Start = Callable[..., "subprocess.Popen[str]"]


def test_init_token_join_revoke(start_paceline: Start, tmp_path: Path) -> None:
    homes = [str(tmp_path / name) for name in ("a", "b")]
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]

    def run(home: int, *args: str) -> tuple[int, str, str]:
        process = start_paceline(*args, PACELINE_HOME=homes[home])
        out, err = process.communicate(timeout=300)
        assert "Traceback" not in err
        return process.returncode, out, err

    code, out, _ = run(0, "init", "--name", "attic", "--join-port", str(port), "--address", "127.0.0.1")
    assert code == 0
    assert "this machine is attic" in out
    unserved = re.search(r"paceline join (paceline1\.\S+)", out)
    assert unserved

    # Nobody keeps the port yet.
    code, _, err = run(1, "join", unserved[1])
    assert code == 2
    assert f"127.0.0.1:{port} (connection refused)" in err
    assert "hint:" in err

    waiting = start_paceline("token", "--uses", "1", "--trust", "guest", "--address", "127.0.0.1", PACELINE_HOME=homes[0])
    assert waiting.stdout is not None
    assert waiting.stderr is not None
    # A script reads what others join by; a person is told beside it what goes on.
    text = "".join(waiting.stdout.readline() for _ in range(3))
    assert "On one machine (guest), until" in text
    token = re.search(r"paceline1\.\S+", text)
    assert token
    assert waiting.stderr.readline().startswith("Waiting for them")
    # Handed over so that no list of processes shows it.
    joining = start_paceline("join", "-", "--name", "cellar", PACELINE_HOME=homes[1], stdin=subprocess.PIPE)
    out, _ = joining.communicate(text, timeout=300)
    code = joining.returncode
    assert (code, out) == (0, "Joined: this machine is cellar.\nNow: paceline up\n")
    assert FleetFolder(Path(homes[1]) / "fleet").identity().member.trust is Trust.GUEST
    out, err = waiting.communicate(timeout=300)
    assert (waiting.returncode, out, err) == (0, "cellar joined\nThe token is used up or has expired.\n", "")

    code, out, _ = run(0, "revoke", "cellar")
    assert code == 0
    assert "Revoked cellar" in out

    code, out, err = run(0, "token", "--no-wait")
    assert (code, err) == (0, "")
    assert "good while paceline up runs here" in out
    code, _, err = run(1, "join", "-")
    assert code == 2
    assert "in a fleet already, as cellar" in err
    assert "paceline revoke cellar on the machine with the fleet's CA" in err

    # Ctrl-C while waiting is no failure.
    waiting = start_paceline("token", "--ttl", "90s", "--address", "127.0.0.1", PACELINE_HOME=homes[0])
    assert waiting.stderr is not None
    assert "Waiting" in waiting.stderr.readline()
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=300)
    assert (waiting.returncode, err) == (0, "")
    assert "Stopped" in out
