"""Models from strangers: their templates, tokenizers, heads and words take a bounded time and memory, and command nothing."""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from paceline.cli.chat import _show_plain, _write
from paceline.cli.endpoint import EndpointClient, EndpointError
from paceline.cli.terminal import report
from paceline.core.errors import InvalidRequest, ModelFileError, PacelineError
from paceline.core.model import LayerRange, WeightsFormat
from paceline.core.text import shown
from paceline.net.wire import shard_pb2
from paceline.store import bounded_tokenizer, catalog
from paceline.store.bounded_tokenizer import BoundedTokenizer, TokenizerProcess
from paceline.store.catalog import BUNDLED, ModelLocation, open_model
from paceline.store.chats import ChatTemplate
from paceline.store.gguf_header import MAX_HEADER_BYTES, MAX_KEYS, MAX_STRINGS, MAX_TENSORS
from paceline.store.hf_folder import MAX_HEAD_BYTES
from paceline.store.home import Home
from paceline.store.tokenizer import ModelTokenizer, byte_alphabet
from paceline.ways.pipeline.codec import read_event
from paceline.ways.pipeline.executor.route import PipelineFault, StageRequest

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
CHAT = [{"role": "user", "content": "hello"}]
BIG = "{% set s = ('a' * 1000000) %}{% set s = s ~ s ~ s ~ s %}{% set s = s ~ s ~ s ~ s %}"
MANY = "{% for i in range(99999) %}"
TEMPLATES = {
    "reversed slices": BIG + MANY + "{% set t = s[::-1] %}{% endfor %}",
    "slices": BIG + MANY + "{% set t = s[1:] %}{% endfor %}",
    "in": BIG + MANY + "{% set t = 'b' in s %}{% endfor %}",
    "equal": BIG + "{% set z = s ~ 'b' %}{% set y = s ~ 'b' %}" + MANY + "{% set t = z == y %}{% endfor %}",
    "less": BIG + "{% set z = s ~ 'b' %}{% set y = s ~ 'b' %}" + MANY + "{% set t = z < y %}{% endfor %}",
    "lists": "{% set n = namespace(x=[]) %}" + MANY + "{% set n.x = [n.x, n.x, n.x] %}{% set t = n.x == [n.x] %}{% endfor %}",
    "tests": BIG + MANY + "{% set t = s is lower %}{% endfor %}",
    "lengths of wide texts": "{% set n = namespace(x='\U0001f600' * 1000) %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "tuples": BIG + MANY + "{% set t = (s[:-1], s[:-2], s[:-3]) %}{% endfor %}",
    "nested loops": MANY * 4 + "{% endfor %}" * 4,
    "macros that call themselves twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a text doubled by writing": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "a text multiplied": "{{ 'a' * 10**11 }}",
    "a width, at compiling": "{{ 'a'|center(100000000000) }}",
    "a power, at compiling": "{{ 10 ** (10 ** 9) }}",
    "dicts": MANY + "{% set d = {'a': " + "[" * 40 + "0" * 1 + "]" * 40 + "} %}{% endfor %}",
    "a text kept of each turn": "{% set n = namespace(x=[]) %}" + BIG + MANY + "{% set n.x = n.x + [s[:-1]] %}{% endfor %}",
}


