"""What of `paceline up` among machines can't be had is said before anything starts."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served
from tests.unit.cli.test_commands import assert_user_error, paceline

from paceline.cli.options import ApiOptions, tensor_nodes, tensor_speeds
from paceline.cli.running import announced
from paceline.cli.sharing import run_shared
from paceline.cli.sharing_options import SharingOptions
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.ids import NodeId
from paceline.fleet.plan import Way
from paceline.fleet.presets import FleetSettings
from paceline.machine.settings import NodeSettings
from paceline.node.planning import Constraints

PLAIN = SharingOptions(
    fleet_port=0,
    tensor_port=None,
    fleet_host="127.0.0.1",
    peers=(),
    fleet_preset="lan",
    mdns=False,
    pipeline=None,
    serve_shards=None,
    fallback_to_local=None,
    pins=(),
    own_layers=None,
    throughput=False,
    propose=(),
    local_nodes=1,
    tied=False,
)
LOCAL = replace(PLAIN, local_nodes=3)


def up(sharing: SharingOptions) -> None:
    run_shared(NodeSettings("nothing-is-loaded"), sharing, ApiOptions(), greet=False)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("asked", [replace(LOCAL, pipeline=False), replace(LOCAL, serve_shards=False), replace(LOCAL, peers=("a:1",))])
def test_local_nodes_are_a_pipeline_of_their_own(asked: SharingOptions) -> None:
    with pytest.raises(ConfigError, match="over nodes of this machine"):
        up(asked)


def test_local_nodes_start_only_where_the_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.bench.fleet.LocalFleet", lambda *_, **__: pytest.fail("nodes were started"))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="Cannot listen on"):
        run_shared(NodeSettings("m"), LOCAL, ApiOptions(port=taken.getsockname()[1]), greet=False)


@pytest.mark.parametrize("sharing", [PLAIN, LOCAL])
def test_an_endpoint_that_runs_here_already_is_named(home: Path, sharing: SharingOptions) -> None:
    served = Served(ScriptedInference())
    try:
        already = rf"A paceline up \(process {os.getpid()}\) serves at {served.url} already"
        note = announced(served.url, has_key=False, certificate=None, owner_key=None)
        with note, pytest.raises(ConfigError, match=already):
            run_shared(NodeSettings("m"), sharing, ApiOptions(port=served.address[1]), greet=False)
    finally:
        served.close()


@pytest.mark.parametrize("sharing", [PLAIN, LOCAL])
def test_a_key_that_does_not_exist_is_said_in_a_fleet_or_out_of_it(home: Path, sharing: SharingOptions) -> None:
    (home / "config.toml").write_text("[pipeline]\nenabld = true\n")
    with pytest.raises(ConfigError, match="enabld does not exist"):
        up(sharing)


def test_a_span_of_time_that_is_none_is_said_in_a_fleet_or_out_of_it_with_its_option() -> None:
    with pytest.raises(ConfigError, match="--max-revocation-age 'x' is no span of time"):
        up(replace(PLAIN, max_revocation_age="x"))


@pytest.mark.parametrize("name", ["", "jacobi:", "ngram", "auto", "fleet"])
def test_what_drafts_is_a_model(name: str) -> None:
    with pytest.raises(ConfigError, match="names no model") as refused:
        up(replace(PLAIN, propose=(name,)))
    assert ("Prompt lookup" in refused.value.hint) == (name == "ngram")


def test_a_model_is_loaded_once_to_draft_with() -> None:
    with pytest.raises(ConfigError, match="small was asked for twice"):
        up(replace(PLAIN, propose=("small", "jacobi:small", "small")))


def test_drafts_of_nothing() -> None:
    with pytest.raises(ConfigError, match="--draft names nothing"):
        run_shared(NodeSettings("nothing-is-loaded", draft=""), PLAIN, ApiOptions(), greet=False)


@pytest.mark.parametrize(("draft", "hint"), [("small", "--propose small"), ("fleet", "Name a model")])
def test_in_no_fleet_nobody_drafts_but_this_machine(draft: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="in no fleet") as refused:
        run_shared(NodeSettings("nothing-is-loaded", draft=draft), PLAIN, ApiOptions(), greet=False)
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("ways", "changes", "said"),
    [
        ("tensors", {}, "names no way of running a model"),
        ("alone,", {}, "names no way of running a model"),
        ("alone", {"pipeline": True}, "--ways alone leaves no way to serve the model: the other options allow pipeline"),
        ("pipeline", {"pipeline": False}, "--ways pipeline leaves no way"),
        ("pipeline", {}, "in no fleet"),
    ],
)
def test_ways_that_fit_nothing_are_refused(ways: str, changes: dict[str, bool], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "no fleet" not in said:
        monkeypatch.setattr("paceline.cli.sharing.fleet_settings", lambda *_args, **_more: FleetSettings(0, "127.0.0.1"))
    with pytest.raises(PacelineError, match=said):
        up(replace(PLAIN, ways=ways, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ways", "draft", "left", "drafts"),
    [
        ("", "auto", {"alone", "draft", "pipeline", "tensor"}, "auto"),
        ("alone", "auto", {"alone"}, "ngram"),
        ("pipeline,alone", "off", {"alone", "pipeline"}, "off"),
        ("draft", "small", {"draft"}, "small"),
    ],
)
def test_the_plan_chooses_of_the_ways_that_are_left(
    ways: str, draft: str, left: set[str], drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[NodeSettings, frozenset[Way]]] = []
    monkeypatch.setattr("paceline.cli.sharing.fleet_settings", lambda *_args, **_more: FleetSettings(0, "127.0.0.1"))

    def run_up(settings: NodeSettings, _api: ApiOptions, *, asked: Constraints, **_more: object) -> NoReturn:
        ran.append((settings, asked.ways))
        raise SystemExit

    monkeypatch.setattr("paceline.cli.up.run_up", run_up)
    with pytest.raises(SystemExit):
        run_shared(NodeSettings("m", draft=draft), replace(PLAIN, ways=ways), ApiOptions(), greet=False)
    ((settings, allowed),) = ran
    assert (set(allowed), settings.draft) == (left, drafts)


@pytest.mark.parametrize(("changes", "ways"), [({}, "alone"), ({"pipeline": True}, "")])
def test_who_drafts_where_no_node_may_draft(changes: dict[str, bool], ways: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.sharing.fleet_settings", lambda *_, **__: FleetSettings(0, "127.0.0.1"))
    with pytest.raises(ConfigError, match=r"--pin-draft idle needs drafts, and the other options allow only (alone|pipeline)"):
        run_shared(NodeSettings("nothing", draft_on=NodeId("idle")), replace(PLAIN, ways=ways, **changes), ApiOptions(), greet=False)


def test_who_drafts_in_no_fleet() -> None:
    with pytest.raises(ConfigError, match="--pin-draft idle is another machine, and this one is in no fleet"):
        run_shared(NodeSettings("nothing", draft_on=NodeId("idle")), PLAIN, ApiOptions(), greet=False)


def test_machines_of_tensor_ranks_are_named_behind_their_speeds() -> None:
    for text in ("2", "2:1"):
        assert tensor_nodes(text) == ()
    assert (tensor_speeds("2:1@desk:1"), tensor_nodes("2:1@desk:1")) == ((2.0, 1.0, 1.0), (None, NodeId("desk"), None))
    for text in ("1@desk:1", "1:1@", "1@desk"):
        with pytest.raises(ConfigError, match=r"names no machines|says no ranks"):
            (tensor_nodes(text), tensor_speeds(text))


def test_tensor_ranks_of_other_machines_in_no_fleet() -> None:
    with pytest.raises(ConfigError, match="--tensor names other machines, and this one is in no fleet"):
        run_shared(NodeSettings("m", tensor=(1.0, 1.0), tensor_on=(None, NodeId("b"))), PLAIN, ApiOptions(), greet=False)


def test_drafts_of_a_node_where_no_node_may_draft() -> None:
    with pytest.raises(ConfigError, match="--draft small is of another node"):
        run_shared(NodeSettings("m", draft="small"), replace(PLAIN, ways="alone"), ApiOptions(), greet=False)


@pytest.mark.parametrize(("ranks", "is_noted"), [("9", True), ("2", False)])
def test_more_ranks_than_threads_are_noted_before_anything_loads(ranks: str, *, is_noted: bool) -> None:
    done = paceline("up", "--port", "0", "--tensor", ranks, "--threads", "2", "--model", "./gone.gguf")
    assert_user_error(done, "There is no file or folder")
    assert ("note: --tensor runs 9 ranks here, which share 2 threads" in done.stdout) == is_noted
