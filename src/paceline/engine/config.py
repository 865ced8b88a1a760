"""What may be tuned about an engine. Each field says what raising it costs."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bounds of one engine. The block size and the number of blocks are the executor's.

    Raises:
        ConfigError: a bound is below what lets a single sequence advance.
    """

    max_context: int
    """Tokens of prompt and answer together. Raising it lets one request hold more of the pool, and the others wait or be preempted."""
    max_running: int = 32
    """Sequences that advance side by side. Raising it lengthens each decode step, and with it everyone's time between tokens."""
    max_waiting: int = 256
    """Sequences that may queue beyond `max_running`. Raising it lets clients wait longer before they are told to come back."""
    prefill_chunk: int = 512
    """Prompt rows in one step, beside the decode rows, where nothing waits for its next token. Raising it makes prompts faster where a machine likes
    many rows, and takes memory for each."""
    step_budget_s: float = 0.25
    """What a step may take while an answer waits for its next token; prompts get the rows that fit. Raising it makes prompts faster and each running
    answer's pauses longer."""
    max_guesses: int = 64
    """Guessed rows in one step, over all sequences. Raising it takes memory: each row's logits are the vocabulary in fp32."""
    prefix_cache: bool = True
    """Keep full blocks for requests that begin alike. Costs a hash of each full block, about 1 us."""
    step_timeout_s: float = 60.0
    """How long one step may take before the executor counts as lost. Raising it delays the news of a hang."""
    wait_timeout_s: float = 60.0
    """How long live sequences may wait while none of them can run, as for KV that is computed elsewhere, before the engine counts as failed. Raising it
    delays the news of a source that hangs."""
    max_losses: int = 8
    """Losses of the executor, with no step between them, before live requests end with an error. Raising it delays the news of an outage."""
    model_digest: str = ""
    """Names the weights in the keys of cached blocks, so that blocks of two models are never taken for each other."""

    @property
    def max_rows(self) -> int:
        """Of one batch: prompts and drafts share a chunk, beside a row of each sequence that runs."""
        return self.prefill_chunk + self.max_running

    @property
    def max_logits_rows(self) -> int:
        """Of one batch: a row of each sequence that runs, and guesses."""
        return self.max_running + self.max_guesses

    def __post_init__(self) -> None:
        for name, least in (
            ("max_context", 2),
            ("max_running", 1),
            ("max_waiting", 0),
            ("prefill_chunk", 1),
            ("max_guesses", 0),
            ("max_losses", 1),
        ):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} is {value}, and {least} is the least that works", f"Raise {name}.")
        for name in ("step_timeout_s", "step_budget_s", "wait_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, and must be above 0", f"Raise {name}.")
