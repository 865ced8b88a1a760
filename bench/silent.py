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
from tests.fleet.network import INSIDE, enter, network, why_not
from tests.fleet.open_files import open_files
from tests.unit.net.trust.served import COUNT, ECHO, dial, node_server, silent_connections, until_connected

from paceline.core.ids import NodeId


async def read_on(stream: grpc.aio.UnaryStreamCall) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def measure(host: str, inside: tuple[str, ...], count: int, seconds: float) -> None:
    fleet = TestFleet()
    async with node_server(fleet, host) as (guard, port):

        async def call_s(name: str) -> float:
            began = time.perf_counter()
            async with dial(fleet, name, f"{host}:{port}") as dialled:
                await dialled.unary_unary(ECHO)(b"", timeout=60, wait_for_ready=True)
            return time.perf_counter() - began

        async def calls_s(kind: str, until_s: float) -> None:
            times = list[float]()
            while time.perf_counter() < until_s:
                times.append(await call_s(f"{kind}-{len(times)}"))
                await asyncio.sleep(0.2)
            print(f"{kind}: {len(times)} members dialled and called: median {statistics.median(times):.3f} s, longest {max(times):.3f} s")

        await calls_s("quiet", time.perf_counter() + seconds / 4)
        with silent_connections(host, port, count, inside=inside):
            await until_connected(port, count)
            print(f"connections open: {open_files(os.getpid()).connected_to(port)}")
            await calls_s("flooded", time.perf_counter() + seconds)
        async with dial(fleet, "revoked-1", f"{host}:{port}") as dialled:
            stream = dialled.unary_stream(COUNT)(b"", timeout=60)
            await stream.read()
            sealed, began = fleet.revoke("revoked-1"), time.perf_counter()
            guard.revoked(NodeId("revoked-1"), sealed.revocation.not_after)
            for words, call in (("its stream", read_on(stream)), ("a new call", dialled.unary_unary(ECHO)(b"", timeout=60))):
                try:
                    await call
                except grpc.aio.AioRpcError as error:
                    print(f"revoked: {words} ended with {error.code().name} after {time.perf_counter() - began:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--inside", nargs=2, metavar=("HOST", "FLOODER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside is not None:
        enter(asked.inside[0])
        asyncio.run(measure(os.environ["BENCH_HOST"], (*INSIDE, asked.inside[1]), asked.connections, asked.seconds))
        return
    if why := why_not():
        sys.exit(f"This needs network namespaces: {why}")
    with network("node", "stranger") as net:
        command = [sys.executable, "-m", "bench.silent", "--inside", net.namespace("node"), net.namespace("stranger")]
        command += ["--connections", str(asked.connections), "--seconds", str(asked.seconds)]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[1], env=os.environ | {"BENCH_HOST": net.address("node")})


if __name__ == "__main__":
    main()
