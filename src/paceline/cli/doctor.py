"""`paceline doctor`: what is wrong with this machine, or between it and others of its fleet. Each finding says what, to what, and what to do.

It needs no running node: it calls others by this machine's identity, wherever they are known to be. What only they can see of this machine, as a
firewall here, it finds where it runs on them.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from rich.text import Text

from paceline import __version__
from paceline.backends import cpu
from paceline.backends.memory import GIB, available_bytes, human
from paceline.cli.running import GONE, STARTING, EndpointLoad, endpoints_here, fleet_homes, lives, running
from paceline.cli.shared_engines import state_at
from paceline.cli.terminal import EXIT_FAILED, Terminal, print_json, print_lines
from paceline.core.background import run_interruptibly
from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import ConfigError, FleetError, MembershipError, PacelineError, UserError
from paceline.core.files import WRITABLE_HINT, nearest_folder
from paceline.core.ids import NodeId
from paceline.core.model import ARITHMETIC
from paceline.core.ports import hold_port
from paceline.core.text import printable, shown
from paceline.fleet.card import NodeCard
from paceline.fleet.placement import ONE_NAME_HINT, different_models
from paceline.fleet.presets import FLEET_PORT
from paceline.machine.config_file import CONFIG_FILE, read_settings
from paceline.machine.devices import usable_cores
from paceline.machine.foreign.shares import read_shares
from paceline.net.discovery import own_hosts, own_interfaces
from paceline.net.member.reach import Barrier, Reach, Setting, barrier_at, own_facts, reach
from paceline.net.member.state import Looked, look, read_running
from paceline.net.tensor.dialling import tensor_addresses
from paceline.net.trust.certificates import is_address
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.identity import Identity
from paceline.store.home import Home

LEAST_MEMORY: Final = GIB // 2
"""Bytes that the bundled model takes, with some room for KV."""
LEAST_DISK: Final = 2 * GIB
"""For compiled kernels and a small model."""
CLOCK_NOTE_S, CLOCK_PROBLEM_S = 5.0, 60.0
"""How far clocks may be apart: certificates and join tokens are judged by them, and nothing else is."""
API_PORT: Final = 8000
RDMA_SINCE: Final = (26, 2)
RDMA_DENIED: Final = re.compile(r"\b(not|no|never|false|disabled|unable|cannot)\b|n't\b", re.IGNORECASE)
"""Words with which a status that contains "enabled" denies it."""
"""The macOS that has RDMA over Thunderbolt."""


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    level: Level
    subject: str
    """To what it happened."""
    what: str
    todo: str = ""


@dataclass(frozen=True, slots=True)
class OwnSide:
    """This machine, as others are held against it."""

    announced: tuple[str, ...]
    """Hosts of its addresses."""
    interfaces: dict[str, str]
    """By address: the network card that has it."""
    setting: Setting
    card: NodeCard | None = None
    """None: its node does not run."""

    def card_of(self, host: str) -> str:
        return self.interfaces.get(host.partition("%")[0], "")


def run_doctor(peers: Sequence[str], *, as_json: bool) -> None:
    """Print the findings. Exits with code 1 if one of them is a problem; notes do not count.

    Raises:
        ConfigError: a peer is not an address.
    """
    for peer in peers:
        if not is_address(peer):
            raise ConfigError(f"--peer {peer!r} is not host:port", "Such as 192.168.1.20:8154.")
    findings = run_interruptibly(examine(peers, SystemClock()))
    if as_json:
        print_json({"ok": all(one.level is not Level.PROBLEM for one in findings), "findings": [asdict(one) for one in findings]})
    else:
        show(findings, Terminal())
    if any(one.level is Level.PROBLEM for one in findings):
        sys.exit(EXIT_FAILED)


def show(findings: Sequence[Finding], console: Terminal) -> None:
    styles = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}
    for one in findings:
        head = Text.assemble((f"{one.level:7}", styles[one.level]), f" {one.check}: {shown(one.subject)}: {shown(one.what)}")
        console.print(head, soft_wrap=True)
        if one.todo:
            print_lines(console, f"        {shown(one.todo)}", style="dim")


async def examine(peers: Sequence[str], clock: Clock) -> list[Finding]:
    """Everything that is looked at, in the order in which a person should read it."""
    try:
        home = Home.from_environment()
    except UserError as error:
        return [Finding("home", Level.PROBLEM, "PACELINE_HOME", error.message, error.hint)]
    return [*await asyncio.to_thread(lambda: list(_machine(home))), *[one async for one in _fleet(home, peers, clock)]]


# -------------------------------------------------------------------------------------------------------------- this machine


def _machine(home: Home) -> Iterator[Finding]:
    facts = own_facts(SystemClock(), 0)
    numba = f"numba {facts.numba}" if facts.numba else "no numba"
    here = platform.node() or "this machine"
    yield Finding("versions", Level.OK, here, f"paceline {__version__}, arithmetic {ARITHMETIC}, Python {facts.python}, {numba}")
    yield _kernels(home, here)
    free, endpoints = available_bytes(), endpoints_here(home)
    if free < LEAST_MEMORY and endpoints:
        yield Finding("memory", Level.NOTE, here, f"{human(free)} is free beside what runs", "A further model may not fit.")
    elif free < LEAST_MEMORY:
        todo = "Stop other programs, or give the container more: not even the bundled model fits."
        yield Finding("memory", Level.PROBLEM, here, f"{human(free)} is free", todo)
    else:
        yield Finding("memory", Level.OK, here, f"{human(free)} is free")
    yield _disk(home)
    if sys.platform == "darwin":
        yield _rdma(here)
    yield from _settings(home)
    yield from _apis(endpoints)
    yield from _engines(home, endpoints)


def _settings(home: Home) -> Iterator[Finding]:
    """Yield a finding about config.toml, which every `paceline up` reads first."""
    place = home.root / CONFIG_FILE
    try:
        read_settings(home)
    except ConfigError as error:
        what = error.message.removeprefix(str(place)).lstrip(": ")
        yield Finding("config", Level.PROBLEM, str(place), what, error.hint or "Correct it, or remove it for the defaults.")


def _kernels(home: Home, here: str) -> Finding:
    if not cpu.runs_here():
        return Finding(
            "kernels", Level.NOTE, here, "this processor has none of the instructions of Paceline's kernels", "torch runs models here."
        )
    from paceline.backends import kernel_cache

    if not cpu.compiled(home.kernels):
        return Finding(
            *("kernels", Level.NOTE, here, "they were not compiled yet, so what they compute was not checked"),
            "The first paceline up with a model compiles them.",
        )
    kernel_cache.use(home.kernels)
    from paceline.backends.cpu import probe

    name = f"{cpu.lowering_in_use()} on {usable_cores()} cores"
    anew = f"Remove {home.kernels}, and the next start compiles them again. If that does not help: paceline up --device torch-cpu, and report the processor."
    try:
        with kernel_cache.alone():
            conform = probe.conforms(usable_cores())
            kernel_cache.complete()
    except PacelineError as error:
        return Finding("kernels", Level.PROBLEM, here, f"{name}: {error.message}", anew)
    if conform:
        return Finding("kernels", Level.OK, here, f"{name}: they compute what they do everywhere")
    return Finding("kernels", Level.PROBLEM, here, f"{name}: they compute other bytes than on other processors", anew)


def _disk(home: Home) -> Finding:
    place = nearest_folder(home.root)
    free, where = shutil.disk_usage(place).free, str(home.root)
    if not os.access(place, os.W_OK):
        return Finding("disk", Level.PROBLEM, where, "it can't be written", WRITABLE_HINT)
    if free < LEAST_DISK:
        todo = "paceline rm removes models; PACELINE_HOME may be on another disk."
        return Finding("disk", Level.PROBLEM, where, f"{human(free)} is free", todo)
    return Finding("disk", Level.OK, where, f"{human(free)} is free")


def _rdma(here: str) -> Finding:
    """Return the finding about RDMA on a Mac, which MLX's jaccl uses."""
    release = platform.mac_ver()[0]
    if tuple(int(part) for part in release.split(".")[:2] if part.isdigit()) < RDMA_SINCE:
        why = f"macOS {release} has no RDMA over Thunderbolt"
        return Finding("rdma", Level.NOTE, here, why, "macOS 26.2 has; until then MLX's ring runs over TCP.")
    program = shutil.which("rdma_ctl")
    said = ""
    if program is not None:
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run([program, "status"], capture_output=True, text=True, check=False, timeout=10)  # noqa: S603
            said = printable((done.stdout or done.stderr).strip(), 100)
    if re.search(r"\benabled\b", said, re.IGNORECASE) and not RDMA_DENIED.search(said):
        return Finding("rdma", Level.OK, here, f"rdma_ctl says: {said}")
    todo = "Start the Mac in recovery, and run there: rdma_ctl enable. Until then MLX's ring runs over TCP."
    return Finding("rdma", Level.NOTE, here, f"RDMA over Thunderbolt is not enabled{f' (rdma_ctl says: {said})' if said else ''}", todo)


