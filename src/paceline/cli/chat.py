"""`paceline chat`: a conversation in the terminal, with an endpoint of this machine, another one, or a model loaded here.

Ctrl-C during an answer ends the answer; at the prompt it clears the line. A question on the command line is answered once. Input from a pipe or a file
is read to its end and answered once. The answer alone goes to standard output; if it fails or is interrupted, the exit code says so.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import termios
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from rich.console import Console

from paceline.cli.endpoint import EndpointClient
from paceline.cli.running import RunningEndpoint, running, starting
from paceline.cli.terminal import EXIT_OK, Terminal, WordWrap, print_lines, report
from paceline.core.errors import ContextOverflow, PacelineError, UserError
from paceline.core.generation import AnswerProgress, ModelLoading
from paceline.core.text import shown
from paceline.machine.settings import NodeSettings
from paceline.store.home import Home

HELP = """\
  /reset   forget the conversation
  /drop    forget its oldest question and answer
  /quit    leave (also /bye, Ctrl-D, or Ctrl-C twice)
  /help    this
A line that ends in \\ goes on in the next. Three double quotes open a text of many lines, and three more close it; pasted lines are one message.
Ctrl-C during an answer stops the answer; at the prompt it clears the line."""
_COMMAND = re.compile(r"/[a-z-]*(?=\s|$)")
WAY_OUT = "/drop forgets the oldest question and answer, /reset all."
CUT = f"(cut: the context is full. {WAY_OUT})"
OUTGROWN = "This question and what was said before it are longer than the model's context"

LOOK_S = 0.5
"""Between two looks whether an endpoint has started."""

Message = dict[str, str]


class Say(Protocol):
    """Streams an answer's text; returns whether the context cut it."""

    def __call__(self, messages: list[Message], *, on_reading: Callable[[AnswerProgress], object]) -> Generator[str, None, bool]: ...


def run_chat(
    settings: NodeSettings,
    *,
    question: str | None,
    url: str | None,
    load_here: bool,
    model: str | None,
    system: str | None,
    temperature: float | None,
    seed: int | None,
    api_key: str | None,
    tls_ca: Path | None = None,
) -> None:
    """Converse until the person leaves; answer once if there is a question, or if input does not come from a terminal.

    Args:
        url: None: an endpoint of this machine where one serves the model, else the model is loaded here.

    Raises:
        UserError: the endpoint or the model can't be used, or the one message can't be answered.
    """
    once = _one_message(question)

    def converse(name: str, say: Say) -> None:
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        if once is not None:
            _write(say, [*opening, {"role": "user", "content": once}], _show_plain)
            print()
            return
        console = Terminal()
        print_lines(console, f"Chatting with {name}. /help says how, /quit leaves.", style="dim")
        _Conversation(console, Asker(Home.from_environment().chat_history), opening, say).run()

    here = None if load_here or url is not None else _endpoint_here(settings, model, api_key)
    found, ca = (url, tls_ca) if here is None else (here.url, here.authority)
    if found is not None:
        with EndpointClient(found, api_key, ca) as endpoint:
            name = model or next(iter(endpoint.models(at_home=True)), "")
            if not name:
                raise UserError(f"{found} serves no model", "Name one with --model.")
            if here is not None:
                print(f"{found} serves {name} on this machine: it answers (--load loads the model here instead)", file=sys.stderr)
            converse(name, partial(endpoint.say, name, temperature=temperature, seed=seed))
        return
    from paceline.cli.endpoint import LocalChat
    from paceline.cli.terminal import end_now
    from paceline.cli.up import load

    node = load(settings, Terminal(stderr=True))
    try:
        with LocalChat(node.host, node.model) as local:
            converse(node.model.name, partial(local.say, temperature=temperature, seed=seed))
    finally:
        node.close()
    end_now(EXIT_OK)


def _one_message(question: str | None) -> str | None:
    """Return the one message to answer: the question, followed by piped input. None: there is a conversation."""
    if sys.stdin.isatty():
        return question
    piped = sys.stdin.read()
    if question is not None:
        return f"{question}\n\n{piped}" if piped.strip() else question
    if not piped.strip():
        raise UserError("There is no message on standard input", "Pipe one in, or start the chat in a terminal.")
    return piped


def _endpoint_here(settings: NodeSettings, model: str | None, api_key: str | None) -> RunningEndpoint | None:
    """Return an endpoint of this machine that serves the model. None if no endpoint does, or if the person chose settings for loading it."""
    if NodeSettings(settings.model, max_running=settings.max_running) != settings:
        return None
    home, told = Home.from_environment(), False
    while (waits := [one for one in starting(home) if api_key is not None or not one.has_key]) and not running(home):
        if not told:
            told = True
            print(f"{waits[0].url} starts on this machine: it is waited for (--load loads the model here instead)", file=sys.stderr)
        time.sleep(LOOK_S)
    for one in running(home):
        if one.has_key and api_key is None:
            continue
        try:
            with EndpointClient(one.url, api_key, one.authority) as endpoint:
                names = endpoint.models()
        except UserError:
            continue
        if (model is None and names) or model in names:
            return one
    return None


