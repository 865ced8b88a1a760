"""Checks of the way to a node for `paceline doctor`: which of its ports answer, from which address of this machine, and how far its clock is off.

Law: a check of an address ends within its bound and raises nothing, because the failure is its result.
"""

from __future__ import annotations

import asyncio
import errno
import platform
import socket
import ssl
import time
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import grpc.aio

from paceline.core.clock import Clock
from paceline.core.errors import OtherProtocol, PacelineError
from paceline.core.model import ARITHMETIC
from paceline.core.text import printable
from paceline.fleet.card import NodeCard
from paceline.net.channels import CHANNEL_OPTIONS
from paceline.net.protocol import PROGRAM
from paceline.net.rpc_faults import error_of
from paceline.net.trust.certificates import NODE_NAME, Member
from paceline.net.trust.credentials import channel_credentials, client_context
from paceline.net.trust.identity import Identity
from paceline.net.trust.seals import open_card
from paceline.net.wire import fleet_pb2 as wire
from paceline.net.wire.fleet_pb2_grpc import CapabilityServiceStub

LOOK_S: Final = 5.0
"""Timeout in seconds of a call to an address, and of the search for the reason if it fails. Raising it: `paceline doctor` takes longer on silent addresses."""
_CLOCK_ALERTS: Final = ("CERTIFICATE_EXPIRED", "CERTIFICATE_NOT_YET_VALID")
_NOT_YET_VALID, _EXPIRED = 9, 10
"""Verification codes of OpenSSL for a certificate outside of its time."""


class Barrier(StrEnum):
    """The reason why a port does not answer as a node of this fleet."""

    NAME = "name"
    """The host name is not known."""
    NO_ROUTE = "no route"
    REFUSED = "refused"
    """Nothing listens there, or a firewall refuses the connection."""
    SILENT = "silent"
    """Nothing came back."""
    HUNG = "hung"
    """The system there accepts the connection, but the process sends nothing: it is stopped, or it is not a node."""
    STRANGER = "stranger"
    """Something other than a node of this fleet listens there."""
    CLOCK = "clock"
    """A certificate is outside of its time."""
    VERSION = "version"
    """A node of this fleet that speaks another protocol version."""
    FAILED = "failed"
    """A node of this fleet that refuses, or any other failure."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Facts about the setup of a node that its card does not hold."""

    clock_ahead_s: float
    """Seconds by which the node's clock is ahead of this machine's, to within half a round trip."""
    tensor_port: int
    arithmetic: int
    python: str
    numba: str


@dataclass(frozen=True, slots=True)
class Reach:
    """The result of a call to an address."""

    address: str
    from_host: str
    """This machine's IP address on the route to there; empty if the system has no route."""
    barrier: Barrier | None = None
    why: str = ""
    member: Member | None = None
    """Node that answered; None if the call failed."""
    card: NodeCard | None = None
    setting: Setting | None = None


def own_facts(clock: Clock, tensor_port: int) -> wire.NodeFacts:
    """Return this node's facts for the answer to GetNodeCapability."""
    try:
        numba = version("numba")
    except PackageNotFoundError:
        numba = ""
    now = int(clock.wall() * 1e6)
    return wire.NodeFacts(clock_unix_us=now, tensor_port=tensor_port, arithmetic=ARITHMETIC, python=platform.python_version(), numba=numba)


def source_host(address: str) -> str:
    """Return this machine's IP address on the route to an address; empty if the system has no route. Nothing is sent."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asked:
            asked.connect(where)
            return str(asked.getsockname()[0])
    except (OSError, ValueError):
        return ""


async def reach(address: str, identity: Identity, clock: Clock) -> Reach:
    """Ask the node at an address for its card and its setting. If no node answers, find out why."""
    from_host = await asyncio.to_thread(source_host, address)
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", NODE_NAME)]
    channel = grpc.aio.secure_channel(address, channel_credentials(identity), options)
    try:
        call = CapabilityServiceStub(channel).GetNodeCapability
        await call(wire.GetNodeCapabilityRequest(protocol=PROGRAM.own), timeout=LOOK_S)  # dials, before the clock is measured
        began, at = time.perf_counter(), clock.wall()
        answer = await call(wire.GetNodeCapabilityRequest(), timeout=LOOK_S)
        middle = at + (time.perf_counter() - began) / 2
        PROGRAM.check(identity.root.member(answer.card.card.certificate, clock.wall()).node_id, answer.protocol)
        sealed = open_card(answer.card.card, root=identity.root, voids=lambda *_: False, now=clock.wall())
        member = identity.root.member(sealed.certificate, clock.wall())
    except grpc.aio.AioRpcError as error:
        refusal = error_of(error, address).message
    except OtherProtocol as error:
        return Reach(address, from_host, Barrier.VERSION, f"{error.message}. {error.hint}")
    except PacelineError as error:
        return Reach(address, from_host, Barrier.FAILED, printable(error.message, 300))
    else:
        facts = answer.facts
        words = (printable(text, 40) for text in (facts.python, facts.numba))
        setting = Setting(facts.clock_unix_us / 1e6 - middle, facts.tensor_port, facts.arithmetic, *words)
        return Reach(address, from_host, member=member, card=sealed.card, setting=setting)
    finally:
        await channel.close(None)
    barrier, why = await asyncio.to_thread(barrier_at, address, identity, None)
    return Reach(address, from_host, barrier or Barrier.FAILED, why or printable(refusal, 300))


def barrier_at(address: str, identity: Identity, member: Member | None) -> tuple[Barrier | None, str]:
    """Return the barrier that keeps a connection from a port of the fleet, and the reason in words; (None, "") if nothing does. Blocks.

    Args:
        member: the node, if the port is the one of its tensor streams; None: the gRPC port of any node.
    """
    host, _, port = address.rpartition(":")
    until = time.perf_counter() + LOOK_S
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK_S)
    except socket.gaierror as error:
        return Barrier.NAME, f"no host of that name is known ({error.strerror})"
    except TimeoutError:
        return Barrier.SILENT, f"nothing came back within {LOOK_S:g} s"
    except ConnectionRefusedError:
        return Barrier.REFUSED, "the connection was refused"
    except (OSError, ValueError) as error:
        kind = Barrier.NO_ROUTE if getattr(error, "errno", 0) in {errno.EHOSTUNREACH, errno.ENETUNREACH} else Barrier.FAILED
        return kind, str(error)
    context = client_context(identity)
    if member is None:
        context.set_alpn_protocols(["h2"])
    try:
        with sock:
            sock.settimeout(max(0.1, until - time.perf_counter()))
            with context.wrap_socket(sock, server_hostname=NODE_NAME if member is None else member.tls_name) as tls:
                if member is None:
                    tls.recv(1)  # gRPC sends first; an alert about this machine's certificate comes here too
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in {_NOT_YET_VALID, _EXPIRED}:
            return Barrier.CLOCK, f"by this machine's clock its certificate does not hold: {error.verify_message}"
        return Barrier.STRANGER, f"it shows no certificate of this fleet: {error.verify_message}"
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        if any(alert in reason for alert in _CLOCK_ALERTS):
            return Barrier.CLOCK, f"by its clock this machine's certificate does not hold: {reason}"
        return Barrier.STRANGER, f"what listens there does not speak as a node of this fleet: {reason}"
    except TimeoutError:
        return Barrier.HUNG, "it does not answer: what listens there takes the connection and says nothing"
    except OSError as error:
        return Barrier.STRANGER, f"what listens there hung up: {error.strerror or error}"
    return None, ""
