"""The settings of an engine, and the requests it refuses before they cost anything. A request that passes can be run to its end, alone if necessary."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from paceline.core.errors import ConfigError, ContextOverflow, InvalidRequest, Overloaded, WayNotAllowed
from paceline.core.generation import GenerationRequest, check_sampling
from paceline.core.text import printable
from paceline.engine.drafts import DRAFTS, MODELS_DRAFT
from paceline.engine.executor import Executor


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bounds of one engine. The block size and the number of blocks are the executor's.

    Raises:
        ConfigError: a bound is below what lets a single sequence advance.
    """

    max_context: int
    """Maximum tokens of prompt and answer together. Raising it: one request may hold more of the pool, and the others wait or are preempted."""
    max_running: int = 32
    """Sequences that run at the same time. Raising it: each decode step takes longer, and with it the time between tokens of all sequences."""
    max_waiting: int = 256
    """Sequences that may queue beyond `max_running`. Raising it: fewer requests are refused, and queued ones wait longer."""
    prefill_chunk: int = 512
    """Prompt rows in one step, in addition to the decode rows, while no answer waits for its next token. Raising it: faster prompts on machines that profit
    from many rows, and memory for each row.
    """
    step_budget_s: float = 0.25
    """Seconds that a step may take while an answer waits for its next token; prompts get the rows that fit. Raising it: faster prompts, and longer pauses in
    running answers.
    """
    max_guesses: int = 64
    """Draft rows in one step, over all sequences. Raising it: more memory, since each row's logits are the vocabulary in fp32."""
    prefix_cache: bool = True
    """Keep full blocks for requests that begin alike. Costs a hash of each full block, about 1 us."""
    step_timeout_s: float = 60.0
    """Seconds that one step may take before the executor counts as lost. Raising it: a hang is noticed later."""
    wait_timeout_s: float = 60.0
    """Seconds for which live sequences may wait while none can run and no block arrives from elsewhere, before the engine counts as failed. Raising it: a
    source that hangs is noticed later.
    """
    kv_check_every: int = 512
    """Blocks from peers for each one that is computed again and compared; 0: none is. Lowering it: a peer that sends wrong KV is found sooner, and more is
    computed twice.
    """
    max_losses: int = 8
    """Losses of the executor, with no step between them, before live requests end with an error. Raising it: an outage is noticed later."""
    model_digest: str = ""
    """Digest of the weights. It is part of the keys of cached blocks, so that blocks of two models are never confused."""

    @property
    def max_rows(self) -> int:
        """Maximum rows of one batch: prompts and drafts share a chunk, and each running sequence has a row."""
        return self.prefill_chunk + self.max_running

    @property
    def max_logits_rows(self) -> int:
        """Maximum rows with logits in one batch: a row of each running sequence, and the draft rows."""
        return self.max_running + self.max_guesses

    def __post_init__(self) -> None:
        for name, least in (
            ("max_context", 2),
            ("max_running", 1),
            ("max_waiting", 0),
            ("prefill_chunk", 1),
            ("max_guesses", 0),
            ("kv_check_every", 0),
            ("max_losses", 1),
        ):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} is {value}, and {least} is the least that works", f"Raise {name}.")
        for name in ("step_timeout_s", "step_budget_s", "wait_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, and must be above 0", f"Raise {name}.")


SHARES = 3
"""Parts of the queue. No other node may have more than one part, except by a single request, and all of them together leave one part to this node's own
clients. Raising it: a node that floods takes less from others, and a node with many requests is refused sooner even when alone.
"""
RETRY_SPAN_S = 60
"""Longest time in seconds after which a refused client is asked to come back. Raising it: clients stay away from a queue that has emptied; lowering it: refused
clients come back while the queue is still long.
"""


