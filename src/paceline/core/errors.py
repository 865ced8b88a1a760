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
|   |-- TokenError            a text that is not a join token
|   |-- JoinRefused           the machine that was asked does not let this one in
|   |-- Unreachable           another machine answers at none of its addresses
|   `-- PlacementError        no machine of the fleet can run what was asked; `constraint` names what is missing
|       |-- VocabularyMismatch  a draft model with another vocabulary than the model it would draft for
|       `-- ImpossiblePin     a pinned machine or range of layers is not available
|-- RequestError              a request that can't be served as asked (HTTP 4xx)
|   |-- InvalidRequest        a field is wrong; `field` names it
|   |   |-- NotServed         a part of a request that others serve and Paceline does not, such as an image
|   |   |-- TemplateRefused   the model's chat template refuses the messages as they are
|   |   `-- WayNotAllowed     the model is served in none of the ways that the request allows
|   |-- ContextOverflow       prompt + max_tokens beyond the context
|   |-- RequestLoop           the request went through this node before, or through too many nodes
|   |-- UnknownModel          the model named is not served here
|   |-- ModelAway             the model will be served here soon, or was until a moment ago
|   `-- Overloaded            the queue is full; `retry_after_s` says when to come back
|       `-- NoRoom            a model can't be loaded: the models that fill the memory are answering
|-- FleetError                a failure between the machines of a fleet
|   |-- NodeUnreachable       a member that can't be reached
|   |-- OtherProtocol         a node that speaks another protocol version; `spoken` is that version
|   |-- NodeStopping          a node that is being stopped, and takes no new requests
|   |-- RemoteProposerError   a remote draft request failed; `status` is gRPC's
|   |-- NotTrusted            a certificate, card or revocation that does not prove what it says
|   |   `-- RevokedNode       a certificate that the CA has revoked
|   |-- WeightsError          weights can't be fetched from another node
|   |   |-- SourceLost        the node can't be reached, does not have them, or went away mid-way
|   |   `-- WrongBytes        the node describes or sends something else than the model asked for
|   |-- PipelineError         one model over several machines; clients get its `code`
|   |   |-- PipelineDisabled      `pipeline_disabled`: this machine's settings don't allow pipelines
|   |   |-- ShardUnavailable      `shard_unavailable`: no machines cover all layers, or they have no free stream
|   |   |-- WeightsMismatch       `weights_mismatch`: a shard's weights or format differ from those asked for
|   |   |-- BadPipelineRequest    `bad_request`: an unknown model, a malformed message
|   |   |-- ShardCorrupt          `shard_corrupt`: a shard sent malformed activations, or others than its layers compute
|   |   `-- PipelineStalled       `pipeline_stalled`: no progress within its bound
|   |-- TensorStreamError     a stream of activations is broken, for good
|   |   |-- StreamClosed          the other side went away
|   |   |-- StreamStalled         the other side takes or sends nothing within the bound
|   |   |   `-- StreamIdle        no message has begun to arrive
|   |   |-- NixlFailed            another process's memory can't be read
|   |   |-- TensorTooLarge        `tensor_too_large`: a tensor beyond the receive bound
|   |   `-- StreamCorrupt         a gap, an overrun, a shape that does not match, bytes that are no chunk
|   `-- GossipRefused         what a peer sent is not taken, and changed nothing
|       |-- PeerFloods        more requests than its share; `retry_after_s` says when to come back
|       |-- MalformedMessage  bytes that are not the message they should be
|       `-- MessageTooLarge   more digests, cards, revocations or bytes than the bounds allow
|-- DrawFailed                no token can be drawn from a row of logits
|   `-- FormFailed              `form_not_followed`: the form of an answer can't be followed to its end
|-- ExecutorUnavailable       nothing can run the model for now; clients get its `code`
|   `-- EngineGone            `engine_gone`: the model's engine failed; it is rebuilt, or stays down
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
    """A text that is not a join token, or a damaged one."""


class JoinRefused(UserError):
    """The machine that was asked refuses to let this one join, and says why."""


