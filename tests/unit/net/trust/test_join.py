"""Joining over real sockets and real TLS, and everybody who may not."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.net.trust.joining import SOON_S, IssuerNode, begun_calls, free_port, request_for
from tests.unit.net.trust.logs import logged

from paceline.core.errors import IdentityError, JoinRefused, MembershipError, Unreachable
from paceline.core.ids import NodeId
from paceline.fleet.eligibility import Revocations
from paceline.net.join_client import join
from paceline.net.join_host import JoinHost
from paceline.net.protocol import PROTOCOL_VERSION
from paceline.net.trust.certificates import PrivateKey, make_key, make_request
from paceline.net.trust.issuer import JoinAttempt
from paceline.net.trust.refusals import Refusals
from paceline.net.trust.tokens import NONCE_BYTES, JoinToken
from paceline.net.wire import fleet_pb2 as wire


@pytest.fixture
def node(tmp_path: Path) -> IssuerNode:
    return IssuerNode.make(tmp_path / "fleet")


async def denied(call: object) -> str:
    """Why a join was refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    return str(caught.value.details())


def test_a_machine_joins_by_a_token(node: IssuerNode) -> None:
    async def main() -> None:
        revoked = node.issuer.revoke(NodeId("carol-1"))
        token = node.mint()
        names: list[str] = []
        async with node.hosted(names):
            # One address leads nowhere, one is no name at all; the third is right.
            nowhere = (f"127.0.0.1:{free_port()}", "no-such-machine.invalid:1", *token.addresses)
            joined = await join(replace(token, addresses=nowhere), NodeId("bob-1"), node.clock)
        assert joined.identity.node_id == "bob-1"
        assert joined.identity.root.pin == token.pin
        assert joined.peers == ("10.0.0.1:8154",)
        assert joined.revocations == (revoked,)
        assert names == ["bob-1"]
        assert node.issuer.issued() == ("bob-1",)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param("expired", "The token has expired", id="expired token"),
        pytest.param("spent", "The token is spent", id="spent token"),
        pytest.param("unknown", "The token is not known here", id="unknown token"),
        pytest.param("secret", "The token is not known here", id="right id, wrong secret"),
    ],
)
def test_a_token_that_is_no_good(node: IssuerNode, spoil: str, message: str) -> None:
    async def main() -> None:
        keeps_open = node.mint()
        token = node.mint(ttl_s=60, uses=1)
        async with node.hosted():
            match spoil:
                case "expired":
                    node.clock.advance(61)
                case "spent":
                    await join(token, NodeId("first-1"), node.clock)
                case "unknown":
                    token = replace(token, token_id=bytes(8))
                case _:
                    token = replace(token, secret=bytes(16))
            with logged() as lines:
                with pytest.raises(JoinRefused, match=message) as caught:
                    await join(token, NodeId("late-1"), node.clock)
                assert "paceline token" in caught.value.hint
                line = await lines.line("refused 127.0.0.1 (port", message, "late-1")
                assert token.secret.hex() not in line
            assert "late-1" not in node.issuer.issued()
            assert node.issuer.is_live(keeps_open)

    asyncio.run(main())


def test_a_replayed_join_is_refused_even_after_a_restart(node: IssuerNode) -> None:
    async def main() -> None:
        request = request_for(node.mint(), "bob-1")
        async with node.hosted(), node.stub() as stub:
            await stub.Join(request, timeout=SOON_S)
            with logged() as lines:
                assert "replay" in await denied(stub.Join(request, timeout=SOON_S))
                await lines.line("refused 127.0.0.1", "replay", "bob-1")
        async with node.hosted(), node.stub() as stub:
            assert "replay" in await denied(stub.Join(request, timeout=SOON_S))

    asyncio.run(main())


def test_a_proof_is_for_one_request_only(node: IssuerNode) -> None:
    """Whoever saw somebody's proof can't have another certificate by it."""

    async def main() -> None:
        token = node.mint()
        good, other = request_for(token, "bob-1"), request_for(token, "mallory-1")
        good.certificate_request = other.certificate_request
        async with node.hosted(), node.stub() as stub:
            with logged() as lines:
                assert "not known" in await denied(stub.Join(good, timeout=SOON_S))
                await lines.line("refused 127.0.0.1", "mallory-1")

    asyncio.run(main())


def test_an_id_is_one_machines_until_it_is_revoked(node: IssuerNode) -> None:
    async def main() -> None:
        token = node.mint()
        async with node.hosted():
            first = await join(token, NodeId("bob-1"), node.clock)
            with logged() as lines:
                with pytest.raises(JoinRefused, match="The id bob-1 is another machine's"):
                    await join(token, NodeId("bob-1"), node.clock)
                await lines.line("refused 127.0.0.1", "another machine's", "bob-1")
            revocation = node.issuer.revoke(NodeId("bob-1"))
            again = await join(node.mint(), NodeId("bob-1"), node.clock)
        known = Revocations([revocation])
        assert known.voids(NodeId("bob-1"), first.identity.member.issued_at)
        assert not known.voids(NodeId("bob-1"), again.identity.member.issued_at)

    asyncio.run(main())


