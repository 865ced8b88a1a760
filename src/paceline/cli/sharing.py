"""`paceline up` as a person asked for it, among machines: in which fleet, what it runs for others, what others run for it.

Whether this machine is in a fleet is cheap to ask: most machines are in none.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

from paceline.backends.table import use_on_processors
from paceline.cli.enrolment import seconds
from paceline.cli.options import ApiOptions
from paceline.cli.sharing_options import SharingOptions
from paceline.cli.terminal import Terminal, counted
from paceline.core.errors import ConfigError, MembershipError
from paceline.engine.drafts import AUTO, DRAFTS, NGRAM, OFF
from paceline.fleet.plan import ALONE, Objective, Way
from paceline.fleet.presets import FleetSettings, parse_preset
from paceline.machine.config_file import PipelineSettings, read_pipeline_settings, read_settings, read_trust_policy
from paceline.machine.devices import usable_cores
from paceline.machine.foreign.shares import read_shares
from paceline.machine.settings import NodeSettings
from paceline.store.home import Home
from paceline.ways.draft.names import FLEET, JACOBI
from paceline.ways.draft.price import DRAFT
from paceline.ways.pipeline.splits import PIPELINE
from paceline.ways.tensor.price import TENSOR


def run_shared(settings: NodeSettings | None, sharing: SharingOptions, api: ApiOptions, *, greet: bool) -> NoReturn:
    """Serve until interrupted.

    Args:
        settings: of the model; None: none is loaded here.

    Raises:
        UserError: a setting, a model or a port can't be used.
    """
    if sharing.tied:
        threading.Thread(target=_stop_at_eof, daemon=True).start()
    if sharing.local_nodes == 1:
        _run(settings, sharing, api, greet=greet)
    if settings is None:
        raise ConfigError("--local-nodes runs a model, and --no-model was asked for", "Leave one of them out.")
    if len(settings.tensor) > 1:
        raise ConfigError("--local-nodes spreads layers over nodes, and --tensor shares each layer among ranks", "Leave one of them out.")
    if sharing.pipeline is False or sharing.serve_shards is False or sharing.peers:
        raise ConfigError(
            "--local-nodes is a pipeline over nodes of this machine alone", "Leave out --no-pipeline, --no-serve-shards and --peer."
        )
    from paceline.bench.fleet import LocalFleet, become_first
    from paceline.cli.models import lies_elsewhere
    from paceline.cli.up import take_port

    # Check everything before a process starts.
    read_pipeline_settings(Home.from_environment())
    api.check()
    take_port(api, Home.from_environment()).close()
    local = LocalFleet(sharing.local_nodes, settings.threads, model=lies_elsewhere(settings.model, Terminal()), device=sharing.device)
    become_first(local)
    others = ", ".join(f"{name} (process {pid})" for name, pid in local.pids.items())
    if others:
        print(f"Nodes of this machine: local-1 (this process), {others}. Kill any of the others in the middle of an answer: it goes on.")
        print("paceline status shows them, once all is ready.")
    settings = replace(settings, threads=local.threads)
    pins = sharing.pins or local.names  # all take part: that is what is to be seen
    sharing = replace(sharing, fleet_port=local.port, fleet_host=local.host, mdns=False, fleet_preset=local.preset, pipeline=True)
    # It is this machine that goes on, whichever of its nodes are left.
    sharing = replace(sharing, pins=pins, throughput=True, fallback_to_local=sharing.fallback_to_local is not False)
    _run(settings, sharing, api, greet=greet)


def _run(settings: NodeSettings | None, sharing: SharingOptions, api: ApiOptions, *, greet: bool) -> NoReturn:
    from paceline.cli.found_engines import found_shares
    from paceline.cli.up import run_up

    _check_names(settings, sharing.propose)
    if sharing.device is not None:
        if settings is None and not sharing.device.compiled:
            raise ConfigError(
                f"--device {sharing.device} is for this machine's own model, and --no-model was asked for",
                "Leave one of them out. Kernels of processors, cpu-avx2 say, run layers for other machines too.",
            )
        use_on_processors(sharing.device)
    age_s = None if sharing.max_revocation_age is None else seconds(sharing.max_revocation_age, "--max-revocation-age")
    if settings is None and (sharing.pipeline or sharing.pins):
        raise ConfigError("--pipeline runs a model, and --no-model was asked for", "Leave one of them out.")
    asked = bool(sharing.pipeline or sharing.pins or sharing.own_layers is not None)
    if asked and sharing.more:
        raise ConfigError("--pipeline, --pin and --own-layers spread one model, and --model names several", "Leave the others out.")
    in_ranks = settings is not None and len(settings.tensor) > 1
    if in_ranks and asked:
        raise ConfigError(
            "--tensor shares each layer among processes of this machine, and --pipeline, --pin and --own-layers spread layers over machines",
            "Leave one of them out.",
        )
    ranks = settings.tensor_on.count(None) if settings is not None and settings.tensor_on else len(sharing.tensor)
    if ranks > (threads := sharing.threads or usable_cores()):  # said before they load
        said = f"--tensor runs {ranks} ranks here, which share {counted(threads, 'thread')}: more ranks than threads are slower, and load longer"
        Terminal().print(f"[yellow]note:[/] {said}", soft_wrap=True)
    settings = _without_drafts(settings, sharing.ways)
    elsewhere = bool(sharing.ways) and ALONE not in sharing.ways.split(",")
    console, home = Terminal(), Home.from_environment()
    sharing = replace(sharing, found=found_shares(sharing.engines, home, api.port, console))
    shared = settings is None and bool(sharing.found or read_shares(home))
    needed = (settings is None and sharing.embeddings is None and not shared) or asked or bool(sharing.serve_shards) or elsewhere
    said = read_settings(Home.from_environment())
    if settings is not None:
        settings = replace(settings, role=sharing.role or said.kv.role, nixl=said.kv.nixl, kv_check_every=said.kv.spot_check_every)
    exact = said.plan.exact if sharing.exact is None else sharing.exact
    api = replace(api, settings=replace(api.settings, exact=exact))
    fleet = fleet_settings(sharing.fleet_port, sharing.fleet_host, sharing.peers, sharing.fleet_preset, mdns=sharing.mdns, needed=needed)
    if fleet is None:
        _check_alone(settings, sharing.propose)
        run_up(settings, api, sharing=sharing, greet=greet)
    from paceline.node.planning import Constraints
    from paceline.node.ways import parse_pin
    from paceline.ways.pipeline.host.serving import hosting_of
    from paceline.ways.pipeline.order import PipelineOrder

    fleet = replace(fleet, tensor_port=said.pipeline.tensor_port if sharing.tensor_port is None else sharing.tensor_port)
    if age_s is not None:
        fleet = replace(fleet, max_revocation_age_s=age_s)
    pipelines = said.pipeline.overridden(
        enabled=False if in_ranks else sharing.pipeline,
        serve_shards=sharing.serve_shards,
        fallback_to_local=sharing.fallback_to_local,
    )
    objective = Objective.THROUGHPUT if sharing.throughput else Objective.LATENCY
    pins = tuple(parse_pin(pin) for pin in sharing.pins)
    order = PipelineOrder(pipelines, pins, sharing.own_layers, objective, exact=exact)
    of_all = settings or NodeSettings()  # models may be loaded later
    model = "" if of_all.draft in (*DRAFTS, FLEET) else of_all.draft  # empty: any
    wanted = Constraints(_ways(sharing, pipelines, of_all.draft, of_all.draft_on, spread=asked), order, model)
    hosting = hosting_of(pipelines, sharing.threads, sharing.kv_disk_bytes)
    if hosting is not None and len(sharing.tensor) > 1:
        from paceline.ways.tensor.loading import load_stage

        hosting = replace(hosting, load=partial(load_stage, sharing.tensor), ranks=len(sharing.tensor))
    run_up(settings, api, sharing=sharing, greet=greet, fleet=fleet, asked=wanted, hosting=hosting)


def _ways(sharing: SharingOptions, pipelines: PipelineSettings, draft: str, draft_on: str | None, *, spread: bool) -> frozenset[Way]:
    """Return the ways of running the model that the options allow."""
    from paceline.node.ways import parse_ways

    drafted = () if draft in ("off", "ngram") else (DRAFT,)
    fitting = frozenset({ALONE, *drafted, *((PIPELINE, TENSOR) if pipelines.enabled and not sharing.more else ())})
    if spread:  # pins may name tensor ranks too, if --ways says so
        fitting = frozenset({PIPELINE} if sharing.pipeline or sharing.own_layers is not None or not sharing.ways else {PIPELINE, TENSOR})
    allowed = parse_ways(sharing.ways)
    if allowed is not None and not allowed & fitting:
        raise ConfigError(
            f"--ways {sharing.ways} leaves no way to serve the model: the other options allow {', '.join(sorted(fitting))}",
            "Leave one out.",
        )
    ways = fitting if allowed is None else fitting & allowed
    if draft_on is None:
        return ways
    if DRAFT not in ways:
        raise ConfigError(
            f"--pin-draft {draft_on} needs drafts, and the other options allow only {', '.join(sorted(ways))}", "Leave one out."
        )
    return frozenset({DRAFT})


def _without_drafts(settings: NodeSettings | None, ways: str) -> NodeSettings | None:
    """Switch a draft of any node to prompt lookup if the ways leave out drafts. Prompt lookup stays: it is the engine's own, not a way."""
    from paceline.node.ways import parse_ways

    allowed = parse_ways(ways)
    if settings is None or allowed is None or DRAFT in allowed or settings.draft in {NGRAM, OFF}:
        return settings
    if settings.draft != AUTO:
        raise ConfigError(f"--draft {settings.draft} is of another node, and --ways {ways} allows none", f"Ask for --ways {ways},{DRAFT}.")
    return replace(settings, draft=NGRAM)


