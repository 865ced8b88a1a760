"""The exception tree, and what each error is on the wire and in the API. Each error says what happened, to what, and what to do.

PacelineError
|-- UserError                 exit code 2: the person can fix it
|   |-- ConfigError           a flag, a setting, an environment variable
|   |-- ModelNotFound         no such model here or at the hub
|   |   `-- NotAtHub          the hub has no such repository, or does not show it
|   |-- ModelFileError        a weights, tokenizer or config file is corrupt, truncated or unknown
|   |-- UnsupportedModel      a model family or tensor type Paceline does not run
|   |-- OutOfMemory           a model or a context larger than this machine's memory
|   |-- DownloadError         a pull that could not be finished
|   |   |-- HubSilent         the hub can't be asked what a repository holds
|   |   `-- FetchInProgress   another process of this machine is fetching the same model
|   |-- MembershipError       init, join, token, revoke or ca can't be done on this machine as it stands
|   |-- IdentityError         a key or a certificate on disk is missing, open to others, or damaged
|   |-- TokenError            a text that is no join token
|   |-- JoinRefused           the machine that was asked does not let this one in
|   |-- Unreachable           another machine answers at none of its addresses
|   `-- PlacementError        no machine of the fleet can run what was asked; `constraint` says for want of what
|       |-- VocabularyMismatch  a draft model whose tokens are others than those of the model it would draft for
|       `-- ImpossiblePin     a machine or a range of layers was pinned that can't be had
|-- RequestError              a request that can't be served as asked (HTTP 4xx)
|   |-- InvalidRequest        a field is wrong; `field` names it
|   |   |-- NotServed         a part of a request that others serve and Paceline does not, such as an image
|   |   |-- TemplateRefused   the model's chat template refuses the messages as they are
|   |   `-- WayNotAllowed     the model is served in none of the ways that the request allows
|   |-- ContextOverflow       prompt + max_tokens beyond the context
|   |-- UnknownModel          the model named is not served here
|   |-- ModelAway             it is about to be, or was until a moment ago
|   `-- Overloaded            the queue is full; `retry_after_s` says when to come back
|       `-- NoRoom            a model can't be loaded: those that fill the memory are in the middle of answers
|-- FleetError                something between the machines of a fleet
|   |-- NodeUnreachable       a member that can't be reached, or no longer
|   |-- OtherProtocol         a node that speaks another protocol version; `spoken` is that version
|   |-- NodeStopping          a node that is being stopped, and takes no new requests
|   |-- RemoteProposerError   a draft that another node was asked for and did not give; `status` is gRPC's
|   |-- NotTrusted            a certificate, card or revocation that does not prove what it says; `who` names the party
|   |   `-- RevokedNode       a certificate that the CA has voided
|   |-- WeightsError          weights that don't come from another node
|   |   |-- SourceLost        the node can't be reached, does not have them, or went away mid-way
|   |   `-- WrongBytes        it describes or sends something else than the model asked for
|   |-- PipelineError         one model over several machines; `code` is what a client is told
|   |   |-- PipelineDisabled      `pipeline_disabled`: this machine's settings don't allow it
|   |   |-- ShardUnavailable      `shard_unavailable`: no machines cover all layers, or they have no stream free
|   |   |-- WeightsMismatch       `weights_mismatch`: a shard's weights or format differ from those asked for
|   |   |-- BadPipelineRequest    `bad_request`: an unknown model, a malformed message
|   |   |-- ShardCorrupt          `shard_corrupt`: what a shard sent is no activations, or not what its layers compute
|   |   `-- PipelineStalled       `pipeline_stalled`: no progress within its bound
|   |-- TensorStreamError     a stream of activations is broken, for good
|   |   |-- StreamClosed          the other side went away
|   |   |-- StreamStalled         the other side takes or sends nothing within the bound
|   |   |   `-- StreamIdle        no message has begun to come
|   |   |-- NixlFailed            what was to be read from another process's memory can't be
|   |   |-- TensorTooLarge        `tensor_too_large`: a tensor beyond the receive bound
|   |   `-- StreamCorrupt         a gap, an overrun, a shape that does not match, bytes that are no chunk
|   `-- GossipRefused         what a peer sent is not taken, and changed nothing
|       |-- PeerFloods        more requests than its share; `retry_after_s` says when to come back
|       |-- MalformedMessage  bytes that are not the message they should be
|       `-- MessageTooLarge   more digests, cards, revocations or bytes than the bounds allow
|-- DrawFailed                no token can be drawn from a row of logits
|   `-- FormFailed              `form_not_followed`: the form of an answer can't be followed to its end
|-- ExecutorUnavailable       nothing can run the model for now; `code` is what clients are told
|   `-- EngineGone            `engine_gone`: the model's engine failed; it is built anew, or stays down
`-- ExecutorLost              spans of the model can't be reached any more
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from paceline.core.model import LayerSpan
from paceline.core.processes import python_command


class PacelineError(Exception):
    """Root of everything Paceline raises on purpose.

    Args:
        message: what happened, and to what.
        hint: what the reader can do about it; empty where there is nothing to do.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


