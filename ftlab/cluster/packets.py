"""Real packet loss between processes of one machine: socket filters that drop everything that arrives.

A partitioned node's sockets get a one-instruction filter ("accept 0 bytes"), and so does the other end of each of its
connections, so packets are lost both ways; TCP sees silence, not an error. With filters at one end only, packets are
lost one way only; with a filter that draws a random number, some of them are. The filters are attached from outside, to
copies of the sockets (pidfd_getfd), so the node cannot notice. Connections that are opened while the partition lasts
are caught by `refresh`, which the launcher calls many times a second; the controller's port refuses the node's address
from the first packet on. Needs Linux and the right to trace one's own children; `available` tries it for real.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

_SYS_PIDFD_GETFD = 438
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_GET_FILTER = 26, 27, 26
_LISTEN = "0A"
_LD_ABS_W, _JEQ, _JGE, _RET = 0x20, 0x15, 0x35, 0x06
_IP_SOURCE = (-0x100000 + 12) & 0xFFFFFFFF  # SKF_NET_OFF: the source address in the IP header
_RANDOM = (-0x1000 + 56) & 0xFFFFFFFF  # SKF_AD_OFF + SKF_AD_RANDOM
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclass
class Cut:
    """One partition, or one bad link: the filtered sockets, kept open so that they can be healed."""

    node: str  # or several, separated by commas
    address: str  # theirs, in the same order
    way: str = ""  # "sends" or "receives": only what these nodes send, or receive, is lost
    loss: float = 1.0  # the share of packets that is lost
    sockets: dict[int, socket.socket] = field(default_factory=dict)  # by inode

    def refresh(self, inside: Iterable[int], outside: Iterable[int], gate: socket.socket | None = None) -> int:
        """Filter all connections between processes `inside` and the rest, new ones too; how many are filtered."""
        sends, receives = self.way in ("", "sends"), self.way in ("", "receives")
        group = self.address.split(",")
        if gate is not None and sends and -1 not in self.sockets:
            self.sockets[-1] = gate.dup()
            _attach(self.sockets[-1], drop_from(*group, loss=self.loss))
        ends = _connections()
        ours = _sockets_of(inside)
        theirs = _sockets_of(outside)
        twins = {(remote, local): inode for inode, (local, remote, _) in ends.items()}
        for inode, owner in ours.items():
            if inode not in ends:
                continue
            local, remote, state = ends[inode]
            twin = twins.get((local, remote))
            if twin in ours:
                continue  # among themselves
            if receives:
                self._filter(inode, owner, drop_except(*group, loss=self.loss) if state == _LISTEN else lose(self.loss))
            if sends and twin in theirs:
                self._filter(twin, theirs[twin], lose(self.loss))
        return len(self.sockets)

    def verify(self) -> int:
        """How many of the sockets the kernel reports as filtered."""
        return sum(_is_filtered(sock) for sock in self.sockets.values())

    def heal(self) -> int:
        """Remove the filters; TCP sends again what was lost."""
        count = len(self.sockets)
        for sock in self.sockets.values():
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            sock.close()
        self.sockets.clear()
        return count

    def _filter(self, inode: int, owner: tuple[int, int], program: bytes) -> None:
        if inode in self.sockets:
            return
        with contextlib.suppress(OSError):
            sock = _borrow(*owner)
            if os.fstat(sock.fileno()).st_ino != inode:
                sock.close()
                return
            _attach(sock, program)
            self.sockets[inode] = sock


def available() -> str:
    """Empty if partitions work here, else why not."""
    if sys.platform != "linux":
        return "needs Linux: socket filters are attached from outside with pidfd_getfd"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with _borrow(os.getpid(), server.fileno()) as copy:
                _attach(copy, DROP_ALL)
                if not _is_filtered(copy):
                    return "the kernel accepts a socket filter but does not keep it"
    except OSError as error:
        return f"the kernel refuses it: {error.strerror}"
    return ""


def _program(*instructions: tuple[int, int, int, int]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


_ACCEPT = (_RET, 0, 0, 0xFFFFFFFF)
DROP_ALL = _program((_RET, 0, 0, 0))


def lose(loss: float) -> bytes:
    """A filter that drops a share of all packets, by the kernel's random numbers."""
    if loss >= 1:
        return DROP_ALL
    return _program((_LD_ABS_W, 0, 0, _RANDOM), (_JGE, 0, 1, int(loss * (1 << 32))), _ACCEPT, (_RET, 0, 0, 0))


def drop_from(*addresses: str, loss: float = 1.0) -> bytes:
    """A filter that drops packets from some IPv4 addresses, or a share of them, and lets the others pass."""
    count = len(addresses)
    checks = [(_JEQ, count - place, 0, _number(address)) for place, address in enumerate(addresses)]
    return _program((_LD_ABS_W, 0, 0, _IP_SOURCE), *checks, _ACCEPT) + lose(loss)


def drop_except(*addresses: str, loss: float = 1.0) -> bytes:
    """A filter that lets packets from some IPv4 addresses pass, and drops the others, or a share of them."""
    others = lose(loss)
    after = len(addresses) + len(others) // 8
    checks = [(_JEQ, after - 1 - place, 0, _number(address)) for place, address in enumerate(addresses)]
    return _program((_LD_ABS_W, 0, 0, _IP_SOURCE), *checks) + others + _program(_ACCEPT)


def _number(address: str) -> int:
    return int(struct.unpack("!I", socket.inet_aton(address))[0])


def _attach(sock: socket.socket, program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program)
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER,
                    struct.pack("HL", len(program) // 8, ctypes.addressof(buffer)))


def _is_filtered(sock: socket.socket) -> bool:
    length = ctypes.c_uint32(0)
    assert _libc is not None
    return _libc.getsockopt(sock.fileno(), socket.SOL_SOCKET, _SO_GET_FILTER, None, ctypes.byref(length)) == 0 \
        and length.value > 0


def _borrow(pid: int, fd: int) -> socket.socket:
    """A copy of another process's socket."""
    assert _libc is not None
    handle = os.pidfd_open(pid)
    try:
        copy = _libc.syscall(_SYS_PIDFD_GETFD, handle, fd, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return socket.socket(fileno=copy)
    finally:
        os.close(handle)


def _sockets_of(pids: Iterable[int]) -> dict[int, tuple[int, int]]:
    """inode → (pid, descriptor) of the sockets of some processes."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    link = os.readlink(f"/proc/{pid}/fd/{name}")
                    if link.startswith("socket:["):
                        found[int(link[8:-1])] = (pid, int(name))
    return found


def _connections() -> dict[int, tuple[str, str, str]]:
    """inode → (local, remote, state) of the TCP sockets of this machine; IPv4 addresses in IPv6 dress included."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                found[int(fields[9])] = (fields[1][-13:], fields[2][-13:], fields[3])
    return found
