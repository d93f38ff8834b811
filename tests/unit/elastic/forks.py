"""Ranks as forked processes of the test: each runs a function, sends back what it returns, and ends.

The function gets its rank and a `Line` to the test. A rank that raises fails the test with its traceback; a rank that
takes longer than `GROUP_S` is killed and the test fails.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.limits import GROUP_S, SOON_S


class Line:
    """A rank's line to the test, or the test's line to a rank."""

    def __init__(self, connection: Connection, pid: int = 0) -> None:
        self._connection, self._pid = connection, pid

    def tell(self, word: Any) -> None:
        try:
            self._connection.send(("word", word))
        except BrokenPipeError:  # it has ended: what it said last tells why
            kind, last = self._take()
            raise AssertionError(f"the rank ended with {kind}:\n{last}") from None

    def hear(self) -> Any:
        """The next word from the other end; raises if that is not what comes."""
        kind, word = self._take()
        assert kind == "word", f"expected a word, got {kind}:\n{word}"
        return word

    def result(self) -> Any:
        kind, value = self._take()
        assert kind == "result", f"the rank ended with {kind}:\n{value}"
        return value

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def _take(self) -> tuple[str, Any]:
        if not self._connection.poll(GROUP_S):
            os.kill(self._pid, signal.SIGABRT)  # it prints where all its threads are
            raise AssertionError(f"nothing was said for {GROUP_S:g} s; stderr says where the rank is")
        return self._connection.recv()


@contextlib.contextmanager
def ranks(work: Callable[[int, Line], Any], world: int) -> Iterator[list[Line]]:
    """Start `work(rank, line)` in one process per rank; the test's lines to them."""
    lines, pids = [], []
    try:
        for rank in range(world):
            mine, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                mine.close()
                _live(work, rank, theirs)
            theirs.close()
            lines.append(Line(mine, pid))
            pids.append(pid)
        yield lines
    finally:
        for line in lines:
            line._connection.close()
        _bury(pids)


def run(work: Callable[[int, Line], Any], world: int) -> list[Any]:
    """What every rank returns."""
    with ranks(work, world) as lines:
        return [line.result() for line in lines]


def host_store() -> tuple[dist.TCPStore, int]:
    """A store in this process, and its port. It has threads: this process must not fork any more."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False,
                         master_listen_fd=listener.detach()), port


@contextlib.contextmanager
def store_of_its_own() -> Iterator[int]:
    """The port of a store in a process of its own, as the controller hosts it: no rank is special."""
    def keep(rank: int, line: Line) -> None:
        kept, port = host_store()
        line.tell(port)
        signal.pause()
        del kept

    with ranks(keep, 1) as (keeper,):
        yield keeper.hear()
        keeper.kill()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Poll until something is true; fail with its name if it does not become so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        threading.Event().wait(0.005)


def _live(work: Callable[[int, Line], Any], rank: int, connection: Connection) -> None:
    signal.alarm(int(GROUP_S) + 5)
    faulthandler.enable(sys.__stderr__)
    try:
        torch.set_num_threads(1)
        connection.send(("result", work(rank, Line(connection))))
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send(("an error", traceback.format_exc()))
    finally:
        os._exit(0)


def _bury(pids: list[int]) -> None:
    deadline = time.monotonic() + SOON_S
    for pid in pids:
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            threading.Event().wait(0.005)