def encoder(cut: Any = None, normalizer: Any = None) -> Tokenizer:
    made = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(byte_alphabet())}, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.Sequence([*([cut] if cut else []), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def model(template: str = "", cut: Any = None) -> ModelTokenizer:
    path = Path("m.gguf")
    return ModelTokenizer(path, encoder(cut), frozenset({0}), ChatTemplate(path, template, {}))


@pytest.fixture
def bounded(request: pytest.FixtureRequest) -> Generator[Any, None, None]:
    made: list[BoundedTokenizer] = []

    def make(tokenizer: ModelTokenizer) -> BoundedTokenizer:
        made.append(BoundedTokenizer(tokenizer))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_row_48_a_template_ends_within_its_time_and_memory(bounded: Any, source: str) -> None:
    # The time and the memory are what the system counts, of a process that ends by them: there is nothing to measure here.
    tokenizer = bounded(model(source))
    with suppress(InvalidRequest):
        tokenizer.render_chat(CHAT, NOW)


def test_row_48_a_template_is_only_text_in_this_process(bounded: Any) -> None:
    tokenizer = bounded(model("{{ messages[0]['content'] }}"))
    assert tokenizer.render_chat(CHAT, NOW)
    assert vars(tokenizer.model.template).keys() == {"path", "source", "special_tokens", "response", "tool_source"}


def test_row_48_where_the_system_limits_no_memory_what_takes_much_is_ended(bounded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_tokenizer, "LIMITS_MEMORY", False)
    monkeypatch.setattr(bounded_tokenizer, "BUILD_BYTES", 64 << 20)
    tokenizer = bounded(model(TEMPLATES["a text kept of each turn"]))
    with pytest.raises(InvalidRequest, match="takes more memory than any chat"):
        tokenizer.render_chat(CHAT, NOW)


def test_row_48_the_next_request_is_served(bounded: Any) -> None:
    source = "{% if messages[0]['content'] == 'attack' %}" + TEMPLATES["slices"] + "{% endif %}{{ messages[0]['content'] }}"
    tokenizer = bounded(model(source))
    plain = model(source)
    assert tokenizer.render_chat(CHAT, NOW) == plain.render_chat(CHAT, NOW)
    with pytest.raises(InvalidRequest, match="was ended"):
        tokenizer.render_chat([{"role": "user", "content": "attack"}], NOW)
    assert tokenizer.render_chat(CHAT, NOW) == plain.render_chat(CHAT, NOW)


def test_row_48_the_loop_lives_while_a_template_runs(bounded: Any) -> None:
    tokenizer = bounded(model(TEMPLATES["slices"]))

    async def turns() -> int:
        rendering = asyncio.create_task(asyncio.to_thread(tokenizer.render_chat, CHAT, NOW))
        count = 0
        while not rendering.done():
            await asyncio.sleep(0.01)
            count += 1
        with pytest.raises(InvalidRequest):
            await rendering
        return count

    assert asyncio.run(turns()) > 20


def test_row_49_a_cut_that_takes_for_ever_is_ended(bounded: Any) -> None:
    slow = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    tokenizer = bounded(model("{{ messages[0]['content'] }}", slow))
    with pytest.raises(InvalidRequest, match="tokenizer"):
        tokenizer.encode(("x" * 22 + " ") * 4000)
    assert tokenizer.encode("word") == model(cut=slow).encode("word")


def test_row_49_a_normaliser_that_swells_is_ended() -> None:
    made = json.loads(encoder().to_str())
    made["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "w"}, "content": "w" * 1000}] * 4}
    packed = json.dumps({"encoder": json.dumps(made), "eos_ids": [], "template": None, "special_tokens": {}}).encode()
    with pytest.raises(ModelFileError):
        TokenizerProcess(packed)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"encoder": "{}", "eos_ids": [], "template": null, "special_tokens": {}}', b"\xff" * (8 << 20)]
)
def test_row_49_what_is_no_tokenizer_is_damaged(data: bytes) -> None:
    with pytest.raises(PacelineError):
        TokenizerProcess(data)


@pytest.fixture(scope="module")
def bundled() -> Generator[BoundedTokenizer, None, None]:
    tokenizer = BoundedTokenizer(open_model("smollm2-135m").tokenizer)
    yield tokenizer
    tokenizer.close()


TEXTS = ["", "hello", "a\n\tb", "\u00e9\u4e2d\U0001f600\u200d", "<|im_end|> is text", "x" * 5000, 'quotes " and \\ and \0']


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_tokenizer_itself(bundled: BoundedTokenizer, text: str) -> None:
    inside = bundled.model
    for special in (True, False):
        assert bundled.encode(text, add_special=special) == inside.encode(text, add_special=special)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    assert bundled.render_chat(chat, NOW) == inside.render_chat(chat, NOW)
    assert [bundled.token_bytes(i) for i in range(300)] == [inside.token_bytes(i) for i in range(300)]


def test_long_chats_stay_within_the_allowance(bundled: BoundedTokenizer) -> None:
    many = [{"role": "user", "content": "word " * 20} for _ in range(20_000)]
    long = [{"role": "user", "content": "word " * 400_000}]
    assert len(bundled.render_chat(many, NOW)) > 20 * 20_000
    assert len(bundled.render_chat(long, NOW)) > 400_000


@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=5, minutes=45)), timezone(timedelta(hours=-8), "PST"), None])
def test_a_template_shows_the_time_as_it_did(bounded: Any, zone: timezone | None) -> None:
    source = "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f %z %Z %A') }}"
    now = datetime(2026, 3, 1, 23, 59, 58, 123456, tzinfo=zone)
    assert bounded(model(source)).render_chat(CHAT, now) == model(source).render_chat(CHAT, now)


