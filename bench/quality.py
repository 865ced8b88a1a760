"""How far each weights format strays from the same weights in float32: kernels' rounding alone, not what quantising a model cost.

Over the first tokens of this repository's own texts: Kullback-Leibler divergence from the reference's next-token distribution (nats a
token), how often both think the same token the likeliest, and perplexity. With `--peers-venv`, llama.cpp's too, on the same file.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tests.conformance.suites.layer_runner import Rows, run
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from paceline.backends import table
from paceline.backends.options import LoadOptions
from paceline.core.model import WeightsFormat
from paceline.engine.executor import Path as KernelPath
from paceline.machine.setup import load_runner
from paceline.store.catalog import OpenedModel, open_model, resolve
from paceline.store.home import Home

Logs = npt.NDArray[np.float64]
"""Log probabilities [T, V]."""

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("docs/internals/architecture.md", "README.md", "src/paceline/engine/scheduler.py")

_LLAMA_CPP = """
import json, sys
import llama_cpp, numpy as np
model, ids, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
llama = llama_cpp.Llama(model, n_ctx=max(map(len, ids)), logits_all=True, verbose=False)
found = []
for text in ids:
    llama.reset()
    llama.eval(text)
    found.append(np.array(llama.scores[: len(text)], np.float32))
np.savez(out, *found)
"""


def log_softmax(logits_TV: npt.NDArray[np.floating[Any]]) -> Logs:
    shifted = logits_TV.astype(np.float64) - logits_TV.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def transformers_logs(gguf: Path, texts: list[list[int]], dtype: torch.dtype) -> list[Logs]:
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype).eval()
    with torch.no_grad():
        return [log_softmax(model(torch.tensor([ids])).logits[0].float().numpy()) for ids in texts]


def our_logs(opened: OpenedModel, weights: WeightsFormat, texts: list[list[int]]) -> list[Logs]:
    blocks = max(map(len, texts)) // 16 + 1
    options = LoadOptions(opened.spec.all_layers, weights, blocks, kernel_cache=Home.from_environment().kernels)
    runner = load_runner(table.choose(opened.spec, weights), opened.weights, options)
    try:
        rows = [Rows(ids, 0, list(range(len(ids) // runner.block_size + 1)), KernelPath.PROMPT) for ids in texts]
        return [log_softmax(run(runner, row)[0].logits_TV) for row in rows]
    finally:
        runner.close()


def llama_cpp_logs(python: Path, gguf: Path, texts: list[list[int]]) -> list[Logs]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npz"
        subprocess.run([python, "-c", _LLAMA_CPP, gguf, json.dumps(texts), out], check=True)
        return [log_softmax(logits) for logits in np.load(out).values()]


def compare(reference: list[Logs], found: list[Logs], texts: list[list[int]]) -> dict[str, float]:
    divergence = np.concatenate([(np.exp(r) * (r - f)).sum(-1) for r, f in zip(reference, found, strict=True)])
    same = np.concatenate([r.argmax(-1) == f.argmax(-1) for r, f in zip(reference, found, strict=True)])
    surprise = np.concatenate([-f[np.arange(len(ids) - 1), ids[1:]] for f, ids in zip(found, texts, strict=True)])
    return {
        "kl_mean": float(divergence.mean()),
        "kl_p99": float(np.quantile(divergence, 0.99)),
        "same_top": float(same.mean()),
        "perplexity": float(np.exp(surprise.mean())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="a model in a GGUF file")
    parser.add_argument("--tokens", type=int, default=1000, help="of each text")
    parser.add_argument("--peers-venv", type=Path, help="a virtual environment with llama-cpp-python")
    args = parser.parse_args()
    opened, gguf = open_model(args.model), resolve(args.model, Home.from_environment()).path
    texts = [opened.tokenizer.encode((ROOT / text).read_text())[: args.tokens] for text in TEXTS]
    reference = transformers_logs(gguf, texts, torch.float32)
    found = {f"paceline {weights}": our_logs(opened, weights, texts) for weights in WeightsFormat}
    found["transformers bf16"] = transformers_logs(gguf, texts, torch.bfloat16)
    if args.peers_venv:
        found["llama.cpp"] = llama_cpp_logs(args.peers_venv / "bin" / "python", gguf, texts)
    report = {name: compare(reference, logs, texts) for name, logs in [("float32", reference), *found.items()]}
    for name, row in report.items():
        line = f"{name:18} KL {row['kl_mean']:.1e} (p99 {row['kl_p99']:.1e})  same top {row['same_top']:.1%}"
        print(f"{line}  perplexity {row['perplexity']:.3f}", file=sys.stderr)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