class Unreachable(UserError):
    """Another machine answers at none of its addresses."""


class PlacementError(UserError):
    """No machine of the fleet, and no set of machines, can run what was asked."""

    def __init__(self, message: str, hint: str = "", *, constraint: str = "no candidate", awaited: str = "") -> None:
        super().__init__(message, hint)
        self.constraint = constraint
        self.awaited = awaited
        """The missing resource, for a caller that waits for it. Empty: the message names it."""


class VocabularyMismatch(PlacementError):
    """A draft model with another vocabulary than the model it would draft for."""


class ImpossiblePin(PlacementError):
    """A machine or a range of layers was pinned that is not available."""


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


class RequestLoop(RequestError):
    """A request went through this node before, or through too many nodes: endpoints share each other."""


class UnknownModel(RequestError):
    """The model named in a request is not served here."""


class ModelAway(RequestError):
    """A model that will be served here soon, or was until a moment ago: a later request may find it."""


class Overloaded(RequestError):
    """The bounded queue is full."""

    def __init__(self, message: str, hint: str = "", *, retry_after_s: int) -> None:
        super().__init__(message, hint)
        self.retry_after_s = retry_after_s


class NoRoom(Overloaded):
    """A model can't be loaded, because the models that fill the memory are answering; `busy` names them."""

    def __init__(self, message: str, hint: str = "", *, busy: tuple[str, ...]) -> None:
        super().__init__(message, hint, retry_after_s=5)
        self.busy = busy


class FleetError(PacelineError):
    """A failure between the machines of a fleet."""


class WeightsError(FleetError):
    """Weights that can't be fetched from another node."""


class SourceLost(WeightsError):
    """The node can't be reached, does not have the model, or went away midway. Another node may have it."""


class WrongBytes(WeightsError):
    """The node describes or sends something else than the model that was asked for."""


class NotTrusted(FleetError):
    """A certificate, card or revocation that does not prove what it says."""

    def __init__(self, message: str, hint: str = "", *, who: str) -> None:
        super().__init__(message, hint)
        self.who = who


class RevokedNode(NotTrusted):
    """A certificate that the CA has revoked."""


class NodeUnreachable(FleetError):
    """A member of the fleet that can't be reached."""


class OtherProtocol(FleetError):
    """A node speaks another protocol version than its peer, so neither is a member for the other."""

    def __init__(self, message: str, hint: str = "", *, spoken: int) -> None:
        super().__init__(message, hint)
        self.spoken = spoken
        """The version that the peer speaks."""


class NodeStopping(FleetError):
    """A node that is stopping takes no new requests. Its running requests end, or move to another node."""


class RemoteProposerError(FleetError):
    """A remote draft request failed: refused, timed out, unreachable, or invalid reply.

    The verifier's state is intact: it may continue without drafts, or with those of another node.
    """

    def __init__(self, message: str, hint: str = "", *, status: str) -> None:
        super().__init__(message, hint)
        self.status = status


class GossipRefused(FleetError):
    """A peer's message was refused. It changed nothing."""


class PeerFloods(GossipRefused):
    """A peer sends more requests than its share."""

    def __init__(self, message: str, hint: str = "", *, retry_after_s: float) -> None:
        super().__init__(message, hint)
        self.retry_after_s = retry_after_s


class MalformedMessage(GossipRefused):
    """Bytes from a peer that are not a valid message."""


class MessageTooLarge(GossipRefused):
    """A message with more digests, cards, revocations or bytes than the bounds allow."""


ENGINE_GONE = "engine_gone"
NO_MACHINE = "no_machine"
SERVER_STOPPING = "server_stopping"
FORM_NOT_FOLLOWED = "form_not_followed"
"""Error codes that clients get, and that end an answer that was cut short. The request may go to another node in all cases but the last."""


class DrawFailed(PacelineError):
    """No token can be drawn from a row of logits. This ends the row's sequence, and no other."""


