"""`paceline chat`: a conversation in the terminal, with a model loaded here or at an endpoint.

Ctrl-C during an answer ends the answer; at the prompt it ends the chat. Where standard input is no terminal, all of it is one message:
the answer alone goes to standard output, and an answer that fails or is interrupted is an exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from paceline.cli.endpoint import Endpoint
from paceline.cli.terminal import EXIT_OK, Terminal, report
from paceline.core.errors import PacelineError, UserError
from paceline.core.shown import shown
from paceline.node.settings import NodeSettings

HELP = """\
  /reset   forget the conversation
  /quit    leave (also Ctrl-D, or Ctrl-C here)
  /help    this
A line that ends in \\ goes on in the next. Three double quotes open a text of many lines, and three more close it.
Ctrl-C during an answer stops the answer."""
FENCE = '"""'

Message = dict[str, str]
Say = Callable[[list[Message]], Generator[str]]


def run_chat(
    settings: NodeSettings,
    *,
    url: str | None,
    model: str | None,
    system: str | None,
    temperature: float,
    seed: int | None,
    api_key: str | None,
    tls_ca: Path | None = None,
) -> None:
    """Converse until the person leaves.

    Raises:
        UserError: the endpoint or the model can't be used, or the one message that was piped in can't be answered.
    """
    piped = None if sys.stdin.isatty() else _all_input()

    def converse(name: str, say: Say) -> None:
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        if piped is None:
            _converse(Terminal(), name, opening, say)
        else:
            _write(say([*opening, {"role": "user", "content": piped}]))
            print()

    if url is not None:
        with Endpoint(url, api_key, tls_ca) as endpoint:
            name = model or next(iter(endpoint.models()), "")
            if not name:
                raise UserError(f"{url} serves no model", "Name one with --model.")
            converse(name, lambda messages: endpoint.say(name, messages, temperature=temperature, seed=seed))
        return
    from paceline.cli.terminal import end_now
    from paceline.cli.up import load
    from paceline.node.local_chat import LocalChat

    node = load(settings, Terminal(stderr=True))
    try:
        with LocalChat(node.host, node.model) as local:
            converse(node.model.name, lambda messages: local.say(messages, temperature=temperature, seed=seed))
    finally:
        node.close()
    end_now(EXIT_OK)


def _all_input() -> str:
    text = sys.stdin.read()
    if not text.strip():
        raise UserError("There is no message on standard input", "Pipe one in, or start the chat in a terminal.")
    return text


def _converse(console: Console, name: str, opening: list[Message], say: Say) -> None:
    _enable_line_editing()
    console.print(f"Chatting with {name}. /help says how, /quit leaves.", style="dim", markup=False)
    messages = list(opening)
    while True:
        try:
            text = read_message(input, prompt=">>> ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        match text.strip():
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/reset":
                messages = list(opening)
                console.print("Forgotten.", style="dim")
            case "/help":
                console.print(HELP, markup=False)
            case command if command.startswith("/") and " " not in command and "\n" not in command:
                console.print(f"There is no {command}; /help lists what there is.", markup=False)
            case _:
                messages.append({"role": "user", "content": text})
                answer = _answer(console, say, messages)
                # A question that got no answer is taken back, so that the roles still alternate.
                messages = [*messages, {"role": "assistant", "content": answer}] if answer else messages[:-1]


def _answer(console: Console, say: Say, messages: list[Message]) -> str:
    parts: list[str] = []
    try:
        _write(say(messages), parts.append)
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/]", end="")
    except PacelineError as error:
        if parts:
            console.print()
        report(error)
        return ""
    console.print("\n")
    return "".join(parts)


def _write(texts: Generator[str], keep: Callable[[str], object] = lambda _: None) -> None:
    """Write an answer as it comes: not through rich, so unwrapped and unstyled. On a terminal, nothing in it commands that; a file gets all of it."""
    is_terminal = sys.stdout.isatty()
    with closing(texts):
        for text in texts:
            keep(text)
            sys.stdout.write(shown(text) if is_terminal else text)
            sys.stdout.flush()


def read_message(read: Callable[[str], str], prompt: str) -> str:
    """One message of one or many lines.

    Args:
        read: reads a line after showing a prompt; `input`.
        prompt: for the first line.

    Raises:
        EOFError: there is nothing more to read.
    """
    line = read(prompt)
    more = "... " if prompt else ""
    if line.lstrip().startswith(FENCE):
        lines = [line.lstrip().removeprefix(FENCE)]
        while not lines[-1].rstrip().endswith(FENCE):
            lines.append(read(more))
        lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(read(more))
    return "\n".join(lines)


def _enable_line_editing() -> None:
    # Importing it is what gives `input` a history and arrow keys; some Pythons are built without it.
    if find_spec("readline") is not None:
        import_module("readline")
