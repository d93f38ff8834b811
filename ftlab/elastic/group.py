"""A process group that can be cut from outside and built again in the same process.

gloo cannot interrupt a collective that waits for a silent peer, so `sever` shuts down the very sockets the group
opened, from another thread; the blocked call raises within milliseconds and the process lives on (NCCL has an abort
of its own, which is used for CUDA groups; that path could not be tried without a GPU). Each generation has its own
store prefix, so nothing that an earlier one left behind is ever read.

Guarantees: after `sever` every call on the group raises, also calls that begin later; sockets that others opened are
not touched. The group binds to this node's own address.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ftlab.membership import RankTable

BACKEND = "ftlab_gloo"
CONNECT_TIMEOUT = timedelta(minutes=5)  # for all members to connect, and for one send or receive
TIMEOUT = timedelta(hours=2)  # the controller ends a wait long before; this is for a world without one
_READS_FIRST_S = 0.02
_FDS = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
_HANGUP = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)
_built: Any = None  # the group that torch is to register next; set by `connect`
_buried: list[Any] = []  # the group that was left last


class GroupSevered(RuntimeError):
    """The group was cut before or while it was being built."""


class Group:
    """The process group of one generation: made unconnected, so that it can be severed from its first moment on."""

    def __init__(self, table: RankTable, rank: int, store: tuple[str, int]) -> None:
        self.table, self.rank, self.store_address = table, rank, store
        self.severed = False
        self._severed_at = 0.0
        self._before = {(fd, inode) for fd, inode, _ in _tcp_sockets()}
        self._own: set[tuple[int, int]] | None = None  # known once connected
        self._adopted: set[tuple[int, int]] = set()
        self._store_sockets: set[tuple[int, int]] = set()  # a dead store is no lost peer
        self.store: Any = None
        self._gloo: Any = None

    def open_store(self) -> None:
        """Connect to the store that the controller hosts."""
        host, port = self.store_address
        self._check()
        before = {(fd, inode) for fd, inode, _ in _tcp_sockets()}
        self.store = self._make(lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False,
                                                      timeout=CONNECT_TIMEOUT))
        self.store.set_timeout(TIMEOUT)
        self._store_sockets = {(fd, inode) for fd, inode, _ in _tcp_sockets()} - before

    def connect(self) -> None:
        """Build the group with all members of the table; blocks until all are there or the group is severed."""
        global _built
        _register_backend()
        prefix = dist.PrefixStore(f"generation-{self.table.generation}", self.store)
        self._gloo = _built = self._build_gloo(prefix)
        backend = f"cpu:{BACKEND},cuda:nccl" if torch.cuda.is_available() else BACKEND
        dist.init_process_group(backend, store=prefix, rank=self.rank, world_size=self.table.world, timeout=TIMEOUT)
        self._own = {(fd, inode) for fd, inode, _ in _tcp_sockets()} - self._before
        self._check()

    def _build_gloo(self, store: Any) -> Any:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = CONNECT_TIMEOUT
        options._threads = 2
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.table.seats[self.rank].address)]
        group = self._make(lambda: dist.ProcessGroupGloo(store, self.rank, self.table.world, options))
        group._set_default_timeout(TIMEOUT)
        return group

    def _make(self, make: Callable[[], Any]) -> Any:
        """What `make` returns, made by a thread of its own: gloo may wait for a peer that will never call, and the
        store's client for a controller that died, on no socket that could be cut. A severed attempt is left behind
        and ends by its own timeout."""
        outcome: Future[Any] = Future()
        threading.Thread(target=_deliver, args=(outcome, make), name="ftlab-connect", daemon=True).start()
        while not (self.severed or outcome.done()):
            wait([outcome], timeout=0.005)
        self._check()
        return outcome.result()

    def sever(self) -> None:
        """Cut the group's connections, from any thread; repeat it until the training thread has noticed.

        At first only what is to be read: gloo then finds the end of the stream, and every wait on it raises. If it
        could not write either, it would forget a send whose peer is just saying that it is ready for it.
        """
        self.severed = True
        self._severed_at = self._severed_at or time.monotonic()
        self._shut(reads_only=time.monotonic() - self._severed_at < _READS_FIRST_S)
        if torch.cuda.is_available() and self._own is not None:
            with contextlib.suppress(Exception):
                dist.distributed_c10d._abort_process_group()

    def adopt(self, sock: socket.socket) -> None:
        """Let `sever` cut this connection too."""
        if self._own is not None:
            self._adopted.add((sock.fileno(), os.fstat(sock.fileno()).st_ino))
        self._check()

    def broken(self) -> bool:
        """Whether a connection of the group is gone: tells a lost peer from a bug in the train function."""
        if self.severed:
            return True
        own, seen, poll = (self._own or set()) - self._store_sockets, set(), select.poll()
        for fd, inode, sock in _tcp_sockets():
            if (fd, inode) in own:
                seen.add((fd, inode))
                if _is_connected(sock):
                    poll.register(fd, _HANGUP)
        return seen != own or bool(poll.poll(0))  # gloo closes a connection that failed

    def collectives(self) -> int:
        """How many collectives this rank has begun in the group, whoever called them."""
        return int(self._gloo._get_sequence_number_for_group()) if self._gloo is not None else 0

    def close(self) -> None:
        """Leave the group, without waiting for it to be taken apart; may be called twice."""
        self._shut(reads_only=False)  # the others shall learn it now
        if dist.is_initialized():
            dist.destroy_process_group()
        # A group that failed while it was being built counts all the same, and the count is part of the keys under
        # which members look for each other: those who failed and those who are new would never meet.
        dist.distributed_c10d._world.group_count = 0
        _bury(self._gloo)
        self.store = self._gloo = None

    def _shut(self, reads_only: bool) -> None:
        for fd, inode, sock in _tcp_sockets():
            ours = (fd, inode) not in self._before and (self._own is None or (fd, inode) in self._own | self._adopted)
            if ours and _is_connected(sock):  # not a listener: gloo aborts the process when accept() fails
                gently = reads_only and (fd, inode) not in self._adopted
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RD if gently else socket.SHUT_RDWR)

    def _check(self) -> None:
        if self.severed:
            raise GroupSevered(f"generation {self.table.generation} is over")


def _bury(gloo: Any) -> None:
    """Let go of a group that was left, in a thread of its own: gloo joins its threads then, and one that lost a send
    never ends. The last one is kept until the next: a DDP wrapper may still hold on to it, and would wait with the GIL.
    """
    if gloo is None:
        return
    before, _buried[:] = _buried[:], [gloo]
    threading.Thread(target=before.clear, name="ftlab-bury", daemon=True).start()


def _register_backend() -> None:
    if BACKEND.upper() not in dir(dist.Backend):
        dist.Backend.register_backend(BACKEND, _hand_over, devices=["cpu"])


def _hand_over(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """What torch calls to make a group of our backend: it is already there."""
    global _built
    group, _built = _built, None
    return group


def _deliver(outcome: Future[Any], make: Callable[[], Any]) -> None:
    try:
        outcome.set_result(make())
    except Exception as error:
        outcome.set_exception(error)


def _tcp_sockets() -> Iterator[tuple[int, int, socket.socket]]:
    """(descriptor, inode, socket) of every TCP socket of this process; the socket is valid until the next one."""
    for name in os.listdir(_FDS):
        fd = int(name)
        try:
            found = os.fstat(fd)
            if not stat.S_ISSOCK(found.st_mode):
                continue
            copy = os.dup(fd)
        except OSError:
            continue  # closed meanwhile
        with socket.socket(fileno=copy) as sock:
            same = os.fstat(copy).st_ino == found.st_ino
            if same and sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield fd, found.st_ino, sock


def _is_connected(sock: socket.socket) -> bool:
    """Whether it is (or was) a connection; a listener has no peer to lose."""
    return not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
