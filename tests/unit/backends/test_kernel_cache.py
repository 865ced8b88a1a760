"""Compiled kernels are kept by version, and old versions don't pile up."""

from __future__ import annotations

import ast
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.backends import cpu, kernel_cache
from paceline.backends.numerics import SeededWeights
from paceline.backends.options import LoadOptions
from paceline.core.model import BLOCK_TOKENS, ModelSpec, RopeSpec, WeightsFormat

SPEC = ModelSpec("llama", 1, 512, 8, 2, 64, 768, 1000, 256, 1e-5, RopeSpec(10000.0), tied_head=False)


@pytest.fixture(autouse=True)
def numba_cache() -> Iterator[None]:
    before = os.environ.get("NUMBA_CACHE_DIR")
    yield
    os.environ.pop("NUMBA_CACHE_DIR", None)
    if before is not None:
        os.environ["NUMBA_CACHE_DIR"] = before
    kernel_cache.config.reload_config()


def compile_layers() -> None:
    """Leave what compiling them leaves."""
    index = Path(os.environ["NUMBA_CACHE_DIR"]) / "cpu" / "team.enter-36.py312.nbi"
    index.parent.mkdir(exist_ok=True)
    index.write_bytes(b"index")


def options(folder: Path) -> LoadOptions:
    """Of all layers, with kernels of nobody else: others may compile at any time."""
    return LoadOptions(SPEC.all_layers, WeightsFormat.BF16, 2, BLOCK_TOKENS, 1, kernel_cache=folder)


def is_locked() -> bool:
    with (Path(os.environ["NUMBA_CACHE_DIR"]) / "lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_known_once_complete(tmp_path: Path) -> None:
    assert not kernel_cache.use(tmp_path)
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    assert not kernel_cache.use(tmp_path)
    kernel_cache.complete()
    assert kernel_cache.use(tmp_path)
    assert folder.parent == tmp_path
    assert not kernel_cache.known(tmp_path), "a sampler was compiled, and no layers"
    compile_layers()
    kernel_cache.complete()
    assert kernel_cache.known(tmp_path)


def test_sources_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_cache.known(tmp_path)
    read: list[str] = []
    monkeypatch.setattr(kernel_cache, "sources", lambda: read.append("again") or [])
    kernel_cache.known(tmp_path)
    assert not read


def test_a_kernel_that_another_process_takes_away_ends_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel_cache.use(tmp_path)
    compile_layers()
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.suffix == ".nbi":
            path.unlink()
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    kernel_cache.complete()
    assert "can't be written" in caplog.text


class Packing(Exception):
    """It begins."""


@pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")
def test_what_threads_pack_with_is_compiled_before_while_no_other_process_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.backends.cpu import pack, probe, weights

    assert probe.pack_model is weights.pack_model, "what imports it has the real one"
    packers: list[tuple[str, bool]] = []

    def pack_model(*_: object, **__: object) -> None:
        raise Packing

    monkeypatch.setattr(pack, "packer", lambda form: packers.append((form.name, is_locked())))
    monkeypatch.setattr(weights, "pack_model", pack_model)
    with pytest.raises(Packing):
        cpu.load(SeededWeights(SPEC), options(tmp_path))
    assert set(packers) == {("BF16", True)}
    assert not is_locked()
    with (
        kernel_cache.alone(),
        pytest.raises(Packing),
    ):  # one that compiles much is not waited for: who counts bytes would take this for a load that hangs
        cpu.load(SeededWeights(SPEC), options(tmp_path))


@pytest.mark.parametrize("there", [True, False])
def test_the_first_load_into_torch_compiles_while_no_other_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, there: bool
) -> None:
    from paceline.backends.torch import load, loading

    loads: list[bool] = []
    kernel_cache.use(tmp_path)
    monkeypatch.setattr(kernel_cache, "use", lambda _: there)
    monkeypatch.setattr(loading, "load_cpu", lambda *_: loads.append(is_locked()))
    load(SeededWeights(SPEC), options(tmp_path))
    assert loads == [not there]


def test_old_versions_are_removed_but_for_the_latest(tmp_path: Path) -> None:
    for age in range(11):
        (tmp_path / f"v{age}").mkdir()
        os.utime(tmp_path / f"v{age}", (1000 - age, 1000 - age))
    kernel_cache.use(tmp_path)
    assert sorted(p.name for p in tmp_path.glob("v*")) == [f"v{age}" for age in range(8)]


@pytest.mark.parametrize("damage", [b"", b"x", None])
def test_damaged_kernels_are_compiled_again(tmp_path: Path, damage: bytes | None) -> None:
    kernel_cache.use(tmp_path)
    kernel = Path(os.environ["NUMBA_CACHE_DIR"]) / "cpu" / "step.other-1.py312.1.nbc"
    compile_layers()
    kernel.write_bytes(b"machine code")
    kernel_cache.complete()
    assert kernel_cache.known(tmp_path)
    kernel.unlink() if damage is None else kernel.write_bytes(damage)
    assert not kernel_cache.use(tmp_path)
    assert not kernel.exists()
    # The others stand, so that plans count no compiler's memory, and nothing is removed twice.
    assert kernel_cache.known(tmp_path)
    assert kernel_cache.use(tmp_path)


