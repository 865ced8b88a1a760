"""Make the typed stubs in src/paceline/net/wire from proto/. With --check: write nothing, and fail where they differ.

The stubs are checked in, so that an installed Paceline needs no compiler. protoc names its modules after the proto's folder
(`paceline.v1`), which would be a package of its own; the import lines are rewritten to where the files are.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
WIRE = ROOT / "src" / "paceline" / "net" / "wire"
IMPORT = re.compile(r"^(from|import) paceline\.v1\b", re.MULTILINE)


def generate(out: Path) -> dict[str, str]:
    """Run protoc and its plugins into `out`; returns the files' text by name."""
    scripts = Path(sys.executable).parent
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.glob("paceline/v1/*.proto"))
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}"),
        *(f"--python_out={out}", f"--grpc_python_out={out}"),
        *(f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}", f"--mypy_out=quiet:{out}"),
        # Our servers and clients are all grpc.aio.
        *(f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}", f"--mypy_grpc_out=quiet,only_async:{out}"),
        *sources,
    ]
    subprocess.run(command, check=True, cwd=PROTO)
    files = sorted((out / "paceline" / "v1").iterdir())
    return {path.name: IMPORT.sub(r"\1 paceline.net.wire", path.read_text()) for path in files}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail where the checked-in stubs differ, and write nothing")
    check: bool = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        made = generate(Path(scratch))
    have = {path.name: path.read_text() for path in WIRE.glob("*_pb2*.py*")}
    drifted = sorted(name for name in made.keys() | have.keys() if made.get(name) != have.get(name))
    if check:
        for name in drifted:
            print(f"{WIRE.relative_to(ROOT) / name} differs from proto/; run: make stubs", file=sys.stderr)
        return 1 if drifted else 0
    for name in drifted:
        if name in made:
            (WIRE / name).write_text(made[name])
        else:
            (WIRE / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