def _apis(endpoints: Sequence[EndpointLoad]) -> Iterator[Finding]:
    printed = "See what paceline up printed there."
    for one in endpoints:
        if one.state == STARTING:
            yield Finding("port.api", Level.NOTE, one.url, "it still starts", "It answers once paceline up says that it is ready.")
        elif one.state != "ok":
            said = "it gives no answer" if one.state == GONE else f"/health says {one.state}" + (f": {one.error}" if one.error else "")
            yield Finding("port.api", Level.PROBLEM, one.url, said, printed)
        elif one.models == ():
            todo = "Start paceline up with a model on a machine of the fleet, or have it loaded here: paceline load MODEL."
            yield Finding("port.api", Level.NOTE, one.url, "it answers, and there is no model that it could serve", todo)
        else:
            yield Finding("port.api", Level.OK, one.url, "it answers")
        for what in one.failing:
            yield Finding("background", Level.NOTE, one.url, f"it keeps failing: {what}", printed)
    if not endpoints:
        yield from _free("port.api", API_PORT, "--port")


def _engines(home: Home, endpoints: Sequence[EndpointLoad]) -> Iterator[Finding]:
    """Yield a finding about each engine that this machine shares: as a running endpoint sees it, else as it answers now."""
    seen = {state.url: state for one in endpoints for state in one.engines}
    try:
        shares = () if not home.engines.exists() else read_shares(home)
    except ConfigError as error:
        yield Finding("engine", Level.PROBLEM, str(home.engines), error.message, error.hint)
        shares = ()
    for share in shares:
        if share.url not in seen:
            seen[share.url] = asyncio.run(state_at(share))
    for url, state in seen.items():
        if state.trouble:
            todo = f"Start it, or share it no more: paceline share --remove {url}"
            yield Finding("engine", Level.PROBLEM, url, f"a shared engine does not answer: {state.trouble}", todo)
            continue
        yield Finding("engine", Level.OK, url, f"{state.engine} answers")
        for model in (model for model in state.models if model.trouble):
            todo = "It is offered again once it has answered a test. See the engine's own log."
            yield Finding("engine", Level.NOTE, url, f"{model.offer.model_id} is not offered now: {model.trouble}", todo)