def test_of_damaged_kernels_only_their_functions_are_compiled_again(tmp_path: Path) -> None:
    kernel_cache.use(tmp_path)
    folder = Path(os.environ["NUMBA_CACHE_DIR"]) / "cpu"
    folder.mkdir()
    names = ["a.f-1.py311.nbi", "a.f-1.py311.1.nbc", "a.f-1.py311.2.nbc", "a.g-9.py311.nbi", "a.g-9.py311.1.nbc"]
    for name in names:
        (folder / name).write_bytes(name.encode())
    kernel_cache.complete()
    (folder / names[2]).write_bytes(b"cut")
    assert not kernel_cache.use(tmp_path)
    assert sorted(file.name for file in folder.iterdir()) == sorted(names[3:])
    kernel_cache.complete()
    assert kernel_cache.use(tmp_path)


def test_one_process_compiles_and_others_wait_for_what_it_leaves(tmp_path: Path) -> None:
    kernel_cache.use(tmp_path)
    code = (
        "import sys; from pathlib import Path; from paceline.backends import kernel_cache;"
        "print(kernel_cache.use(Path(sys.argv[1])), flush=True); lock = kernel_cache.alone(); lock.__enter__();"
        "print(kernel_cache.known(Path(sys.argv[1])))"
    )
    with kernel_cache.alone():
        other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "False\n", "it does not wait before it has to compile"
        with (Path(os.environ["NUMBA_CACHE_DIR"]) / "lock").open("ab") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        compile_layers()
        kernel_cache.complete()
    assert other.communicate()[0] == "True\n"


def test_a_seal_that_is_no_seal_counts_for_nothing(tmp_path: Path) -> None:
    kernel_cache.use(tmp_path)
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    for text in (b"", b"[]", b"\xff"):
        (folder / "complete").write_bytes(text)
        assert not kernel_cache.known(tmp_path)


def test_where_nothing_can_be_kept_kernels_are_still_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kernels").write_bytes(b"a file where a folder should be")
    assert not kernel_cache.use(tmp_path / "kernels")
    assert not kernel_cache.in_use()
    kernel_cache.complete()
    assert "can't be kept" in caplog.text


def test_whatever_is_compiled_into_kernels_is_part_of_their_version() -> None:
    hashed = {source.resolve() for source in kernel_cache.sources()}
    package = Path(kernel_cache.__file__).parents[1]
    for source in hashed:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline."):
                constants = [name.name for name in node.names if name.name.isupper()]
                origin = package.joinpath(*(node.module or "").split(".")[1:])
                origin = origin / "__init__.py" if origin.is_dir() else origin.with_suffix(".py")
                assert not constants or origin.resolve() in hashed, f"{source.name} takes {constants} of {origin.name}"


def test_the_function_that_runs_layers_is_where_the_names_of_its_files_say() -> None:
    module, function = kernel_cache._LAYERS.removesuffix("-").split(".")
    tree = ast.parse((Path(kernel_cache.__file__).parent / "cpu" / f"{module}.py").read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


COMPILE_READERS = """
import sys
from pathlib import Path
from paceline.backends import kernel_cache
kernel_cache.use(Path(sys.argv[1]))
from paceline.backends.cpu.forms import Form
from paceline.backends.cpu.rows import reader
print(*(sum(reader(form).stats.cache_hits.values()) for form in Form))
"""


def test_embedding_kernels_of_every_form_are_read_by_the_next_process(tmp_path: Path) -> None:
    def hits() -> list[int]:
        process = subprocess.run([sys.executable, "-c", COMPILE_READERS, str(tmp_path)], capture_output=True, text=True, check=True)
        return [int(count) for count in process.stdout.split()]

    assert not any(hits())
    assert all(hits())


COMPILE_PRODUCT = """
import sys
from pathlib import Path
from paceline.backends import kernel_cache
kernel_cache.use(Path(sys.argv[1]))
from paceline.backends.cpu.forms import Form
from paceline.backends.cpu.products import product
product(Form.Q8_0)
"""


def test_a_product_is_read_by_the_next_process_and_leaves_no_file_more(tmp_path: Path) -> None:
    def compiled() -> dict[str, bytes]:
        subprocess.run([sys.executable, "-c", COMPILE_PRODUCT, str(tmp_path)], check=True)
        return {file.name: file.read_bytes() for file in tmp_path.rglob("products.*")}

    first = compiled()
    assert any(name.endswith(".nbc") for name in first)
    assert compiled() == first