class _Conversation:
    """Questions and answers, until the person leaves."""

    def __init__(self, console: Console, asker: Asker, opening: list[Message], say: Say) -> None:
        self._console, self._asker, self._opening, self._say = console, asker, opening, say
        self._messages = list(opening)

    def run(self) -> None:
        goes_on = True
        while goes_on:
            try:
                goes_on = self._turn()
            except KeyboardInterrupt:  # between an answer and the next prompt
                self._console.print()

    def _turn(self) -> bool:
        """Handle one message. Returns whether the chat goes on."""
        text = self._asker.message()
        if text is None:
            return False
        command = _COMMAND.match(text.strip())
        if command is not None:
            return self._obey(command.group(), text.strip())
        if text.strip():
            self._answer(text)
        return True

    def _obey(self, command: str, line: str) -> bool:
        """Do what a line that begins with a slash says; returns whether the chat goes on."""
        match command:
            case "/quit" | "/exit" | "/bye" if line == command:
                return False
            case "/reset" if line == command:
                self._messages = list(self._opening)
                self._console.print("Forgotten.", style="dim")
            case "/drop" if line == command:
                self._drop()
            case "/help" if line == command:
                self._console.print(HELP, markup=False)
            case _:
                print_lines(self._console, f"There is no {line.splitlines()[0]}; /help lists what there is.")
        return True

    def _drop(self) -> None:
        first = len(self._opening)
        if len(self._messages) == first:
            self._console.print("There is nothing to forget.", style="dim")
            return
        del self._messages[first : first + 2]
        self._console.print(f"Forgot the oldest; {(len(self._messages) - first) // 2} left.", style="dim")

    def _answer(self, text: str) -> None:
        asked: list[Message] = [*self._messages, {"role": "user", "content": text}]
        parts: list[str] = []
        wrap = WordWrap(shutil.get_terminal_size().columns)

        def show(piece: str) -> None:
            parts.append(piece)
            sys.stdout.write(wrap.feed(shown(piece)))

        cut = False
        try:
            with untyped():
                cut = _write(self._say, asked, show)
        except KeyboardInterrupt:
            print(wrap.end(), end="")
            self._console.print(" [dim](stopped)[/]", end="")
        except PacelineError as error:
            print(wrap.end())
            report(ContextOverflow(OUTGROWN, WAY_OUT) if isinstance(error, ContextOverflow) else error)
            return  # a question that got no answer is taken back, so that the roles still alternate
        print(wrap.end())
        if cut:
            print_lines(self._console, CUT, style="dim")
        self._console.print()
        if parts:
            self._messages = [*asked, {"role": "assistant", "content": "".join(parts)}]


class ReadingLine:
    """A line on the terminal that says how far the model is loaded or the prompt is read. The answer's first text takes its place."""

    def __init__(self) -> None:
        self._is_over, self._is_shown = not sys.stderr.isatty(), False

    def show(self, reading: AnswerProgress) -> None:
        """Write the line, in place of the one before. Does nothing after `close`, or if standard error is not a terminal."""
        if not self._is_over:
            self._is_shown = True
            if isinstance(reading, ModelLoading):
                self._write(f"(loading the model: {reading.seconds} of about {reading.expected_s} s)")
                return
            share = reading.tokens_read / max(1, reading.tokens)
            self._write(f"(reading the prompt: {reading.tokens_read} of {reading.tokens} tokens, {share:.0%})")

    def close(self) -> None:
        """Remove the line for good. Idempotent."""
        if self._is_shown:
            self._write("")
        self._is_over, self._is_shown = True, False

    def _write(self, text: str) -> None:
        sys.stderr.write(f"{_LINE_AGAIN}{text}")
        sys.stderr.flush()


_LINE_AGAIN = "\r\x1b[2K"
"""Clears the terminal's line and goes back to its beginning."""


def _write(say: Say, messages: list[Message], show: Callable[[str], object]) -> bool:
    """Show an answer as it comes: not through rich, so unstyled. Returns whether the context cut it."""
    line = ReadingLine()
    with closing(say(messages, on_reading=line.show)) as texts, closing(line):
        while True:
            try:
                text = next(texts)
            except StopIteration as end:
                return bool(end.value)
            line.close()
            show(text)
            sys.stdout.flush()


def _show_plain(text: str) -> None:
    """Print text: without its control sequences on a terminal, unchanged to a file."""
    sys.stdout.write(shown(text) if sys.stdout.isatty() else text)


FENCE = '"""'


class Asker:
    """Reads messages at a terminal.

    Args:
        history: the file that keeps what was typed, for this user's eyes; one that can't be written is done without.
    """

    def __init__(self, history: Path) -> None:
        self._session: PromptSession[str] = PromptSession(history=_kept(history))
        self._interrupted = False

    def message(self) -> str | None:
        """Read the next message; empty if Ctrl-C cancelled the line. None: the person leaves (Ctrl-D, or Ctrl-C twice)."""
        try:
            text = read_message(self._session.prompt, ">>> ")
        except EOFError:
            return None
        except KeyboardInterrupt:
            empty = not self._session.default_buffer.text
            if empty and self._interrupted:
                return None
            self._interrupted = True
            if empty:
                print("(Ctrl-C once more, Ctrl-D or /quit leaves)")
            return ""
        self._interrupted = False
        return text


def _kept(path: Path) -> History:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def read_message(read: Callable[[str], str], prompt: str) -> str:
    """Read one message of one or many lines.

    Args:
        read: reads a line after showing a prompt.
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


@contextmanager
def untyped() -> Generator[None]:
    """Keep what is typed during an answer off the screen, until the next prompt shows it."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):  # no terminal
        yield
        return
    silent = [*before]
    silent[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(descriptor, termios.TCSANOW, silent)
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSANOW, before)
