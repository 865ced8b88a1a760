"""Trace a request through real processes, and print the files of src/paceline that it passes through.

    python tools/trace_flow.py [chat] [pipeline] [draft]

chat: one answer of one machine. pipeline: one answer over three, of which one that runs layers is killed on the way. draft: one answer whose tokens
another machine guesses.

The counting rule. Every call of a Python function is seen, in every thread of every process, from just before the request is sent until its answer
has ended. A file counts if it has a function that was called meanwhile, or called another one, and that did not run in the seconds before, in which
nothing was asked. So what a node does all the time does not count, nor does what gossip, links and cards do on their own time (functions that are
called from `BACKGROUND`), even where a machine's death is what they tell. The same request was made once before, so nothing that is done once only
counts: imports, compiled templates, the opening of a pipeline. A file counts once, in however many processes it runs. Compiled kernels, generated
stubs (`net/wire`) and code outside of src/paceline are no files of it.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from urllib.request import Request, urlopen

from paceline.core.ports import find_port

SOURCE = Path(__file__).parents[1] / "src" / "paceline"
BACKGROUND = ("net/member/", "net/exchange.py", "fleet/gossip.py")
FOLDER = "PACELINE_TRACE_FLOW"
"""In the environment of a process that is traced: where it writes, and where it reads whether it should."""
OFF, IDLE, ASKED = b"\0\1\2"
IDLE_S = 4.0
SMALL = ("--context", "1024", "--kv-tokens", "4096", "--threads", "1")
BOUND_S = 300.0


def trace_this_process() -> None:
    """Write each function that runs while a request is traced, the first time that it does."""
    folder, prefix = Path(os.environ[FOLDER]), f"{SOURCE}{os.sep}"
    with (folder / "window").open("r+b") as file:
        window = mmap.mmap(file.fileno(), 1)
    out = os.open(folder / f"{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen: dict[int, set[CodeType]] = {IDLE: set(), ASKED: set()}

    def note(frame: FrameType | None, now: int) -> None:
        if frame is None or frame.f_code in seen[now] or not frame.f_code.co_filename.startswith(prefix):
            return
        if frame.f_code.co_name == "<module>":
            return
        if now == ASKED and in_background(frame):
            return
        code = frame.f_code
        seen[now].add(code)
        os.write(out, f"{now} {code.co_filename.removeprefix(prefix)} {code.co_qualname}:{code.co_firstlineno}\n".encode())

    def in_background(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_filename.removeprefix(prefix).startswith(BACKGROUND):
                return True
            frame = frame.f_back
        return False

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        now = window[0]
        if now != OFF and event == "call":
            note(frame, now)
            note(frame.f_back, now)

    threading.setprofile(on_event)
    sys.setprofile(on_event)


class Machines:
    """Nodes of one fleet on this machine, each traced."""

    def __init__(self, root: Path) -> None:
        from paceline.bench.fleet import found_fleet
        from paceline.store.home import Home

        self.folder = root / "traced"
        self.folder.mkdir()
        (self.folder / "window").write_bytes(bytes([OFF]))
        start = root / "start"
        start.mkdir()
        (start / "sitecustomize.py").write_text(
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport trace_flow\nsys.path.pop(0)\ntrace_flow.trace_this_process()\n"
        )
        self._homes = found_fleet(root, Home.from_environment(), ["a", "b", "c"])
        path = os.pathsep.join(filter(None, [str(start), str(SOURCE.parent), os.environ.get("PYTHONPATH", "")]))
        self._environment = {
            **os.environ,
            "PYTHONPATH": path,
            FOLDER: str(self.folder),
            "PACELINE_FLEET_PRESET": "desk,exchange_s=0.5,ttl_s=10",
        }
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._said: dict[str, list[str]] = defaultdict(list)
        self.port = find_port("127.0.0.1")

    def up(self, name: str, *arguments: str) -> str:
        """Start a node; the address of its API, once it serves."""
        fleet = ("--fleet-port", str(self.port)) if name == "a" else ("--fleet-port", "0", "--peer", f"127.0.0.1:{self.port}")
        command = [sys.executable, "-m", "paceline", "up", "--port", "0", "--fleet-host", "127.0.0.1", "--tensor-port", "0", "--no-mdns"]
        process = self._running[name] = subprocess.Popen(
            [*command, *fleet, *arguments],
            env={**self._environment, "PACELINE_HOME": str(self._homes[name])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        ready = threading.Event()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                self._said[name].append(line)
                if "Ready at" in line:
                    ready.set()
            ready.set()

        threading.Thread(target=read, daemon=True).start()
        ready.wait(BOUND_S)
        found = re.search(r"Ready at (http://\S+)/v1", self.said(name))
        if found is None:
            sys.exit(f"{name} does not serve:\n{self.said(name)}")
        return found[1]

    def said(self, name: str) -> str:
        return "".join(self._said[name])

    def kill(self, name: str) -> None:
        self._running[name].kill()

    def close(self) -> None:
        for process in self._running.values():
            process.send_signal(signal.SIGKILL)
            process.wait()

    def set_window(self, window: int) -> None:
        (self.folder / "window").open("r+b").write(bytes([window]))

    def counted(self) -> set[str]:
        """Files, by the rule."""
        files: set[str] = set()
        for path in self.folder.iterdir():
            if path.name != "window":
                lines = {line.partition(" ")[::2] for line in path.read_text().splitlines()}
                idle = {function for window, function in lines if window == str(IDLE)}
                files |= {function.split(" ")[0] for window, function in lines if window == str(ASKED) and function not in idle}
        return {file for file in files if not file.startswith("net/wire/")}


def fetch(url: str, body: bytes | None = None) -> Any:
    return urlopen(Request(url, body, {"Content-Type": "application/json"}), timeout=BOUND_S)  # noqa: S310  our own nodes


def ask(url: str, tokens: int, on_piece: Callable[[int], None] = lambda _: None) -> str:
    """One chat, streamed. `on_piece` is told how many pieces there are."""
    messages = [{"role": "user", "content": "Repeat after me: one two three four five, one two three four five, one two three four five."}]
    with fetch(f"{url}/v1/models") as listed:
        model = json.load(listed)["data"][0]["id"]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    text, pieces = "", 0
    with fetch(f"{url}/v1/chat/completions", json.dumps(body).encode()) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                said = json.loads(line[6:])
                if "choices" not in said:
                    sys.exit(f"The answer broke off: {said}")
                text += "".join(choice["delta"].get("content") or "" for choice in said["choices"])
                pieces += 1
                on_piece(pieces)
    return text


def chat(nodes: Machines) -> tuple[str, Callable[[int], None]]:
    return nodes.up("a", *SMALL, "--draft", "off"), lambda _: None


def pipeline(nodes: Machines) -> tuple[str, Callable[[int], None]]:
    for name in ("b", "c"):
        nodes.up(name, "--no-model", "--serve-shards", "--threads", "1")
    url = nodes.up("a", *SMALL, "--draft", "off", "--pipeline", "--own-layers", "10")
    ask(url, 4)
    over = re.findall(r"\b([bc])\b", nodes.said("a").rpartition("Loaded in")[2])

    def kill(pieces: int) -> None:
        if pieces == 8:
            nodes.kill(over[0] if over else "b")

    return url, kill


def draft(nodes: Machines) -> tuple[str, Callable[[int], None]]:
    from tests.fakes.seeded_models import shape, write_gguf

    # The bundled model is so quick that no other machine's drafts would pay.
    small, large = (write_gguf(nodes.folder.parent / f"{n}.gguf", shape("llama-1b", n_layers=n, vocab=32_768), "Q4_0", 0) for n in (1, 12))
    nodes.up("b", "--no-model", "--propose", str(small), "--threads", "1")
    return nodes.up("a", *SMALL, "--draft", "fleet", "--model", str(large)), lambda _: None


FLOWS = {"chat": (chat, 18), "pipeline": (pipeline, 25), "draft": (draft, 9)}
"""What makes the machines, and the most files that the flow should pass through."""


@contextmanager
def machines() -> Generator[Machines]:
    with tempfile.TemporaryDirectory(prefix="trace-") as root:
        nodes = Machines(Path(root))
        try:
            yield nodes
        finally:
            nodes.close()


def trace(flow: str) -> set[str]:
    """The files that a flow passes through."""
    with machines() as nodes:
        url, on_piece = FLOWS[flow][0](nodes)
        ask(url, 24)
        nodes.set_window(IDLE)
        time.sleep(IDLE_S)
        nodes.set_window(ASKED)
        ask(url, 24, on_piece)
        nodes.set_window(OFF)
        return nodes.counted()


def main(flows: list[str]) -> None:
    sys.path[:0] = [str(SOURCE.parent), str(Path(__file__).parents[1])]
    chats: set[str] = set()
    for flow in flows or list(FLOWS):
        files = trace(flow)
        chats = files if flow == "chat" else chats
        beyond = f", {len(files - chats)} of them no chat's" if chats and flow != "chat" else ""
        print(f"{flow}: {len(files)} files{beyond}; wanted are {FLOWS[flow][1]} at most")
        print("\n".join(f"  {'+' if chats and file not in chats else ' '} {file}" for file in sorted(files)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