def _free(check: str, port: int, option: str) -> Iterator[Finding]:
    """Yield a note if `paceline up` could not listen on a port."""
    try:
        hold_port("", port, "paceline up", option).close()
    except ConfigError as error:
        why = error.message.rpartition(": ")[2]
        yield Finding(check, Level.NOTE, f"port {port} of this machine", f"paceline up could not listen there: {why}", error.hint)


# ---------------------------------------------------------------------------------------------------------------- the fleet


async def _fleet(home: Home, peers: Sequence[str], clock: Clock) -> AsyncIterator[Finding]:
    homes = await asyncio.to_thread(lambda: fleet_homes(home, running(home)))
    if not home.is_in_fleet:
        said = "it is in no fleet" + ("; what follows is of the nodes that paceline up --local-nodes runs on it" if homes else "")
        yield Finding("fleet", Level.NOTE, "this machine", said, "Start one: paceline init. Or join one: paceline join.")
    if not homes:
        return
    folder = FleetFolder(homes[0].fleet)
    try:
        identity = await asyncio.to_thread(folder.identity)
    except (UserError, FleetError) as error:
        yield Finding("identity", Level.PROBLEM, str(folder.identity_file), error.message, error.hint)
        return
    late_s = identity.member.issued_at - clock.wall()
    if late_s > CLOCK_PROBLEM_S:
        why = f"it is {late_s:.0f} s before the time at which this machine's certificate was made"
        yield Finding("clock", Level.PROBLEM, identity.node_id, why, "Set it: others refuse what is from another time.")
    looked: Looked | None = None
    try:
        looked = await look(folder)
    except MembershipError as error:
        if (claimed := read_running(folder)) is not None and lives(claimed.pid):
            yield Finding("node", Level.PROBLEM, identity.node_id, error.message, error.hint)
        else:
            yield Finding("node", Level.NOTE, identity.node_id, "it does not run", "paceline up starts it.")
            for one in _free("port.grpc", FLEET_PORT, "--fleet-port"):
                yield one
    for one in await _others(identity, folder, looked, peers, clock):
        yield one


