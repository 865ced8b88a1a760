"""Files of hosts in each form, what a launcher says, and what becomes of options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.cli.test_commands import assert_user_error, paceline

from paceline.cli import launch
from paceline.cli.launch import DistributedEnv, create_hostfile, read_hostfile, run_launch, validate_distributed_env
from paceline.core.errors import ConfigError


def written(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("said", "hosts"),
    [
        ([{"host": "mac-1.local", "port": 22}, {"host": "mac-2.local", "port": 22}], ("mac-1.local", "mac-2.local")),
        ([["10.0.0.1:32323", "10.1.0.1:32324"], ["[fd00::2]:32325"]], ("10.0.0.1", "fd00::2")),
        ([{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": []}], ("10.0.0.1", "b")),
        ({"backend": "jaccl", "hosts": [{"ssh": "a", "ips": ["10.0.0.1"], "rdma": [None]}]}, ("10.0.0.1",)),
        ("", ()),
    ],
)
def test_hosts_are_read_in_each_form(tmp_path: Path, said: object, hosts: tuple[str, ...]) -> None:
    assert read_hostfile(written(tmp_path / "hosts.json", said)) == hosts


@pytest.mark.parametrize("said", ["{", "7", [7], [[]], [["nohost"]], [{"port": 22}], [{"host": ""}]])
def test_what_names_no_hosts_is_refused(tmp_path: Path, said: object) -> None:
    with pytest.raises(ConfigError, match=r"The file of hosts .*hosts\.json"):
        read_hostfile(written(tmp_path / "hosts.json", said))


def test_what_is_created_is_read_here_and_by_mlx(tmp_path: Path) -> None:
    path = create_hostfile([{"host": "mac-1.local", "ip": "10.0.0.1"}, {"host": "10.0.0.2", "port": 2222}], tmp_path / "hosts.json")
    assert read_hostfile(path) == ("10.0.0.1", "10.0.0.2")
    assert [each["port"] for each in json.loads(path.read_text())] == [22, 2222]
    pytest.importorskip("mlx")
    reads = "import sys; from mlx._distributed_utils.common import Hostfile as H; print([(h.ssh_hostname, h.ips) for h in H.from_file(sys.argv[1]).hosts])"
    done = subprocess.run([sys.executable, "-c", reads, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[('mac-1.local', ['10.0.0.1']), ('10.0.0.2', ['10.0.0.2'])]"


def test_a_hostfile_that_was_written_is_said_and_one_that_cannot_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "my hosts.json"
    done = paceline("hostfile", str(path), "mac-1.local=10.0.0.1", "mac-2.local")
    assert done.returncode == 0, done.stderr
    assert f"{path} is written: a rank each for 10.0.0.1, mac-2.local; the first serves" in done.stdout
    assert f"mlx.launch --hostfile '{path}' --" in done.stdout
    assert_user_error(paceline("hostfile", str(tmp_path), "a"), f"{tmp_path} can't be written: Is a directory")
    for nameless in ("", "=3"):  # as of `mac-1.local =3`
        assert_user_error(paceline("hostfile", str(path), nameless), "A host has no name")
    assert read_hostfile(path) == ("10.0.0.1", "mac-2.local")


def test_what_the_launcher_says(tmp_path: Path) -> None:
    two = str(written(tmp_path / "two", [["a:1"], ["b:1"]]))
    empty = str(written(tmp_path / "one", "\n"))
    assert validate_distributed_env({}) == DistributedEnv(available=False, rank=0, hosts=("",))
    assert validate_distributed_env({"MLX_RANK": "0", "MLX_HOSTFILE": empty}).size == 1
    assert validate_distributed_env({"MLX_RANK": "1", "MLX_HOSTFILE": two}) == DistributedEnv(available=True, rank=1, hosts=("a", "b"))
    assert validate_distributed_env({"MLX_RANK": "1"}, Path(two)).hosts == ("a", "b")
    for wrong in (
        {"MLX_RANK": "1"},
        {"MLX_WORLD_SIZE": "2"},
        {"MLX_RANK": "2", "MLX_HOSTFILE": two},
        {"MLX_RANK": "-1", "MLX_HOSTFILE": two},
    ):
        with pytest.raises(ConfigError):
            validate_distributed_env(wrong)


@pytest.mark.parametrize(
    ("rank", "hosts", "options"),
    [
        ("0", [["a:1"]], ["--tensor", "1", "--drain-s", "2", "--model", "m"]),
        ("0", [["a:1"], ["a:2"], ["a:3"]], ["--tensor", "3", "--drain-s", "2", "--model", "m"]),
        ("1", [["a:1"], ["a:2"]], None),
        (
            "1",
            [["a:1"], ["b:1"]],
            ["--no-model", "--serve-shards", "--peer", "a:8154", "--drain-s", "2"],
        ),
        ("2", [["a:1"], ["b:1"], ["b:2"]], None),
    ],
)
def test_each_rank_is_what_its_host_makes_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    hosts: list[list[str]],
    options: list[str] | None,
) -> None:
    """A rank on a host where another is runs in a process of that one's. Each says which it is."""
    ran: list[list[str]] = []
    monkeypatch.setenv("MLX_RANK", rank)
    monkeypatch.setattr(launch, "_run", lambda options: ran.append(list(options)))
    asked = ["--model", "m"]
    path = written(tmp_path / "hosts.json", hosts)
    if options is None:
        run_launch(asked, path)
        assert ran == []
        assert capsys.readouterr().out.startswith(f"Rank {rank} is a process of")
        return
    with pytest.raises(SystemExit):
        run_launch(asked, path)
    assert ran == [options]
    assert capsys.readouterr().err.startswith(f"Rank {rank} of {len(hosts)} ")


def test_what_up_refuses_ends_the_launch_as_it_ends_up() -> None:
    done = paceline("launch", "--model", "nobody", "--port", "0")
    assert_user_error(done, "Rank 0 of 1 serves", "There is no model 'nobody'")
    assert "Fatal" not in done.stderr


def test_a_host_without_a_model_takes_what_speaks_of_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLX_RANK", "1")
    ran: list[list[str]] = []
    monkeypatch.setattr(launch, "_run", lambda options: ran.append(list(options)))
    asked = [
        "--model",
        "m",
        "--fleet-port",
        "9000",
        "--no-mdns",
        "--draft",
        "off",
        "--port=0",
        "--greet",
        "--threads",
        "2",
        "--drain-s=9",
        "--kv-disk",
        "2GB",
    ]
    with pytest.raises(SystemExit):
        run_launch(asked, written(tmp_path / "hosts.json", [["a:1"], ["b:1"]]), 9000)
    (options,) = ran
    assert options[:4] == ["--no-model", "--serve-shards", "--peer", "a:9000"]
    assert options[4:] == ["--fleet-port", "9000", "--no-mdns", "--port=0", "--threads", "2", "--drain-s=9"]
