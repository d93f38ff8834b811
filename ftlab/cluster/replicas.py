"""Replicas of snapshots on another node: the node's loss loses nothing that was in its memory.

A snapshot travels from agent to agent over a TCP connection of its own, on which both sides prove that they hold the
cluster's token. It is labelled, and so usable, only when all of it has arrived and its digest was found right.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from ftlab.checkpoint.arena import Slot
from ftlab.checkpoint.digest import digest

log = logging.getLogger(__name__)
_PATIENCE_S = 5  # with a buddy that does not move
_MAX_CARD = 64 << 10


class ReplicaServer:
    """Takes in other nodes' snapshots; `slot_for(card)` says where one goes, None that nobody here wants it."""

    def __init__(self, address: str, token: str, slot_for: Callable[[dict[str, Any]], Slot | None]) -> None:
        self._token, self._slot_for = token.encode(), slot_for
        self._server = socket.create_server((address, 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._run, name="ftlab-replicas", daemon=True).start()

    def _run(self) -> None:
        while True:
            sock, _ = self._server.accept()
            with contextlib.suppress(OSError, EOFError, AuthenticationError, ValueError):
                self._serve(sock)

    def _serve(self, sock: socket.socket) -> None:
        _limit(sock)
        with sock, Connection(os.dup(sock.fileno())) as connection:
            deliver_challenge(connection, self._token)
            answer_challenge(connection, self._token)
            card = json.loads(connection.recv_bytes(_MAX_CARD))
            slot = self._slot_for(card)
            connection.send_bytes(b"send" if slot else b"no")
            if slot is not None:
                _receive(sock, slot, card)
                connection.send_bytes(b"thanks")


def send_replica(address: str, port: int, source: str, token: str, card: dict[str, Any], data: memoryview) -> bool:
    """Send a snapshot to a buddy; whether it has it now."""
    key = token.encode()
    try:
        with (socket.create_connection((address, port), _PATIENCE_S, source_address=(source, 0)) as sock,
              Connection(os.dup(sock.fileno())) as connection):
            _limit(sock)
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            connection.send_bytes(json.dumps(card).encode())
            if connection.recv_bytes(16) != b"send":
                return False
            sock.sendall(data)
            return connection.recv_bytes(16) == b"thanks"
    except (OSError, EOFError, AuthenticationError) as error:
        log.info("the replica was not sent: %s", error)
        return False


def _limit(sock: socket.socket) -> None:
    """Let the kernel end a wait: the two ways of reading from this connection share it."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _PATIENCE_S, 0))


def _receive(sock: socket.socket, slot: Slot, card: dict[str, Any]) -> None:
    view = slot.reserve(int(card["bytes"]))
    left = view
    while len(left):
        count = sock.recv_into(left)
        if count == 0:
            raise EOFError
        left = left[count:]
    if digest(view) != card["digest"]:
        raise ValueError("the replica does not match its digest")
    slot.label(card)
