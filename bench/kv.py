"""KV on the disk: the first token of a prefix that was kept, against computing it; the disk's rate; and what writing behind the steps costs.

    python bench/kv.py restart
    python bench/kv.py restart --model 1b.gguf          # of bench/make_model.py --preset llama-1b
    python bench/kv.py rate --heads 8 --head-dim 128 --layers 32
    python bench/kv.py steps
    python bench/kv.py histories

In one process. A restart is another engine over the same folder. Before blocks are read, the page cache is asked to drop every file of theirs
(POSIX_FADV_DONTNEED, after they were synced); `--cached` leaves them. Figures that are compared come from one run, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from paceline.core.clock import SystemClock
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import BlockId, RequestId
from paceline.core.model import LayerRange
from paceline.machine.build import BuiltEngine, build_engine
from paceline.machine.kv_tier import DiskTier, KvDiskLimits
from paceline.machine.settings import NodeSettings
from paceline.store.home import Home
from size_rows import machine

BUDGET = 64 << 30
ROUNDS = 3


def drop_cache(folder: Path) -> None:
    """Have the next reads come from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def run_to_rest(built: BuiltEngine, *requests: GenerationRequest, steps_s: list[float] | None = None) -> float:
    """Seconds to the first token of all. Goes on until all is written.

    Args:
        steps_s: gets the processor time, of the thread that steps, of each step that gave as many tokens as there are requests.
    """
    began, first = time.perf_counter(), 0.0
    for request in requests:
        built.engine.add(request)
    while built.engine.has_work:
        begins = time.thread_time()
        chunks = built.engine.step()
        if steps_s is not None and sum(len(chunk.token_ids) for chunk in chunks) == len(requests):
            steps_s.append(time.thread_time() - begins)
        if any(chunk.token_ids for chunk in chunks) and not first:
            first = time.perf_counter() - began
    return first


def asked(name: str, prompt: list[int], answer: int = 2) -> GenerationRequest:
    return GenerationRequest(RequestId(name), tuple(prompt), answer, SamplingParams(temperature=0.0), ignore_eos=True, draft="off")


def prompt_of(n: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(300, 8000) for _ in range(n)]


def restart(options: argparse.Namespace) -> dict[str, Any]:
    settings = NodeSettings(
        options.model,
        None,
        options.tokens + options.new + 64,
        options.tokens + options.new + 64,
        None,
        options.threads,
        kv_disk_bytes=BUDGET,
    )
    computed, read, reading, tokens = [], [], [], []
    for number in range(options.rounds):
        built = build_engine(settings)
        prompt = prompt_of(options.tokens, number)
        longer = [*prompt, *prompt_of(options.new, 3000 + number)]
        run_to_rest(built, asked("warm", prompt_of(64, 1000 + number)))
        computed.append(run_to_rest(built, asked("computed", prompt)))
        while built.engine.stats().kept_blocks["written"] < options.tokens // 16 - 1:
            time.sleep(0.01)
        built.close()
        if not options.cached:
            drop_cache(Home.from_environment().kv)
        built = build_engine(settings)
        run_to_rest(built, asked("warm", prompt_of(64, 2000 + number)))
        began = time.perf_counter()
        built.engine.add(asked("read", longer))
        came = first = 0.0
        before = built.engine.stats().prefix_fetched_tokens
        while built.engine.has_work:
            begins = time.perf_counter() - began
            chunks = built.engine.step()
            # The step that finds all there goes on to compute.
            if not came and built.engine.stats().prefix_fetched_tokens > before:
                came = begins
            if any(chunk.token_ids for chunk in chunks) and not first:
                first = time.perf_counter() - began
        read.append(first)
        reading.append(came)
        tokens.append(built.engine.stats().prefix_fetched_tokens - before)
        block_bytes = built.runner.block_bytes
        built.close()
    return {
        "model": options.model,
        "prompt_tokens": options.tokens,
        "new_tokens_behind_what_is_read": options.new,
        "tokens_read": tokens,
        "computed_s": computed,
        "read_s": read,
        "of_it_until_all_is_read_s": reading,
        "reading_share": median(reading) / median(read),
        "megabytes": block_bytes * options.tokens / 16 / 1e6,
        "faster": median(computed) / median(read),
        "at_least": 10,
        "reach_for": 30,
    }