def check_request(request: GenerationRequest, config: EngineConfig, executor: Executor, vocab: int) -> None:
    """Check a request against an engine's bounds.

    Raises:
        InvalidRequest: a field is wrong; `field` names it.
        ContextOverflow: it exceeds the context, or the KV memory as a whole.
        WayNotAllowed: it is exact, and the executor promises no bytes.
    """
    if request.exact and not executor.numerics_id:
        raise WayNotAllowed("exact: no bytes are promised by the machines that run the model now", "Leave it out.", field="exact")
    n_prompt = len(request.prompt_ids)
    if n_prompt == 0:
        raise InvalidRequest("The prompt is empty", "Send at least one token.", field="prompt")
    if request.max_tokens is not None and request.max_tokens < (0 if request.scores_prompt else 1):
        raise InvalidRequest(f"max_tokens is {request.max_tokens}", "Ask for at least one token.", field="max_tokens")
    most = config.max_running + config.max_waiting
    if not 1 <= request.n <= most:
        raise InvalidRequest(f"n is {request.n}, and this engine takes 1 to {most}", "Ask for fewer answers.", field="n")
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab:
        raise InvalidRequest(f"The prompt holds token ids outside 0 to {vocab - 1}", "Use the tokenizer of this model.", field="prompt")
    so_far = request.so_far
    longest = max(map(len, so_far.values()), default=0)
    if not all(0 <= index < request.n for index in so_far) or (request.max_tokens is not None and longest >= max(request.max_tokens, 1)):
        raise InvalidRequest("What the answer has so far is not of this request", "Ask for it from its beginning.", field="so_far")
    if not all(0 <= token < vocab for tokens in so_far.values() for token in tokens):
        raise InvalidRequest(
            f"The answer so far holds token ids outside 0 to {vocab - 1}", "Use the tokenizer of this model.", field="so_far"
        )
    check_sampling(request.sampling)
    if not all(0 <= token < vocab for token in request.sampling.logit_bias):
        raise InvalidRequest(f"logit_bias names token ids outside 0 to {vocab - 1}", "Use the tokenizer of this model.", field="logit_bias")
    context = context_of(config, executor)
    if n_prompt + (request.max_tokens or longest + 1) > context:
        what = f"the context of {context}" if context == config.max_context else f"what the KV memory holds, {context}"
        answer = "" if request.max_tokens is None else f" and {request.max_tokens} of answer"
        raise ContextOverflow(
            f"{n_prompt} tokens of prompt{answer} exceed {what}",
            "Shorten the prompt, ask for fewer tokens, or give the server more KV memory.",
            field="prompt" if n_prompt >= context else "max_tokens",
        )


def context_of(config: EngineConfig, executor: Executor) -> int:
    """Return the maximum tokens of prompt and answer for one sequence, with the KV memory that the executor has now. The last drawn token is never run."""
    return min(config.max_context, executor.n_blocks * executor.block_size + 1)


def check_draft(request: GenerationRequest, models: Collection[str]) -> None:
    """Check that the source of draft tokens that a request names exists.

    Args:
        models: ids of the draft models.

    Raises:
        InvalidRequest: the draft model is not available, or the request's ways rule it out.
    """
    draft = request.draft
    if draft is None or draft in DRAFTS:
        return
    if not request.allows(MODELS_DRAFT):
        raise InvalidRequest(
            f"draft: {printable(draft, 200)!r} is a model's, and the request's ways are without {MODELS_DRAFT}",
            "Add it to them.",
            field="draft",
        )
    if draft not in models:
        there = ", ".join((*DRAFTS, *sorted(models)))
        raise InvalidRequest(f"draft: no node drafts with {printable(draft, 200)!r}", f"There are: {there}.", field="draft")


def check_grammar(request: GenerationRequest, *, served: bool) -> None:
    """Check that an answer of the requested form can end.

    Raises:
        InvalidRequest: it can't, or forms are not served here.
    """
    if request.grammar is None:
        return
    if not served:
        raise InvalidRequest("Answers of a given form are not served here", "Ask without one.", field="response_format")
    if request.ignore_eos:
        raise InvalidRequest("ignore_eos: an answer of a given form ends where the form does", "Send one of them.", field="ignore_eos")


def check_room(live: int, more: int, config: EngineConfig, held: int | None = None) -> None:
    """Check that `more` sequences may join the live ones.

    Args:
        live: number of live sequences.
        held: how many of them belong to the node that asks; None: a client of this node asks.

    Raises:
        Overloaded: the queue is full, or the asking node has its share of it. The time to come back grows with the number of live sequences.
    """
    most = config.max_running + config.max_waiting
    wait_s = min(RETRY_SPAN_S, max(1, 2 * math.ceil(live / config.max_running)))
    if held and held + more > most // SHARES:
        raise Overloaded(f"{held} answers of that node are running or waiting here", "Try again later.", retry_after_s=wait_s)
    room = most if held is None or not live else most - most // SHARES
    if live + more > room:
        raise Overloaded(f"{live} answers are running or waiting, and {room} is the most", "Try again later.", retry_after_s=wait_s)
