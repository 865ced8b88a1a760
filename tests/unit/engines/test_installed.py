"""Engines that are found on a machine, by programs that stand in for llama-server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.engines import installed
from paceline.engines.installed import Gpu, Installed, Kind, find_installed

SCRIPT = """#!/bin/sh
[ -z "$HF_TOKEN" ] || exit 9
case "$1" in
--list-devices) {listing} ;;
--version) echo "version: 6123 (abc)" >&2 ;;
--help) printf -- '--parallel N\\n--host HOST  or a UNIX socket that ends with .sock\\n--no-webui\\n' ;;
esac
"""


@pytest.fixture(autouse=True)
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: None)


def found(folder: Path, listing: str) -> tuple[Installed, ...]:
    program = folder / "llama-server"
    program.write_text(SCRIPT.format(listing=listing))
    program.chmod(0o755)
    return find_installed({"PATH": f"{folder}{os.pathsep}/usr/bin:/bin", "HF_TOKEN": "secret"})


def test_a_program_on_the_path_is_asked_for_its_devices(tmp_path: Path) -> None:
    (engine,) = found(tmp_path, "echo 'Available devices:'; echo '  CUDA0: RTX (24217 MiB, 23849 MiB free)'")
    assert (engine.kind, engine.version, engine.gpus, engine.devices) == (Kind.LLAMA, "b6123", {Gpu.CUDA}, ("RTX",))
    assert engine.takes_socket
    assert engine.has("--no-webui")
    assert not engine.has("--offline")


@pytest.mark.parametrize("listing", ["exit 1", "kill -ILL $$", "exec sleep 600"])
def test_a_program_that_can_not_run_here_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: str) -> None:
    monkeypatch.setattr(installed, "ASK_S", 0.2)
    assert found(tmp_path, listing) == ()


@pytest.mark.parametrize(
    ("binary", "wheel", "first"), [("", "", "binary"), ("CUDA", "", "binary"), ("", "CUDA", "wheel"), ("CUDA", "CUDA", "binary")]
)
def test_the_one_with_a_device_comes_first_and_the_program_before_the_package(
    monkeypatch: pytest.MonkeyPatch, binary: str, wheel: str, first: str
) -> None:
    def one(name: str, gpu: str) -> Installed:
        return Installed(Kind.LLAMA, "llama-server", name, (), frozenset({Gpu(gpu)} if gpu else ()))

    monkeypatch.setattr(installed, "_binary", lambda _: one("binary", binary))
    monkeypatch.setattr(installed, "_wheel", lambda _: one("wheel", wheel))
    assert find_installed({})[0].version == first
