"""Training state from ranks that hold it to ranks that need it, in as few rounds as possible.

Receivers of one round are senders of the next, so feeding a whole new world from one rank takes log2(world) rounds,
and feeding one replacement takes one connection that nobody else takes part in.

The state travels over a TCP connection of its own, not through gloo: a gloo `recv` whose sender dies in mid-message
is not woken by the closed connection (tried; it waits for its timeout), a socket is. The two sides meet through the
generation's store and prove to each other that they know the generation's secret.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Protocol

import torch

_POLL_S = 0.02
_CONNECT_S = 30.0


class Severable(Protocol):
    """What a transfer needs to know of its group."""

    severed: bool

    def adopt(self, sock: socket.socket) -> None:
        """Let a cut of the group cut this connection too."""


@dataclass(frozen=True)
class Parcel:
    """A packed tree on its way: its digest, its header, its tensors."""

    digest: str
    header: bytes
    tensors: Sequence[torch.Tensor]


class TransferFailed(RuntimeError):
    """The other side is gone."""


def plan_transfers(holders: Sequence[int], receivers: Sequence[int]) -> list[tuple[int, int]]:
    """(sender, receiver) pairs in order; a receiver may send once it has received."""
    able, waiting = list(holders), list(receivers)
    pairs: list[tuple[int, int]] = []
    while waiting:
        batch, waiting = waiting[:len(able)], waiting[len(able):]
        pairs += zip(able, batch, strict=False)
        able += batch
    return pairs


def send(parcel: Parcel, address: str, store: Any, key: str, secret: bytes, group: Severable) -> None:
    """Wait for the receiver that asks under `key`, and send it a parcel."""
    with socket.create_server((address, 0), backlog=1) as server:
        store.set(key, f"{address}:{server.getsockname()[1]}")
        sock = _accept(server, group)
    with sock, Connection(os.dup(sock.fileno())) as connection:
        deliver_challenge(connection, secret)
        answer_challenge(connection, secret)
        connection.send_bytes(parcel.digest.encode() + parcel.header)
        for tensor in parcel.tensors:
            sock.sendall(_raw(tensor.detach().cpu().contiguous()))
        connection.recv_bytes()  # the receiver has it all


def receive(store: Any, key: str, secret: bytes, group: Severable, make_tensors: Any) -> Parcel:
    """Ask for the parcel under `key`; `make_tensors(header)` gives the tensors to receive into."""
    host, port = store.get(key).decode().rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=_CONNECT_S) as sock:
        sock.settimeout(None)
        group.adopt(sock)
        with Connection(os.dup(sock.fileno())) as connection:
            answer_challenge(connection, secret)
            deliver_challenge(connection, secret)
            raw = connection.recv_bytes()
            parcel = Parcel(raw[:64].decode(), raw[64:], make_tensors(raw[64:]))
            for tensor in parcel.tensors:
                _fill(sock, _raw(tensor))
            connection.send_bytes(b"thanks")
    return parcel


def _accept(server: socket.socket, group: Severable) -> socket.socket:
    server.settimeout(_POLL_S)
    while not group.severed:
        try:
            sock, _ = server.accept()
        except TimeoutError:
            continue
        sock.settimeout(None)
        group.adopt(sock)
        return sock
    raise TransferFailed("the generation ended before the receiver came")


def _fill(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        count = sock.recv_into(view)
        if count == 0:
            raise TransferFailed("the sender is gone")
        view = view[count:]


def _raw(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
