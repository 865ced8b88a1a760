"""The files that a node keeps in addition to its identity, and ControlService, which shows the node's view of its fleet to its own machine. A caller of
ControlService must have the node's own certificate.

version        highest version that a card of this node has
running.json   process id and port of the node that runs now
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Final

import grpc
import grpc.aio

from paceline.core.errors import FleetError, MembershipError, NodeUnreachable
from paceline.core.ids import NodeId, Trust
from paceline.core.ports import hold_port
from paceline.core.stats import DraftUse
from paceline.fleet.eligibility import Clash, FleetView, LiveCard
from paceline.fleet.presets import FleetSettings
from paceline.net.card_codec import read_card, write_card
from paceline.net.channels import CHANNEL_OPTIONS
from paceline.net.discovery import Failure
from paceline.net.mapper import Codec, Mapped, from_ms, milliseconds, refuse_with, to_ms
from paceline.net.protocol import OtherVersion
from paceline.net.rpc_faults import error_of
from paceline.net.server import KIB, Service
from paceline.net.trust.credentials import channel_credentials
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.handlers import Context, Limit
from paceline.net.trust.identity import Identity
from paceline.net.wire import control_pb2 as wire
from paceline.net.wire.control_pb2_grpc import ControlServiceServicer, ControlServiceStub, add_ControlServiceServicer_to_server

OLD_S = 30 * 86400.0
"""Age in seconds of the known revocations above which a person is warned. Raising it: an absent CA is noticed later."""
ENDS_SOON_S = 60 * 86400.0
"""Seconds left of this node's certificate below which a person is warned. Raising it: the warning comes earlier."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The fleet as a node sees it at one moment, and the state of the node itself."""

    view: FleetView
    failures: tuple[Failure, ...]
    """Addresses that do not answer. Their `since` is in seconds relative to now, so it is negative."""
    rounds: int
    """Rounds of exchanges that this node began."""
    drafts: tuple[DraftUse, ...] = ()
    """Use of drafts for the model that this node runs."""
    revocations_as_of: int = 0
    """Unix seconds up to which all revocations are known here; 0 if the node did not send it."""
    certificate_ends: int = 0
    plans: tuple[tuple[str, str], ...] = ()
    """Pairs of a model and a description of the plan that runs it."""
    other_versions: tuple[OtherVersion, ...] = ()
    """Nodes that were lately seen to speak another protocol version."""


Look = Callable[[], Awaitable[Sight]]


def fleet_id(identity: Identity) -> str:
    """Return the id of a fleet: 16 hexadecimal digits, equal on all of its nodes and different from every other fleet's."""
    return identity.root.fingerprint.hex()[:16]


class ControlServicer(ControlServiceServicer):
    """The service for this machine's own commands."""

    def __init__(self, identity: Identity, guard: PeerGuard, look: Look) -> None:
        self._identity, self._guard, self._look = identity, guard, look

    async def GetFleetView(self, request: wire.GetFleetViewRequest, context: Context) -> wire.GetFleetViewResponse:
        del request
        if self._guard.peer(context).certificate != self._identity.member.certificate:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "a node tells its view to its own machine only")
        return write_sight(fleet_id(self._identity), await self._look())


_REFUSE: Final = refuse_with(FleetError)
_SHORT: Final = Mapped(write=lambda text: text[:500])
_LIVE: Final = Codec(
    LiveCard,
    wire.SeenNode,
    _REFUSE,
    {
        "card": Mapped(write=write_card, read=read_card),
        "age_s": milliseconds("age_ms"),
        "trust": Mapped(write=str, read=lambda trust: Trust(trust or Trust.MEMBER)),
    },
    given=["beat"],
)
_CLASH: Final = Codec(Clash, wire.SeenClash, _REFUSE, {"node_id": "", "seen_s_ago": milliseconds("seen_ms_ago")})
_FAILURE: Final = Codec(
    Failure,
    wire.FailingPeer,
    _REFUSE,
    {"error": _SHORT, "since": Mapped("since_ms", None, lambda since: to_ms(-since), lambda ms: -from_ms(ms))},
)
_OTHER_VERSION: Final = Codec(OtherVersion, wire.SeenOtherVersion, _REFUSE, {"node_id": ""})
_DRAFTS: Final = Codec(DraftUse, wire.SeenDrafts, _REFUSE, {"trouble": _SHORT})


def write_sight(fleet: str, sight: Sight) -> wire.GetFleetViewResponse:
    view = sight.view
    return wire.GetFleetViewResponse(
        own_node_id=view.own,
        fleet_id=fleet,
        nodes=_LIVE.write_all(view.nodes),
        clashes=_CLASH.write_all(view.clashes),
        revoked_node_ids=view.revoked,
        failing_peers=_FAILURE.write_all(sight.failures),
        rounds=sight.rounds,
        revocations_as_of_unix=sight.revocations_as_of,
        certificate_ends_unix=sight.certificate_ends,
        drafts=_DRAFTS.write_all(sight.drafts),
        plans=[wire.RunningPlan(model=model, words=words[:2000]) for model, words in sight.plans],
        other_versions=_OTHER_VERSION.write_all(sight.other_versions),
    )


def sight_of(message: wire.GetFleetViewResponse) -> Sight:
    return Sight(
        FleetView(
            NodeId(message.own_node_id),
            _LIVE.read_all(message.nodes),
            _CLASH.read_all(message.clashes),
            tuple(map(NodeId, message.revoked_node_ids)),
        ),
        _FAILURE.read_all(message.failing_peers),
        message.rounds,
        _DRAFTS.read_all(message.drafts),
        message.revocations_as_of_unix,
        message.certificate_ends_unix,
        tuple((plan.model, plan.words) for plan in message.plans),
        _OTHER_VERSION.read_all(message.other_versions),
    )


