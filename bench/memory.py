"""What a loaded model weighs: resident memory after load with every KV block written, less that after imports, less the KV pool, over
the size of its file.

Measured in a fresh process, the second of two: the first fills the caches of a new machine (compiled kernels, digests).
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.backends import table
from paceline.backends.table import Kernels
from paceline.core.clock import SystemClock
from paceline.core.model import WeightsFormat
from paceline.machine.build import build_engine
from paceline.machine.settings import NodeSettings
from paceline.machine.speed import PromptMaker, drive
from paceline.store.catalog import open_model, resolve
from paceline.store.home import Home


def resident_bytes() -> int:
    """This process's memory now; its most so far where the system doesn't say."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["VmRSS"].split()[0]) * 1024
    except OSError:
        return peak_bytes()


def peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def weigh(model: str, weights: str, kv_tokens: int, threads: int, device: Kernels | None) -> dict[str, Any]:
    """Import, load, fill the pool, and weigh at each step. For a fresh process."""
    wanted = WeightsFormat(weights) if weights else None
    _import_kernels(model, wanted, device)
    gc.collect()
    imported = resident_bytes()
    sequences, answer = 16, 16
    length = kv_tokens // sequences
    built = build_engine(
        NodeSettings(
            model,
            wanted,
            kv_tokens=kv_tokens,
            context=length,
            threads=threads,
            max_running=sequences,
            prefix_cache=False,
            device=device,
        )
    )
    loaded = resident_bytes()
    try:
        prompts = PromptMaker(built.model.tokenizer).make(sequences, length - answer)
        drive(built.engine, prompts, answer, SystemClock())
        gc.collect()
        full = resident_bytes()
        pool = built.kv.tokens * built.kv.token_bytes
        path = resolve(model, Home.from_environment()).path
        file = path.stat().st_size if path.is_file() else sum(each.stat().st_size for each in path.glob("*.safetensors"))
        return {
            "model": built.model.name,
            "summary": built.summary,
            "file_bytes": file,
            "pool_bytes": pool,
            "imported_bytes": imported,
            "loaded_bytes": loaded,
            "full_bytes": full,
            "peak_bytes": peak_bytes(),
            "ratio": (full - imported - pool) / file,
        }
    finally:
        built.close()


def _import_kernels(model: str, weights: WeightsFormat | None, device: Kernels | None) -> None:
    """Import what the load will import on this machine: libraries are not the model's weight."""
    opened = open_model(model)
    if table.choose(opened.spec, weights or WeightsFormat.STORED, asked=device).compiled:
        from paceline.backends import kernel_cache

        kernel_cache.use(Home.from_environment().kernels)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="", help="default: the format nearest to the file's")
    parser.add_argument("--kv-tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", type=Kernels, choices=list(Kernels), help="default: what this machine would choose")
    parser.add_argument("--here", action="store_true", help="measure in this process, once")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(weigh(options.model, options.weights, options.kv_tokens, options.threads, options.device), indent=2))
        return 0
    for _ in range(2):
        run = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--here"], stdout=subprocess.PIPE, text=True, check=True)
    report = {**json.loads(run.stdout), "at_most": {"resident": 3.8, "streamed": 1.6}, "reach_for": {"resident": 3.0, "streamed": 1.2}}
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