def _check_names(settings: NodeSettings | None, propose: tuple[str, ...]) -> None:
    if settings is not None and not settings.draft.strip():
        raise ConfigError("--draft names nothing", f"Choose of {', '.join((*DRAFTS, FLEET))}, or name a draft model.")
    for name in propose:
        if not name.removeprefix(JACOBI).strip():
            raise ConfigError(f"--propose {name!r} names no model", "Write it like smollm2-135m or jacobi:smollm2-135m.")
        if name in (*DRAFTS, FLEET):
            hint = "Prompt lookup needs none: each machine has it." if name == NGRAM else "It is for --draft, on a machine that has drafts."
            raise ConfigError(f"--propose {name!r} names no model", hint)
    if twice := {name for name in propose if propose.count(name) > 1}:
        raise ConfigError(f"--propose {min(twice)} was asked for twice", "Once is enough.")


def _check_alone(settings: NodeSettings | None, propose: tuple[str, ...]) -> None:
    """Check the options of a machine in no fleet: it can only use drafts that it makes itself."""
    draft = None if settings is None else settings.draft
    if settings is not None and settings.tensor_on:
        raise ConfigError(
            "--tensor names other machines, and this one is in no fleet", "Make it part of one: paceline init, paceline join."
        )
    if settings is not None and settings.draft_on is not None:
        raise ConfigError(
            f"--pin-draft {settings.draft_on} is another machine, and this one is in no fleet",
            "Make it part of one: paceline init, paceline join.",
        )
    if draft is not None and draft not in (*DRAFTS, *propose):
        here = "Name a model to draft here" if draft == FLEET else f"Draft here, with --propose {draft} too"
        raise ConfigError(
            f"No node can draft with {draft!r}: this machine is in no fleet",
            f"{here}, or make it part of a fleet: paceline init, paceline join.",
        )
    if propose and draft not in propose:
        raise ConfigError(
            f"No node can use drafts of {propose[0]!r}: this machine is in no fleet", f"Have them here, with --draft {propose[0]} too."
        )


