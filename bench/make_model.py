"""Write a model of any size with seeded random weights: a GGUF file, or a folder of safetensors.

    python bench/make_model.py /tmp/8b.gguf --preset llama-8b
    python bench/make_model.py /tmp/1b-q6.gguf --preset llama-1b --types Q6_K --layers 4
    python bench/make_model.py /tmp/1b --preset llama-1b --types BF16 --folder

Answers are no language, but shapes, types, speed and memory are those of the real model, and each seed gives the same bytes everywhere.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.fakes.seeded_blocks import BLOCK_TYPES, DENSE
from tests.fakes.seeded_models import MIXES, PRESETS, shape, write_folder, write_gguf

CHANGES = {"layers": "n_layers", "hidden": "hidden", "heads": "n_heads", "kv_heads": "n_kv_heads", "head_dim": "head_dim", "ffn": "ffn", "vocab": "vocab", "context": "max_context"}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="llama-8b")
    parser.add_argument("--types", choices=[*MIXES, *BLOCK_TYPES, *sorted(DENSE)], default="Q4_K_M")
    parser.add_argument("--folder", action="store_true", help="safetensors; --types BF16, F16 or F32")
    parser.add_argument("--seed", type=int, default=0)
    for name in CHANGES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="default: the preset's")
    options = parser.parse_args()
    spec = shape(options.preset, **{field: value for name, field in CHANGES.items() if (value := getattr(options, name)) is not None})
    began_s = time.perf_counter()
    write = write_folder if options.folder else write_gguf
    path = write(options.path, spec, options.types, options.seed)
    size = sum(file.stat().st_size for file in path.iterdir()) if options.folder else path.stat().st_size
    print(f"{path}: {size / 1e9:.2f} GB in {time.perf_counter() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
