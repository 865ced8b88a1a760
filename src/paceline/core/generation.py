"""A generation as the server asks for it and the engine answers it.

One table has the ranges of sampling parameters, for the API, for requests from other nodes and for the engine.
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
    """Reason why a sequence ended. The first two are OpenAI's; the others never reach a client as an answer."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. The ranges stand at the end of this module; `check_sampling` refuses values outside of them.

    Order: logit_bias, penalties, temperature, top-k, top-p, min-p, then the draw from noise keyed by (seed, position).
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """Fixed at admission if it is None, so that a replay draws the same tokens."""
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    logprobs: int | None = None
    """None: no logprobs. Otherwise the number of top alternatives (0 to 20) reported with each token's own."""


MAX_GRAMMAR_LETTERS = 256 << 10
"""Maximum length of a grammar's text, in characters. Raising it: compiling one grammar may hold up other requests for longer."""


class GrammarKind(StrEnum):
    """The language in which a grammar is written."""

    JSON_SCHEMA = "json_schema"
    """The answer is a JSON document that the schema allows."""
    REGEX = "regex"
    """The whole answer matches the expression."""
    LARK = "grammar"
    """Lark's language, as llguidance reads it."""
    TOOLS = "tools"
    """Lark's language; Paceline wrote the grammar from a request's tools."""
    FORM = "form"
    """Lark's language; Paceline wrote the grammar from a request's `response_format`."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The structured output that an answer must follow."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class KvLeg:
    """This node's part of a disaggregated request. A router sends it to two nodes: one computes the prompt, the other fetches its KV and writes the answer."""

    request_id: str
    """The id that both nodes have in common (see `server.call.Call.named`), followed by 8 hex digits of this node's own."""
    is_prefill: bool
    """True: this node computes the prompt. False: it writes the answer."""
    engine_id: str = ""
    """The node that computes the prompt, if this node writes the answer. Empty: that node is known by its `address`."""
    address: str = ""
    tp_size: int = 1
    """Number of tensor-parallel ranks of that node."""
    remote_request_id: str = ""
    """The other node's id of its own part. Empty: not known."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One client request, tokenized. Its sequence i of `n` draws with seed + i."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    max_tokens: int | None
    """None: as many as the context leaves."""
    sampling: SamplingParams = SamplingParams()
    n: int = 1
    stop: tuple[str, ...] = ()
    """Texts that end an answer. They are not part of it."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end an answer, in addition to the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Mask the logits of end-of-sequence tokens. Benchmarks set it, so that lengths are exact."""
    draft: str | None = None
    """The source of draft tokens: "off", "ngram", "auto", or the id of a draft model. None: the engine's setting. It never changes an answer."""
    so_far: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """For an answer that began at another node: the tokens so far of each unfinished sequence, by index. They are computed again and not sent again. Empty: the
    answer begins here.
    """
    caller: str = ""
    """The node that sent the request. Empty: a client of this node."""
    client: str = ""
    """The network address of the client that sent the request to this node. Empty: not known."""
    shares_kv: bool = False
    """The calling node may fetch this node's KV. Its prompts then share the prefix cache with those of this node's own clients."""
    grammar: Grammar | None = None
    """The form of each answer. Tokens that would leave it are never drawn; log probabilities are among the tokens that remain."""
    cache_salt: str = ""
    """The cache salt. A computed prompt is reused only for the same caller (or among all that share KV) and the same salt. Otherwise the time to the first
    token would tell other callers which prompts were sent.
    """
    scores_prompt: bool = False
    """Report the log probabilities of the prompt's own tokens too, each with `sampling.logprobs` alternatives. Only then `max_tokens` may be 0, to report
    nothing else.
    """
    ways: frozenset[str] | None = None
    """Names of the plans' ways that may serve the request. None: any way."""
    exact: bool = False
    """Only holders with one and the same numerics id may answer. False: an answer may continue with other numerics, and a notice says so."""
    chat: str = ""
    """The body of an OpenAI chat completion, JSON, for an engine of another maker that renders the prompt itself: then there are no `prompt_ids`, and an
    answer that has begun can't continue elsewhere. Empty: the prompt is `prompt_ids`.
    """
    via: tuple[str, ...] = ()
    """Marks of the nodes that the request went through; see `core.via`."""
    leg: KvLeg | None = None
    """This node's part, if the request is disaggregated. None: this node serves all of it."""

    def allows(self, way: str) -> bool:
        """Return whether this way of spreading work may serve the request."""
        return self.ways is None or way in self.ways

    @property
    def keeps_apart(self) -> bool:
        """True if KV computed for this request may only be reused for the same caller."""
        return bool(self.caller) and not self.shares_kv

    @property
    def indices(self) -> Sequence[int]:
        """Indices of the sequences to run."""
        return sorted(self.so_far) if self.so_far else range(self.n)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a drawn token and its top alternatives, under the model's distribution before temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


LOCAL_FALLBACK = "local_fallback"
"""Kind of notice: this machine alone continues an answer that several machines ran."""
KV_TRANSFER = "kv_transfer"
"""Kind of notice: the result of a remote prefill."""
NUMERICS_CHANGED = "numerics_changed"
"""Kind of notice: an answer continues with other numerics, so its words may differ from here on."""
PROMPT_PROGRESS = "prompt_progress"
"""Kind of notice: how far a prompt is read, as `tokens_read` of `tokens`."""
MODEL_LOADING = "model_loading"
"""Kind of notice: an engine loads the model, for `seconds` so far and `expected_seconds` in all."""


