from __future__ import annotations

import contextlib
import gc
import os
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.fleets import TestFleet
from tests.unit.net.tensor.meeting import Meeting, meeting, soon, until_it_breaks

from paceline.core.errors import ConfigError, NodeUnreachable, RevokedNode, StreamClosed, StreamStalled, TensorStreamError
from paceline.net.tensor import dialling
from paceline.net.tensor import listener as module
from paceline.net.tensor.dialling import dial
from paceline.net.tensor.frames import close, hello, tensor_start
from paceline.net.trust.credentials import client_context


def tls(met: Meeting) -> ssl.SSLSocket:
    """A member that says what it likes."""
    sock = socket.create_connection(("127.0.0.1", met.listener.port), timeout=100)
    return client_context(met.near).wrap_socket(sock, server_hostname=met.far.member.tls_name)


def cut_off(sock: socket.socket) -> bytes:
    """What the other side says until it closes."""
    said = b""
    try:
        while data := sock.recv(4096):
            said += data
    except (ConnectionResetError, ssl.SSLError):
        pass
    sock.close()
    return said


def test_a_stranger_is_cut_and_named(met: Meeting) -> None:
    expected = met.listener.expect()
    stranger = TestFleet().member("stranger")
    with pytest.raises(NodeUnreachable, match="certificate"):
        met.dial(expected.ticket, stranger)
    sock = socket.create_connection(("127.0.0.1", met.listener.port), timeout=100)
    context = client_context(stranger)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(sock) as end:
        assert cut_off(end) == b""
    for who, why in met.refusals.first(2):
        assert who == "127.0.0.1"
        assert "no certificate of this fleet" in why
    # Its ticket was not spent.
    met.dial(expected.ticket).close()


def test_a_caller_without_a_certificate_is_cut(met: Meeting) -> None:
    context = ssl.create_default_context(cadata=met.near.root.pem.decode())
    context.check_hostname = False
    with socket.create_connection(("127.0.0.1", met.listener.port), timeout=100) as sock, context.wrap_socket(sock) as end:
        assert cut_off(end) == b""
    assert "no certificate of this fleet" in met.refusals.first(1)[0][1]


def test_tls_before_1_3_is_refused(met: Meeting) -> None:
    context = client_context(met.near)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("127.0.0.1", met.listener.port), timeout=100) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock, server_hostname=met.far.member.tls_name)


def test_a_revoked_member_is_cut_and_named(met: Meeting) -> None:
    expected = met.listener.expect()
    met.fleet.revoke("near")
    with pytest.raises(StreamClosed):
        met.dial(expected.ticket)
    assert met.refusals.first(1) == [("near", "near was revoked [activations]")]


def test_a_revoked_member_is_not_dialled(met: Meeting) -> None:
    met.fleet.revoke("far")
    with pytest.raises(RevokedNode):
        dial([met.address], met.far.member, bytes(32), met.near, met.fleet.revocations.voids, soon())
    assert not met.refusals.lines


def test_streams_of_a_revoked_member_are_cut(met: Meeting) -> None:
    other = met.fleet.member("other")
    _sender, receiver = met.stream()
    others_sender, others = met.stream(other)
    met.listener.cut(met.near.node_id, met.near.member.issued_at - 1)
    assert not receiver.closed
    met.listener.cut(met.near.node_id)
    with pytest.raises(StreamClosed):
        receiver.receive(soon())
    others_sender.send(b"", np.zeros(1, np.uint16), soon())
    assert others.receive(soon()).array.size == 1


def test_an_unknown_ticket_is_refused(met: Meeting) -> None:
    met.listener.expect()
    with pytest.raises(StreamClosed, match="unknown or was used"):
        met.dial(os.urandom(32))
    assert met.refusals.first(1) == [("near", "it brought a ticket that is unknown or was used [activations]")]