class Pages:
    """KV of a shape, in memory, without a model."""

    numerics_id, kv_layout, block_size = "bench", "bench", 16

    def __init__(self, n_blocks: int, layers: int, heads: int, head_dim: int) -> None:
        self.layers = LayerRange(0, layers)
        self.block_bytes = layers * heads * head_dim * 2 * 2 * 16
        self.kv = np.random.default_rng(0).integers(0, 256, (n_blocks, self.block_bytes), np.uint8)

    def export_block(self, block: BlockId, into: memoryview, part: LayerRange | None = None) -> None:
        assert part is None, "all layers are here"
        np.copyto(np.frombuffer(into, np.uint8), self.kv[block])

    def import_block(self, block: BlockId, data: memoryview, part: LayerRange | None = None) -> None:
        assert part is None, "all layers are here"
        np.copyto(self.kv[block], np.frombuffer(data, np.uint8))


def rate(options: argparse.Namespace) -> dict[str, Any]:
    n = options.tokens // 16
    pages = Pages(n, options.layers, options.heads, options.head_dim)
    folder = Home.from_environment().kv
    keys = [number.to_bytes(16, "big") for number in range(n)]
    blocks = [BlockId(block) for block in range(n)]
    tier = DiskTier(pages, "bench", folder, KvDiskLimits(BUDGET), SystemClock(), lambda: None)
    began = time.perf_counter()
    for key, block in zip(keys, blocks, strict=True):
        while not tier.keep(key, block):
            tier.kept()
            time.sleep(0.001)
    while tier.counts["written"] < n:
        time.sleep(0.001)
    written = time.perf_counter() - began
    plain = folder / "plain"
    plain.write_bytes(pages.kv.tobytes())
    total = n * pages.block_bytes
    rows: dict[str, list[float]] = {"tier": [], "plain": []}
    buffer = memoryview(bytearray(4 << 20))
    for _ in range(options.rounds):
        drop_cache(folder)
        began = time.perf_counter()
        handle = os.open(plain, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while os.readv(handle, [buffer]):
            pass
        os.close(handle)
        rows["plain"].append(total / (time.perf_counter() - began) / 1e6)
        drop_cache(folder)
        began = time.perf_counter()
        fetch = tier.fetch(keys, blocks)
        while not fetch.is_over:
            time.sleep(0.0005)
        assert fetch.filled == n
        rows["tier"].append(total / (time.perf_counter() - began) / 1e6)
    tier.close()
    share = median(a / b for a, b in zip(rows["tier"], rows["plain"], strict=True))
    return {
        "block_bytes": pages.block_bytes,
        "gigabytes": total / 1e9,
        "written_mb_s": total / written / 1e6,
        "plain_mb_s": rows["plain"],
        "tier_mb_s": rows["tier"],
        "share": share,
        "at_least": 0.7,
        "reach_for": 0.9,
    }


def steps(options: argparse.Namespace) -> dict[str, Any]:
    settings = NodeSettings(options.model, None, 16 * 320, 512, None, options.threads, max_running=16)
    kinds = {"without": build_engine(settings), "with": build_engine(replace(settings, kv_disk_bytes=BUDGET))}
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    wall: dict[str, list[float]] = {kind: [] for kind in kinds}
    of_steps: dict[str, list[float]] = {kind: [] for kind in kinds}
    kept = 0
    for number in range(2 * options.rounds + 1):
        for kind, built in kinds.items() if number % 2 else reversed(kinds.items()):
            requests = [asked(f"{number}-{i}", prompt_of(128, 100 * number + i), 160) for i in range(16)]
            began, began_s = time.process_time(), time.perf_counter()
            steps_s = list[float]()
            run_to_rest(built, *requests, steps_s=steps_s)
            kept = built.engine.stats().kept_blocks.get("written", kept)
            if number:
                spent[kind].append(time.process_time() - began)
                of_steps[kind].append(sum(steps_s) / len(steps_s) * 1000)
                wall[kind].append(time.perf_counter() - began_s)
    block_bytes = kinds["with"].runner.block_bytes
    for built in kinds.values():
        built.close()
    return {
        "streams": 16,
        "step_ms": of_steps,
        "processor_s_of_the_whole_process": spent,
        "wall_s": wall,
        "blocks_written": kept,
        "megabytes_written": kept * block_bytes / 1e6,
        "ratio": median(of_steps["without"]) / median(of_steps["with"]),
        "ratio_of_the_whole_process": median(spent["without"]) / median(spent["with"]),
        "at_least": 0.97,
        "reach_for": 1.0,
    }


QUESTIONS = (
    "What is a paceline?", "Write a haiku about rain.", "Explain how a bicycle works, in steps.", "Write a Python function that reverses a list.",
    "List ten rivers of Europe with their lengths.", "Tell me a joke about a snake.", "Translate 'good morning' into five languages.",
    "What is 17 * 23? Think it through.", "Write a letter to a landlord about a leaking tap.", "Give me JSON with a name, an age and hobbies.",
)  # fmt: skip


def histories(options: argparse.Namespace) -> dict[str, Any]:
    """How often a chat's second turn has other tokens for the first answer than those that were drawn."""
    built = build_engine(NodeSettings(options.model, None, 16 * 256, 512, None, options.threads, max_running=16))
    tokenizer, told = built.setup.opened.tokenizer, dict[str, tuple[list[int], str]]()
    first: dict[str, list[int]] = {}
    for number in range(options.turns):
        asked_of = [{"role": "user", "content": f"{QUESTIONS[number % len(QUESTIONS)]} ({number})"}]
        name, prompt = str(number), tokenizer.render_chat(asked_of)
        first[name] = prompt
        sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=number)
        built.engine.add(GenerationRequest(RequestId(name), tuple(prompt), 96, sampling, draft="off"))
    while built.engine.has_work:
        for chunk in built.engine.step():
            ids, text = told.get(chunk.request_id, ([], ""))
            told[chunk.request_id] = ([*ids, *chunk.token_ids], text + chunk.text)
    differ, lost, drawn = 0, list[int](), 0
    for number in range(options.turns):
        name = str(number)
        ids, text = told[name]
        ids = [one for one in ids if one not in tokenizer.eos_ids]
        turns = [
            {"role": "user", "content": f"{QUESTIONS[number % len(QUESTIONS)]} ({number})"},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Go on."},
        ]
        before, now = [*first[name], *ids], tokenizer.render_chat(turns)
        alike = next((place for place, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now)))
        drawn += len(ids)
        if alike < len(before):
            differ += 1
            lost.append(len(before) - alike)
    built.close()
    return {
        "turns": options.turns,
        "tokens_drawn": drawn,
        "turns_with_other_tokens": differ,
        "tokens_from_the_first_difference_on": {"median": median(lost or [0]), "all": sum(lost)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=["restart", "rate", "steps", "histories"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--new", type=int, default=0, help="tokens behind the prefix, that are computed")
    parser.add_argument("--cached", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: the temporary one")
    options = parser.parse_args()
    kernels = Home.from_environment().kernels
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        (Path(scratch) / "cache").mkdir()
        if kernels.exists():
            (Path(scratch) / "cache" / "kernels").symlink_to(kernels.resolve())
        os.environ["PACELINE_HOME"] = scratch
        row: Callable[[argparse.Namespace], dict[str, Any]] = {"restart": restart, "rate": rate, "steps": steps, "histories": histories}[
            options.row
        ]
        print(json.dumps({"machine": machine(options.threads), **row(options)}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
