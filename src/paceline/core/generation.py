"""A generation as the server asks for it and the engine answers it.

Which sampling parameters are taken stands in one table for the API, for requests from other nodes and for the engine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from paceline.core.errors import InvalidRequest
from paceline.core.ids import RequestId


class FinishReason(StrEnum):
    """Why a sequence ended. The first two are OpenAI's; the others never reach a client as an answer."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `core.generation` has the ranges; the engine refuses what is out of them.

    Order: logit_bias, penalties, temperature, top-k, top-p, min-p, then the draw from noise keyed by (seed, position).
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """Fixed at admission where missing, so that a replay draws the same."""
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    logprobs: int | None = None
    """None: no logprobs. Otherwise the number of top alternatives (0 to 20) reported beside each token's own."""


MAX_GRAMMAR_LETTERS = 256 << 10
"""Of a grammar's text. Raising it: compiling one may hold up others for longer."""


class GrammarKind(StrEnum):
    """In what language a grammar is written."""

    JSON_SCHEMA = "json_schema"
    """The answer is a JSON document that the schema allows."""
    REGEX = "regex"
    """The whole answer matches it."""
    LARK = "grammar"
    """Lark's, as llguidance reads it."""
    TOOLS = "tools"
    """The same, made of a request's tools."""
    FORM = "form"
    """The same, made of a request's `response_format`."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that an answer must have."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class KvLeg:
    """This node's part of a request that a router sends to two: one computes the prompt, the other has its KV from there and writes the answer."""

    request_id: str
    """What both have in common (see `server.call.Call.named`), and 8 hex digits of this node's own."""
    is_prefill: bool
    """The prompt is computed here; else the answer is written here."""
    engine_id: str = ""
    """The node that computes the prompt, where the answer is written here; empty: it is known by its address."""
    address: str = ""
    tp_size: int = 1
    """Ranks of that node."""
    remote_request_id: str = ""
    """That node's own id of its part; empty: it is not known."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One client request, tokenized. Each of its `n` sequences i draws with seed + i."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    max_tokens: int | None
    """None: as many as the context leaves."""
    sampling: SamplingParams = SamplingParams()
    n: int = 1
    stop: tuple[str, ...] = ()
    """Text that ends an answer; not part of it."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end an answer, beside the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Benchmarks ban the end of sequence: its logits are masked, so that lengths are exact."""
    draft: str | None = None
    """What tokens are guessed with: "off", "ngram", "auto", or the id of a draft model. None: as the engine is set. Never changes an answer."""
    so_far: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Where the answer began at another node: the tokens of each sequence that has not ended, by index. They are run and not said again. Empty:
    it begins here."""
    caller: str = ""
    """The node that asks; empty: a client of this one."""
    client: str = ""
    """The network address of the client that asks this node; empty: not known."""
    shares_kv: bool = False
    """That node may have KV of this one: its prompts and those of this one's own clients are computed once for all."""
    grammar: Grammar | None = None
    """The form of each answer. Tokens that would leave it are never drawn; logprobs are then among those that remain."""
    cache_salt: str = ""
    """Prompts are computed once for requests of one caller (of all that share KV) and one salt: how soon an answer begins tells no other what was
    asked."""
    scores_prompt: bool = False
    """The log probabilities of the prompt's own tokens are wanted, too, with as many alternatives as `sampling.logprobs`. Only then `max_tokens` may be 0:
    nothing else is."""
    ways: frozenset[str] | None = None
    """Ways of spreading work that may serve it, as plans call them; None: whichever the plan chose."""
    leg: KvLeg | None = None
    """None: all of it is this node's."""

    def allows(self, way: str) -> bool:
        """Whether a way of spreading work may serve it."""
        return self.ways is None or way in self.ways

    @property
    def keeps_apart(self) -> bool:
        """What is computed for it is for its caller alone."""
        return bool(self.caller) and not self.shares_kv

    @property
    def indices(self) -> Sequence[int]:
        """Of the sequences to be run."""
        return sorted(self.so_far) if self.so_far else range(self.n)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a drawn token and its top alternatives, under the model's distribution before temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


LOCAL_FALLBACK = "local_fallback"
"""The notice that one machine goes on with what others ran with it."""
KV_TRANSFER = "kv_transfer"
"""The notice of how it ended that another node was to compute a prompt."""
PROMPT_PROGRESS = "prompt_progress"
"""The notice of how far a prompt is read: `tokens_read` of `tokens`."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that happened to an answer and is no part of it, for clients that ask: a machine was lost, another took over."""

    kind: str
    """`shard_status`, `shard_failover`, `pipeline_aborted`, `local_fallback`, `kv_transfer`, `kv_distrusted`, `prompt_progress`."""
    detail: Mapping[str, str | int | float]


