"""The source assumes no Linux: what a Mac's Python or system lacks is used where its presence was asked for, or where nothing goes on a Mac."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "paceline"
LACKING = {
    "os": {
        "sched_getaffinity", "sched_setaffinity", "memfd_create", "MFD_CLOEXEC", "eventfd", "pidfd_open", "posix_fadvise", "posix_fallocate", "splice",
        "copy_file_range", "getrandom", "setns", "unshare", "O_DIRECT", "O_TMPFILE", "P_PIDFD", "getxattr", "setxattr", "sched_setscheduler",
    },
    "socket": {"SO_PEERCRED", "TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_QUICKACK", "TCP_CORK", "AF_NETLINK", "AF_PACKET", "SO_BINDTODEVICE", "SOCK_CLOEXEC", "SOCK_NONBLOCK"},
    "select": {"epoll"},
    "signal": {"sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGPOLL"},
    "mmap": {"MAP_POPULATE", "MADV_HUGEPAGE", "MADV_DONTFORK"},
    "fcntl": {"F_SETPIPE_SZ", "F_ADD_SEALS"},
    "resource": {"prlimit", "RLIMIT_OFILE", "RLIMIT_MSGQUEUE"},
    "time": {"CLOCK_BOOTTIME", "CLOCK_TAI"},
}  # fmt: skip
"""Names of the standard library's that Linux has and macOS has not."""
LINUX_ALONE = {"net/nixl.py"}
"""Loaded where NIXL is installed, which has wheels for Linux."""
PLACES = ("/proc", "/sys", "/dev/", "/run", "/etc/")
READ_WHERE_THERE = {
    "backends/cpu/sync.py": "memory of one node",
    "backends/memory.py": "control groups that are not shown bound nothing",
    "cli/doctor.py": "no card is called wireless",
    "cli/service.py": "launchd writes elsewhere",
    "engines/finding.py": "listeners of own processes, from psutil",
    "machine/devices.py": "no driver, no boot's name, every processor a core, and the processor's name from platform",
    "net/nixl.py": "Linux alone",
    "net/trust/credentials.py": "a temporary file in the place of one in memory",
    "store/tokenizer_child.py": "no limit where a system does not tell a process's size",
}
"""Files that name places of Linux's, and what they do without."""

pytestmark = pytest.mark.skipif(not SOURCE.is_dir(), reason="the tests travel without the source")


def files() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        if "wire" not in path.parts:
            yield str(path.relative_to(SOURCE)), ast.parse(path.read_text())


def asked_for(test: ast.expr) -> set[str]:
    """Names that a condition asks `hasattr` for."""
    calls = [
        node for node in ast.walk(test) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr"
    ]
    return {call.args[1].value for call in calls if isinstance(call.args[1], ast.Constant) and isinstance(call.args[1].value, str)}


def unguarded(tree: ast.Module) -> set[str]:
    """Names of `LACKING` that are used in a function that asks for none of them."""
    found, told = set[str](), set[str]()
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]:
        if any(asked_for(node.test) for node in ast.walk(function) if isinstance(node, ast.If | ast.IfExp)):
            told |= {f"{node.lineno}" for node in ast.walk(function) if hasattr(node, "lineno")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in LACKING.get(node.value.id, ()):
            found |= {f"{node.value.id}.{node.attr}"} if f"{node.lineno}" not in told else set()
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{name.name}" for name in node.names if name.name in LACKING.get(node.module or "", ())}
    return found


def test_what_macos_lacks_is_asked_for_before_it_is_used() -> None:
    found = {name: sorted(unguarded(tree)) for name, tree in files() if name not in LINUX_ALONE}
    assert {name: used for name, used in found.items() if used} == {}
    assert unguarded(ast.parse("import os\ndef f(): return os.memfd_create('x')")) == {"os.memfd_create"}
    assert unguarded(ast.parse("def f():\n  if hasattr(os, 'memfd_create'): return os.memfd_create('x')")) == set()
    assert unguarded(ast.parse("from select import epoll")) == {"select.epoll"}


def test_places_of_linux_are_named_where_it_is_known_what_is_done_without() -> None:
    named = {
        name
        for name, tree in files()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(PLACES) and "\n" not in node.value
    }
    assert named - READ_WHERE_THERE.keys() == set()
    assert READ_WHERE_THERE.keys() - named == set()


def test_the_core_imports_no_backends_library() -> None:
    heavy = {"mlx", "mlx_lm", "torch", "nixl"}
    rooms = ("core/", "engine/", "fleet/", "store/", "server/", "net/", "ways/", "machine/", "node/", "cli/")
    for name, tree in files():
        if not name.startswith(rooms):
            continue
        for node in tree.body:
            imported = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [one.name for one in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            assert not {one.partition(".")[0] for one in imported} & heavy, f"{name} imports {imported} as it is imported"
