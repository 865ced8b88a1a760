"""What spreading a model over two machines costs and gains, at the executor: two processes, a core and a thread each, against one of them alone.

    python bench/pipeline.py [--cut 11] [--rounds 5] [--cores 0,1] [--json pipeline.json]

Process A embeds, runs layers 0 to CUT - 1, and turns into tokens what process B makes of the rest; activations travel as they do between nodes
(mutual TLS over loopback). The whole model on A alone, with one thread, is measured in the same run, a block of one after a block of the other.
Prompt 128, 128 generated; one stream, then sixteen.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.fakes.fleets import TestFleet

from paceline.backends.options import LoadOptions
from paceline.backends.table import choose
from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange, WeightsFormat
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.local import LocalExecutor
from paceline.machine.setup import load_runner
from paceline.machine.speed import PromptMaker, drive
from paceline.net.tensor.dialling import dial
from paceline.net.tensor.listener import TensorListener
from paceline.net.trust.identity import Identity
from paceline.net.trust.refusals import Refusals
from paceline.store.catalog import open_model
from paceline.store.home import Home
from paceline.ways.pipeline.executor.pipeline import PipelineExecutor
from paceline.ways.pipeline.executor.route import ActivationSink, ActivationSource, PipelineFault, RouteStage
from paceline.ways.pipeline.executor.search import PipelineLimits
from paceline.ways.pipeline.executor.stage import Stage
from paceline.ways.pipeline.host.ends import StreamSink, StreamSource

MODEL = "smollm2-135m"
WEIGHTS = WeightsFormat.INT4
BLOCKS = 16 * 17
PROMPT, ANSWER = 128, 128
PATIENCE_S = 120.0


def never(_node: NodeId, _issued_at: int) -> bool:
    return False


def load(layers: LayerRange | None, *, edges: bool) -> tuple[Any, Any]:
    opened = open_model(MODEL)
    options = LoadOptions(
        layers or opened.spec.all_layers, WEIGHTS, BLOCKS, threads=1, edges=edges, kernel_cache=Home.from_environment().kernels
    )
    return load_runner(choose(opened.spec, WEIGHTS), opened.weights, options), opened


def listen(identity: Identity) -> TensorListener:
    return TensorListener(identity, never, SystemClock(), Refusals())


def stage_process(core: int, cut: int, identity_pem: bytes, other_certificate: bytes, pipe: Connection) -> None:
    """Process B: layers from `cut` on, for as long as the other side lives."""
    os.sched_setaffinity(0, {core})
    identity = Identity.from_pem(identity_pem)
    opened = open_model(MODEL)
    runner, _ = load(LayerRange(cut, opened.spec.n_layers), edges=False)
    stage = Stage(
        runner, runner.layers, base_block=0, n_blocks=BLOCKS, max_rows=1024, max_context=opened.spec.max_context, width=opened.spec.hidden
    )
    listener = listen(identity)
    port = listener.start("127.0.0.1")
    expected = listener.expect()
    pipe.send((port, expected.ticket))
    back_port, back_ticket = pipe.recv()
    member = identity.root.member(other_certificate, time.time())
    sink = StreamSink(dial([f"127.0.0.1:{back_port}"], member, back_ticket, identity, never, time.perf_counter() + PATIENCE_S))
    source = StreamSource(expected.wait(time.perf_counter() + PATIENCE_S))
    while True:
        batch, x_TD = source.receive(time.perf_counter() + PATIENCE_S)
        sink.prepare(batch, x_TD.shape[1])
        sink.send(batch, stage.run(batch, x_TD), time.perf_counter() + PATIENCE_S)


@dataclass
class TwoProcesses:
    """A `Route` and its `Router`."""

    stages: tuple[RouteStage, ...]
    sink: ActivationSink
    source: ActivationSource
    block_size: int

    def find(self, wait_s: float) -> TwoProcesses:
        del wait_s
        return self

    def lacks(self) -> None: ...

    def forget_kv(self) -> None:
        """Nothing is kept: no stage is ever lost here."""

    def quarantine(self, fault: PipelineFault) -> None:
        raise SystemExit(f"the pipeline broke: {fault.message}")

    def fault(self, wait_s: float = 0.0) -> None:
        del wait_s

    def suspect(self, received: int) -> PipelineFault:
        return PipelineFault(None, "pipeline_stalled", f"nothing came after batch {received}")

    def close(self) -> None:
        self.sink.close()
        self.source.close()


def connect(cut: int, n_layers: int, core: int, block_size: int) -> tuple[TwoProcesses, multiprocessing.Process]:
    fleet = TestFleet()
    a, b = fleet.member("a"), fleet.member("b")
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=stage_process, args=(core, cut, b.to_pem(), a.member.certificate, theirs), daemon=True
    )
    process.start()
    listener = listen(a)
    port = listener.start("127.0.0.1")
    expected = listener.expect()
    their_port, ticket = ours.recv()
    ours.send((port, expected.ticket))
    sink = StreamSink(dial([f"127.0.0.1:{their_port}"], b.member, ticket, a, never, time.perf_counter() + PATIENCE_S))
    source = StreamSource(expected.wait(time.perf_counter() + PATIENCE_S))
    stage = RouteStage(
        NodeId("b"), LayerRange(cut, n_layers), f"{MODEL}:{cut}-{n_layers - 1}", "", holds_identity=True, kv_tokens=BLOCKS * block_size
    )
    return TwoProcesses((stage,), sink, source, block_size), process


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--cut", type=int, default=11)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--cores", default="0,1")
    arguments.add_argument("--streams", default="1,16")
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    first, second = (int(core) for core in options.cores.split(","))
    os.sched_setaffinity(0, {first})
    whole, opened = load(None, edges=True)
    head, _ = load(LayerRange(0, options.cut), edges=True)
    route, process = connect(options.cut, opened.spec.n_layers, second, whole.block_size)
    clock = SystemClock()
    limits = PipelineLimits(stall_s=PATIENCE_S, search_s=1.0)
    executors = {
        "alone": LocalExecutor(whole),
        "two": PipelineExecutor(head, opened.spec.n_layers, route, limits, clock),
    }
    config = EngineConfig(max_context=1024, max_running=16, prefix_cache=False)
    prompts = PromptMaker(opened.tokenizer)
    rates: dict[int, dict[str, list[float]]] = {}
    for streams in [int(each) for each in options.streams.split(",")]:
        found = rates[streams] = {name: [] for name in executors}
        for turn in range(options.rounds + 1):
            for name, executor in executors.items():
                engine = Engine(executor, opened.tokenizer, config, clock)
                timing = drive(engine, prompts.make(streams, PROMPT), ANSWER, clock)
                if turn:
                    found[name].append(timing.total_decode_per_s)
        alone, two = (statistics.median(found[name]) for name in ("alone", "two"))
        ratios = sorted(b / a for a, b in zip(found["alone"], found["two"], strict=True))
        print(
            f"{streams:3} streams: alone {alone:7.1f} tok/s   two stages {two:7.1f} tok/s   {statistics.median(ratios):.3f}x  ({ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rates, indent=1))
    process.kill()


if __name__ == "__main__":
    main()
