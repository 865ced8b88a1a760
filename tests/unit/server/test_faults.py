from __future__ import annotations

import orjson
import pytest

from paceline.core.errors import (
    FleetError,
    ImpossiblePin,
    InvalidRequest,
    ModelNotFound,
    NodeUnreachable,
    OutOfMemory,
    PlacementError,
    UserError,
    VocabularyMismatch,
)
from paceline.server.faults import Api, Fault, fault_of_error, fault_of_mistake


def test_what_no_json_can_hold_is_replaced() -> None:
    fault = fault_of_error(InvalidRequest("the template says \ud800\x00"))
    assert orjson.loads(fault.body())["error"]["message"] == "the template says ?\x00"
    assert orjson.loads(fault.body(Api.ANTHROPIC)) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "the template says ?\x00"},
    }
    assert orjson.loads(fault.body(Api.OLLAMA)) == {"error": "the template says ?\x00"}


@pytest.mark.parametrize("error", [NodeUnreachable("b is gone"), FleetError("b refuses this node: a was revoked")])
def test_a_machine_that_is_gone_or_refuses_is_no_bug_of_ours(error: FleetError) -> None:
    fault = fault_of_error(error)
    assert (fault.status, fault.code, fault.headers) == (503, "no_machine", {"Retry-After": "5"})


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ImpossiblePin("desk is pinned and is not in the fleet"), 400, "invalid_value"),
        (VocabularyMismatch("its tokens are others"), 400, "invalid_value"),
        (OutOfMemory("it does not fit"), 400, "invalid_value"),
        (ModelNotFound("there is none"), 404, "model_not_found"),
        (PlacementError("no machine has it"), 503, "no_machine"),
    ],
)
def test_what_is_the_owner_s_to_mend_is_no_fault_of_the_fleet(error: UserError, status: int, code: str) -> None:
    fault = fault_of_mistake(error)
    assert (fault.status, fault.code) == (status, code)


@pytest.mark.parametrize("rest", [": the schema is nested too deep", " and tools: an answer has one form"])
def test_messages_have_the_field_as_the_api_calls_it(rest: str) -> None:
    fault = Fault(400, f"response_format{rest}", param="response_format")
    assert orjson.loads(fault.body(Api.OPENAI))["error"]["message"] == f"response_format{rest}"
    assert orjson.loads(fault.body(Api.ANTHROPIC))["error"]["message"] == f"output_config.format{rest}"
    assert orjson.loads(fault.body(Api.OLLAMA))["error"] == f"format{rest}"
    assert (
        orjson.loads(Fault(400, f"No response_format{rest}", param="response_format").body(Api.OLLAMA))["error"]
        == f"No response_format{rest}"
    )