def test_an_id_that_another_machine_gave_to_a_member_is_not_given_away(node: IssuerNode) -> None:
    here = {NodeId("bob-1"), NodeId("first-1")}
    token = node.mint()
    key = make_key()
    with pytest.raises(JoinRefused, match="bob-1 is another machine's"):
        node.issuer.admit(attempt(token, key), here)
    assert node.issuer.issued() == ()
    node.issuer.admit(attempt(token, key))
    node.issuer.admit(attempt(token, key), here)  # which is what this machine gave it to


def attempt(token: JoinToken, key: PrivateKey) -> JoinAttempt:
    request, nonce = make_request(key, NodeId("bob-1")), secrets.token_bytes(NONCE_BYTES)
    return JoinAttempt(request, token.token_id.hex(), token.proof(request, nonce), nonce)


@pytest.mark.parametrize(("spoken", "todo"), [(PROTOCOL_VERSION - 1, "on this machine"), (PROTOCOL_VERSION + 1, "that the token is from")])
def test_a_newcomer_of_another_protocol_version_is_told_so_and_spends_no_token(node: IssuerNode, spoken: int, todo: str) -> None:
    token, key = node.mint(), make_key()
    good = attempt(token, key)
    with pytest.raises(JoinRefused, match=f"version {spoken}, and the fleet version {PROTOCOL_VERSION}") as caught:
        node.issuer.admit(replace(good, protocol=spoken))
    assert todo in caught.value.hint
    # A newcomer without the token learns no version.
    with pytest.raises(JoinRefused, match="not known here"):
        node.issuer.admit(replace(good, protocol=spoken, proof=bytes(32)))
    assert node.issuer.admit(good)[0] == "bob-1"


def test_nothing_is_sent_to_a_man_in_the_middle(node: IssuerNode, tmp_path: Path) -> None:
    async def main() -> None:
        other = IssuerNode.make(tmp_path / "other")
        other.mint()
        names: list[str] = []
        token = node.mint(addresses=(f"127.0.0.1:{other.port}",))
        async with other.hosted(names):
            with logged() as lines:
                with pytest.raises(JoinRefused, match=rf"The machine that answers at 127.0.0.1:{other.port} did not make this token"):
                    await join(token, NodeId("bob-1"), node.clock)
                await lines.line(f"refused 127.0.0.1:{other.port}", "another CA than the token's")
                assert not [line for line in lines.lines if "join as" in line], "the impostor saw a join request"
        assert names == []

    asyncio.run(main())


def test_who_shows_the_ca_but_lacks_its_key_learns_nothing(node: IssuerNode) -> None:
    """A man in the middle can show the certificate only by passing on the issuer's own handshake, and then he is left out of what follows."""

    async def main() -> None:
        token = node.mint()
        seen = bytearray()

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", node.port)

            async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(65536):
                    seen.extend(data)
                    sink.write(data)
                sink.close()

            await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

        async with node.hosted():
            relay = await asyncio.start_server(pass_on, "127.0.0.1", 0)
            port = relay.sockets[0].getsockname()[1]
            joined = await join(replace(token, addresses=(f"127.0.0.1:{port}",)), NodeId("bob-1"), node.clock)
            relay.close()
        assert joined.identity.node_id == "bob-1"
        assert token.secret not in seen
        assert token.token_id not in seen
        assert b"bob-1" not in seen

    asyncio.run(main())


def test_an_unreachable_issuer_is_told_with_every_address(node: IssuerNode) -> None:
    async def main() -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))  # bound but not listening: refuses
            addresses = (f"127.0.0.1:{silent.getsockname()[1]}", "no-such-machine.invalid:8155")
            with pytest.raises(Unreachable) as caught:
                await join(node.mint(addresses=addresses), NodeId("bob-1"), node.clock)
        assert all(address in caught.value.message for address in addresses)
        assert "paceline up" in caught.value.hint

    asyncio.run(main())


def test_a_slow_clock_is_told(node: IssuerNode) -> None:
    async def main() -> None:
        token = node.mint()
        async with node.hosted():
            slow = type(node.clock)(wall=node.clock.wall() - 3 * 86400)
            with pytest.raises(JoinRefused, match="This machine's clock is wrong") as caught:
                await join(token, NodeId("bob-1"), slow)
            assert f"{datetime.fromtimestamp(slow.wall(), UTC):%Y-%m-%d %H:%M} UTC" in caught.value.message
            # A day is forgiven.
            await join(token, NodeId("bob-1"), type(node.clock)(wall=node.clock.wall() - 86000))

    asyncio.run(main())


