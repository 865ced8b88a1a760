"""llama.cpp, through its C API as `llama-batched-bench` drives it: one decode call a step for all sequences, no server, no sampler chain.

Settings are those of its context that matter on a CPU: flash attention, and whether sequences share one KV stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from worker import Engine, Job, Times, serve

BATCH_TOKENS = 4096
MICRO_BATCH = 512


class LlamaEngine:
    def __init__(self, job: Job) -> None:
        self._now = job.now
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(job.model.encode(), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp can't load {job.model}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        flash, unified = ("on" in part for part in job.setting.split(","))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = job.sequences * job.context
        params.n_batch = BATCH_TOKENS
        params.n_ubatch = MICRO_BATCH
        params.n_seq_max = job.sequences
        params.n_threads = params.n_threads_batch = job.threads
        params.flash_attn_type = 1 if flash else 0
        params.kv_unified = unified
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F16
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp can't make a context with {job.setting}")
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def run(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> Times:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        arrivals: list[list[float]] = [[] for _ in prompts]
        tokens = [0] * len(prompts)
        started_s = self._now()
        for group in _groups(prompts):
            rows = [(token, at, which, at == len(prompts[which]) - 1) for which in group for at, token in enumerate(prompts[which])]
            lasts = [row for row, (_, _, _, wanted) in enumerate(rows) if wanted]
            for which, token in zip(group, self._decode(rows, lasts), strict=True):
                tokens[which] = token
                arrivals[which].append(self._now())
        for step in range(answer_tokens - 1):
            rows = [(token, len(prompts[which]) + step, which, True) for which, token in enumerate(tokens)]
            tokens = self._decode(rows, range(len(rows)))
            now_s = self._now()
            for stamps in arrivals:
                stamps.append(now_s)
        return Times(started_s, arrivals)

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]], wanted: Sequence[int]) -> list[int]:
        batch = self._batch
        for row, (token, position, sequence, logits) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = logits
        batch.n_tokens = len(rows)
        code = llama_cpp.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode answered {code}")
        return [int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, row), (self._vocab,)).argmax()) for row in wanted]


def _groups(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts in as few batches as hold them."""
    groups: list[list[int]] = [[]]
    room = BATCH_TOKENS
    for which, prompt in enumerate(prompts):
        if len(prompt) > room:
            groups.append([])
            room = BATCH_TOKENS
        groups[-1].append(which)
        room -= len(prompt)
    return groups


def load(job: Job) -> tuple[Engine, dict[str, Any]]:
    engine = LlamaEngine(job)
    return engine, {
        "version": llama_cpp.__version__,
        "weights": "as in the file",
        "build": llama_cpp.llama_print_system_info().decode().strip(),
    }


if __name__ == "__main__":
    serve(load)