async def _others(identity: Identity, folder: FleetFolder, looked: Looked | None, peers: Sequence[str], clock: Clock) -> list[Finding]:
    """Examine every machine that is known here. Returns the findings."""
    own = identity.node_id
    cards = {} if looked is None else {card.node_id: card for card in looked.sight.view.cards}
    failing = () if looked is None else tuple(failure.address for failure in looked.sight.failures)
    remembered = [*failing, *folder.peers()]
    addresses = dict.fromkeys([*peers, *(at for card in cards.values() if card.node_id != own for at in card.addresses), *remembered])
    reaches = {one.address: one for one in await asyncio.gather(*(reach(at, identity, clock) for at in addresses))}
    # Where the nodes that answered say that they are.
    for one in list(reaches.values()):
        if one.card is not None:
            cards.setdefault(one.card.node_id, one.card)
    more = {at for card in cards.values() if card.node_id != own for at in card.addresses} - reaches.keys()
    reaches |= {one.address: one for one in await asyncio.gather(*(reach(at, identity, clock) for at in more))}
    here = _own_side(cards.get(own), clock)
    findings = list(judge_own(here, [one for one in reaches.values() if one.member is not None and one.member.node_id != own]))
    known: set[str] = set()
    for node_id, card in sorted(cards.items()):
        if node_id == own:
            known.update(card.addresses)
            continue
        mine = [
            one for one in reaches.values() if one.address in card.addresses or (one.member is not None and one.member.node_id == node_id)
        ]
        known.update(one.address for one in mine)
        findings += judge_node(node_id, card, mine, here)
        findings += await _tensors(node_id, mine, identity)
    for address in addresses:
        one = reaches[address]
        if address in known or (one.member is not None and one.member.node_id == own):
            continue
        if one.barrier is Barrier.VERSION:
            findings.append(Finding("versions", Level.PROBLEM, address, one.why, _todo(one, "that machine", "--fleet-port")))
            continue
        level = Level.PROBLEM if address in peers else Level.NOTE
        findings.append(Finding("port.grpc", level, address, one.why, _todo(one, "that machine", "--fleet-port")))
    findings += [Finding("models", Level.NOTE, name, words, ONE_NAME_HINT) for name, words in different_models(cards.values())]
    if len(cards.keys() - {own}) == 0 and not addresses:
        todo = "Start paceline up on them, or name one: paceline doctor --peer host:port."
        findings.append(Finding("fleet", Level.NOTE, own, "no other machine is known here", todo))
    return findings


