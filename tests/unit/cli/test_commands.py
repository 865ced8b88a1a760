"""The command line as a person meets it: real processes, real files."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tests.fakes.warm import popen

from paceline.backends import cpu
from paceline.backends.cpu import Lowering
from paceline.cli.endpoint import EndpointClient, EndpointError
from paceline.machine.settings import DEFAULT_MODEL
from paceline.server.serve import own_certificate
from paceline.store.families import BY_NAME
from paceline.store.home import Home


def paceline(*args: str, message: str = "Hi.", cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    process = popen(*args, environment={"COLUMNS": "200", **environment}, folder=cwd)
    try:
        out, err = process.communicate(message, timeout=500)
    finally:
        process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess(args, process.returncode, out, err)


@contextmanager
def served(status: int, body: bytes) -> Generator[str]:
    """An endpoint, at the address given, that answers everything alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Nothing: tests don't chatter."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def assert_user_error(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "Ready" not in done.stdout
    for word in words:
        assert word in done.stderr


def test_version_and_help() -> None:
    from paceline import __version__

    assert paceline("version").stdout.strip() == __version__
    assert paceline("--version").stdout.strip() == __version__
    shown = paceline("--help")
    assert shown.returncode == 0
    for command in ("up", "chat", "pull", "models", "bench", "version"):
        assert command in shown.stdout


@pytest.mark.parametrize("heavy", ["numpy", "numba", "torch", "fastapi", "uvicorn", "httpx", "huggingface_hub", "pydantic"])
def test_the_command_line_imports_nothing_heavy(heavy: str) -> None:
    code = f"import sys, paceline.cli.app; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0


