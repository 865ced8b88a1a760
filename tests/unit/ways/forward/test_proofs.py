"""Answers of other nodes that are computed again here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import pytest
from tests.fakes.clock import FakeClock
from tests.unit.net.member.nodes import in_loop, until

from paceline.core.generation import NUMERICS_CHANGED, FinishReason, GenerationChunk, GenerationRequest, Notice
from paceline.core.ids import NodeId, RequestId
from paceline.core.model import ModelRef
from paceline.ways.forward.proofs import Proofs
from paceline.ways.forward.routes import RouteStop

ID = RequestId("r")
REQUEST = GenerationRequest(ID, (1, 2), 8)
STOP = RouteStop(NodeId("b"), b"", "n", ())


@pytest.mark.parametrize(("token", "changes", "is_wrong"), [(7, False, False), (8, False, True), (8, True, False)])
@in_loop
async def test_other_tokens_are_wrong_unless_the_node_said_that_its_numerics_changed(token: int, changes: bool, is_wrong: bool) -> None:
    wrong, computed = list[NodeId](), list[str]()

    async def answer(token: int, *, changes: bool = False) -> AsyncGenerator[Sequence[GenerationChunk]]:
        if changes:
            yield [GenerationChunk(ID, 0, (), "", notices=(Notice(NUMERICS_CHANGED, {"to": ""}),))]
        yield [GenerationChunk(ID, 0, (token,), "x", finish_reason=FinishReason.STOP)]

    def again(request: GenerationRequest) -> AsyncGenerator[Sequence[GenerationChunk]]:
        computed.append(request.request_id)
        return answer(7)

    proofs = Proofs(FakeClock(), lambda: None, lambda node_id, _: wrong.append(node_id), lambda: 0.0)
    async for _ in proofs.watched(STOP, ModelRef("d", "int4"), answer(token, changes=changes), REQUEST, again):
        pass
    await until(lambda: not proofs._tasks or bool(wrong))  # pyright: ignore[reportPrivateUsage]
    assert (bool(wrong), bool(computed)) == (is_wrong, not changes)
    await proofs.close()
