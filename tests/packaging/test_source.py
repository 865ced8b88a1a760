"""The source stays small, and its names tell one thing from another."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "paceline"
LONGEST = 500
"""Lines of a file."""

pytestmark = pytest.mark.skipif(not SOURCE.is_dir(), reason="the tests travel without the source")


def files() -> list[Path]:
    """Without generated stubs."""
    return sorted(path for path in SOURCE.rglob("*.py") if "wire" not in path.parts)


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in files()}


def test_no_file_is_too_long() -> None:
    assert [str(path) for path in files() if lines(path) > LONGEST] == []


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict[str, list[str]](list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_two_files_of_a_room_have_one_name() -> None:
    """A room is a package, or a way. What each API, backend or way has, it calls alike."""
    rooms = defaultdict[tuple[str, ...], list[str]](list)
    for path in files():
        inside = path.relative_to(SOURCE)
        if path.name != "__init__.py" and inside.parts[0] not in {"backends", "server"}:
            rooms[inside.parts[: 2 if inside.parts[0] == "ways" else 1]].append(path.name)
    twice = {room: sorted({name for name in names if names.count(name) > 1}) for room, names in rooms.items()}
    assert {room: names for room, names in twice.items() if names} == {}


STARTS_PYTHON = re.compile(
    r"""sys\.executable|\bimport\ executable|ProcessPoolExecutor|multiprocessing\ import\ (?!Pipe\b)|multiprocessing\.(?!connection\b)|resource_tracker|runpy
    |\bos\.(?:fork|exec|spawn|posix_spawn|system|popen)|create_subprocess|shell=True|getoutput|[\["']/?(?:[\w./]+/)?python[\d.]*["'],\s*["']-""",
    re.VERBOSE,
)
"""Spellings by which a module could start Python, or a shell, without the one function that makes the command."""


def test_one_function_makes_the_command_of_every_python_process() -> None:
    found = {str(path.relative_to(SOURCE)): STARTS_PYTHON.findall(path.read_text()) for path in files()}
    assert {path: said for path, said in found.items() if said} == {
        "core/processes.py": ["sys.executable"],
        "core/piped.py": ["create_subprocess"],  # with that command
    }


RETIRED = {
    "CoverPart": "LayerSpan",
    "DeskLine": "LocalConnection",
    "FleetEyes": "FleetAccess",
    "FleetLines": "FleetConnections",
    "LostSpan": "LayerSpan",
    "Mailbox": "AskQueue",
    "ProposerDesk": "ProposerPool",
    "RemoteLine": "RemoteConnection",
    "RouteNews": "events",
    "SpanLease": "LayerSpan",
    "StageLoss": "PipelineFault",
    "StagePart": "LayerSpan",
    "fleet_look": "snapshot",
    "wait_for_news": "wait for events",
}
"""Coinages that were renamed, and the words that stand for them now."""


def test_no_retired_word_comes_back() -> None:
    words = re.compile(rf"\b({'|'.join(RETIRED)})\b")
    root = SOURCE.parents[1]
    sources = [path for folder in ("src", "tests", "bench", "tools") for path in sorted((root / folder).rglob("*.py"))]
    pages = sorted(path for path in (root / "docs").rglob("*.md") if "adr" not in path.parts)
    found = {
        str(path.relative_to(root)): sorted(set(words.findall(path.read_text()))) for path in (*sources, *pages) if path != Path(__file__)
    }
    assert {path: said for path, said in found.items() if said} == {}


GIVEN_LATER = {
    "node/build.py": {"built.loans.wake"},
    "node/pipelines.py": {"built.loans.wake", "peers.prompts_per_s"},
    "server/app.py": {"app.openapi"},  # as FastAPI documents it
    "ways/kv/pushing.py": {"fetch.hang_up"},
    "ways/kv/service.py": {"fetch.hang_up", "kv.compute", "kv.loans.on_used", "kv.on_checked"},
    "ways/kv/source.py": {"loans.on_checked"},
    "ways/tensor/rank.py": {"weights.reads"},
}  # fmt: skip
"""Callbacks that another object sets after construction, by file. The list may only shrink."""
NO_CALLBACKS = {"client.opening", "prompt.ended", "shard.loading"}
"""Attributes with the name of a callback."""


def is_callable(annotation: ast.expr) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "Callable" for each in ast.walk(annotation))


def is_own(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id == "self"


def test_no_object_sets_a_callback_of_another_one() -> None:
    callbacks, found = {"openapi"}, defaultdict[str, set[str]](set)
    given: list[tuple[str, ast.Attribute]] = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name | ast.Attribute) and is_callable(node.annotation):
                callbacks.add(node.target.attr if isinstance(node.target, ast.Attribute) else node.target.id)
            for target in node.targets if isinstance(node, ast.Assign) else ():
                every = target.elts if isinstance(target, ast.Tuple) else [target]
                given += [
                    (path.relative_to(SOURCE).as_posix(), each) for each in every if isinstance(each, ast.Attribute) and not is_own(each)
                ]
    for name, each in given:
        if each.attr in callbacks and (spelled := ast.unparse(each)) not in NO_CALLBACKS:
            found[name].add(spelled)
    assert found == GIVEN_LATER
