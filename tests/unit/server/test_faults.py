from __future__ import annotations

import orjson

from paceline.core.errors import InvalidRequest
from paceline.server.faults import of_error


def test_what_no_json_can_hold_is_replaced() -> None:
    fault = of_error(InvalidRequest("the template says \ud800\x00"))
    assert orjson.loads(fault.body())["error"]["message"] == "the template says ?\x00"
    assert fault.event().startswith(b"data: {")