def test_the_port_is_open_while_a_token_lives(node: IssuerNode) -> None:
    async def main() -> None:
        async with node.hosted() as host:
            assert not host.is_open
            token = node.mint(ttl_s=60)
            await host.refresh()
            assert host.is_open
            node.clock.advance(61)
            await host.refresh()
            assert not host.is_open
            with pytest.raises(Unreachable):
                await join(token, NodeId("bob-1"), node.clock)
            one = node.mint(uses=1)
            await host.refresh()
            await join(one, NodeId("bob-1"), node.clock)
            await host.refresh()
            assert not host.is_open

    asyncio.run(main())


def test_calls_that_are_begun_and_never_sent_keep_nobody_out(node: IssuerNode) -> None:
    async def main() -> None:
        token = node.mint()
        async with node.hosted(), AsyncExitStack() as held:
            for _ in range(16):
                await held.enter_async_context(begun_calls(node.port, 8))
            joined = await join(token, NodeId("bob-1"), node.clock)
            assert joined.identity.node_id == "bob-1"

    asyncio.run(main())


def test_one_process_keeps_the_port_and_another_takes_over(node: IssuerNode) -> None:
    async def main() -> None:
        node.mint()
        heard: list[str] = []
        second = JoinHost(
            node.folder,
            node.clock,
            Refusals(),
            host="127.0.0.1",
            on_revocations=lambda all_: heard.extend(one.revocation.node_id for one in all_),
            look_s=0.01,
        )
        async with node.hosted() as first:
            running = asyncio.create_task(second.run())
            # It hears of revocations all the same.
            node.issuer.revoke(NodeId("carol-1"), keep_tokens=True)
            async with asyncio.timeout(SOON_S):
                while heard != ["carol-1"]:  # noqa: ASYNC110 - a file is looked at, there is no event
                    await asyncio.sleep(0.01)
            assert first.is_open
            assert not second.is_open
        async with asyncio.timeout(SOON_S):
            while not second.is_open:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert not second.is_open

    asyncio.run(main())


def test_a_taken_port_is_told(node: IssuerNode) -> None:
    async def main() -> None:
        node.mint()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", node.port))
            taken.listen()
            host = JoinHost(node.folder, node.clock, Refusals(), host="127.0.0.1")
            with pytest.raises(MembershipError, match=f"The join port {node.port} can't be opened"):
                await host.refresh()
            await host.close()

    asyncio.run(main())


def test_files_that_others_can_read_are_refused(node: IssuerNode) -> None:
    for mode in (0o640, 0o604, 0o660, 0o777):
        node.folder.authority_file.chmod(mode)
        with pytest.raises(IdentityError, match=r"can be read by others \(mode") as caught:
            node.folder.authority()
        assert f"chmod 600 {node.folder.authority_file}" in caught.value.hint
    node.folder.authority_file.chmod(0o600)
    node.folder.authority()
    assert node.folder.issuer_file.stat().st_mode & 0o777 == 0o600
    assert node.folder.root.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(node: IssuerNode) -> None:
    os.chown(node.folder.authority_file, 12345, 12345)
    with pytest.raises(IdentityError, match="belongs to another user"):
        node.folder.authority()


raw_requests = st.one_of(
    st.binary(max_size=400),
    st.builds(
        lambda csr, token, proof, nonce: wire.JoinRequest(
            certificate_request=csr, token_id=token, proof=proof, nonce=nonce
        ).SerializeToString(),
        st.binary(max_size=5000),
        st.sampled_from(["", "0" * 16, "x" * 16, "ü" * 8]),
        st.sampled_from([b"", bytes(32), bytes(33)]),
        st.sampled_from([b"", bytes(16), bytes(4000)]),
    ),
)


@given(st.lists(raw_requests, min_size=1, max_size=40))
@settings(max_examples=8, deadline=None)
def test_wire_noise_at_the_join_port(tmp_path_factory: pytest.TempPathFactory, noise: list[bytes]) -> None:
    """Whatever arrives, the answer is a refusal, nobody joins, and the next good join works."""

    async def main() -> None:
        node = IssuerNode.make(tmp_path_factory.mktemp("noise") / "fleet")
        token = node.mint()
        async with node.hosted():
            options = [("grpc.ssl_target_name_override", "join.paceline.internal")]
            credentials = await node.credentials()
            async with grpc.aio.secure_channel(f"127.0.0.1:{node.port}", credentials, options) as channel:
                call = channel.unary_unary("/paceline.v1.JoinService/Join")
                for data in [*noise, b"\xff", bytes(1 << 20)]:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call(data, timeout=SOON_S)
                    assert caught.value.code() in {
                        grpc.StatusCode.PERMISSION_DENIED,
                        grpc.StatusCode.INVALID_ARGUMENT,
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                    }
            assert node.issuer.issued() == ()
            await join(token, NodeId("bob-1"), node.clock)

    asyncio.run(main())
