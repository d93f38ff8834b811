"""Real packet loss between two processes of this machine: silence without an error, and all of it when it heals."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator

import pytest

from ftlab.cluster import packets
from ftlab.cluster.packets import Cut
from tests.limits import SOON_S

SILENCE_S = 0.15


@pytest.fixture(autouse=True)
def filters(require):
    reason = packets.available()
    require("filters", not reason, reason)


@contextlib.contextmanager
def echo(address: str = "127.0.0.1") -> Iterator[tuple[socket.socket, int]]:
    """A connection to another process that sends back whatever it gets, and that process's id."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        gate = server.getsockname()
        pid = os.fork()
        if pid == 0:
            try:
                server.close()
                signal.alarm(int(SOON_S) * 2)
                with socket.create_connection(gate, source_address=(address, 0)) as there:
                    while data := there.recv(1 << 16):
                        there.sendall(data)
            finally:
                os._exit(0)
        here, _ = server.accept()
    try:
        with here:
            yield here, pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def hears(sock: socket.socket, seconds: float) -> bytes:
    """What arrives within some seconds; nothing if nothing does."""
    return sock.recv(100) if select.select([sock], [], [], seconds)[0] else b""


def test_a_cut_makes_both_ends_silent_and_healing_resends_what_was_lost():
    with echo() as (here, pid):
        here.sendall(b"before")
        assert hears(here, SOON_S) == b"before"
        cut = Cut("node-1", "127.0.0.1")
        both = cut.refresh(inside=[pid], outside=[os.getpid()])  # more if the child inherited other connections
        assert both == cut.verify() >= 2 and os.fstat(here.fileno()).st_ino in cut.sockets, "both ends are filtered"
        here.sendall(b"meanwhile")
        assert hears(here, SILENCE_S) == b"", "silence, and no error"
        assert cut.refresh([pid], [os.getpid()]) == both, "looking again adds nothing"
        assert cut.heal() == both
        assert hears(here, SOON_S) == b"meanwhile"
        assert cut.verify() == 0 and cut.heal() == 0


def test_a_cut_leaves_other_processes_alone():
    with echo() as (lost, lost_pid), echo() as (fine, _):
        cut = Cut("node-1", "127.0.0.1")
        cut.refresh([lost_pid], [os.getpid()])
        lost.sendall(b"x")
        fine.sendall(b"y")
        assert hears(fine, SOON_S) == b"y" and hears(lost, SILENCE_S) == b""
        cut.heal()
        assert hears(lost, SOON_S) == b"x"


def test_connections_that_are_opened_later_are_caught_by_the_next_look():
    cut = Cut("node-1", "127.0.0.1")
    with echo() as (first, agent):
        before = cut.refresh([agent], [os.getpid()])
        with echo() as (second, worker):
            second.sendall(b"seen")
            assert hears(second, SOON_S) == b"seen"
            assert cut.refresh([agent, worker], [os.getpid()]) == cut.verify() >= before + 2
            for sock in (first, second):
                sock.sendall(b"x")
            assert hears(first, SILENCE_S) + hears(second, 0) == b""
            cut.heal()
            assert hears(first, SOON_S) == hears(second, SOON_S) == b"x"


def test_a_process_that_is_gone_is_no_problem():
    with echo() as (_, pid):
        pass
    cut = Cut("node-1", "127.0.0.1")
    assert cut.refresh([pid], [os.getpid()]) == 0 == cut.heal()


def test_a_filter_on_one_address_lets_the_others_pass():
    with echo("127.0.1.7") as (lost, _), echo("127.0.1.8") as (fine, _):
        for sock in (lost, fine):
            packets._attach(sock, packets.drop_from("127.0.1.7"))
            sock.sendall(b"hello")
        assert hears(fine, SOON_S) == b"hello"
        assert hears(lost, SILENCE_S) == b""
        lost.setsockopt(socket.SOL_SOCKET, packets._SO_DETACH_FILTER, 0)
        assert hears(lost, SOON_S) == b"hello"


def test_a_gate_refuses_the_nodes_address_from_the_first_packet_on():
    with socket.create_server(("127.0.0.1", 0)) as gate:
        cut = Cut("node-1", "127.0.1.7")
        assert cut.refresh([], [], gate) == 1 == cut.verify()
        with socket.socket() as barred, pytest.raises(TimeoutError):
            barred.bind(("127.0.1.7", 0))
            barred.settimeout(SILENCE_S)
            barred.connect(gate.getsockname())
        with socket.create_connection(gate.getsockname(), source_address=("127.0.1.8", 0), timeout=SOON_S):
            pass
        cut.heal()
        with socket.create_connection(gate.getsockname(), source_address=("127.0.1.7", 0), timeout=SOON_S):
            pass
