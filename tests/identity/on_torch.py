"""Run by test_instruction_sets.py under bounds of what torch and its libraries may use: tells what torch's kernels say of themselves, and do."""

from __future__ import annotations

import json
import sys

from paceline.backends import torch
from paceline.backends.numerics import SeededWeights
from paceline.backends.options import LoadOptions
from paceline.backends.torch.linear import onednn_isa
from paceline.backends.torch.loading import cuts_agree, seeded_rows
from paceline.core.model import ModelSpec, RopeSpec, WeightsFormat

SPEC = ModelSpec(
    model_type="qwen3", n_layers=2, hidden=576, n_heads=9, n_kv_heads=3, head_dim=64, ffn=1536, vocab=512, max_context=1024, rms_eps=1e-5,
    rope=RopeSpec(10_000.0), tied_head=True, qk_norm=True,
)  # fmt: skip
ROWS = 330
CUTS = ((ROWS,), (7, 3, 1, 64, 255), (129, 2, 5, 17, 33, 65, 79), (1,) * 30 + (300,))


def main() -> None:
    runner = torch.load(SeededWeights(SPEC), LoadOptions(SPEC.all_layers, WeightsFormat.BF16, -(-ROWS // 16)))
    agree = cuts_agree(runner, seeded_rows(ROWS, SPEC.hidden), CUTS)
    sys.stdout.write(json.dumps({"isa": onednn_isa(), "id": runner.numerics_id, "holds": runner.holds_identity, "agree": agree}))


if __name__ == "__main__":
    main()