class FormFailed(DrawFailed):
    """An answer left the form it must follow, or the form grew beyond what can be followed. Clients get the `code`."""

    code = FORM_NOT_FOLLOWED


class ExecutorUnavailable(PacelineError):
    """Nothing can run the model for now. Running requests end with an error; a later request may find the model running again."""

    def __init__(self, message: str, hint: str = "", *, code: str) -> None:
        super().__init__(message, hint)
        self.code = code


class EngineGone(ExecutorUnavailable):
    """The model's engine failed. Its requests have ended with an error."""

    def __init__(self, message: str, hint: str = "", *, code: str = ENGINE_GONE) -> None:
        super().__init__(message, hint, code=code)


class ExecutorLost(PacelineError):
    """Spans of the model can't be reached. The engine replays live sequences once the spans are back."""

    def __init__(self, message: str, spans: tuple[LayerSpan, ...]) -> None:
        super().__init__(message)
        self.spans = spans


class PipelineError(FleetError):
    """An error of a pipeline: one model on several machines. Clients get the `code`, which is also its name on the wire."""

    code = "pipeline_error"


class PipelineDisabled(PipelineError):
    """This machine's settings don't allow pipelines."""

    code = "pipeline_disabled"


class ShardUnavailable(PipelineError):
    """No machines cover all layers of the model, or those that do have no free stream."""

    code = "shard_unavailable"


class WeightsMismatch(PipelineError):
    """A shard's weights, or their format, differ from those that were asked for."""

    code = "weights_mismatch"


class BadPipelineRequest(PipelineError):
    """An unknown model, or a malformed message."""

    code = "bad_request"


class ShardCorrupt(PipelineError):
    """A shard sent malformed activations, or others than its layers compute."""

    code = "shard_corrupt"


class PipelineStalled(PipelineError):
    """A pipeline made no progress within its bound."""

    code = "pipeline_stalled"


class TensorStreamError(FleetError):
    """A stream of activations is broken and can't be used again."""


class StreamClosed(TensorStreamError):
    """The other side went away, or this side closed the stream."""


class StreamStalled(TensorStreamError):
    """The other side takes or sends nothing within the bound."""


class StreamIdle(StreamStalled):
    """Nothing arrived, and nothing was under way. The stream can still be used, unlike after every other `StreamStalled`."""


class NixlFailed(TensorStreamError):
    """Another process's memory can't be read, or NIXL is not installed here."""


class TensorTooLarge(TensorStreamError):
    """A tensor larger than the receive bound."""


class StreamCorrupt(TensorStreamError):
    """A gap, an overrun, a shape that does not match, or bytes that are not a chunk."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """How an error is reported to other nodes and to clients.

    Args:
        grpc: the status it leaves a node with, by its name in gRPC.
        http: the API's status.
        code: the API's code; "" where the error itself has one.
        elsewhere: whether the request may be sent to the next node, which may not have the same reason to refuse it.
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
    RequestLoop: ErrorRow("FAILED_PRECONDITION", 508, "request_loop", True),
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
"""The error types that a node may name to another. gRPC, the API and the choice of a next node use this table alone. Any other type counts as its nearest
ancestor here.
"""


def kind_of(error: PacelineError) -> type[PacelineError]:
    """Return the error's own type if the table has it, else its nearest ancestor there."""
    return next(kind for kind in type(error).__mro__ if kind in ERROR_TABLE)


def code_of(error: PacelineError) -> str:
    """Return the API's code of an error."""
    return ERROR_TABLE[kind_of(error)].code or getattr(error, "code", NO_MACHINE)


def goes_elsewhere(error: PacelineError) -> bool:
    """Return whether a request that failed with this error may be sent to another node."""
    return ERROR_TABLE[kind_of(error)].elsewhere


def how_to_install(*words: str) -> str:
    """Return the shell command that installs packages into this very Python. Environments of uv have no pip of their own."""
    pip = python_command("-m", "pip", "install") if find_spec("pip") else ["uv", "pip", "install", "--python", *python_command()[:1]]
    return shlex.join([*pip, *words])