def _own_side(card: NodeCard | None, clock: Clock) -> OwnSide:
    facts = own_facts(clock, 0)
    announced = own_hosts() if card is None else tuple(_host(address) for address in card.addresses)
    return OwnSide(announced, own_interfaces(), Setting(0.0, 0, facts.arithmetic, facts.python, facts.numba), card)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def judge_own(here: OwnSide, reached: Iterable[Reach]) -> Iterator[Finding]:
    """Yield a note if this machine announces itself on network cards over which no other machine is reached."""
    used = {name for one in reached if (name := here.card_of(one.from_host))}
    announced = {name: host for host in reversed(here.announced) if (name := here.card_of(host))}
    idle = sorted(announced.keys() - used)
    if used and idle and announced.keys() & used:
        best = next(host for host in here.announced if here.card_of(host) in used)
        where = ", ".join(f"{announced[name]} ({name})" for name in idle)
        todo = f"Where they lead nowhere, others lose time with them: paceline up --fleet-host {best}"
        said = f"it announces {where} too, and other machines are reached over {' and '.join(sorted(used))} alone"
        yield Finding("network card", Level.NOTE, "this machine", said, todo)


def judge_node(node_id: NodeId, card: NodeCard, reaches: Sequence[Reach], here: OwnSide) -> Iterator[Finding]:
    """Yield the findings about the connection between this machine and another one."""
    good = [one for one in reaches if one.member is not None and one.member.node_id == node_id]
    bad = [one for one in reaches if one not in good]
    if not good:
        for one in bad:
            yield Finding("port.grpc", Level.PROBLEM, f"{node_id} at {one.address}", one.why, _todo(one, node_id, "--fleet-port"))
        return
    best = good[0]
    yield Finding("port.grpc", Level.OK, node_id, f"it answers at {', '.join(one.address for one in good)}")
    for one in bad:
        why = one.why if one.member is None else f"{one.member.node_id} answers there"
        todo = f"On {node_id}: paceline up --fleet-host {_host(best.address)}, so that other machines do not try its other addresses."
        said = f"it announces {one.address}, and is not reached there: {why}"
        yield Finding("network card", Level.NOTE, node_id, said, todo)
    yield from _judge_card(node_id, best, here)
    if best.setting is not None:
        yield from _judge_setting(node_id, card, best.setting, here)


def _judge_card(node_id: NodeId, best: Reach, here: OwnSide) -> Iterator[Finding]:
    """Check that this machine announces the network card that leads to the node."""
    if _host(best.address) in here.interfaces:
        return  # on this very machine
    card, announced = here.card_of(best.from_host), {here.card_of(host) for host in here.announced}
    if card and card not in announced:
        said = (
            f"it is reached over {card} ({best.from_host}), and this machine announces "
            f"{', '.join(here.announced) or 'no address'} on another network card"
        )
        yield Finding("network card", Level.PROBLEM, node_id, said, f"paceline up --fleet-host {best.from_host}, or without --fleet-host.")
    if card and Path("/sys/class/net", card, "wireless").exists():
        todo = "A cable is several times faster for layers and ranks that machines share; answers and drafts need little."
        yield Finding("network card", Level.NOTE, node_id, f"it is reached over {card}, which is wireless", todo)


