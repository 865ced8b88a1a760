"""The child process of `grammar_trial`. It reads grammars line by line, and writes why each can't be followed."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from typing import cast

from paceline.core.generation import Grammar, GrammarKind
from paceline.core.text import Tokenizer
from paceline.engine.grammar import Grammars
from paceline.engine.grammar_trial import SECONDS

BYTES = 2 << 30
"""Limit of the child's address space, in bytes. The largest grammars take some 150 MB."""
SPECIALS = 64
"""Special tokens that a grammar may name and that stay distinct while it is tried. Raising it: children start later."""
_NAMED_TOKENS = re.compile(r"<\[\^?\d{1,9}(?:[-,]\d{1,9})*\]>")
STACK = 4 << 20
"""Stack of the trial thread, in bytes: half the stack of the threads that compile and follow grammars."""


class _Bytes:
    """A cheap vocabulary of the 256 bytes, an end token and special tokens. The cost of compiling hardly depends on the vocabulary."""

    size, eos_ids = 257 + SPECIALS, frozenset({256})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def encode_inside(self, text: str) -> list[int]:
        return list(text.encode())


def _serve() -> None:
    grammars = Grammars(cast("Tokenizer", _Bytes()), tried=True)
    for line in sys.stdin.buffer:
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        for refusal in grammars.attempt(Grammar(GrammarKind(kind), _with_own_specials(text))):
            sys.stdout.buffer.write(json.dumps(refusal).encode() + b"\n")
            sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def _with_own_specials(text: str) -> str:
    """Replace the model's special tokens that a grammar names by those of `_Bytes`, in the same order, so that ranges stay ranges."""
    ids = sorted({int(number) for named in _NAMED_TOKENS.findall(text) for number in re.findall(r"\d+", named)})
    own = {number: str(257 + min(place, SPECIALS - 1)) for place, number in enumerate(ids)}
    return _NAMED_TOKENS.sub(lambda named: re.sub(r"\d+", lambda number: own[int(number[0])], named[0]), text)


if __name__ == "__main__":
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    threading.stack_size(STACK)
    threading.Thread(target=_serve).start()