class UserError(PacelineError):
    """Something the person at the keyboard can fix; the CLI prints it without a traceback and exits 2."""


class ConfigError(UserError):
    """A flag, a setting or an environment variable is wrong."""


class ModelNotFound(UserError):
    """No such model on this machine, nor where it was looked for."""


class NotAtHub(ModelNotFound):
    """The hub has no such repository or revision, or does not show it."""


class ModelFileError(UserError):
    """A weights, tokenizer or config file is missing, corrupt, truncated or of an unknown kind."""


class UnsupportedModel(UserError):
    """A model family, tensor type or feature that Paceline does not run."""


class OutOfMemory(UserError):
    """A model or a context that does not fit this machine's memory."""


class DownloadError(UserError):
    """A pull that could not be finished; what was fetched is kept and resumed next time."""


class HubSilent(DownloadError):
    """The hub can't be asked what a repository holds."""


class FetchInProgress(DownloadError):
    """Another process of this machine is fetching the same model."""


class MembershipError(UserError):
    """`init`, `join`, `token`, `revoke` or `ca` can't be done on this machine as it stands."""


class IdentityError(UserError):
    """A key or a certificate on disk is missing, open to others, or damaged."""


class TokenError(UserError):
    """A text that is no join token, or a damaged one."""


class JoinRefused(UserError):
    """The machine that was asked does not let this one in, and says why."""


class Unreachable(UserError):
    """Another machine answers at none of its addresses."""


class PlacementError(UserError):
    """No machine of the fleet, and no set of them, can run what was asked."""

    def __init__(self, message: str, hint: str = "", *, constraint: str = "no candidate", awaited: str = "") -> None:
        super().__init__(message, hint)
        self.constraint = constraint
        self.awaited = awaited
        """What would have to come, for one who waits for it; empty: the message says it."""


class VocabularyMismatch(PlacementError):
    """A draft model whose tokens are others than those of the model it would draft for."""


class ImpossiblePin(PlacementError):
    """A machine or a range of layers was pinned that can't be had."""


class RequestError(PacelineError):
    """A request that can't be served as asked."""


class InvalidRequest(RequestError):
    """A field of a request is wrong."""

    def __init__(self, message: str, hint: str = "", *, field: str | None = None) -> None:
        super().__init__(message, hint)
        self.field = field


class NotServed(InvalidRequest):
    """A request has a part that Paceline does not serve, such as an image."""


class TemplateRefused(InvalidRequest):
    """The model's chat template refuses messages as they are. It may take them in another form."""


class WayNotAllowed(InvalidRequest):
    """A request allows none of the ways in which this machine serves the model now."""


class ContextOverflow(InvalidRequest):
    """Prompt and answer together are longer than the model's context."""


class UnknownModel(RequestError):
    """The model named in a request is not served here."""


class ModelAway(RequestError):
    """A model that is about to be served here, or was until a moment ago: a later request may find it."""


class Overloaded(RequestError):
    """The bounded queue is full."""

    def __init__(self, message: str, hint: str = "", *, retry_after_s: int) -> None:
        super().__init__(message, hint)
        self.retry_after_s = retry_after_s


class NoRoom(Overloaded):
    """A model can't be loaded beside those that are in the middle of answers; `busy` names them."""

    def __init__(self, message: str, hint: str = "", *, busy: tuple[str, ...]) -> None:
        super().__init__(message, hint, retry_after_s=5)
        self.busy = busy


class FleetError(PacelineError):
    """Something between the machines of a fleet."""


class WeightsError(FleetError):
    """Weights that don't come from another node."""


class SourceLost(WeightsError):
    """The node can't be reached, does not have the model, or went away mid-way. Another may have it."""


class WrongBytes(WeightsError):
    """The node describes or sends something else than the model that was asked for."""


