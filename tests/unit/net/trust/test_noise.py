"""Noise at every decoder: what is not well made is refused with an error of ours, and costs no more memory than its size would have it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.fakes.fleets import TestFleet, sealed_card
from tests.sampling import examples

from paceline.cli.enrolment import seconds
from paceline.core.errors import FleetError, PacelineError, TokenError, UserError
from paceline.core.ids import NodeId
from paceline.net.trust.authority import Authority
from paceline.net.trust.certificates import is_address, make_key, make_request, open_request
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.identity import Identity
from paceline.net.trust.issuer import Issuer
from paceline.net.trust.refusals import remote_of
from paceline.net.trust.seals import open_card, open_revocation
from paceline.net.trust.tokens import JoinToken
from paceline.net.wire import fleet_pb2 as wire

FLEET = TestFleet()
ALICE = FLEET.member("alice-1")
SEALED = sealed_card(ALICE)
SIGNED = wire.SignedCard.FromString(SEALED.sealed)
SIGNED.certificate = SEALED.certificate
REVOCATION = FLEET.revoke("carol-1")
REQUEST = make_request(make_key(), NodeId("bob-1"))
TOKEN = JoinToken(("10.0.0.1:8155", "[fd00::1]:8155"), bytes(33), bytes(8), bytes(16))


def spoiled(whole: bytes) -> st.SearchStrategy[bytes]:
    """Something well made with parts cut out, doubled or replaced; or nothing well made at all."""

    def spoil(at: int, length: int, instead: bytes) -> bytes:
        return whole[:at] + instead + whole[at + length :]

    edges = st.integers(0, len(whole))
    return st.builds(spoil, edges, st.integers(0, 40), st.binary(max_size=40)) | st.binary(max_size=600)


def read_signed(data: bytes) -> Any:
    with suppress(DecodeError):
        return open_card(wire.SignedCard.FromString(data), root=FLEET.authority.root, voids=lambda *_: False, now=FLEET.clock.wall())
    raise FleetError("no message")


def read_revocation(data: bytes) -> Any:
    with suppress(DecodeError):
        return open_revocation(wire.SignedRevocation.FromString(data), FLEET.authority.root)
    raise FleetError("no message")


DECODERS: dict[str, tuple[Callable[[bytes], Any], bytes, type[PacelineError]]] = {
    "card": (read_signed, SIGNED.SerializeToString(), FleetError),
    "revocation": (read_revocation, REVOCATION.sealed, FleetError),
    "certificate": (lambda data: FLEET.authority.root.member(data, FLEET.clock.wall()), ALICE.member.certificate, FleetError),
    "request": (open_request, REQUEST, FleetError),
    "identity": (Identity.from_pem, ALICE.to_pem(), UserError),
    "authority": (Authority.from_pem, FLEET.authority.to_pem(), UserError),
}


@pytest.mark.parametrize("decoder", DECODERS)
def test_noise_is_refused_by_name(decoder: str) -> None:
    read, whole, kind = DECODERS[decoder]
    read(whole)

    @given(spoiled(whole))
    @example(whole[:-1])
    @example(whole * 2)
    @example(b"")
    @settings(deadline=None, max_examples=examples(150))
    def refused_or_read(data: bytes) -> None:
        with suppress(kind):
            read(data)

    refused_or_read()


@given(st.text(max_size=200) | spoiled(TOKEN.text.encode()).map(lambda data: data.decode("latin-1")))
@settings(deadline=None)
def test_a_text_is_the_token_or_no_token(text: str) -> None:
    with suppress(TokenError):
        assert JoinToken.parse(text) == TOKEN, "the checksum let another token through"


@pytest.mark.parametrize(
    "text", ["hello", "paceline1.AAAA", "paceline2.", "paceline2.AAAA", "paceline2." + "A" * 10_000, TOKEN.text[:-2], ""]
)
def test_what_is_wrong_with_a_token_is_told(text: str) -> None:
    with pytest.raises(TokenError) as caught:
        JoinToken.parse(text)
    assert caught.value.hint


def test_a_token_survives_its_way() -> None:
    assert JoinToken.parse(f"  {TOKEN.text}\n") == TOKEN
    assert "secret" not in repr(TOKEN)


@given(st.text(max_size=60))
def test_addresses_and_peers_of_any_text(text: str) -> None:
    if is_address(text):
        assert 0 < int(text.rpartition(":")[2]) <= 65535
    assert isinstance(remote_of(text)[1], int)
    with suppress(UserError):
        assert seconds(text, "--age") >= 0


@pytest.mark.parametrize(("text", "span"), [("90s", 90), ("30m", 1800), ("1h30m", 5400), ("2d", 172800)])
def test_spans_of_time(text: str, span: float) -> None:
    assert seconds(text, "--age") == span


@given(state=spoiled(b'{"join_port": 1, "tokens": {"00": {"secret": "00", "expires_at": 1, "uses_left": 1, "nonces": []}}, "issued": {}}'))
@settings(deadline=None, max_examples=examples(60))
def test_a_damaged_state_is_told(tmp_path_factory: pytest.TempPathFactory, state: bytes) -> None:
    folder = FleetFolder(tmp_path_factory.getbasetemp() / "damaged")
    for file in (folder.issuer_file, folder.revocations_file, folder.peers_file):
        folder.write_secret(file, state)
    issuer = Issuer(FLEET.authority, folder, FLEET.clock)
    for use in (issuer.open_until, folder.sealed_revocations, folder.peers):
        with suppress(UserError):
            use()


def test_a_size_that_a_message_only_claims_costs_nothing(tmp_path: Path) -> None:
    """Lengths of gigabytes in front of nothing."""
    claims = [b"\x0a\xff\xff\xff\xff\x07", b"\x30\x84\x7f\xff\xff\xff", b"\x1a\xff\xff\xff\xff\x0fabc"]
    tracemalloc.start()
    try:
        for read, _, kind in DECODERS.values():
            for claim in claims:
                with suppress(kind):
                    read(claim)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
