"""What a long prompt does to others: the first token of a short request behind it, and the pauses of an answer beside it.

    python bench/scheduling.py --model smollm2-135m
    python bench/make_model.py /tmp/1b.gguf --preset llama-1b && python bench/scheduling.py --model /tmp/1b.gguf --seconds 60

In one process, through the host that a server uses: requests come while steps run. The long prompt is given up once enough was seen of it, so that a
slow machine need not compute it whole. Steps, rows and figures are this process's; the processor is printed with them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import aclosing
from itertools import count, pairwise
from pathlib import Path
from statistics import median

from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.inference import ChunkStream
from paceline.machine.devices import usable_cores
from paceline.machine.settings import NodeSettings
from paceline.machine.speed import PromptMaker
from paceline.node.build import BuiltNode, build_node
from size_rows import machine

LIVE = 1 << 20
"""Tokens of an answer that goes on for as long as it is read; cut to what fits."""
WARM_TOKENS = 12
"""Of an answer, before its pauses count."""


class Clients:
    """Of one node."""

    def __init__(self, node: BuiltNode) -> None:
        self._node, self._prompts, self._numbers = node, PromptMaker(node.model.tokenizer), count()

    def ask(self, prompt_tokens: int, answer_tokens: int) -> ChunkStream:
        prompt = self._prompts.make(1, prompt_tokens)[0]
        most = self._node.model.max_context - prompt_tokens
        sampling = SamplingParams(temperature=0.0)
        request_id = RequestId(f"bench-{next(self._numbers)}")
        request = GenerationRequest(request_id, prompt, min(answer_tokens, most), sampling, ignore_eos=True, draft="off")
        return self._node.host.generate(self._node.model.name, request)

    async def first_token_s(self, prompt_tokens: int) -> tuple[float, float]:
        """Until the first token of a request that wants one: seconds, and those that this process computed."""
        began, began_cpu = time.perf_counter(), time.process_time()
        async with aclosing(self.ask(prompt_tokens, 1)) as stream:
            await anext(stream)
        return time.perf_counter() - began, time.process_time() - began_cpu

    async def in_background(self, stream: ChunkStream) -> None:
        async with aclosing(stream):
            async for _ in stream:
                pass


async def first_tokens(clients: Clients, long: int, short: int, rounds: int, after_s: list[float]) -> dict[str, object]:
    """Of short requests, alone and so many seconds after a long prompt came."""
    await clients.first_token_s(short)
    alone = [await clients.first_token_s(short) for _ in range(2 * rounds)]
    alone_s, alone_cpu_s = (median(each) for each in zip(*alone, strict=True))
    behind: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for wait_s in after_s:
            busy = asyncio.create_task(clients.in_background(clients.ask(long, 1)))
            await asyncio.sleep(wait_s)
            if busy.done():
                print(f"{long} tokens took less than {wait_s} s: nothing to wait behind", file=sys.stderr)
                continue
            behind.setdefault(f"{wait_s:g}", []).append(await clients.first_token_s(short))
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)
    return {
        "alone_s": round(alone_s, 4),
        "alone_cpu_s": round(alone_cpu_s, 4),
        "behind_s": {wait: [round(wall, 4) for wall, _ in times] for wait, times in behind.items()},
        "median_times": {wait: round(median(wall for wall, _ in times) / alone_s, 2) for wait, times in behind.items()},
        # Of what this process computed, whatever else the machine does.
        "times_by_cpu": {wait: [round(cpu / alone_cpu_s, 2) for _, cpu in times] for wait, times in behind.items()},
    }


async def pauses(clients: Clients, long: int, seconds: float) -> dict[str, object]:
    """Of an answer: alone for a while, and while a long prompt is computed beside it."""
    told: list[float] = []
    computed: list[float] = []  # by this process until then
    warm = asyncio.Event()
    async with aclosing(clients.ask(16, LIVE)) as live:

        async def read() -> None:
            async for chunks in live:
                tokens = sum(bool(chunk.token_ids) for chunk in chunks)
                told.extend([time.perf_counter()] * tokens)
                computed.extend([time.process_time()] * tokens)
                if len(told) >= 2 * WARM_TOKENS:
                    warm.set()

        reading = asyncio.create_task(read())
        await warm.wait()
        alone, alone_cpu = ([b - a for a, b in pairwise(times[WARM_TOKENS:])] for times in (told, computed))
        began, place = time.perf_counter(), len(told)
        busy = asyncio.create_task(clients.in_background(clients.ask(long, 1)))
        await asyncio.wait([busy], timeout=seconds)
        ended, is_done = time.perf_counter(), busy.done()
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        beside = [b - a for a, b in pairwise(told[place - 1 :]) if b <= ended]
        beside_cpu = [b - a for a, b in pairwise(computed[place - 1 : place + len(beside)])]
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    return {
        "alone_s": median(alone),
        "beside_median_s": median(beside),
        "beside_worst_s": max(beside),
        # Of what this process computed, whatever else the machine does.
        "worst_times_by_cpu": round(max(beside_cpu) / median(alone_cpu), 2),
        "worst_first": [round(each, 4) for each in sorted(beside, reverse=True)[:8]],
        "tokens_beside": len(beside),
        "long_prompt_done_s": ended - began if is_done else None,
    }


async def measure(node: BuiltNode, options: argparse.Namespace) -> dict[str, object]:
    """Print each part as it is there; returns all."""
    clients, report = Clients(node), dict[str, object]()

    def add(**found: object) -> None:
        report.update(found)
        print(json.dumps(found, indent=2), flush=True)

    add(processor=machine(options.threads or usable_cores()), model=node.summary)
    if "first" in options.parts:
        add(short_behind_long=await first_tokens(clients, options.long, options.short, options.rounds, options.after))
    if "pauses" in options.parts:
        add(pauses_beside_long=await pauses(clients, options.long, options.seconds), load_average=os.getloadavg()[0])
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--long", type=int, default=8000, help="tokens of the long prompt")
    parser.add_argument("--short", type=int, default=20, help="tokens of the short one")
    parser.add_argument("--after", type=float, nargs="+", default=[0.5, 2.0, 5.0], help="seconds from the long one to the short one")
    parser.add_argument("--seconds", type=float, default=120.0, help="of pauses, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default="first,pauses", help="first: tokens of short requests; pauses: of an answer")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prefill-chunk", type=int, default=512)
    parser.add_argument("--step-budget-ms", type=int, default=250)
    parser.add_argument("--json", type=Path, help="write all of it here")
    options = parser.parse_args()
    settings = NodeSettings(
        options.model,
        kv_tokens=2 * options.long + 4096,
        threads=options.threads,
        prefill_chunk=options.prefill_chunk,
        step_budget_ms=options.step_budget_ms,
        prefix_cache=False,
    )
    node = build_node(settings)
    try:
        report = asyncio.run(measure(node, options))
    finally:
        node.close()
    if options.json:
        options.json.write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