class NotTrusted(FleetError):
    """A certificate, card or revocation that does not prove what it says."""

    def __init__(self, message: str, hint: str = "", *, who: str) -> None:
        super().__init__(message, hint)
        self.who = who


class RevokedNode(NotTrusted):
    """A certificate that the CA has voided."""


class NodeUnreachable(FleetError):
    """A member of the fleet can't be reached, or no longer."""


class OtherProtocol(FleetError):
    """A node speaks another protocol version than its peer, so neither is a member for the other."""

    def __init__(self, message: str, hint: str = "", *, spoken: int) -> None:
        super().__init__(message, hint)
        self.spoken = spoken
        """The version that the peer speaks."""


class NodeStopping(FleetError):
    """A node that is being stopped takes no new requests; those it has end, or move on."""


class RemoteProposerError(FleetError):
    """A draft that was asked of another node and not had: it refused, was late, can't be reached, or sent what is no draft.

    What the verifier holds is intact: it may go on without drafts, or with those of another.
    """

    def __init__(self, message: str, hint: str = "", *, status: str) -> None:
        super().__init__(message, hint)
        self.status = status


class GossipRefused(FleetError):
    """What a peer sent is not taken; it changed nothing."""


class PeerFloods(GossipRefused):
    """A peer sends more requests than its share."""

    def __init__(self, message: str, hint: str = "", *, retry_after_s: float) -> None:
        super().__init__(message, hint)
        self.retry_after_s = retry_after_s


class MalformedMessage(GossipRefused):
    """Bytes from a peer that are not the message they should be."""


class MessageTooLarge(GossipRefused):
    """A message with more digests, cards, revocations or bytes than the bounds allow."""


ENGINE_GONE = "engine_gone"
NO_MACHINE = "no_machine"
SERVER_STOPPING = "server_stopping"
FORM_NOT_FOLLOWED = "form_not_followed"
"""Codes: what clients are told, and what an answer that was cut short ends with. Another node helps in all cases but the last."""


class DrawFailed(PacelineError):
    """No token can be drawn from a row of logits. It ends its sequence, and no other."""


class FormFailed(DrawFailed):
    """An answer left the form it was to have, or the form grew beyond what can be followed. `code` is what clients are told."""

    code = FORM_NOT_FOLLOWED


class ExecutorUnavailable(PacelineError):
    """Nothing can run the model for now: what is under way ends with an error, and a later request may find it running again."""

    def __init__(self, message: str, hint: str = "", *, code: str) -> None:
        super().__init__(message, hint)
        self.code = code


class EngineGone(ExecutorUnavailable):
    """The model's engine failed. What it ran has ended with an error."""

    def __init__(self, message: str, hint: str = "", *, code: str = ENGINE_GONE) -> None:
        super().__init__(message, hint, code=code)


class ExecutorLost(PacelineError):
    """Spans of the model can't be reached; the engine replays live sequences once they are back."""

    def __init__(self, message: str, spans: tuple[LayerSpan, ...]) -> None:
        super().__init__(message)
        self.spans = spans


class PipelineError(FleetError):
    """One model over several machines. `code` is what a client is told, by the name it has on the wire."""

    code = "pipeline_error"


class PipelineDisabled(PipelineError):
    """This machine's settings don't allow it."""

    code = "pipeline_disabled"


class ShardUnavailable(PipelineError):
    """No machines cover all layers of the model, or those that could have no stream free."""

    code = "shard_unavailable"


class WeightsMismatch(PipelineError):
    """A shard's weights, or their format, differ from those asked for."""

    code = "weights_mismatch"


class BadPipelineRequest(PipelineError):
    """An unknown model, or a malformed message."""

    code = "bad_request"


class ShardCorrupt(PipelineError):
    """What a shard sent is no activations, or not what its layers compute."""

    code = "shard_corrupt"


class PipelineStalled(PipelineError):
    """No progress within its bound."""

    code = "pipeline_stalled"


class TensorStreamError(FleetError):
    """A stream of activations is broken, for good."""


class StreamClosed(TensorStreamError):
    """The other side went away, or this side closed."""


class StreamStalled(TensorStreamError):
    """The other side takes or sends nothing within the bound."""


class StreamIdle(StreamStalled):
    """Nothing came, and nothing was under way. The stream is as good as before, unlike after every other error of its kind."""


class NixlFailed(TensorStreamError):
    """What was to be read from another process's memory can't be; or there is no NIXL here that could."""


class TensorTooLarge(TensorStreamError):
    """A tensor beyond the receive bound."""


