"""Two Paceline endpoints that share each other: neither lists a model that it has from the other alone, and a request that comes back is refused."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from tests.fakes.foreign_engines import llama_server
from tests.fleet.machines import EMPTY, free_port, machines, until
from tests.fleet.test_forwarding import client_of

from paceline.core.via import VIA_HEADER
from paceline.store.catalog import BUNDLED
from paceline.store.home import Home

ASKED = {"model": BUNDLED, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}


def test_a_request_goes_through_an_endpoint_and_around_never(tmp_path: Path, bundled_gguf: Path) -> None:
    with machines(tmp_path, Home.from_environment().kernels, "a", "b") as (a, b):
        for one in (a, b):
            one.init("--join-port", str(free_port()), "--address", "127.0.0.1")  # a fleet each
            one.up(*EMPTY)
        with llama_server(bundled_gguf, n_ctx=1024, n_parallel=1) as engine:
            b.run("share", engine.url, "--name", BUNDLED)
            until(lambda: [model.id for model in client_of(b).models.list()] == [BUNDLED])
            a.run("share", b.node.url)
            until(lambda: [model.id for model in client_of(a).models.list()] == [BUNDLED])
            assert client_of(a).chat.completions.create(**ASKED).choices[0].finish_reason == "length"
            b.run("share", a.node.url)
            (listed,) = client_of(a).models.list()
            marks = listed.model_extra["via"]
            assert marks[1:] == [mark for model in client_of(b).models.list() for mark in model.model_extra["via"]]
            for mark in marks:
                with pytest.raises(openai.APIStatusError, match="came back") as refused:
                    client_of(a).with_options(max_retries=0).chat.completions.create(**ASKED, extra_headers={VIA_HEADER: mark})
                assert refused.value.status_code == 508
        # Each could now have the model from the other one alone.
        b.run("share", "--remove", engine.url)
        until(lambda: not any(model.id for one in (a, b) for model in client_of(one).models.list()))
        with pytest.raises(openai.APIStatusError) as refused:
            client_of(a).with_options(max_retries=0).chat.completions.create(**ASKED)
        assert refused.value.status_code in {404, 503}  # 503 for a while after the model left
