"""transformers in bf16 with its own KV cache: the loop a newcomer would write. Prompts of one run have one length, so nothing is padded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache
from worker import Engine, Job, Times, serve


class TransformersEngine:
    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self._model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> Times:
        arrivals: list[list[float]] = [[] for _ in prompts]
        cache = DynamicCache(config=self._model.config)
        started_s = time.perf_counter()
        ids = torch.tensor([list(prompt) for prompt in prompts])
        for _ in range(answer_tokens):
            logits = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            now_s = time.perf_counter()
            for stamps in arrivals:
                stamps.append(now_s)
        return Times(started_s, arrivals)


def load(job: Job) -> tuple[Engine, dict[str, Any]]:
    return TransformersEngine(job), {"version": transformers.__version__, "torch": torch.__version__, "weights": "bf16"}


if __name__ == "__main__":
    serve(load)