@pytest.mark.parametrize("module", ["typer", "rich", "paceline.cli.terminal"])
def test_an_interrupt_while_the_command_line_itself_is_imported_is_no_traceback(module: str) -> None:
    code = f"""
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from paceline.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("up", "--port", "abc"), "error: --port: 'abc' is not an integer\nhint:  This says what it takes: "),
        (("up", "--port", "99999"), "error: --port: '99999' is more than 65535\n"),
        (("up", "--drain-s", "-1"), "error: --drain-s: '-1' is less than 0\n"),
        (("chat", "--temperature", "warm"), "error: --temperature: 'warm' is not a number\n"),
    ],
)
def test_a_value_that_is_no_such_number_is_said_with_what_it_was(args: tuple[str, ...], words: str) -> None:
    done = paceline(*args)
    assert_user_error(done, words)
    assert f"paceline {args[0]} --help" in done.stderr


@pytest.mark.parametrize("args", [("up", "--device", "gpu"), ("up", "--weights", "int3"), ("token", "--trust", "all")])
def test_a_word_that_is_none_of_an_option_s_is_said_with_those_that_are(args: tuple[str, ...]) -> None:
    done = paceline(*args)
    assert_user_error(
        done, f"error: {args[1]}: {args[2]!r} is not one of '", "hint:  This says what it takes: ", f"paceline {args[0]} --help"
    )
    assert "Value error" not in done.stderr


def test_a_wrong_flag_names_the_near_ones() -> None:
    assert_user_error(paceline("up", "--prot", "1"), "--prot", "--port")


def test_another_name_for_no_model_is_refused() -> None:
    assert_user_error(paceline("up", "--port", "0", "--no-model", "--served-name", "gpt-4"), "--served-name", "--no-model")


def test_a_model_beside_no_model_is_refused() -> None:
    done = paceline("up", "--port", "0", "--no-model", "-m", "some.gguf")
    assert_user_error(done, "--model some.gguf loads a model, and --no-model asked for none", "Leave one of them out.")


def test_drafts_for_no_model_are_refused() -> None:
    assert_user_error(paceline("up", "--port", "0", "--no-model", "--draft", "ngram"), "--draft", "--no-model")


def test_kernels_are_asked_for_layers_of_others_too() -> None:
    gpu = paceline("up", "--port", "0", "--no-model", "--serve-shards", "--device", "torch-cuda")
    assert_user_error(gpu, "--device torch-cuda is for this machine's own model", "Leave one of them out.")
    other = next(lowering for lowering in Lowering if lowering not in cpu.lowerings_here())
    lacking = paceline("up", "--port", "0", "--no-model", "--serve-shards", "--device", f"cpu-{other}")
    assert_user_error(lacking, f"--device cpu-{other} can't be used here: this processor has no {other}", "Leave --device out.")


def test_a_wrong_command_names_the_near_ones() -> None:
    assert_user_error(paceline("modles"), "models")


def test_a_wrong_format_names_the_right_ones() -> None:
    assert_user_error(paceline("up", "--weights", "int3"), "int3", "int4", "int8", "bf16")


def test_an_unknown_model_names_the_near_ones() -> None:
    assert_user_error(paceline("up", "--port", "0", "--model", "smolm2-135m"), "smolm2-135m", "Did you mean smollm2-135m")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing.gguf")
    assert_user_error(paceline("up", "--port", "0", "--model", missing), missing)


def test_a_folder_without_a_model_is_named_before_anything_is_said_to_load(tmp_path: Path) -> None:
    done = paceline("up", "--port", "0", "--model", str(tmp_path))
    assert_user_error(done, f"{tmp_path} holds no model")
    assert "Loading" not in done.stdout


def test_of_several_models_one_that_is_missing_is_named_before_another_is_loaded() -> None:
    done = paceline("up", "--port", "0", "--model", DEFAULT_MODEL, "--model", "nobody/has-this")
    assert_user_error(done, "nobody/has-this")
    assert "Loading" not in done.stdout


@pytest.mark.parametrize("command", [("up", "--port", "0"), ("models",), ("status",), ("init",)])
def test_a_home_that_is_a_file_is_named(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "home").touch()
    assert_user_error(paceline(*command, PACELINE_HOME=str(tmp_path / "home")), "PACELINE_HOME", "no folder")


@pytest.mark.parametrize("name", ["llama3", "qwen3:8b"])
def test_a_name_that_no_hub_has_is_told_what_names_there_look_like(name: str) -> None:
    assert_user_error(paceline("pull", name), f"'{name}' is no name at the hub", "org/name")


def test_what_goes_to_a_program_is_not_broken_over_lines(tmp_path: Path, bundled_gguf: Path) -> None:
    mine = tmp_path / f"{'long-' * 30}name.gguf"
    mine.symlink_to(bundled_gguf)
    home = str(tmp_path / "home")
    assert paceline("pull", str(mine), PACELINE_HOME=home).returncode == 0
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"PACELINE_HOME": home}
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "models"], capture_output=True, text=True, timeout=500, env=environment, check=True
    )
    assert len(done.stdout.splitlines()) == 3
    assert mine.stem in done.stdout


@pytest.mark.sampled(2)
@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64, b"not a model at all"])
def test_a_corrupt_gguf_is_named(tmp_path: Path, content: bytes) -> None:
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(content)
    assert_user_error(paceline("up", "--port", "0", "--model", str(corrupt)), "corrupt.gguf", "hint:")


def test_a_truncated_gguf_is_named(tmp_path: Path, bundled_gguf: Path) -> None:
    truncated = tmp_path / "truncated.gguf"
    with bundled_gguf.open("rb") as whole:
        truncated.write_bytes(whole.read(8 << 20))
    done = paceline("up", "--port", "0", "--model", str(truncated))
    assert_user_error(done, "truncated.gguf", "hint:")
    assert "Delete" not in done.stderr  # it is the person's own


def test_a_taken_port_is_found_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        # The model does not exist: had it been looked for first, the error would name it.
        assert_user_error(paceline("up", "--port", port, "--model", "no-such-model"), port, "--port")


def test_other_machines_need_a_key() -> None:
    assert_user_error(paceline("up", "--host", "0.0.0.0", "--model", "no-such-model"), "0.0.0.0", "--api-key-file")


def test_a_context_beyond_the_models_is_refused() -> None:
    assert_user_error(paceline("up", "--port", "0", "--context", "1000000"), "1000000", "--context")


def test_more_kv_than_memory_is_refused_with_numbers() -> None:
    assert_user_error(paceline("up", "--port", "0", "--kv-tokens", "100000000000"), "100000000000", "GiB", "or fewer")


def test_models_lists_the_bundled_one() -> None:
    (model,) = json.loads(paceline("models", "--json").stdout)
    assert model["name"] == "smollm2-135m"
    assert model["problem"] is None
    assert Path(model["path"]).is_file()
    assert "smollm2-135m" in paceline("models").stdout


def test_what_runs_each_family_is_listed() -> None:
    rows = {row["family"]: row for row in json.loads(paceline("models", "--supported", "--json").stdout)}
    assert rows.keys() == BY_NAME.keys()
    assert all("yes" in {row["compiled"], row["torch"]} for row in rows.values())
    assert rows["llama"]["compiled"] == rows["llama"]["torch"] == rows["llama"]["mlx"] == "yes"
    assert "was not brought here" in rows["phi3"]["mlx"]
    assert "norms behind" in rows["gemma3_text"]["torch"]
    shown = paceline("models", "--supported", COLUMNS="200").stdout
    assert "MLX" in shown.splitlines()[0]
    assert all(family.shown in shown for family in BY_NAME.values())


def test_what_is_wrong_with_options_of_a_launch_is_said_of_it() -> None:
    done = paceline("launch", "--bogus")
    assert done.returncode == 2
    assert "No such option: --bogus" in done.stderr
    assert "paceline launch" in done.stderr.splitlines()[0]


def test_pull_registers_a_file(tmp_path: Path, bundled_gguf: Path) -> None:
    home = str(tmp_path / "home")
    mine = tmp_path / "mine.gguf"
    mine.symlink_to(bundled_gguf)
    done = paceline("pull", str(mine), PACELINE_HOME=home)
    assert done.returncode == 0, done.stderr
    assert str(mine) in done.stdout
    assert "mine" in {model["name"] for model in json.loads(paceline("models", "--json", PACELINE_HOME=home).stdout)}


def test_what_pull_says_to_try_survives_a_shell(tmp_path: Path, bundled_gguf: Path) -> None:
    mine = tmp_path / "it's mine.gguf"
    mine.symlink_to(bundled_gguf)
    done = paceline("pull", str(mine), PACELINE_HOME=str(tmp_path / "home"))
    (tried,) = [line for line in done.stdout.splitlines() if line.startswith("Try: ")]
    assert shlex.split(tried)[-3:] == ["up", "--model", "it's mine"]


def test_a_model_that_went_away_is_named_with_its_problem(tmp_path: Path, bundled_gguf: Path) -> None:
    home, mine = str(tmp_path / "home"), tmp_path / "mine.gguf"
    mine.symlink_to(bundled_gguf)
    assert paceline("pull", str(mine), PACELINE_HOME=home).returncode == 0
    mine.unlink()
    done = paceline("models", PACELINE_HOME=home, COLUMNS="80")
    assert done.returncode == 0
    assert f"mine can't be used: {mine} can't be read: No such file or directory\n" in done.stdout
    assert str(Path(home) / "models") in done.stdout


def test_pull_of_nothing_is_an_error(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing.gguf")
    assert_user_error(paceline("pull", missing), missing)


def test_chat_with_an_endpoint_that_is_not_there() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    assert_user_error(paceline("chat", "--url", url), url, "paceline up")


@contextmanager
def served_tls(folder: Path) -> Generator[str]:
    """What listens as `paceline up --tls` does, and ends what has no TLS."""
    files = own_certificate(Home(folder), (), time.time())
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with suppress(OSError), files.context().wrap_socket(connection, server_side=True) as secured:
                        secured.recv(1)

        Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def test_what_to_do_about_tls_is_said(tmp_path: Path) -> None:
    with served_tls(tmp_path) as address, served(200, b"{}") as plain:
        for url, hint in {
            f"https://{address}": "--tls-ca FILE",
            address: f"Where it speaks TLS: --url https://{address}/v1 --tls-ca FILE",
            f"https://{plain}": f"Where it speaks no TLS: --url http://{plain}/v1",
        }.items():
            with EndpointClient(url, None) as endpoint, pytest.raises(EndpointError) as refused:
                endpoint.models()
            assert hint in refused.value.hint, str(refused.value)


@pytest.mark.parametrize("form", ["{}", "http://{}", "http://{}/v1/"])
def test_an_endpoint_is_named_with_or_without_scheme_and_version(form: str) -> None:
    with served(404, b'{"error": {"message": "nothing here"}}') as address:
        assert_user_error(paceline("chat", "--url", form.format(address)), f"http://{address}/v1 refused (404): nothing here", "--url")


def test_an_endpoint_that_goes_away_is_said_to_have_gone() -> None:
    said = b'data: {"choices": [{"delta": {"content": "so far"}}]}\n\n'
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(said), said)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer_in_part() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        Thread(target=answer_in_part, daemon=True).start()
        with EndpointClient(f"127.0.0.1:{listening.getsockname()[1]}", None) as endpoint:
            say = partial(endpoint.say, "m", [], temperature=None, seed=None)
            texts = say()
            assert next(texts) == "so far"
            for again, why in ((texts, "it ended the connection"), (say(), "Connection refused")):
                with pytest.raises(EndpointError, match=f"^http://[0-9.:]+/v1 went away: .*{why}") as gone:
                    next(again)
                assert "paceline status" in gone.value.hint
                listening.close()


@pytest.mark.parametrize("event", [b"{broken", b"[]", b'{"choices": 1}', b'{"error": "odd"}', b'{"choices": [{"delta": 5}]}'])
def test_an_endpoint_that_streams_nonsense_is_an_error(event: bytes) -> None:
    with served(200, b"data: " + event + b"\n\n") as address:
        assert_user_error(paceline("chat", "--url", address, "--model", "m"), address, "Check the URL")


def test_a_chat_without_a_message_is_refused_before_anything_is_loaded() -> None:
    done = paceline("chat", "--model", "no-such-model", message=" \n")
    assert_user_error(done, "no message on standard input")


def test_bench_measures_what_was_asked() -> None:
    done = paceline("bench", "--prompt", "8", "--answer", "4", "--concurrency", "1,2", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["concurrency"] for row in report["rows"]] == [1, 2]
    assert all(row["total_decode_per_s"] > 0 for row in report["rows"])
    # Where no spinner turns, what is going on is still said.
    assert "round 1 of 1: 2 at once" in done.stderr


def test_bench_of_nonsense_is_refused() -> None:
    assert_user_error(paceline("bench", "--concurrency", "1,many"), "1,many", "1,4,16")