class StreamCorrupt(TensorStreamError):
    """A gap, an overrun, a shape that does not match, bytes that are no chunk."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """What an error is to others.

    Args:
        grpc: the status it leaves a node with, by its name in gRPC.
        http: the API's status.
        code: the API's code; "" where the error itself has one.
        elsewhere: whether a request that one node refuses so may be asked of the next, which may not share the reason.
    """

    grpc: str
    http: int
    code: str
    elsewhere: bool = False


_BUG: Final = "internal_error"

ERROR_TABLE: Final[Mapping[type[PacelineError], ErrorRow]] = {
    PacelineError: ErrorRow("INTERNAL", 500, _BUG),
    ConfigError: ErrorRow("FAILED_PRECONDITION", 500, _BUG),
    ModelNotFound: ErrorRow("NOT_FOUND", 500, _BUG),
    PlacementError: ErrorRow("UNAVAILABLE", 503, NO_MACHINE, True),
    RequestError: ErrorRow("FAILED_PRECONDITION", 400, "invalid_value"),
    InvalidRequest: ErrorRow("INVALID_ARGUMENT", 400, "invalid_value"),
    NotServed: ErrorRow("INVALID_ARGUMENT", 400, "unsupported_parameter"),
    WayNotAllowed: ErrorRow("INVALID_ARGUMENT", 400, "invalid_value", True),
    ContextOverflow: ErrorRow("OUT_OF_RANGE", 400, "context_length_exceeded", True),
    UnknownModel: ErrorRow("NOT_FOUND", 404, "model_not_found", True),
    ModelAway: ErrorRow("UNAVAILABLE", 503, NO_MACHINE, True),
    Overloaded: ErrorRow("RESOURCE_EXHAUSTED", 429, "rate_limit_exceeded", True),
    FleetError: ErrorRow("FAILED_PRECONDITION", 503, NO_MACHINE, True),
    OtherProtocol: ErrorRow("FAILED_PRECONDITION", 503, NO_MACHINE, True),
    NodeStopping: ErrorRow("UNAVAILABLE", 503, SERVER_STOPPING, True),
    NotTrusted: ErrorRow("PERMISSION_DENIED", 503, NO_MACHINE, True),
    GossipRefused: ErrorRow("FAILED_PRECONDITION", 503, NO_MACHINE, True),
    PeerFloods: ErrorRow("RESOURCE_EXHAUSTED", 503, NO_MACHINE, True),
    MalformedMessage: ErrorRow("INVALID_ARGUMENT", 503, NO_MACHINE, True),
    MessageTooLarge: ErrorRow("RESOURCE_EXHAUSTED", 503, NO_MACHINE, True),
    PipelineError: ErrorRow("FAILED_PRECONDITION", 503, "", True),
    PipelineDisabled: ErrorRow("FAILED_PRECONDITION", 503, "", True),
    ShardUnavailable: ErrorRow("RESOURCE_EXHAUSTED", 503, "", True),
    WeightsMismatch: ErrorRow("FAILED_PRECONDITION", 503, "", True),
    BadPipelineRequest: ErrorRow("INVALID_ARGUMENT", 503, "", True),
    ShardCorrupt: ErrorRow("DATA_LOSS", 503, "", True),
    PipelineStalled: ErrorRow("ABORTED", 503, "", True),
    ExecutorUnavailable: ErrorRow("UNAVAILABLE", 503, "", True),
    EngineGone: ErrorRow("UNAVAILABLE", 503, "", True),
}
"""The kinds that another node may name, and all that gRPC, the API and a request's next node go by. Any other error counts as its nearest ancestor here."""


def kind_of(error: PacelineError) -> type[PacelineError]:
    """An error's own type where the table has it, or its nearest ancestor there."""
    return next(kind for kind in type(error).__mro__ if kind in ERROR_TABLE)


def code_of(error: PacelineError) -> str:
    """What the API calls an error."""
    return ERROR_TABLE[kind_of(error)].code or getattr(error, "code", NO_MACHINE)


def goes_elsewhere(error: PacelineError) -> bool:
    """Whether the next node may be asked what one refused with this."""
    return ERROR_TABLE[kind_of(error)].elsewhere


def how_to_install(*words: str) -> str:
    """The command that installs into this very Python. Environments of uv have no pip of their own."""
    pip = python_command("-m", "pip", "install") if find_spec("pip") else ["uv", "pip", "install", "--python", *python_command()[:1]]
    return shlex.join([*pip, *words])