def control_channel(identity: Identity, address: str) -> grpc.aio.Channel:
    """Return a channel to the node of this identity; no other node can answer on it."""
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", identity.member.tls_name)]
    return grpc.aio.secure_channel(address, channel_credentials(identity), options)


async def read_sight(channel: grpc.aio.Channel, timeout_s: float) -> Sight:
    """Ask a node for its view of the fleet, over a `control_channel`.

    Raises:
        NodeUnreachable: no node of this identity runs there.
        FleetError: the node refuses.
    """
    try:
        message = await ControlServiceStub(channel).GetFleetView(wire.GetFleetViewRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise error_of(error, "The node of this machine") from error
    return sight_of(message)


def control_service(identity: Identity, guard: PeerGuard, look: Look) -> Service:
    servicer = ControlServicer(identity, guard, look)
    return Service(
        partial(add_ControlServiceServicer_to_server, servicer), {"ControlService/GetFleetView": Limit(KIB, 8, least=Trust.GUEST)}
    )


@dataclass(frozen=True, slots=True)
class RunningNode:
    """A node of this machine that serves its fleet."""

    pid: int
    address: str
    """host:port by which this machine reaches the node."""


def read_version(folder: FleetFolder) -> int:
    """Return the highest version used; 0 if none was, or the file can't be read."""
    try:
        return int((folder.root / "version").read_bytes())
    except (OSError, ValueError):
        return 0


def keep_version(folder: FleetFolder, version: int) -> None:
    """Write a version to disk, before a card of this version is announced. Blocks.

    Raises:
        MembershipError: the folder can't be written.
    """
    folder.write_secret(folder.root / "version", str(version).encode())


def claim_running(folder: FleetFolder) -> IO[bytes]:
    """Become the process that runs this identity, until the returned file is closed.

    Raises:
        MembershipError: another process runs it, or the folder can't be written.
    """
    lock = folder.hold(folder.root / ".running")
    if lock is None:
        running = read_running(folder)
        which = f" (process {running.pid}, at {running.address})" if running is not None else ""
        raise MembershipError(
            f"This machine's node runs already{which}",
            "Stop it first. A second one on one machine needs a PACELINE_HOME and an identity of its own",
        )
    return lock


class Claim:
    """The resources that a node takes before a model is loaded for it: the lock on its identity, its ports, and a folder that can be written.

    Raises:
        MembershipError: this machine's node runs already, or its folder can't be written.
        ConfigError: a port is taken, or the address does not belong to this machine.
    """

    def __init__(self, folder: FleetFolder, settings: FleetSettings) -> None:
        from paceline.net.tensor.listener import TENSOR_OPTIONS  # commands that only look at a fleet open no streams

        with contextlib.ExitStack() as taken:
            taken.enter_context(claim_running(folder))
            self.fleet = taken.enter_context(hold_port(settings.host, settings.port, "the fleet", "--fleet-port or --fleet-host"))
            """Socket that holds the fleet's port. It is closed just before gRPC opens the port, which takes only a number."""
            self.tensors = taken.enter_context(hold_port(settings.host, settings.tensor_port, "activations", TENSOR_OPTIONS))
            keep_version(folder, read_version(folder))
            self._taken = taken.pop_all()

    def close(self) -> None:
        """Release all that is still held. Idempotent."""
        self._taken.close()


def keep_running(folder: FleetFolder, running: RunningNode) -> None:
    """Write to disk that this node runs and where, for commands such as `paceline status`. Blocks."""
    data = json.dumps({"pid": running.pid, "address": running.address}).encode()
    folder.write_secret(folder.root / "running.json", data)


def forget_running(folder: FleetFolder) -> None:
    """Remove the file of `keep_running` at the end of this process, if it is this process's own."""
    if (running := read_running(folder)) is not None and running.pid == os.getpid():
        with contextlib.suppress(OSError):  # nothing answers there any more, which is what counts
            (folder.root / "running.json").unlink(missing_ok=True)


def read_running(folder: FleetFolder) -> RunningNode | None:
    """Return the node that last wrote that it runs; None if the file can't be read. Only a call shows if the node still runs."""
    try:
        value: Any = json.loads((folder.root / "running.json").read_bytes())
        return RunningNode(int(value["pid"]), str(value["address"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


ASK_S = 5.0


@dataclass(frozen=True, slots=True)
class Looked:
    """A fleet, and what this machine's node sees of it."""

    fleet_id: str
    sight: Sight


async def look(folder: FleetFolder) -> Looked:
    """Ask the node that runs on this machine for its view of the fleet.

    Raises:
        MembershipError: this machine is in no fleet, was revoked, or its node does not run.
    """
    identity = folder.identity()
    running = await asyncio.to_thread(read_running, folder)
    if running is None:
        raise MembershipError(f"The node of this machine ({identity.node_id}) does not run", "Start it: paceline up")
    try:
        async with control_channel(identity, running.address) as channel:
            sight = await read_sight(channel, ASK_S)
    except NodeUnreachable as error:
        raise MembershipError(f"The node of this machine ({identity.node_id}) does not answer", "Start it: paceline up") from error
    except FleetError as error:  # it was revoked, and knows it
        anew = "Stop paceline up and start it again: it says how this machine can join again"
        raise MembershipError(f"{identity.node_id} is not a member any more: {error.message}", anew) from error
    return Looked(fleet_id(identity), sight)
