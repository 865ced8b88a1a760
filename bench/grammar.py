"""What answers of a given form cost: masks beside a step, and the compiling of schemas.

    python bench/grammar.py masks [--step-ms 3.2,14] [--step-ms-large 12,40]     # milliseconds of an unconstrained step of 1 and 16 rows
    python bench/grammar.py schemas FOLDER ... [--listed schemas.txt]

`masks`: processor time of a mask and of applying it, medians over the tokens of a seeded document, at 49k tokens (the bundled model's own) and at 152k (seeded words).
`schemas`: FOLDER holds JSON Schema's test suite (jsonschema's source archive has it: json/tests/draft*) or OpenAPI documents (openapi*.json, whose component schemas
are taken). Prints percentiles of compile times, and what is refused and why; the list written has every schema's file, place, milliseconds and answer.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from paceline.core.errors import InvalidRequest
from paceline.core.generation import Grammar, GrammarKind
from paceline.engine.grammar import Grammars, Matcher, restrict
from paceline.store.catalog import open_model

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


def timed(do: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    do()
    return (time.thread_time_ns() - began) / 1e6


def mask_times(vocabulary: Any) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of each token's mask, of applying it, and of taking the token."""
    grammars = Grammars(vocabulary)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(DOCUMENT))
    masks, applied, taken = list[float](), list[float](), list[float]()
    logits = np.zeros(vocabulary.size, np.float32)
    for _ in range(5):
        matcher: Matcher = grammars.matcher(grammar)
        for token in vocabulary.encode(TEXT, add_special=False):
            found: list[Any] = []
            masks.append(timed(lambda matcher=matcher, found=found: found.append(matcher.mask())))
            logits[:] = 1.0
            applied.append(timed(lambda found=found: restrict(logits, found[0])))
            taken.append(timed(lambda matcher=matcher, token=token: matcher.take(token)))
    return masks, applied, taken


def masks(arguments: argparse.Namespace) -> None:
    for name, vocabulary, steps in (
        ("the bundled model", open_model("smollm2-135m").tokenizer, arguments.step_ms),
        ("seeded words", Seeded(151_936), arguments.step_ms_large),
    ):
        parts = mask_times(vocabulary)
        row = sum(median(part) for part in parts)
        print(
            f"{name}, {vocabulary.size} tokens: mask {median(parts[0]):.3f} ms (p99 {sorted(parts[0])[int(0.99 * len(parts[0]))]:.3f}), applied in "
            f"{median(parts[1]):.3f}, a token taken in {median(parts[2]):.3f}; a row {row:.3f} ms"
        )
        if steps:
            for rows, step in zip((1, 16), map(float, steps.split(",")), strict=True):
                print(f"  {rows} rows: {rows * row:.3f} ms beside a step of {step} ms, {100 * rows * row / step:.1f} %")


def schemas_of(folder: Path) -> Iterator[tuple[str, dict[str, Any] | bool]]:
    """(file and place, schema) of a folder's test suites and OpenAPI documents."""
    for file in sorted(folder.rglob("*.json")):
        try:
            document = json.loads(file.read_text())
        except (ValueError, OSError):
            continue
        if isinstance(document, dict) and ("openapi" in document or "swagger" in document):
            parts = document.get("components", {}).get("schemas") or document.get("definitions") or {}
            for name in parts:
                key = "components" if "components" in document else "definitions"
                yield (
                    f"{file.name} {name}",
                    {"$ref": f"#/{'components/schemas' if key == 'components' else key}/{name}", key: document[key]},
                )
        elif isinstance(document, list) and document and all(isinstance(case, dict) and "schema" in case for case in document):
            for case in document:
                yield f"{file.parent.name}/{file.name} {case.get('description', '')}", case["schema"]


def schemas(arguments: argparse.Namespace) -> None:
    grammars = Grammars(open_model("smollm2-135m").tokenizer)
    grammars.prepare(Grammar(GrammarKind.REGEX, "a"))  # the vocabulary's tree is made once
    lines: list[str] = []
    times: dict[str, list[float]] = {"taken": [], "refused": []}
    reasons: Counter[str] = Counter()
    for folder in arguments.folders:
        for name, schema in schemas_of(folder):
            text = json.dumps(schema)
            began = time.thread_time_ns()
            try:
                grammars.prepare(Grammar(GrammarKind.JSON_SCHEMA, text))
                answer = "taken"
            except InvalidRequest as error:
                answer = error.message
                reasons[re.sub(r"(\"[^\"]*\"|'[^']*'|\d+)", "..", answer)[:90]] += 1
            took = (time.thread_time_ns() - began) / 1e6
            times["taken" if answer == "taken" else "refused"].append(took)
            lines.append(f"{name}\t{took:.2f} ms\t{answer}")
    arguments.listed.write_text("\n".join(lines) + "\n")
    for kind, found in times.items():
        found.sort()
        if found:
            print(f"{len(found)} {kind}: p50 {median(found):.2f} ms, p99 {found[int(0.99 * len(found))]:.2f}, max {found[-1]:.2f}")
    for reason, count in reasons.most_common(25):
        print(f"  {count:4} {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    of_masks = parts.add_parser("masks")
    of_masks.add_argument("--step-ms")
    of_masks.add_argument("--step-ms-large")
    of_masks.set_defaults(run=masks)
    of_schemas = parts.add_parser("schemas")
    of_schemas.add_argument("folders", nargs="+", type=Path)
    of_schemas.add_argument("--listed", type=Path, default=Path("schemas.txt"))
    of_schemas.set_defaults(run=schemas)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