def test_a_ticket_works_once(met: Meeting) -> None:
    expected = met.listener.expect()
    sender = met.dial(expected.ticket)
    with pytest.raises(StreamClosed, match="unknown or was used"):
        met.dial(expected.ticket)
    receiver = expected.wait(soon())
    sender.send(b"the first", np.zeros(1, np.uint16), soon())
    assert receiver.receive(soon()).header == b"the first"


def test_a_cancelled_ticket_is_refused(met: Meeting) -> None:
    expected = met.listener.expect()
    expected.cancel()
    expected.cancel()
    with pytest.raises(StreamClosed, match="unknown or was used"):
        met.dial(expected.ticket)
    with pytest.raises(StreamClosed):
        expected.wait(soon())


def test_cancelling_wakes_who_waits(met: Meeting) -> None:
    expected = met.listener.expect()
    with pytest.raises(StreamStalled):
        expected.wait(soon(0))
    threading.Timer(0, expected.cancel).start()
    with pytest.raises(StreamClosed):
        expected.wait(soon())


def test_a_stream_that_nobody_fetched_ends_with_its_ticket(met: Meeting) -> None:
    expected = met.listener.expect()
    sender = met.dial(expected.ticket)
    with expected._changed:
        assert expected._changed.wait_for(lambda: expected._receiver is not None, 20)
    expected.cancel()
    with pytest.raises(TensorStreamError):
        until_it_breaks(sender)


def test_another_node_at_the_address_is_not_taken_for_the_one_meant(met: Meeting) -> None:
    other = met.fleet.member("other")
    with pytest.raises(NodeUnreachable, match=r"other can't be reached .*Hostname mismatch"):
        met.dial(met.listener.expect().ticket, far=other)


def test_addresses_are_tried_in_turn(met: Meeting) -> None:
    expected = met.listener.expect()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = f"127.0.0.1:{gone.getsockname()[1]}"
    dial([nobody, "nonsense", met.address], met.far.member, expected.ticket, met.near, lambda *_: False, soon()).close()
    with pytest.raises(NodeUnreachable, match=nobody):
        dial([nobody], met.far.member, expected.ticket, met.near, lambda *_: False, soon())
    with pytest.raises(NodeUnreachable, match="no addresses"):
        dial([], met.far.member, expected.ticket, met.near, lambda *_: False, soon())


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4000, tensor_start(0, 0, 2, 1, (1,), 2) + b"xx", close(0, ""), hello(bytes(32))[:-1] + b"\1"],
)
def test_who_says_no_hello_is_cut(met: Meeting, said: bytes) -> None:
    end = tls(met)
    end.sendall(said)
    cut_off(end)
    assert [who for who, _ in met.refusals.first(1)] == ["near"]


def test_tensors_before_the_welcome_end_the_stream(met: Meeting) -> None:
    expected = met.listener.expect()
    end = tls(met)
    end.sendall(hello(expected.ticket) + tensor_start(0, 0, 2, 1, (1,), 2) + b"xx")
    cut_off(end)
    assert "went on before it was welcome" in met.refusals.first(1)[0][1]


