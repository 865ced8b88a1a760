"""Two machines become a fleet by what a person types, as real processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from paceline.core.ids import Trust
from paceline.core.ports import find_port
from paceline.net.trust.folder import FleetFolder

Start = Callable[..., "subprocess.Popen[str]"]


def test_init_token_join_revoke(start_paceline: Start, tmp_path: Path) -> None:
    homes = [str(tmp_path / name) for name in ("a", "b")]
    port = find_port("127.0.0.1")

    def run(home: int, *args: str) -> tuple[int, str, str]:
        process = start_paceline(*args, PACELINE_HOME=homes[home])
        out, err = process.communicate(timeout=300)
        assert "Traceback" not in err
        return process.returncode, out, err

    code, out, _ = run(0, "init", "--name", "attic", "--join-port", str(port), "--address", "127.0.0.1")
    assert code == 0
    assert "this machine is attic" in out
    # On a line of its own: what is pasted after a command is in the list of processes, and in a shell's history.
    unserved = re.search(r"^(paceline2\.\S+)$", out, re.MULTILINE)
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
    token = re.search(r"^paceline2\.\S+$", text, re.MULTILINE)
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

    code, out, _ = run(0, "token", "--list")
    assert code == 0
    assert re.fullmatch(r"[0-9a-f]{16}  member, for one machine until .*\n", out)
    code, out, _ = run(0, "revoke", "cellar")
    assert code == 0
    assert "Revoked cellar" in out
    assert "1 open token voided" in out
    assert run(0, "token", "--list")[1] == "There is no token that a machine could join by.\n"

    code, out, err = run(0, "token", "--no-wait")
    assert (code, err) == (0, "")
    assert "good while paceline up runs here" in out
    code, out, _ = run(0, "token", "--void", "all")
    assert (code, out) == (0, "Voided 1 token: no machine joins by it any more.\n")
    code, _, err = run(0, "token", "--void", "abc")
    assert code == 2
    assert "'abc' is no open token" in err
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


def memory_of(pid: int) -> Iterator[bytes]:
    """What a process has in its memory, piece by piece."""
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in maps:
            span, rights = line.split()[:2]
            if rights.startswith("rw"):
                start, end = (int(part, 16) for part in span.split("-"))
                memory.seek(start)
                with contextlib.suppress(OSError):  # given back meanwhile
                    yield memory.read(end - start)


@pytest.mark.skipif(sys.platform != "linux", reason="where a process can be looked into")
def test_the_process_that_serves_strangers_does_not_have_the_cas_key(start_paceline: Start, tmp_path: Path) -> None:
    homes = [str(tmp_path / name) for name in ("a", "b")]
    port = str(20_000 + os.getpid() % 10_000)  # below those that the system hands out, to other tests too
    begun = start_paceline("init", "--name", "attic", "--join-port", port, "--address", "127.0.0.1", PACELINE_HOME=homes[0])
    assert begun.wait(300) == 0, begun.communicate()
    serving = start_paceline("token", "--uses", "2", "--address", "127.0.0.1", PACELINE_HOME=homes[0])
    assert serving.stdout is not None
    text = "".join(serving.stdout.readline() for _ in range(3))
    joining = start_paceline("join", "-", "--name", "cellar", PACELINE_HOME=homes[1], stdin=subprocess.PIPE)
    said = joining.communicate(text, timeout=300)
    assert joining.returncode == 0, said
    # It has let a machine in, and still has not had what it takes.
    folder = FleetFolder(Path(homes[0]) / "fleet")
    root = folder.identity().root
    secrets = {"the CA's key": secret_parts(folder.authority().key_pem), "what everybody may know": (root.der,)}
    found = set[str]()
    for piece in memory_of(serving.pid):
        found.update(name for name, parts in secrets.items() if any(part in piece for part in parts))
    assert found == {"what everybody may know"}
    serving.send_signal(signal.SIGINT)
    assert serving.wait(300) == 0


def secret_parts(pem: bytes) -> tuple[bytes, ...]:
    """A key as a process may hold it: the number both ways round, and as text."""
    key = load_pem_private_key(pem, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    number = key.private_numbers().private_value.to_bytes(32, "big")
    return number, number[::-1], pem.splitlines()[1]


def test_a_copy_of_the_ca_is_encrypted(start_paceline: Start, tmp_path: Path) -> None:
    home, copy, passphrase = str(tmp_path / "a"), tmp_path / "ca.pem", tmp_path / "passphrase"
    passphrase.write_text("five words on a line\n")

    def run(*args: str) -> tuple[int, str]:
        process = start_paceline(*args, PACELINE_HOME=home, stdin=subprocess.DEVNULL)
        out, err = process.communicate(timeout=300)
        assert "Traceback" not in err
        return process.returncode, out + err

    assert run("init", "--name", "attic")[0] == 0
    code, said = run("ca", "export", str(copy))
    assert code == 2
    assert "--passphrase-file" in said
    assert run("ca", "export", str(copy), "--passphrase-file", str(passphrase))[0] == 0
    assert b"BEGIN ENCRYPTED PRIVATE KEY" in copy.read_bytes()
    folder = FleetFolder(tmp_path / "a" / "fleet")
    before = folder.authority_file.read_bytes()
    folder.authority_file.unlink()
    assert run("ca", "import", str(copy))[0] == 2
    assert not folder.has_authority
    assert run("ca", "import", str(copy), "--passphrase-file", str(passphrase))[0] == 0
    assert folder.authority_file.read_bytes() == before
    # Only where that is asked for, it is not.
    assert run("ca", "export", str(tmp_path / "plain.pem"), "--no-passphrase")[0] == 0
    assert (tmp_path / "plain.pem").read_bytes() == before
