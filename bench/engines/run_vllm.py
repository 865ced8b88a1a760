"""vLLM on CPU, its engine stepped in this process. The end of sequence is ignored rather than banned, which costs it nothing.

Settings: `eager`, or `compiled` through torch.compile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from worker import Engine, Job, Times, serve


class VllmEngine:
    def __init__(self, job: Job) -> None:
        from vllm import EngineArgs, LLMEngine

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=job.model,
                skip_tokenizer_init=True,
                dtype="bfloat16",
                max_model_len=job.context,
                max_num_seqs=job.sequences,
                max_num_batched_tokens=4096,
                enable_prefix_caching=False,
                disable_log_stats=True,
                enforce_eager=job.setting == "eager",
            )
        )
        self._runs = 0

    def run(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> Times:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._runs += 1
        params = SamplingParams(
            temperature=0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        arrivals: dict[str, list[float]] = {f"{self._runs}-{which}": [] for which in range(len(prompts))}
        started_s = time.perf_counter()
        for name, prompt in zip(arrivals, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now_s = time.perf_counter()
            for output in outputs:
                arrivals[output.request_id].extend([now_s] * len(output.outputs[0].token_ids))
        return Times(started_s, list(arrivals.values()))


def load(job: Job) -> tuple[Engine, dict[str, Any]]:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{job.threads - 1}"
    import vllm

    return VllmEngine(job), {"version": vllm.__version__, "weights": "bf16"}


if __name__ == "__main__":
    serve(load)
