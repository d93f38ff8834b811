"""The controller's process: its server, its store, and its pipe to the launcher, which starts nodes for it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

from ftlab.cluster.launcher_settings import DETECTOR
from ftlab.cluster.private_network import give_up_rights
from ftlab.config import ClusterConfig
from ftlab.events import EventLog
from ftlab.health.own import MakeOwn
from ftlab.policy import Policy
from ftlab.recovery.controller import Controller
from ftlab.recovery.restore import restore
from ftlab.recovery.server import ControlServer

JOURNAL = "journal.jsonl"
_NEWS = {"created": "node.created", "removed": "node.removed", "oom": "node.oom_killed"}  # of containers


def run_controller(config: ClusterConfig, token: str, folder: Path, gates: list[socket.socket],
                   launcher: Connection, launched: bool = True) -> int:
    """The whole life of a controller; returns its exit code. The last of the gates is the one that nodes knock at.
    `launched`: the launcher has started all nodes already; else they come by themselves."""
    if config.network == "private":
        give_up_rights()
    asyncio.run(_ControlProcess(config, token, folder, gates, launcher, launched).run())
    return 0


class _ControlProcess:
    """Wires controller, server, store and launcher together."""

    def __init__(self, config: ClusterConfig, token: str, folder: Path, gates: list[socket.socket],
                 launcher: Connection, launched: bool) -> None:
        self.config, self.token, self.folder, self.gates, self.launcher = config, token, folder, gates, launcher
        self._launched = launched
        self._opening = threading.Lock()
        self._over = asyncio.Event()
        self._store: Any = None
        self._store_address = ("127.0.0.1", 0)

    async def run(self) -> None:
        """Serve until the launcher is gone."""
        loop = asyncio.get_running_loop()
        log = EventLog(self.folder / JOURNAL)
        controller = Controller(self.config, log, self, self._open_store, loop.call_later,
                                load_detector(self.folder / DETECTOR) if self.config.detector == "own" else None)
        server = ControlServer(controller, token=self.token, folder=self.folder, load_policy=load_policy,
                               shutdown=lambda: self._ask(do="close"))
        restored = restore(controller, server.policy_of)
        if not restored and self._launched:
            for number in range(self.config.nodes + self.config.spares):
                controller.roster.expect(f"node-{number}")
        log.record("controller.started", restored=restored, pid=os.getpid(), config=self.config.to_dict())
        if self._launched:
            self._open_store()
        else:  # nobody has imported torch for it: nodes and clients are served meanwhile
            threading.Thread(target=self._open_store, name="ftlab-store", daemon=True).start()
        loop.add_reader(self.launcher.fileno(), self._on_launcher, controller)
        server.start(self.gates)
        await self._over.wait()

    def start_node(self, name: str) -> None:
        """Ask the launcher for a node."""
        self._ask(do="start_node", node=name)

    def remove_node(self, name: str) -> None:
        """Have the launcher end a node."""
        self._ask(do="remove_node", node=name)

    def _ask(self, **request: Any) -> None:
        self.launcher.send_bytes(json.dumps(request).encode())

    def _on_launcher(self, controller: Controller) -> None:
        try:
            while self.launcher.poll():
                news = json.loads(self.launcher.recv_bytes())
                if "exited" in news:
                    controller.node_exited(news["exited"], news["how"])
                for kind, name in _NEWS.items():
                    if kind in news:
                        controller.log.record(name, source=news.pop(kind), **news)
                if "alive" in news:
                    for name in set(controller.roster.nodes) - set(news["alive"]):
                        controller.node_exited(name, "ended while the controller was away")
        except (EOFError, OSError):
            self._over.set()

    def _open_store(self) -> tuple[str, int]:
        """The TCPStore's address: where nodes reach it, and nowhere else. It lives as long as this process."""
        with self._opening:
            if self._store is None:
                from torch.distributed import TCPStore

                listener = socket.create_server((self.gates[-1].getsockname()[0], 0), backlog=512)
                host, port = listener.getsockname()
                self._store = TCPStore(host, port, is_master=True, wait_for_workers=False,
                                       master_listen_fd=listener.detach())
                self._store_address = (host, port)
        return self._store_address


def load_policy(raw: bytes) -> Policy:
    """A policy that a client holding the token has sent."""
    policy: Policy = cloudpickle.loads(raw)
    return policy


def load_detector(path: Path) -> MakeOwn:
    """The detector that the owner of this cluster has written; one that cannot be loaded fails when it is made."""
    try:
        make: MakeOwn = cloudpickle.loads(path.read_bytes())
        return make
    except Exception as error:
        problem = error

    def fail() -> Any:
        raise problem

    return fail