def _judge_setting(node_id: NodeId, card: NodeCard, its: Setting, here: OwnSide) -> Iterator[Finding]:
    off_s = abs(its.clock_ahead_s)
    if off_s > CLOCK_NOTE_S:
        level = Level.PROBLEM if off_s > CLOCK_PROBLEM_S else Level.NOTE
        said = f"its clock is {off_s:.0f} s {'ahead of' if its.clock_ahead_s > 0 else 'behind'} this machine's"
        todo = "Set the one that is wrong (timedatectl set-ntp true): certificates and join tokens are judged by clocks."
        yield Finding("clock", level, node_id, said, todo)
    else:
        yield Finding("clock", Level.OK, node_id, f"its clock is within {max(off_s, 0.001):.3f} s of this machine's")
    pairs = {
        "paceline": (card.software, __version__),
        "Python": (its.python, here.setting.python),
        "numba": (its.numba or "none", here.setting.numba or "none"),
    }
    unlike = [
        f"{name} {printable(theirs, 40)} there and {ours} here" for name, (theirs, ours) in pairs.items() if theirs and theirs != ours
    ]
    if its.arithmetic != here.setting.arithmetic:
        said = f"its arithmetic is version {its.arithmetic}, and this machine's {here.setting.arithmetic}: {'; '.join(unlike)}"
        todo = "Give both one version of Paceline: until then no answer moves between them, and no layers are shared."
        yield Finding("versions", Level.PROBLEM, node_id, said, todo)
    elif unlike:
        yield Finding("versions", Level.NOTE, node_id, "; ".join(unlike), "One version on all machines is what is tested.")
    else:
        yield Finding("versions", Level.OK, node_id, "as this machine's")
    mine = {(offer.digest, offer.weights): offer for offer in (here.card.models if here.card is not None else ()) if offer.numerics_id}
    for offer in card.models:
        own = mine.get((offer.digest, offer.weights)) if offer.digest and offer.numerics_id else None
        if own is not None and own.numerics_id != offer.numerics_id:
            said = f"it computes other bytes than this machine with {printable(offer.model_id, 80)} ({card.backend} there)"
            todo = "A GPU and processors do. Of two processors: one version of Paceline on both, and paceline doctor there."
            yield Finding("kernels", Level.NOTE, node_id, said, todo)


async def _tensors(node_id: NodeId, reaches: Sequence[Reach], identity: Identity) -> list[Finding]:
    """Return the finding about a node's port for activations, tried at the first address that its other port answered at."""
    best = next((one for one in reaches if one.member is not None and one.member.node_id == node_id), None)
    if best is None or best.setting is None or best.member is None:
        return []
    if not best.setting.tensor_port:
        return [Finding("port.tensor", Level.PROBLEM, node_id, "it takes no activations", "Start paceline up there again.")]
    (address,) = tensor_addresses([best.address], best.setting.tensor_port)
    barrier, why = await asyncio.to_thread(barrier_at, address, identity, best.member)
    if barrier is None:
        return [Finding("port.tensor", Level.OK, node_id, f"{address} answers")]
    one = Reach(address, best.from_host, barrier, why)
    return [Finding("port.tensor", Level.PROBLEM, f"{node_id} at {address}", why, _todo(one, node_id, "--tensor-port"))]


def _todo(one: Reach, who: str, option: str) -> str:
    """Return the advice for a port that does not answer as it should."""
    port = one.address.rpartition(":")[2]
    match one.barrier:
        case Barrier.NAME:
            return "Correct the name, or give the machine's number."
        case Barrier.NO_ROUTE:
            return f"Bring this machine and {who} into one network, or have {who} announce an address of one: paceline up --fleet-host."
        case Barrier.REFUSED:
            return f"Start paceline up on {who}; where it runs, let TCP port {port} in there, or give both the same {option}."
        case Barrier.SILENT:
            return f"Where {who} is on, its firewall drops it: let TCP port {port} in there ({option} chooses it), on the network card of {_host(one.address)}."
        case Barrier.HUNG:
            return f"The process on {who} is stopped, or too busy: let it go on, or start it again. If another program has port {port}, choose another {option}."
        case Barrier.STRANGER:
            return f"Another program has port {port} there, or a node of another fleet: choose another {option}, or join it to this fleet."
        case Barrier.CLOCK:
            return "Set the clock that is wrong, here or there (timedatectl set-ntp true); paceline join replaces a certificate that has expired."
        case Barrier.VERSION:
            return "All machines of a fleet need Paceline of one protocol version."
        case Barrier.FAILED | None:
            return f"See what paceline up prints on {who}."