def test_silent_callers_are_turned_away_in_time(met: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELLO_S", 0.1)
    with socket.create_connection(("127.0.0.1", met.listener.port), timeout=100) as silent:
        assert silent.recv(1) == b""
    with tls(met) as half:
        assert cut_off(half)
    assert [why for _, why in met.refusals.first(2)] == ["it said no hello in time [activations]"] * 2


def test_a_flood_of_silent_callers_keeps_no_member_out(met: Meeting) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", met.listener.port), timeout=100)) for _ in range(200)]
        sender, receiver = met.stream()
        assert len(met.listener._newcomers) <= module.MAX_NEWCOMERS
        sender.send(b"through", np.zeros(1, np.uint16), soon())
        assert receiver.receive(soon()).header == b"through"
        assert silent[0].recv(1) == b""


def test_callers_that_come_at_once_all_come_through(met: Meeting) -> None:
    expected = [met.listener.expect() for _ in range(12)]
    threads = [threading.Thread(target=lambda ticket=one.ticket: met.dial(ticket)) for one in expected]
    for thread in threads:
        thread.start()
    assert len({one.wait(soon()) for one in expected}) == 12
    for thread in threads:
        thread.join()


def test_closing_ends_everything(met: Meeting) -> None:
    gc.collect()
    descriptors = len(list(Path("/dev/fd").iterdir()))
    with meeting(met.fleet) as another:
        sender, receiver = another.stream()
        waited_for = another.listener.expect()
        silent = socket.create_connection(("127.0.0.1", another.listener.port), timeout=100)
        another.listener.close()
        with pytest.raises(StreamClosed):
            receiver.receive(soon())
        with pytest.raises(StreamClosed):
            waited_for.wait(soon())
        with pytest.raises(StreamClosed):
            another.listener.expect()
        silent.close()
        sender.close()
        assert not another.listener._thread.is_alive()
        assert not another.listener._streams
    another.listener.close()
    assert len(list(Path("/dev/fd").iterdir())) == descriptors


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_ticket_is_spent_by_the_welcome(met: Meeting, monkeypatch: pytest.MonkeyPatch, *, cancelled: bool) -> None:
    """A connection that breaks before it leaves the ticket valid, unless the session cancelled it."""
    expected, go_on = met.listener.expect(), module.Newcomer.go_on

    def break_off(newcomer: module.Newcomer, admit: Any) -> module.Wants | bytes:
        step = go_on(newcomer, admit)
        if isinstance(step, bytes):
            newcomer.sock.shutdown(socket.SHUT_RDWR)
            if cancelled:
                expected.cancel()
        return step

    with monkeypatch.context() as broken:
        broken.setattr(module.Newcomer, "go_on", break_off)
        with pytest.raises(TensorStreamError):
            met.dial(expected.ticket)
    if cancelled:
        with pytest.raises(TensorStreamError, match="unknown"):
            met.dial(expected.ticket)
        return
    sender = met.dial(expected.ticket)
    expected.wait(soon()).close()
    with pytest.raises(TensorStreamError, match="was used"):
        met.dial(expected.ticket)
    sender.close()


def test_a_port_that_is_taken_is_an_error(met: Meeting) -> None:
    second = module.TensorListener(met.far, met.fleet.revocations.voids, met.fleet.clock, met.refusals)
    with pytest.raises(ConfigError, match="Cannot listen"):
        second.start("127.0.0.1", met.listener.port)
    second.close()


def test_a_name_with_several_addresses_leaves_time_for_the_next_one(met: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, resolve, waits = socket.create_connection, socket.getaddrinfo, list[float]()

    def create_connection(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[0] == "192.0.2.1":
            waits.append(timeout)
            raise TimeoutError
        return connect(address, timeout)

    def getaddrinfo(host: str, *args: Any, **kw: Any) -> list[Any]:
        return [found for each in ("192.0.2.1", "127.0.0.1") for found in resolve(each if host == "far.example" else host, *args, **kw)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "create_connection", create_connection)
    monkeypatch.setattr(dialling, "leads_here", lambda _: False)  # only loopback answers in a test
    expected = met.listener.expect()
    address = f"far.example:{met.listener.port}"
    dial([address], met.far.member, expected.ticket, met.near, met.fleet.revocations.voids, soon()).close()
    assert waits == [dialling.ADDRESS_S]


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f000001", "evil.example"])
def test_a_name_that_leads_to_loopback_is_not_dialled(met: Meeting, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *args, **kw: resolve("127.0.0.1" if host == "evil.example" else host, *args, **kw)
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        address = f"{host}:{listening.getsockname()[1]}"
        with pytest.raises(NodeUnreachable, match="itself"):
            dial([address], met.far.member, bytes(32), met.near, met.fleet.revocations.voids, soon())
        with pytest.raises(BlockingIOError):
            listening.accept()
