"""What answers of a given form cost and gain: masks beside the steps they are part of, and JSON with drafts and without.

    python bench/grammar.py masks [--model /tmp/1b.gguf] [--steps 30]
    python bench/grammar.py drafts [--model /tmp/1b.gguf] [--rounds 3]

One thread, in its processor time: a shared machine stretches the wall. `masks`: steps of 1 and of 16 answers without a form, and after each what as many rows of a form add
(mask, its use on logits, the token taken), in turns. `drafts`: the same answers of a form with what it forces drafted and not, in turns. A 1B with 152k tokens:
`bench/make_model.py /tmp/1b.gguf --preset llama-1b --vocab 151936`; its weights are random, so the values it writes are noise, and the form gives the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

from paceline.backends.options import LoadOptions
from paceline.backends.table import choose
from paceline.core.clock import SystemClock
from paceline.core.generation import GenerationRequest, Grammar, GrammarKind, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.model import WeightsFormat
from paceline.engine.config import EngineConfig
from paceline.engine.drafting import DraftingConfig
from paceline.engine.engine import Engine
from paceline.engine.grammar import Grammars, Matcher, restrict
from paceline.engine.local import LocalExecutor
from paceline.machine.setup import load_runner
from paceline.store.catalog import open_model
from paceline.store.home import Home

DOCUMENT = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "used"]}},
        "notes": {"type": "string"},
    },
    "required": ["name", "age", "tags", "notes"],
    "additionalProperties": False,
}
TEXT = '{"name": "Ada Lovelace of London", "age": 36, "tags": ["new", "used"], "notes": "She wrote the first program, for a machine that was never built."}'


class Seeded:
    """A vocabulary of made-up words: all bytes, then distinct words of two to twelve letters, half of them behind a blank."""

    def __init__(self, size: int) -> None:
        draw = random.Random(size)
        words: dict[bytes, None] = dict.fromkeys(bytes([code]) for code in range(256))
        while len(words) < size - 1:
            word = "".join(draw.choices('etaoinshrdlucmfwypvbgkjqxz"{}:,0123456789', k=draw.randint(2, 12)))
            words[(b" " if draw.random() < 0.5 else b"") + word.encode()] = None
        self.pieces = [*words, b""]
        self.size, self.eos_ids = size, frozenset({size - 1})
        self._places = {piece: i for i, piece in enumerate(self.pieces)}

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        del add_special
        data, ids = text.encode(), list[int]()
        while data:
            length = next(n for n in range(min(13, len(data)), 0, -1) if data[:n] in self._places)
            ids.append(self._places[data[:length]])
            data = data[length:]
        return ids


FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "green", "blue"]},
        "in_stock": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 2},
    },
    "required": ["name", "colour", "in_stock", "tags"],
    "additionalProperties": False,
}
LONGEST = 256


class Bench:
    """A model on one thread."""

    def __init__(self, name: str) -> None:
        self.opened = open_model(name)
        spec = self.opened.spec
        weights = WeightsFormat.INT4
        options = LoadOptions(spec.all_layers, weights, LONGEST, threads=1, edges=True, kernel_cache=Home.from_environment().kernels)
        self.executor = LocalExecutor(load_runner(choose(spec, weights), self.opened.weights, options))
        tokenizer = self.opened.tokenizer
        self.vocabulary: Any = tokenizer if tokenizer.eos_ids and tokenizer.size == spec.vocab else Seeded(spec.vocab)
        self.grammars = Grammars(self.vocabulary)

    def engine(self) -> Engine:
        config = EngineConfig(max_context=LONGEST, max_running=16, step_timeout_s=1e9, step_budget_s=1e9)
        return Engine(self.executor, self.vocabulary, config, SystemClock(), drafting=DraftingConfig(), grammars=self.grammars)


def timed(do: Callable[[], object]) -> float:
    """Milliseconds of this thread."""
    began = time.thread_time_ns()
    do()
    return (time.thread_time_ns() - began) / 1e6


def masked(matchers: Sequence[Matcher], logits: Any, token: int) -> None:
    for matcher in matchers:
        mask = matcher.mask()
        assert mask is not None, "nothing was guessed"
        restrict(logits, mask)
        matcher.take(token)


def masks(bench: Bench, arguments: argparse.Namespace) -> None:
    text = bench.vocabulary.encode(TEXT, add_special=False)
    form = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(DOCUMENT))
    logits = np.zeros(bench.vocabulary.size, np.float32)
    for rows in (1, 16):
        engine = bench.engine()
        prompts = [tuple(range(100 + n, 124 + n)) for n in range(rows)]
        for n, prompt in enumerate(prompts):
            engine.add(GenerationRequest(RequestId(f"{n}"), prompt, LONGEST - 40, SamplingParams(seed=n), ignore_eos=True, draft="off"))
        for _ in range(6):
            engine.step()
        bench.grammars.prepare(form)
        matchers = [bench.grammars.matcher(form) for _ in range(rows)]
        steps, added = list[float](), list[float]()

        for place in range(arguments.steps):
            steps.append(timed(engine.step))
            if place % len(text) == 0:
                matchers[:] = [bench.grammars.matcher(form) for _ in range(rows)]
            logits[:] = 1.0
            added.append(timed(partial(masked, matchers, logits, text[place % len(text)])))
        for n in range(rows):
            engine.abort(RequestId(f"{n}"))
        while engine.has_work:
            engine.step()
        print(
            f"  {rows} rows: a step {median(steps):.2f} ms (least {min(steps):.2f}), masks {median(added):.3f} ms (least {min(added):.3f}, "
            f"p90 {quantiles(added, n=10)[-1]:.3f}): {100 * median(added) / median(steps):.2f} % by medians, {100 * min(added) / min(steps):.2f} % by least"
        )


def drafts(bench: Bench, arguments: argparse.Namespace) -> None:
    form = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(FORM))
    requests = [
        GenerationRequest(
            RequestId(f"{n}"), tuple(bench.vocabulary.encode(f"Thing number {n} in JSON: ", add_special=False)), 80,
            SamplingParams(temperature=0.8 * (n % 2), seed=n), grammar=form,
        )
        for n in range(8)
    ]  # fmt: skip
    found: dict[str | None, list[tuple[float, int, int]]] = {"off": [], None: []}
    told: dict[str | None, list[tuple[int, ...]]] = {}
    for _ in range(arguments.rounds):
        for draft, times in found.items():
            engine, tokens, spent = bench.engine(), dict[str, tuple[int, ...]](), 0.0
            for request in requests:
                engine.add(replace(request, draft=draft))
                while engine.has_work:
                    began = time.thread_time()
                    chunks = engine.step()
                    spent += time.thread_time() - began
                    for chunk in chunks:
                        tokens[chunk.request_id] = tokens.get(chunk.request_id, ()) + tuple(chunk.token_ids)
            told[draft] = list(tokens.values())
            times.append((spent, sum(map(len, tokens.values())), engine.stats().steps))
    assert told["off"] == told[None], "drafts never change an answer"
    ratios = [off[0] / on[0] for off, on in zip(found["off"], found[None], strict=True)]
    (_, tokens, steps), (_, _, fewer) = found["off"][0], found[None][0]
    best = max(tokens / spent for spent, _, _ in found[None])
    print(
        f"  {tokens} tokens in {steps} steps, drafted in {fewer}; drafted / not, in turns: "
        f"{', '.join(f'{ratio:.2f}x' for ratio in ratios)}; at best {best:.0f} tokens/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    for name, run in ("masks", masks), ("drafts", drafts):
        part = parts.add_parser(name)
        part.add_argument("--model", default="smollm2-135m")
        part.add_argument("--steps", type=int, default=60)
        part.add_argument("--rounds", type=int, default=3)
        part.set_defaults(run=run)
    arguments = parser.parse_args()
    bench = Bench(arguments.model)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    print(f"{arguments.model}, {bench.vocabulary.size} tokens; {processor}, load {os.getloadavg()[0]:.1f}")
    arguments.run(bench, arguments)
    bench.executor.close()


if __name__ == "__main__":
    main()
