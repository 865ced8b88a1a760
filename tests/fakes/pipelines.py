"""A pipeline in one process: real stages on real runners, each in a thread, and memory where the network would be. Machines can be broken.

What is broken shows as it would over a network: a machine that is gone closes its streams, one that hangs takes and gives nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.core.errors import PacelineError, ShardUnavailable, StreamClosed, StreamStalled
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange, shard_id
from paceline.engine.local import LayerRunner, WireBits
from paceline.ways.pipeline.executor.route import Opening, PipelineFault, RouteStage, StageReport
from paceline.ways.pipeline.executor.stage import Stage, StageBatch

Item = tuple[StageBatch, WireBits]
Tamper = Callable[[StageBatch, Any], Any]


class MemoryPipe:
    """A sink and a source in one."""

    def __init__(self) -> None:
        self._items: queue.Queue[Item | None] = queue.Queue()
        self._closed = False

    def prepare(self, batch: StageBatch, width: int) -> None:
        """There is nothing to prepare."""

    def send(self, batch: StageBatch, x_TD: WireBits, deadline: float) -> None:
        del deadline
        if self._closed:
            raise StreamClosed("the pipe is closed")
        self._items.put((batch, np.array(x_TD)))

    def receive(self, deadline: float) -> Item:
        try:
            item = self._items.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise StreamStalled("nothing came") from None
        if item is None or self._closed:
            raise StreamClosed("the pipe is closed")
        return item

    def close(self) -> None:
        self._closed = True
        self._items.put(None)


class Machine:
    """One machine: runners of layers, and ways to break it."""

    def __init__(self, node_id: str, runner: LayerRunner[Any], width: int, n_blocks: int = 0) -> None:
        self.node_id, self.runner, self.width = NodeId(node_id), runner, width
        self.n_blocks = n_blocks or runner.n_blocks
        self.alive, self.hangs = True, False
        self.holds_identity, self.numerics_id = runner.holds_identity, runner.numerics_id
        self.tamper: Tamper | None = None
        self.dies_at: int | None = None
        """Batches from now until it dies."""
        self.keeps: dict[LayerRange, Stage] = {}
        """Stages of the last route, with their KV. It loses them as it dies."""
        self.rows: dict[LayerRange, int] = {}
        """That it has run."""
        self.on_death: Callable[[], None] = lambda: None
        self.refused: list[Exception] = []
        """Why it did not run batches that came."""
        self.lock = threading.Lock()


class MemoryRoute:
    """Stages in threads, joined by `close`."""

    def __init__(self, parts: Sequence[tuple[Machine, LayerRange]], block_size: int = 0) -> None:
        self.machines = [machine for machine, _ in parts]
        self.block_size = max(block_size, *(machine.runner.block_size for machine in self.machines))
        self.stages = tuple(
            RouteStage(
                machine.node_id,
                layers,
                shard_id("m", layers),
                machine.numerics_id,
                machine.holds_identity,
                machine.n_blocks * machine.runner.block_size,
                layers in machine.keeps,
            )
            for machine, layers in parts
        )
        self._pipes = [MemoryPipe() for _ in range(len(parts) + 1)]
        self.sink, self.source = self._pipes[0], self._pipes[-1]
        self._faults: list[PipelineFault] = []
        self.reports = [StageReport() for _ in parts]
        self._done = [0] * len(parts)
        self._threads = [
            threading.Thread(target=self._serve, args=(place, machine, layers), daemon=True)
            for place, (machine, layers) in enumerate(parts)
        ]
        for thread in self._threads:
            thread.start()

    def fault(self, wait_s: float = 0.0) -> PipelineFault | None:
        del wait_s  # who goes away says so first
        return self._faults[0] if self._faults else None

    def suspect(self, received: int) -> PipelineFault:
        place = next((place for place, done in enumerate(self._done) if done <= received), len(self._done) - 1)
        return PipelineFault(self.stages[place].node_id, "pipeline_stalled", f"{self.stages[place].node_id} does no work")

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for thread in self._threads:
            thread.join()

    def _serve(self, place: int, machine: Machine, layers: LayerRange) -> None:
        stage = machine.keeps.setdefault(
            layers,
            Stage(machine.runner, layers, base_block=0, n_blocks=machine.n_blocks, max_rows=1024, max_context=1 << 20, width=machine.width),
        )
        stage.take_blocks_of(self.block_size)
        source, sink = self._pipes[place], self._pipes[place + 1]

        while True:
            try:
                batch, x_TD = source.receive(time.monotonic() + 3600)
                if machine.dies_at is not None:
                    machine.dies_at -= 1
                    machine.alive = machine.dies_at > 0
                if not machine.alive:
                    machine.keeps.clear()
                    machine.on_death()
                    self._faults.append(PipelineFault(machine.node_id, "shard_unavailable", f"{machine.node_id} went away"))
                    raise StreamClosed("gone")
                if machine.hangs:
                    continue
                try:
                    with machine.lock:
                        out_TD = np.array(stage.run(batch, x_TD))
                except Exception as error:
                    machine.refused.append(error)
                    raise
                machine.rows[layers] = machine.rows.get(layers, 0) + batch.n_rows
                batch = batch.behind(layers)
                out_TD = out_TD[: batch.n_rows]
                if machine.tamper is not None:
                    out_TD = machine.tamper(batch, out_TD)
                self._done[place] += 1
                self.reports[place] = StageReport(sent=self._done[place], latency_s=0.002 * self._done[place])
                sink.send(batch, out_TD, 0.0)
            except PacelineError:
                sink.close()
                return


class MemoryRouter:
    """Covers the layers with machines in the order given, leaving out those that are broken or quarantined. Those of the last route keep their layers.

    Args:
        machines: by the layers each holds.
        splits: layer ranges to cover; every range takes the first machine that can run it.
        block_size: tokens that the orchestrator keeps together, where none of them keeps as many.
    """

    def __init__(self, machines: Sequence[Machine], splits: Sequence[LayerRange], block_size: int = 0) -> None:
        self.machines, self.splits, self.block_size = machines, splits, block_size
        self.quarantined: set[NodeId] = set()
        self.routes: list[MemoryRoute] = []
        self.looks = 0
        self.on_look: Callable[[int], None] = lambda _: None
        self.loading: list[Opening] = []
        """What is said before the next route is found, one a look."""

    def find(self, wait_s: float) -> MemoryRoute | Opening:
        del wait_s
        self.looks += 1
        self.on_look(self.looks)
        if self.loading:
            return self.loading.pop(0)
        chosen: list[tuple[Machine, LayerRange]] = []
        for span in self.splits:
            able = sorted(self._able(span), key=lambda machine: span not in machine.keeps)
            kept = [machine for machine in self.machines if machine.alive and machine.keeps.keys() - {span}]
            found = next((machine for machine in able if machine not in [*kept, *(one for one, _ in chosen)]), None)
            found = found or next((machine for machine in able if machine not in [one for one, _ in chosen]), None)
            if found is None:
                raise ShardUnavailable(f"No machine has layers {span.words}")
            chosen.append((found, span))
        if self.routes:
            self.routes[-1].close()
        for machine in self.machines:
            part = dict(chosen)
            machine.keeps = {layers: stage for layers, stage in machine.keeps.items() if part.get(machine) == layers}
        self.routes.append(MemoryRoute(chosen, self.block_size))
        return self.routes[-1]

    def lacks(self) -> str | None:
        return next((f"No machine has layers {span.words}" for span in self.splits if not self._able(span)), None)

    def forget_kv(self) -> None:
        for machine in self.machines:
            machine.keeps.clear()

    def quarantine(self, fault: PipelineFault) -> None:
        if fault.node_id is not None:
            self.quarantined.add(fault.node_id)

    def close(self) -> None:
        for route in self.routes:
            route.close()

    def _able(self, span: LayerRange) -> Sequence[Machine]:
        return [
            machine
            for machine in self.machines
            if machine.alive
            and machine.node_id not in self.quarantined
            and machine.runner.layers.start <= span.start
            and span.stop <= machine.runner.layers.stop
        ]