def _stop_at_eof() -> None:
    """End this process once the parent process is gone."""
    while os.read(0, 1024):  # not sys.stdin: the interpreter wants its lock at its end
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def fleet_settings(port: int, host: str, peers: Sequence[str], preset: str, *, mdns: bool, needed: bool) -> FleetSettings | None:
    """This node's part in its fleet; None where it is in none.

    Args:
        host: to listen on; empty: everything.
        needed: whether being in none is an error.

    Raises:
        ConfigError: an option makes no sense.
        MembershipError: this machine is in no fleet, and must be.
    """
    settings = FleetSettings(port, host, peers=tuple(peers), mdns=mdns, preset=parse_preset(preset))
    home = Home.from_environment()
    if not home.is_in_fleet:
        if needed or peers:
            raise MembershipError(
                "This machine is in no fleet, which what was asked for needs",
                "Start one here: paceline init. Or join one: paceline join. Or try several nodes on this machine: paceline up --local-nodes 3.",
            )
        return None
    from paceline.net.trust.certificates import is_address  # which imports what proves identities: of members alone

    for peer in peers:
        if not is_address(peer):
            raise ConfigError(f"--peer {peer!r} is not host:port", "Such as 192.168.1.20:8154.")
    return replace(settings, trust=read_trust_policy(home))
