"""How long a context and how many KV blocks a machine can hold: arithmetic on numbers, no look at the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.backends.memory import human
from paceline.core.errors import ConfigError, OutOfMemory
from paceline.core.model import LayerRange, ModelSpec

KV_SHARE = 0.5
"""Of the memory that weights leave free, how much KV may take unasked. Raising it leaves less to everything else on the machine."""
TYPICAL_TOKENS = 2048
"""Length of an answer and its prompt in everyday use: the pool holds this many for every sequence that may run."""
MIN_CONTEXT = 256
"""Shorter contexts answer nothing of use; better to say that the model does not fit."""


@dataclass(frozen=True, slots=True)
class KvPlan:
    """Room for KV."""

    n_blocks: int
    block_size: int
    context: int
    """Longest prompt and answer together, in tokens."""
    shortened_from: int | None
    """The model's own context, where memory allowed only a shorter one."""
    token_bytes: int
    """What one token takes, over all layers."""

    @property
    def tokens(self) -> int:
        return self.n_blocks * self.block_size


def plan_kv(
    spec: ModelSpec,
    *,
    free_bytes: int,
    weights_bytes: int,
    working: Callable[[int], int] = lambda _: 0,
    max_running: int,
    block_size: int,
    group: int = 1,
    context: int | None,
    kv_tokens: int | None,
    layers: LayerRange | None = None,
) -> KvPlan:
    """Divide memory.

    Args:
        spec: the model's sizes.
        free_bytes: memory available before the model is loaded.
        weights_bytes: what the weights will take of it.
        working: bytes that a step's rows take of it, with so many KV blocks.
        max_running: sequences side by side.
        block_size: tokens a block holds.
        group: blocks whose memory comes together.
        context: as asked; None: the model's, or as long as memory allows.
        kv_tokens: as asked; None: enough for everyday use, at most `KV_SHARE` of what is left.
        layers: whose KV it is; None: all.

    Raises:
        ConfigError: what was asked contradicts itself or the model.
        OutOfMemory: what was asked does not fit.
    """
    if context is not None and context > spec.max_context:
        raise ConfigError(
            f"A context of {context} tokens is more than this model was made for ({spec.max_context})",
            f"Ask for --context {spec.max_context} or less.",
        )
    if context is not None and kv_tokens is not None and kv_tokens < context:
        raise ConfigError(f"--kv-tokens {kv_tokens} can't hold one context of {context} tokens", f"Raise it to {context} or more.")
    token_bytes = max(1, spec.kv_bytes_per_token(spec.all_layers if layers is None else layers))
    group_tokens = group * block_size
    # With as many blocks as there could be: fewer take less.
    most_tokens = kv_tokens if kv_tokens is not None else int(max(0, free_bytes - weights_bytes) * KV_SHARE) // token_bytes
    working_bytes = working(-(-most_tokens // block_size))
    left = free_bytes - weights_bytes - working_bytes
    if left <= 0:
        beside = f" and work on them {human(working_bytes)}" if working_bytes else ""
        raise OutOfMemory(
            f"The weights need {human(weights_bytes)}{beside}, and {human(max(free_bytes, 0))} of memory is free",
            "Close other programs, choose a smaller model, or a smaller --weights format.",
        )
    if kv_tokens is not None:
        pool_bytes = -(-kv_tokens // group_tokens) * group_tokens * token_bytes
        if pool_bytes > left:
            raise OutOfMemory(
                f"--kv-tokens {kv_tokens} needs {human(pool_bytes)}; "
                f"{human(left)} of memory is free beside the weights ({human(weights_bytes)})",
                f"Ask for {left // token_bytes // group_tokens * group_tokens} or fewer.",
            )
        affordable = kv_tokens
    else:
        affordable = int(left * KV_SHARE) // token_bytes // group_tokens * group_tokens
    if context is not None and context > affordable:
        raise OutOfMemory(
            f"A context of {context} tokens needs {human(context * token_bytes)} for KV; "
            f"{human(affordable * token_bytes)} can be spared beside the weights ({human(weights_bytes)})",
            f"Ask for --context {affordable} or less, or give it the memory with --kv-tokens {context}.",
        )
    granted = context if context is not None else min(spec.max_context, affordable)
    if granted < MIN_CONTEXT and context is None and kv_tokens is None:
        raise OutOfMemory(
            f"Only {human(max(left, 0))} of memory is free beside the weights ({human(weights_bytes)}): room for {affordable} tokens",
            "Close other programs, or choose a smaller model.",
        )
    tokens = kv_tokens if kv_tokens is not None else min(affordable, max(granted, max_running * min(granted, TYPICAL_TOKENS)))
    shortened_from = spec.max_context if context is None and granted < spec.max_context else None
    n_blocks = max(1, -(-tokens // block_size))
    if kv_tokens is None:
        n_blocks = -(-n_blocks // group) * group
    return KvPlan(n_blocks, block_size, granted, shortened_from, token_bytes)