@pytest.mark.parametrize(
    ("source", "is_named"),
    [
        ("{% for %}", True),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", True),
        ("{{ raise_exception('none') }}", False),
        ("{{ 1 }}", False),
    ],
)
def test_a_template_that_does_not_compile_is_named_at_the_start(
    bounded: Any, caplog: pytest.LogCaptureFixture, source: str, *, is_named: bool
) -> None:
    tokenizer = bounded(model(source))
    with caplog.at_level("WARNING"):
        tokenizer._begin()
    assert [line for line in caplog.messages if "chat template" in line] == caplog.messages
    assert len(caplog.messages) == is_named
    assert tokenizer.encode("text")


def test_a_tool_template_that_does_not_compile_is_named_at_the_start(bounded: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = model("{{ 1 }}")
    assert made.template is not None
    made.template = replace(made.template, tool_source="{% if %}")
    bounded(made)._begin()
    assert "does not compile" in caplog.text


def test_what_a_template_says_reaches_the_client(bounded: Any) -> None:
    tokenizer = bounded(model("{{ raise_exception('only users') }}"))
    with pytest.raises(InvalidRequest, match="only users") as caught:
        tokenizer.render_chat(CHAT, NOW)
    assert caught.value.field == "messages"
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        tokenizer.encode("\ud800")


def gguf_head(n_tensors: int, n_keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes) -> bytes:
    return text(name) + struct.pack("<IQIQ", 1, 32, 0, 0)


def safetensors_head(table: bytes) -> bytes:
    return len(table).to_bytes(8, "little") + table


HEADS: dict[str, Callable[[], bytes]] = {
    "gguf tensors": lambda: gguf_head(MAX_TENSORS, 0) + b"".join(tensor(b"t%d" % i) for i in range(MAX_TENSORS)),
    "gguf keys": lambda: gguf_head(0, MAX_KEYS) + b"".join(text(b"k%d" % i) + struct.pack("<IB", 0, 1) for i in range(MAX_KEYS)),
    "gguf too many tensors": lambda: gguf_head(10_000_000, 0) + bytes(MAX_HEADER_BYTES * 8),
    "gguf too many keys": lambda: gguf_head(0, 10_000_000) + bytes(MAX_HEADER_BYTES * 8),
    "gguf same tensor": lambda: gguf_head(MAX_TENSORS, 0) + tensor(b"t") * MAX_TENSORS,
    "gguf strings": lambda: (
        gguf_head(0, 1) + text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, MAX_STRINGS) + text(b"ab") * MAX_STRINGS
    ),
    "gguf too many strings": lambda: gguf_head(0, 1) + text(b"x") + struct.pack("<IIQ", 9, 8, 4 << 20) + bytes(MAX_HEADER_BYTES * 2),
    "safetensors table": lambda: safetensors_head(b"{" + b",".join(b'"%d":[]' % i for i in range(MAX_HEAD_BYTES // 11)) + b"}"),
    "safetensors nested": lambda: safetensors_head(b'{"a":[' + b"[]," * (MAX_HEAD_BYTES // 3 - 8) + b"[]]}"),
    "safetensors too long": lambda: (MAX_HEAD_BYTES + 1).to_bytes(8, "little") + bytes(MAX_HEAD_BYTES + 1),
}
"""Files whose heads are as large as any may be, by the reader that reads them."""


READ = """
import resource, sys
from pathlib import Path
from paceline.core.errors import PacelineError
from paceline.store.gguf_header import read_header
from paceline.store.hf_folder import read_head
held = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (256 << 20), held + (256 << 20)))
resource.setrlimit(resource.RLIMIT_CPU, (8, 8))
path = Path(sys.argv[1])
try:
    if path.suffix == ".gguf":
        header = read_header(path)
        for key in header.fields:
            if "tokens" in key:
                header.strings(key)
    else:
        list(read_head(path))
except PacelineError as error:
    print(type(error).__name__)
"""


@pytest.mark.sampled(3)
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system counts no address space")
@pytest.mark.parametrize("name", HEADS)
def test_row_50_heads_at_their_bounds_are_read_or_refused_within_256_mib(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"m.{name.split(maxsplit=1)[0]}"
    path.write_bytes(HEADS[name]())
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


ESCAPES = (
    "\x1b]52;c;cm0gLXJm\x07\x1b[2J\x9b1;1H\rgone\x08\x7f\u202etxt.exe\u2066 plain \u00e9 \U0001f468\u200d\U0001f469\u200d\U0001f467\n\tnext"
)
COMMANDS = {"\x1b", "\x07", "\x9b", "\r", "\x08", "\x7f", "\u202e", "\u2066"}


def test_row_51_an_answer_commands_no_terminal_whatever_its_pieces() -> None:
    assert not COMMANDS & set(shown(ESCAPES))
    assert shown(ESCAPES).endswith(" plain \u00e9 \U0001f468\u200d\U0001f469\u200d\U0001f467\n\tnext")
    assert "".join(map(shown, ESCAPES)) == shown(ESCAPES)
    harmless = "".join(map(chr, [*range(0x20, 0x7F), *range(0xA0, 0x2000), 0x200D, 0x4E2D, 0x1F600])) + "\n\t"
    assert shown(harmless) == harmless


def test_row_51_a_chat_shows_what_a_model_says_and_no_more(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: object, **__: object) -> Generator[str, None, bool]:
        yield from ESCAPES
        return False

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    _write(answer, [], _show_plain)
    assert capsys.readouterr().out == shown(ESCAPES)
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    _write(answer, [], _show_plain)
    assert capsys.readouterr().out == ESCAPES  # a file gets all of it


def test_row_51_errors_of_endpoints_and_files_are_shown_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    report(PacelineError(f"it said {ESCAPES}", ESCAPES))
    assert not COMMANDS & set(capsys.readouterr().err)


class Hostile(BaseHTTPRequestHandler):
    """An endpoint whose every word is a command."""

    def do_GET(self) -> None:
        self._say(200, {"data": [{"id": ESCAPES}]})

    def do_POST(self) -> None:
        self._say(500, {"error": {"message": ESCAPES}})

    def log_message(self, *args: object) -> None:
        """Nothing."""

    def _say(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_row_51_an_endpoints_names_and_errors_are_shown_harmless() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with EndpointClient(f"127.0.0.1:{server.server_port}", None) as endpoint:
            (name,) = endpoint.models()
            assert not COMMANDS & set(name)
            with pytest.raises(EndpointError) as caught:
                list(endpoint.say("m", CHAT, temperature=0, seed=None))
        server.shutdown()
    assert not {*COMMANDS, "\n"} & set(str(caught.value))


def test_row_51_a_stages_fault_starts_no_line_of_a_log() -> None:
    told = shard_pb2.OpenStageResponse(fault=shard_pb2.StageFault(code="x\ny", message=f"a\nERROR all is lost {ESCAPES}"))
    asked = StageRequest(bytes(16), "m", "0" * 64, WeightsFormat.BF16, LayerRange(0, 1), 1, 1, 1)
    fault = read_event(told, asked)
    assert isinstance(fault, PipelineFault)
    assert not {*COMMANDS, "\n"} & set(fault.message + fault.code)


def test_the_bundled_models_file_is_the_one_that_was_meant(tmp_path: Path, bundled_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / bundled_gguf.name
    data = bytearray(bundled_gguf.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    monkeypatch.setattr(catalog, "_bundled", lambda: ModelLocation(BUNDLED, other))
    with pytest.raises(ModelFileError, match="is not the bundled model's file"):
        open_model(BUNDLED, Home(tmp_path))
