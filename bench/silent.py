"""How long a member's call waits while another machine keeps thousands of silent connections to the port, and when a revoked member's calls end.

Each of the two is in a network namespace of its own, as on two hosts of one cable; needs root.

    python -m bench.silent [--connections 2000] [--seconds 20]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import grpc.aio
from tests.fakes.fleets import TestFleet
from tests.fleet.network import enter, network, why_not
from tests.unit.net.trust.served import COUNT, ECHO, Services, connections

from paceline.core.ids import NodeId, Trust
from paceline.fleet.eligibility import TrustPolicy
from paceline.net.channels import CHANNEL_OPTIONS
from paceline.net.server import NodeServer, RpcMeter, Service
from paceline.net.trust.certificates import NODE_NAME
from paceline.net.trust.credentials import channel_credentials
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.handlers import Limit
from paceline.net.trust.refusals import Refusals

FLOOD = """
import selectors, socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
looking, held = selectors.DefaultSelector(), 0
while True:
    while held < count:
        try:
            one = socket.create_connection((host, port))
        except OSError:
            break
        looking.register(one, selectors.EVENT_READ)
        held += 1
    for key, _ in looking.select(0.5):
        looking.unregister(key.fileobj)
        key.fileobj.close()
        held -= 1
"""


async def serve(host: str) -> tuple[TestFleet, PeerGuard, NodeServer, int]:
    fleet, refusals = TestFleet(), Refusals()
    guard = PeerGuard(fleet.authority.root, fleet.revocations.voids, fleet.clock, refusals)
    identity = fleet.member("server-1")
    server, services = NodeServer(identity, guard, RpcMeter(), TrustPolicy()), Services(guard, identity)
    server.add(Service(lambda grpc_server: grpc_server.add_generic_rpc_handlers((services,)), {}))
    server._limits |= dict.fromkeys((ECHO, COUNT), Limit(1 << 10, 8, least=Trust.GUEST))  # noqa: SLF001 - methods of a test have none
    return fleet, guard, server, await server.start(host, 0)


async def read_on(stream: grpc.aio.UnaryStreamCall) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def measure(host: str, flood: tuple[str, ...], count: int, seconds: float) -> None:
    fleet, guard, server, port = await serve(host)
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", NODE_NAME)]

    def channel(name: str) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(f"{host}:{port}", channel_credentials(fleet.member(name)), options)

    async def call_s(name: str) -> float:
        began = time.perf_counter()
        async with channel(name) as dialled:
            await dialled.unary_unary(ECHO)(b"", timeout=60, wait_for_ready=True)
        return time.perf_counter() - began

    async def calls_s(kind: str, until_s: float) -> None:
        times = list[float]()
        while time.perf_counter() < until_s:
            times.append(await call_s(f"{kind}-{len(times)}"))
            await asyncio.sleep(0.2)
        print(f"{kind}: {len(times)} members dialled and called: median {statistics.median(times):.3f} s, longest {max(times):.3f} s")

    await calls_s("quiet", time.perf_counter() + seconds / 4)
    command = [*flood, sys.executable, "-c", FLOOD, host, str(port), str(count)]
    with subprocess.Popen(command) as strangers:  # noqa: ASYNC220 - it begins at once
        while len(connections(port)) < count:  # noqa: ASYNC110 - sockets are looked at, there is no event
            await asyncio.sleep(0.1)
        print(f"connections open: {len(connections(port))}")
        await calls_s("flooded", time.perf_counter() + seconds)
        strangers.kill()
    async with channel("revoked-1") as dialled:
        stream = dialled.unary_stream(COUNT)(b"", timeout=60)
        await stream.read()
        sealed, began = fleet.revoke("revoked-1"), time.perf_counter()
        guard.revoked(NodeId("revoked-1"), sealed.revocation.not_after)
        for words, call in (("its stream", read_on(stream)), ("a new call", dialled.unary_unary(ECHO)(b"", timeout=60))):
            try:
                await call
            except grpc.aio.AioRpcError as error:
                print(f"revoked: {words} ended with {error.code().name} after {time.perf_counter() - began:.3f} s")
    await server.stop(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--inside", nargs=2, metavar=("HOST", "FLOODER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside is not None:
        enter(asked.inside[0])
        flood = ("ip", "netns", "exec", asked.inside[1])
        asyncio.run(measure(os.environ["BENCH_HOST"], flood, asked.connections, asked.seconds))
        return
    if why := why_not():
        sys.exit(f"This needs network namespaces: {why}")
    with network("node", "stranger") as net:
        command = [sys.executable, "-m", "bench.silent", "--inside", net.namespace("node"), net.namespace("stranger")]
        command += ["--connections", str(asked.connections), "--seconds", str(asked.seconds)]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[1], env=os.environ | {"BENCH_HOST": net.address("node")})


if __name__ == "__main__":
    main()
