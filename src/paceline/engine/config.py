"""What may be tuned about an engine (each field says what raising it costs), and what an engine of that size refuses before a request costs anything.
Whatever passes can be run to its end, alone if need be.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from paceline.core.errors import ConfigError, ContextOverflow, InvalidRequest, Overloaded
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
    """How long live sequences may wait while none of them can run and no block comes that is computed elsewhere, before the engine counts as failed.
    Raising it delays the news of a source that hangs."""
    kv_check_every: int = 512
    """Of blocks that peers gave, one in so many is computed again and compared; 0: none. Lowering it: a peer that lies is found sooner, and more is
    computed twice."""
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
"""Parts of the queue: no other node has more than one of them, unless by a single request, and all together leave one to this node's own clients.
Raising it: a node that floods keeps less from others, and one that alone asks for many is refused sooner."""
RETRY_SPAN_S = 60
"""Longest wait asked of a client that was refused."""


def check_request(request: GenerationRequest, config: EngineConfig, executor: Executor, vocab: int) -> None:
    """Check a request against an engine's bounds.

    Raises:
        InvalidRequest: a field is wrong; `field` names it.
        ContextOverflow: it exceeds the context, or the KV memory as a whole.
    """
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
    """Tokens of prompt and answer that one sequence may have, with the KV memory that the executor has now. The last one drawn is never run."""
    return min(config.max_context, executor.n_blocks * executor.block_size + 1)


def check_draft(request: GenerationRequest, models: Collection[str]) -> None:
    """Check that there is what a request wants its tokens guessed with.

    Args:
        models: ids of those that draft.

    Raises:
        InvalidRequest: there is no such draft model, or the request's ways rule it out.
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
        raise InvalidRequest(f"draft: nobody drafts with {printable(draft, 200)!r}", f"There are: {there}.", field="draft")


def check_grammar(request: GenerationRequest, *, served: bool) -> None:
    """Check that an answer of the form that a request asks for can end.

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
    """Check that `more` sequences may join those that are live.

    Args:
        held: of those that are live, how many the node has that asks; None: a client of this node asks.

    Raises:
        Overloaded: the queue is full, or that node's share of it; when to come back goes by how many are before the client.
    """
    most = config.max_running + config.max_waiting
    wait_s = min(RETRY_SPAN_S, max(1, 2 * math.ceil(live / config.max_running)))
    if held and held + more > most // SHARES:
        raise Overloaded(f"{held} answers of that node are running or waiting here", "Try again later.", retry_after_s=wait_s)
    room = most if held is None or not live else most - most // SHARES
    if live + more > room:
        raise Overloaded(f"{live} answers are running or waiting, and {room} is the most", "Try again later.", retry_after_s=wait_s)
