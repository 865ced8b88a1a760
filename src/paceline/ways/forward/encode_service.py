"""EncodeService: works on texts with what this node itself has, for another node that was asked; and the messages of both sides.

The caller's end is the work's end, as with a generation. A part of a request is bounded, and so is each message of its answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np

from paceline.core.encoding import Encoded, EncodeRequest
from paceline.core.errors import FleetError, InvalidRequest, UnknownModel
from paceline.core.ids import Trust
from paceline.core.model import ModelRef
from paceline.core.via import MOST_NODES, is_node_mark
from paceline.machine.encoders import LocalEncoders
from paceline.net.member.meter import FleetMeter
from paceline.net.server import KIB, Service
from paceline.net.trust.handlers import Context, Limit
from paceline.net.wire import encode_pb2 as wire
from paceline.net.wire.encode_pb2_grpc import EncodeServiceServicer, add_EncodeServiceServicer_to_server
from paceline.ways.forward.service import MAX_REQUEST_BYTES, Allows, Notices, check_outside

MAX_TEXTS: Final = 256
"""Texts of one call. Raising it: calls of many short texts take longer before others of the same peer have a turn."""
MAX_PART_BYTES: Final = 1 << 20
"""Bytes of texts in one call, unless it has one text alone. Raising it: more memory for each call."""
MAX_TEXT_BYTES: Final = 2 << 20
"""Maximum size of one text, and of a query with it. Raising it needs a larger `MAX_REQUEST_BYTES`."""
MAX_VECTOR: Final = 1 << 14
"""Maximum length of a vector. Raising it: a peer can fill more memory."""
ANSWER_BYTES: Final = 1 << 20
"""Bytes of vectors in one message. Raising it: a caller holds more before it can take the first."""
MAX_TOKENS: Final = 1 << 40
FIELD = re.compile("[a-z_]{1,32}")


class EncodeServicer(EncodeServiceServicer):
    def __init__(self, encoders: LocalEncoders, meter: FleetMeter, allows: Allows) -> None:
        self._encoders, self._meter, self._allows = encoders, meter, allows

    async def Encode(self, request: wire.EncodeRequest, context: Context) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        wanted = read_encode_request(request)
        # A caller with an old view must not get another model's vectors.
        if self._encoders.ref_of(request.model_id, wanted.task) != ModelRef(request.digest, request.quantization):
            raise UnknownModel(f"The encoder {request.model_id[:200]!r} that is asked for is not served here")
        for model in self._encoders.encoders():
            if model.name == request.model_id:
                check_outside(model.name, model.facts, context, self._allows)
        self._meter.served += 1
        # The work is bounded by the texts and by what an engine may take, so it advances for as long as it runs.
        async with Notices(context, wire.EncodeResponse(), lambda: True) as notices:
            for message in write_encoded(await self._encoders.encode(request.model_id, wanted)):
                await notices.write(message)


def encode_service(encoders: LocalEncoders, meter: FleetMeter, allows: Allows = lambda *_: False) -> Service:
    """Return the service for a node's server. Its callers are those of GenerateService."""
    limits = {"EncodeService/Encode": Limit(MAX_REQUEST_BYTES, 2 * MAX_TEXTS, MAX_TEXT_BYTES + 64 * KIB, least=Trust.GUEST)}
    return Service(partial(add_EncodeServiceServicer_to_server, EncodeServicer(encoders, meter, allows)), limits)


def write_encode_request(model: ModelRef, request: EncodeRequest) -> wire.EncodeRequest:
    """Return the message for a part of a request.

    Raises:
        InvalidRequest: a text is not Unicode.
    """
    texts = [given for given in request.inputs if isinstance(given, str)]
    ids = [wire.TokenIds(ids=given) for given in request.inputs if not isinstance(given, str)]
    try:
        return wire.EncodeRequest(
            model_id=model.name,
            digest=model.digest,
            quantization=model.weights,
            texts=texts,
            ids=ids,
            query=request.query,
            via=request.via,
            field=request.field,
            first=request.first,
        )
    except UnicodeEncodeError:
        raise InvalidRequest(f"{request.field}: a text has half of a surrogate pair", "Send Unicode text.", field=request.field) from None


def read_encode_request(message: wire.EncodeRequest) -> EncodeRequest:
    """Read a part of a request. What the model decides is checked by its holder.

    Raises:
        InvalidRequest: it has nothing to work on, or what no caller writes.
    """
    inputs: list[str | list[int]] = [*message.texts, *(list(one.ids) for one in message.ids)]
    is_mixed = bool(message.texts) == bool(message.ids)
    if is_mixed or len(inputs) > MAX_TEXTS or not FIELD.fullmatch(message.field):
        raise InvalidRequest(f"input: a call has up to {MAX_TEXTS} texts, or token ids of as many", field="input")
    if len(message.via) > MOST_NODES or not all(map(is_node_mark, message.via)):
        raise InvalidRequest("via: not what a node writes", field="via")
    query = message.query if message.HasField("query") else None
    first = message.first if message.HasField("first") else None
    return EncodeRequest(inputs, query, tuple(message.via), message.field, first)


def write_encoded(encoded: Encoded) -> Iterator[wire.EncodeResponse]:
    """Yield the messages of an answer."""
    values = encoded.values
    if values.ndim == 1:
        yield wire.EncodeResponse(scores=values.tolist(), tokens=encoded.tokens)
        return
    rows, tokens = max(1, ANSWER_BYTES // (4 * values.shape[1])), encoded.tokens
    for at in range(0, len(values), rows):
        yield wire.EncodeResponse(dimensions=values.shape[1], vectors=values[at : at + rows].astype("<f4").tobytes(), tokens=tokens)
        tokens = 0


def read_encoded(message: wire.EncodeResponse, request: EncodeRequest, peer: str) -> Encoded:
    """Read a message that has values.

    Raises:
        FleetError: it has others than those that were asked for, or numbers that mean nothing.
    """
    if request.query is not None:
        values = np.array(message.scores, np.float64)
        is_whole = 0 < len(values) <= len(request.inputs) and not message.vectors
    else:
        size = message.dimensions
        is_whole = (
            0 < size <= MAX_VECTOR and 0 < len(message.vectors) <= 4 * size * len(request.inputs) and not len(message.vectors) % (4 * size)
        )
        values = np.frombuffer(message.vectors, "<f4").reshape(-1, size) if is_whole else np.empty(0, np.float32)
    if not is_whole or message.tokens > MAX_TOKENS or not np.isfinite(values).all():
        raise FleetError(f"{peer} sent something else than what it was asked for", "Look at its log.")
    return Encoded(values, message.tokens)
