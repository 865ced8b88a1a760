"""How fast weights go from one node to another: over loopback, with mTLS, between two processes.

    python bench/fetch.py [--mib 1024] [--rounds 3]

Makes a model of random bytes, gives it from a child process, fetches it into a fresh folder, and prints medians: describing it for the
first time (its files are read and hashed), the transfer with each piece checked and written, and the check of whole files at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import paceline  # noqa: F401 - before grpc  # isort: skip
import grpc.aio
import numpy as np
from tests.fakes.fleets import TestFleet

from paceline.core.ids import NodeId
from paceline.core.manifest import pieces_needed
from paceline.core.model import ModelSpec, RopeSpec
from paceline.core.weights import tensor_shapes
from paceline.fleet.placement import WeightsSource
from paceline.net.trust.certificates import NODE_NAME
from paceline.net.trust.credentials import channel_credentials, server_credentials
from paceline.net.trust.identity import Identity
from paceline.net.weights_client import WeightsClient
from paceline.net.weights_servicer import WeightsServicer
from paceline.net.wire.weights_pb2_grpc import add_WeightsServiceServicer_to_server
from paceline.store.catalog import MANIFEST, Library, open_weights
from paceline.store.digests import DigestCache
from paceline.store.home import Home
from paceline.store.staging import staged

MIB = 1 << 20


def write_model(home: Home, mib: int) -> None:
    """A llama folder of about `mib` MiB in float32 under the name `random`."""
    n_layers = max(1, mib // 68)
    spec = ModelSpec("llama", n_layers, 1024, 8, 8, 128, 4480, 256, 128, 1e-5, RopeSpec(1e4), tied_head=True)
    folder = home.models / "random"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": spec.hidden, "num_hidden_layers": n_layers, "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads, "intermediate_size": spec.ffn, "vocab_size": spec.vocab, "rms_norm_eps": spec.rms_eps,
        "max_position_embeddings": spec.max_context, "tie_word_embeddings": True,
    }))  # fmt: skip
    table, at = {}, 0
    for name, shape in tensor_shapes(spec).items():
        nbytes = 4 * int(np.prod(shape))
        table[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    head = json.dumps(table).encode()
    random = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for first in range(0, at, MIB):
            file.write(random.bytes(min(MIB, at - first)))
    (folder / MANIFEST).write_text(json.dumps({"files": {"config.json": {}, "model.safetensors": {}}}))


def quiet(*_: int) -> None:
    """Progress that nobody looks at."""


async def give(home: Home, identity: bytes) -> None:
    """Serve until standard input ends."""
    server = grpc.aio.server()
    add_WeightsServiceServicer_to_server(WeightsServicer(Library(home), lambda _: None), server)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(Identity.from_pem(identity)))
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


@asynccontextmanager
async def giver(home: Home, identity: Path) -> AsyncGenerator[str]:
    command = [sys.executable, __file__, "--give", str(home.root), str(identity)]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.stdin.close()
        await process.wait()


async def measure(root: Path, mib: int, rounds: int) -> None:
    fleet, given = TestFleet(), Home(root / "giver")
    identity = root / "giver.pem"
    identity.write_bytes(fleet.member("giver-1").to_pem())
    write_model(given, mib)
    digest = open_weights(given.models / "random", DigestCache(given)).digest
    source = WeightsSource(NodeId("giver-1"), (), "random", digest, 0)
    credentials = channel_credentials(fleet.member("taker-1"))
    seconds: dict[str, list[float]] = {"described": [], "transferred": [], "checked whole": []}
    size = 0
    for turn in range(rounds):
        for entry in given.digests.glob("*.sums"):
            entry.unlink()
        async with (
            giver(given, identity) as address,
            grpc.aio.secure_channel(address, credentials, [("grpc.ssl_target_name_override", NODE_NAME)]) as channel,
        ):
            client = WeightsClient(channel, "giver-1")
            began = time.perf_counter()
            manifest = await client.describe(digest, quiet)
            seconds["described"].append(time.perf_counter() - began)
            size, needed = manifest.size, pieces_needed(manifest, None)
            with staged(source.model_id, manifest, Home(root / f"taker-{turn}")) as staging:
                lacking = staging.missing(needed, quiet)
                began = time.perf_counter()
                writing = None
                async for piece in client.fetch(manifest, lacking):
                    if writing is not None:
                        await writing
                    writing = asyncio.create_task(asyncio.to_thread(staging.write, piece.file, piece.piece, piece.data))
                if writing is not None:
                    await writing
                seconds["transferred"].append(time.perf_counter() - began)
                began = time.perf_counter()
                staging.seal(needed)
                assert staging.missing(needed, quiet) == []
                seconds["checked whole"].append(time.perf_counter() - began)
    print(f"{size / MIB:.0f} MiB, medians of {rounds}:")
    for what, times in seconds.items():
        print(f"  {what:14} {size / MIB / statistics.median(times):6.0f} MiB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--give", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.give:
        asyncio.run(give(Home(Path(arguments.give[0])), Path(arguments.give[1]).read_bytes()))
        return
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(measure(Path(root), arguments.mib, arguments.rounds))


if __name__ == "__main__":
    main()
