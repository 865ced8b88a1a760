"""Models of real size, by one command: starts, memory, pipelines over nodes that are each too small, decode, long prompts, bytes.

    python bench/size.py                        # everything that can run here; hours on two cores
    python bench/size.py --parts load,speed     # some of it
    python bench/size.py --rounds 1 --no-before # quicker

Each row prints as it is found: what was measured beside what was asked and what to reach for, and the processor. The models are seeded random weights of real shapes (`make_model.py`), kept
in --scratch. Figures stand beside commit c943c08, which is checked out for the run, and beside llama.cpp where --peers-venv has it (`make bench-size` builds it).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import httpx
from tests.fakes.seeded_models import shape, write_gguf

import size_fleet
import size_load
import size_speed
import size_steps
import size_weights
from contender import ContenderError, Kind, kinds
from quiet import Patience
from size_builds import BEFORE, OURS, ROOT, Build, earlier
from size_rows import Row, machine


@dataclass(frozen=True, slots=True)
class Bench:
    """What all parts share."""

    scratch: Path
    model: Path
    before: Build | None
    llama: Kind | None
    threads: int
    rounds: int
    limit_bytes: int
    peers_venv: Path

    def load(self) -> Iterator[Row]:
        yield from size_load.measure(OURS, self.before, self.llama, self.model, self.scratch, threads=self.threads, rounds=self.rounds)

    def weights(self) -> Iterator[Row]:
        yield from size_weights.bytes_a_token(self.model)
        yield from size_weights.weight_error(size_weights.find_ggml(self.peers_venv), self.scratch)

    def speed(self) -> Iterator[Row]:
        if self.llama is None:
            yield missing("decode and prefill beside llama.cpp", "llama.cpp is not there: make bench-size builds it")
            return
        patience = Patience(60.0, 0.04)
        yield from size_speed.beside_llama(
            OURS, self.llama, self.model, self.scratch, threads=self.threads, rounds=self.rounds, patience=patience
        )

    def context(self) -> Iterator[Row]:
        if self.before is None:
            yield missing("prefill at 8k and 32k", f"{BEFORE} is left out")
            return
        yield from size_speed.deep_prefill(OURS, self.before, self.scratch)

    def scheduling(self) -> Iterator[Row]:
        yield from size_steps.scheduling(OURS, self.model, self.scratch, threads=self.threads, rounds=self.rounds)

    def sampling(self) -> Iterator[Row]:
        yield from size_steps.sampling(OURS, self.scratch)

    def fleet(self) -> Iterator[Row]:
        yield from size_fleet.measure(OURS, self.model, self.scratch, threads=self.threads, limit_bytes=self.limit_bytes)

    def bytes(self) -> Iterator[Row]:
        """The identity matrix at a 1B shape, which CI runs with fewer layers."""
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(ROOT / "tests/identity/test_sizes.py")]
        done = subprocess.run(
            command, env={**OURS.environment(), "PACELINE_SIZES": "whole", "PACELINE_TEST_ALL": "1"}, cwd=ROOT, check=False
        )
        measured = "equal" if done.returncode == 0 else "see above"
        yield Row(
            "bytes at a 1B shape: 1, 2, 3 stages, context 8k, kills, batch 1 and 16, all formats",
            measured,
            "equal",
            "equal",
            done.returncode == 0,
            "against one node",
        )


def missing(what: str, why: str) -> Row:
    return Row(what, f"not measured: {why}", "-", "-", None, "")


def guarded(part: str, rows: Iterator[Row]) -> Iterator[Row]:
    """A part's rows; one that fails says so in a row, and the others are measured."""
    try:
        yield from rows
    except (ContenderError, OSError, RuntimeError, httpx.HTTPError, subprocess.SubprocessError) as error:
        yield Row(
            f"{part}: the rest",
            f"FAILED: {error}",
            "-",
            "-",
            held=False,
            conditions=f"its logs are in the folder of --scratch ({type(error).__name__})",
        )


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "load": Bench.load, "weights": Bench.weights, "fleet": Bench.fleet, "speed": Bench.speed, "context": Bench.context,
    "scheduling": Bench.scheduling, "sampling": Bench.sampling, "bytes": Bench.bytes,
}  # fmt: skip


def main() -> int:
    options = _options()
    options.scratch.mkdir(parents=True, exist_ok=True)
    model = options.scratch / f"{options.preset}-{options.types}.gguf"
    if not model.exists() and set(options.parts) - {"context", "sampling", "bytes"}:
        print(f"writing {model}", file=sys.stderr)
        write_gguf(model, shape(options.preset), options.types)
    llama = kinds(options.peers_venv.absolute(), options.threads)["llama.cpp"]
    rows: list[Row] = []
    with ExitStack() as stack:
        before = None if options.no_before else stack.enter_context(earlier(BEFORE, options.scratch))
        bench = Bench(
            options.scratch,
            model,
            before,
            llama if llama.python.exists() else None,
            options.threads,
            options.rounds,
            int(options.limit_gib * size_fleet.GIB),
            options.peers_venv.absolute(),
        )
        for part in options.parts:
            print(f"== {part}", flush=True)
            for row in guarded(part, PARTS[part](bench)):
                row.print(machine(options.threads))
                rows.append(row)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(options.threads), "rows": [row.as_json() for row in rows]}, indent=1) + "\n")
    return 1 if any(row.held is False for row in rows) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scratch = Path(tempfile.gettempdir()) / "paceline-bench" / "size"
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--preset", default="llama-8b", help="of bench/make_model.py")
    parser.add_argument("--types", default="Q4_K_M")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-gib", type=float, default=2.5, help="of each node's memory, in the part called fleet")
    parser.add_argument("--no-before", action="store_true", help=f"leave {BEFORE} out: its starts take minutes")
    parser.add_argument("--peers-venv", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--scratch", type=Path, default=scratch, help="models, homes and logs; some 15 GB")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