_PROMPT_COMMENT = re.compile(r": prompt: (\d+) of (\d+) tokens read")


@dataclass(frozen=True, slots=True)
class PromptReading:
    """How far a prompt is read, in tokens."""

    tokens_read: int
    tokens: int

    def comment(self) -> bytes:
        """Return it as a comment in a stream of server-sent events."""
        return b": prompt: %d of %d tokens read\n\n" % (self.tokens_read, self.tokens)

    @classmethod
    def of_comment(cls, line: str) -> PromptReading | None:
        """Read a line of a stream; None: it is not such a comment."""
        found = _PROMPT_COMMENT.fullmatch(line)
        return None if found is None else cls(int(found[1]), int(found[2]))

    @classmethod
    def of_notice(cls, notice: Notice) -> PromptReading | None:
        """Read a notice, which another node may have written; None: it tells something else."""
        counts = notice.detail.get("tokens_read"), notice.detail.get("tokens")
        match counts:
            case (int(tokens_read), int(tokens)) if notice.kind == PROMPT_PROGRESS and 0 <= tokens_read <= tokens:
                return cls(tokens_read, tokens)
            case _:
                return None


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """What one sequence of a request gained in one step.

    `text` may lag behind `token_ids`: bytes of an unfinished UTF-8 character or of a possible stop string are held back.
    """

    request_id: RequestId
    index: int
    """Which of the request's `n` sequences."""
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Set with `FinishReason.ERROR`: what happened."""
    code: str | None = None
    """With it, where machines are missing: `shard_unavailable`, `weights_mismatch`, `pipeline_stalled`, `pipeline_aborted`; or where the answer's form
    can't be followed: `form_not_followed`."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache; set on a sequence's first chunk."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens, from the second on, where they were asked for: those that follow what earlier chunks had."""
    notices: tuple[Notice, ...] = ()
    """Set on chunks that carry nothing else."""
    transfer: Mapping[str, object] | None = None
    """Of a request with legs, at its end: `kv_transfer_params` of the answer."""


@dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers from `least` to `most`."""

    least: float
    most: float
    above: bool = False
    """`least` itself is not in it."""

    def holds(self, value: float) -> bool:
        return (self.least < value if self.above else self.least <= value) and value <= self.most and math.isfinite(value)

    def __str__(self) -> str:
        return f"{'above ' if self.above else ''}{self.least:g} to {self.most:g}"


TEMPERATURE = Range(0, 2)
TOP_K = Range(0, (1 << 31) - 1)
TOP_P = Range(0, 1)
MIN_P = Range(0, 1)
REPETITION_PENALTY = Range(0, 10, above=True)
PRESENCE_PENALTY = FREQUENCY_PENALTY = Range(-2, 2)
BIAS = Range(-100, 100)
LOGPROBS = Range(0, 20)
MAX_BIASES = 1024


def model_sampling(values: Mapping[str, object]) -> dict[str, float]:
    """What of a model's own settings may stand for what a request leaves out: numbers within their ranges. Files are strangers': the rest is dropped."""
    ranges = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P, "min_p": MIN_P, "repetition_penalty": REPETITION_PENALTY}
    found: dict[str, float] = {}
    for name, range_ in ranges.items():
        value = values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and range_.holds(value):
            found[name] = int(value) if name == "top_k" else float(value)
    return found


def check_sampling(params: SamplingParams) -> None:
    """Check what does not depend on the model.

    Raises:
        InvalidRequest: a value is out of its range; `field` names it.
    """
    values: Iterable[tuple[str, float, Range]] = (
        ("temperature", params.temperature, TEMPERATURE),
        ("top_k", params.top_k, TOP_K),
        ("top_p", params.top_p, TOP_P),
        ("min_p", params.min_p, MIN_P),
        ("repetition_penalty", params.repetition_penalty, REPETITION_PENALTY),
        ("presence_penalty", params.presence_penalty, PRESENCE_PENALTY),
        ("frequency_penalty", params.frequency_penalty, FREQUENCY_PENALTY),
        ("logprobs", params.logprobs or 0, LOGPROBS),
        *(("logit_bias", bias, BIAS) for bias in params.logit_bias.values()),
    )
    for name, value, range_ in values:
        if not range_.holds(value):
            raise InvalidRequest(f"{name} is {value}", f"Send {range_}.", field=name)
    if len(params.logit_bias) > MAX_BIASES:
        raise InvalidRequest(f"logit_bias names {len(params.logit_bias)} tokens", f"Send at most {MAX_BIASES}.", field="logit_bias")