@dataclass(frozen=True, slots=True)
class Notice:
    """An event that concerns an answer without being part of it, for clients that ask. Example: a machine was lost, and another took over."""

    kind: str
    """One of `shard_status`, `shard_failover`, `pipeline_aborted`, `local_fallback`, `kv_transfer`, `kv_distrusted`, `numerics_changed`, `prompt_progress`,
    `model_loading`."""
    detail: Mapping[str, str | int | float]


_PROMPT_COMMENT = re.compile(r": prompt: (\d+) of (\d+) tokens read")


@dataclass(frozen=True, slots=True)
class PromptReading:
    """Progress through a prompt, in tokens."""

    tokens_read: int
    tokens: int

    def comment(self) -> bytes:
        """Return the progress as a comment line of a server-sent event stream."""
        return b": prompt: %d of %d tokens read\n\n" % (self.tokens_read, self.tokens)

    @classmethod
    def of_comment(cls, line: str) -> PromptReading | None:
        """Parse a line of a stream. Return None if it is not such a comment."""
        found = _PROMPT_COMMENT.fullmatch(line)
        return None if found is None else cls(int(found[1]), int(found[2]))

    @classmethod
    def of_notice(cls, notice: Notice) -> PromptReading | None:
        """Parse a notice, which another node may have written. Return None if it is of another kind or malformed."""
        counts = notice.detail.get("tokens_read"), notice.detail.get("tokens")
        match counts:
            case (int(tokens_read), int(tokens)) if notice.kind == PROMPT_PROGRESS and 0 <= tokens_read <= tokens:
                return cls(tokens_read, tokens)
            case _:
                return None


_LOADING_COMMENT = re.compile(r": loading the model: (\d+) of about (\d+) s")


@dataclass(frozen=True, slots=True)
class ModelLoading:
    """Progress of a load by an engine that says nothing of it: only time passes."""

    seconds: int
    expected_s: int

    def comment(self) -> bytes:
        """Return the progress as a comment line of a server-sent event stream."""
        return b": loading the model: %d of about %d s\n\n" % (self.seconds, self.expected_s)

    def notice(self) -> Notice:
        return Notice(MODEL_LOADING, {"seconds": self.seconds, "expected_seconds": self.expected_s})

    @classmethod
    def of_comment(cls, line: str) -> ModelLoading | None:
        """Parse a line of a stream. Return None if it is not such a comment."""
        found = _LOADING_COMMENT.fullmatch(line)
        return None if found is None else cls(int(found[1]), int(found[2]))

    @classmethod
    def of_notice(cls, notice: Notice) -> ModelLoading | None:
        """Parse a notice, which another node may have written. Return None if it is of another kind or malformed."""
        match notice.detail.get("seconds"), notice.detail.get("expected_seconds"):
            case (int(seconds), int(expected_s)) if notice.kind == MODEL_LOADING and min(seconds, expected_s) >= 0:
                return cls(seconds, expected_s)
            case _:
                return None


AnswerProgress = PromptReading | ModelLoading
"""Progress that a stream reports before its first text."""


def progress_of(notice: Notice) -> AnswerProgress | None:
    """Return the progress that a notice tells; None if it tells none."""
    return PromptReading.of_notice(notice) or ModelLoading.of_notice(notice)


def progress_of_comment(line: str) -> AnswerProgress | None:
    """Return the progress that a line of a stream tells; None if it tells none."""
    return PromptReading.of_comment(line) or ModelLoading.of_comment(line)


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """The output of one step for one sequence of a request.

    `text` may lag behind `token_ids`: bytes of an unfinished UTF-8 character or of a possible stop string are held back.
    """

    request_id: RequestId
    index: int
    """Index of the sequence among the request's `n`."""
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Message of the error; set with `FinishReason.ERROR`."""
    code: str | None = None
    """Code of the error. Where machines are missing: `shard_unavailable`, `weights_mismatch`, `pipeline_stalled` or `pipeline_aborted`. Where the answer's form
    can't be followed: `form_not_followed`.
    """
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache; set on a sequence's first chunk."""
    deltas: tuple[str, ...] = ()
    """For a request with a `chat`: what the engine wrote, as the JSON of OpenAI's deltas. Then there are no tokens and no text."""
    n_tokens: int = 0
    """Tokens of the deltas, as the engine counts them."""
    prompt_tokens: int = 0
    """For a request with a `chat`: length of the prompt as the engine counts it; on one chunk."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Log probabilities of prompt tokens, from the second token on, where the request asked for them. They continue those of earlier chunks."""
    notices: tuple[Notice, ...] = ()
    """Notices. A chunk that carries any carries nothing else."""
    transfer: Mapping[str, object] | None = None
    """The answer's `kv_transfer_params`; set at the end of a disaggregated request."""


@dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers from `least` to `most`."""

    least: float
    most: float
    above: bool = False
    """`least` itself is excluded."""

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
    """Return the sampling defaults in a model's own settings: numbers within their ranges. The rest is dropped, because model files are not trusted."""
    ranges = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P, "min_p": MIN_P, "repetition_penalty": REPETITION_PENALTY}
    found: dict[str, float] = {}
    for name, range_ in ranges.items():
        value = values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and range_.holds(value):
            found[name] = int(value) if name == "top_k" else float(value)
    return found


def check_sampling(params: SamplingParams) -> None:
    """Check the sampling parameters, as far as that does not depend on the model.

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
