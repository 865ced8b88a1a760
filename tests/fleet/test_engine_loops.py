"""Two Paceline endpoints that share each other: a request that would go around is refused, and the loop is named."""

from __future__ import annotations

from pathlib import Path

import openai
from tests.fakes.foreign_engines import llama_server
from tests.fleet.machines import EMPTY, free_port, machines, until
from tests.fleet.test_forwarding import client_of

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
        # Each now has the model from the other one alone.
        b.run("share", "--remove", engine.url)
        client = client_of(a).with_options(max_retries=0)
        until(lambda: b.node.url in a.run("share") and engine.url not in b.run("share"))
        until(lambda: "went through" in why_refused(client))
        assert {"a~", "b~"} <= {word[:2] for word in why_refused(client).split()}


def why_refused(client: openai.OpenAI) -> str:
    """Return the message of a refusal with status 508; nothing for another answer."""
    try:
        client.chat.completions.create(**ASKED)
    except openai.APIStatusError as error:
        return error.message if error.status_code == 508 else ""
    return ""
