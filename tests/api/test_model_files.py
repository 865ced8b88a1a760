"""What a model's own files say of requests that leave something out: how tokens are drawn, and which ones a gap is filled in with."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.served import Served

from paceline.machine.host import EngineHost
from paceline.machine.settings import NodeSettings
from paceline.node.build import BuiltNode, build_node
from paceline.server.settings import ServerSettings

pytestmark = pytest.mark.timeout(600)  # the first load on a machine compiles kernels

DRAWN: dict[str, float] = {"temperature": 0.5, "top_k": 7, "top_p": 0.875, "min_p": 0.0625, "repetition_penalty": 1.25}
KEYS = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"}
PREFIX, SUFFIX, MIDDLE = 40, 50, 60
METADATA = {f"general.sampling.{KEYS[name]}": value for name, value in DRAWN.items()} | {
    "tokenizer.ggml.fim_pre_token_id": PREFIX,
    "tokenizer.ggml.fim_suf_token_id": SUFFIX,
    "tokenizer.ggml.middle_token_id": MIDDLE,  # its name in older files
}
PLAIN: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 24, "seed": 3}


def with_metadata(source: Path, path: Path, added: dict[str, float]) -> Path:
    """A GGUF file with more metadata, which stands before the other, and shifts what follows by a multiple of its alignment."""

    def entry(key: str, kind: int, value: bytes) -> bytes:
        return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value

    whole = [
        entry(key, 4, struct.pack("<I", value)) if isinstance(value, int) else entry(key, 6, struct.pack("<f", value))
        for key, value in added.items()
    ]
    fill = -(len(b"".join(whole)) + len(entry("filler", 8, bytes(8)))) % 32
    whole.append(entry("filler", 8, struct.pack("<Q", fill) + b" " * fill))
    data = source.read_bytes()
    (entries,) = struct.unpack_from("<Q", data, 16)
    path.write_bytes(data[:16] + struct.pack("<Q", entries + len(whole)) + b"".join(whole) + data[24:])
    return path


@pytest.fixture(scope="module")
def node(bundled_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuiltNode]:
    path = with_metadata(bundled_gguf, tmp_path_factory.mktemp("model") / "m.gguf", METADATA)
    node = build_node(NodeSettings(model=str(path), kv_tokens=1024, context=256))
    yield node
    assert node.close()


@contextmanager
def served(node: BuiltNode, **settings: Any) -> Iterator[Served[EngineHost]]:
    running = Served(node.host, ServerSettings(**settings))
    try:
        yield running
    finally:
        running.close()


def text_of(api: Served[EngineHost], **fields: Any) -> str:
    answer = api.http.post("/v1/completions", json={"model": "m"} | PLAIN | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_what_a_request_leaves_out_is_as_the_model_s_files_say(node: BuiltNode) -> None:
    openai_s = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    with served(node) as api:
        assert api.http.get("/v1/models").json()["data"][0]["sampling_defaults"] == DRAWN
        silent, as_said, plain = text_of(api), text_of(api, **DRAWN), text_of(api, **openai_s)
        assert silent == as_said != plain
        # What a request does say holds, beside what it leaves out.
        assert text_of(api, temperature=1.5) == text_of(api, **DRAWN | {"temperature": 1.5}) != silent
    with served(node, uses_model_sampling=False) as api:
        assert text_of(api) == plain


def test_a_gap_is_filled_in_with_the_tokens_that_the_file_names(node: BuiltNode) -> None:
    with served(node) as api:
        before, behind = (api.http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in ("One two", " four five"))
        asked = {"prompt": "One two", "suffix": " four five", "temperature": 0}
        assert text_of(api, **asked) == text_of(api, prompt=[PREFIX, *before, SUFFIX, *behind, MIDDLE], temperature=0)
