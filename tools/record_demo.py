"""Record the picture of README: three nodes share a model, one is killed while an answer streams, and the answer goes on.

    python -m tools.record_demo docs/demo.svg

The script starts the nodes on this machine, asks the same question twice and kills a node during the second answer. It writes nothing and fails if
the stream breaks or the two answers differ. The SVG plays the second answer with the times that were measured; it holds no scripts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Self

import httpx

QUESTION = "Explain in a few sentences why the sky is blue."
TOKENS = 120
KILL_AT = 40
"""Tokens of the answer before the kill."""
START_S = 600.0
"""A first start compiles kernels. Raising it: a node that hangs is noticed later."""
COLUMNS, ROW, LEFT, TOP = 92, 21, 18, 46
PLAN = re.compile(r"(local-\d) \[[^]]+\] -> (local-\d) \[[^]]+\] -> (local-\d) \[[^]]+\]")


@dataclass(frozen=True, slots=True)
class Shown:
    """A piece of text that appears at a time."""

    at_s: float
    text: str
    style: str = ""


class Nodes:
    """Three nodes of `paceline up --local-nodes 3`, in a home of their own that keeps the compiled kernels of this one."""

    def __init__(self, home: Path, kernels: Path) -> None:
        (home / "cache").mkdir(parents=True)
        (home / "cache" / "kernels").symlink_to(kernels)
        command = [sys.executable, "-P", "-m", "paceline", "up", "--local-nodes", "3", "--port", "0"]
        self._process = subprocess.Popen(
            command, env={**os.environ, "PACELINE_HOME": str(home)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.url, self.plan, self.pids = "", "", dict[str, int]()

    def __enter__(self) -> Self:
        stdout, end_s = self._process.stdout, time.monotonic() + START_S
        assert stdout is not None, "it was asked for"
        for line in stdout:
            self.pids |= {name: int(pid) for name, pid in re.findall(r"(local-\d) \(process (\d+)\)", line)}
            if line.startswith("Plan for") and (plan := PLAN.search(line)):
                self.plan = plan[0]
            if found := re.match(r"Ready at (\S+)/v1", line):
                self.url = found[1]
                return self
            if time.monotonic() > end_s:
                break
        self.__exit__()
        raise SystemExit("The nodes did not start. Run: paceline up --local-nodes 3")

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def ask(self, on_token: Callable[[int], None]) -> Iterator[str]:
        """Stream an answer. `on_token` hears the number of pieces so far. Raises SystemExit where the stream breaks."""
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS, "temperature": 0, "stream": True}
        count, reason = 0, None
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                said = json.loads(line.removeprefix("data: "))
                if "error" in said:
                    raise SystemExit(f"The answer broke: {said['error']}")
                for choice in said["choices"]:
                    reason = choice.get("finish_reason") or reason
                    if piece := choice["delta"].get("content"):
                        count += 1
                        on_token(count)
                        yield piece
        if reason not in {"stop", "length"}:
            raise SystemExit(f"The answer ended with {reason}")


def record(nodes: Nodes) -> list[list[Shown]]:
    """Return the two panes: the answer, and the shell that kills a node."""
    first = "".join(nodes.ask(lambda _: None))
    victim = nodes.plan.split(" -> ")[-1].split()[0]
    killed_s: list[float] = []
    began_s = time.monotonic()

    def kill(count: int) -> None:
        if count == KILL_AT:
            os.kill(nodes.pids[victim], signal.SIGKILL)
            killed_s.append(time.monotonic() - began_s)

    pieces = [Shown(time.monotonic() - began_s, piece) for piece in nodes.ask(kill)]
    if "".join(piece.text for piece in pieces) != first:
        raise SystemExit("The answer changed after the kill")
    gap_s = max(after.at_s - before.at_s for before, after in zip(pieces[KILL_AT - 1 :], pieces[KILL_AT:], strict=False))
    end_s = pieces[-1].at_s
    answer = [
        Shown(0, "$ paceline up --local-nodes 3\n", "ask"),
        Shown(0, f"Plan for smollm2-135m: {nodes.plan}\n", "dim"),
        Shown(0, f'$ paceline chat "{QUESTION}"\n', "ask"),
        *pieces,
    ]
    shell = [
        Shown(killed_s[0], f"$ kill -9 {nodes.pids[victim]}   # {victim}, in the middle of the answer\n", "kill"),
        Shown(end_s, f"The answer went on after {gap_s:.1f} s, with the same bytes as without the kill.", "good"),
    ]
    return [answer, shell]


def rows(shown: Sequence[Shown]) -> list[list[Shown]]:
    """Cut pieces into rows of at most `COLUMNS` letters, between words."""
    text = "".join(each.text for each in shown)
    lines = [part for line in text.split("\n") for part in (textwrap.wrap(line, COLUMNS, drop_whitespace=False) or [""])]
    letters = [Shown(each.at_s, letter, each.style) for each in shown for letter in each.text if letter != "\n"]
    cut: list[list[Shown]] = []
    for line in lines:
        row, letters = letters[: len(line)], letters[len(line) :]
        if cut and row and row[0].text == " ":  # between two words of a line that goes on
            row = row[1:]
        joined: list[Shown] = []
        for letter in row:
            if joined and (joined[-1].at_s, joined[-1].style) == (letter.at_s, letter.style):
                joined[-1] = Shown(letter.at_s, joined[-1].text + letter.text, letter.style)
            else:
                joined.append(letter)
        cut.append(joined)
    return cut


def draw(panes: Sequence[Sequence[Shown]]) -> str:
    """Return the SVG."""
    body: list[str] = []
    y = TOP
    for pane in panes:
        for row in rows(pane):
            spans = "".join(
                f'<tspan class="{each.style} late" style="animation-delay:{each.at_s:.2f}s">{escape(each.text)}</tspan>' for each in row
            )
            body.append(f'<text x="{LEFT}" y="{y}" xml:space="preserve">{spans}</text>')
            y += ROW
        y += ROW // 2
    width, height = 2 * LEFT + round(8.4 * COLUMNS), y
    style = (
        "text{font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d7dae0}.ask{fill:#8ec07c}.dim{fill:#8b93a1}"
        ".kill{fill:#fb6b5b;font-weight:bold}.good{fill:#8ec07c;font-weight:bold}"
        ".late{animation:come 1ms linear both}@keyframes come{from{opacity:0}to{opacity:1}}"
        "@media (prefers-reduced-motion){.late{animation:none}}"
    )
    dots = "".join(
        f'<circle cx="{LEFT + 18 * n}" cy="18" r="6" fill="{fill}"/>' for n, fill in enumerate(("#fb6b5b", "#e5c07b", "#8ec07c"))
    )
    title = "Three nodes answer together; one is killed, and the answer goes on"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}"><title>{title}</title>'
        f'<style>{style}</style><rect width="{width}" height="{height}" rx="8" fill="#1e222a"/>{dots}' + "\n".join(body) + "</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("svg", type=Path)
    chosen = parser.parse_args()
    from paceline.store.home import Home

    kernels = Home.from_environment().kernels
    kernels.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Nodes(Path(folder) / "home", kernels) as nodes:
        panes = record(nodes)
    chosen.svg.write_text(draw(panes))
    print(panes[1][-1].text)


if __name__ == "__main__":
    main()
