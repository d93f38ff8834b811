"""The launcher: a warm, single-threaded process that forks the controller and the nodes of one cluster.

It pays for `import torch` and the first optimizer step once; whatever it forks starts in milliseconds. (What imports
torch is imported inside of functions: containers are started before, and import their own meanwhile.) It leaves for the
cluster's private network, if it is to have one, before anything else. It holds the controller's listening sockets, so a
controller that died is replaced behind them, and callers only wait a moment. It restarts a controller that ends, tells
it of nodes that end, does what faults ask for, and when its owner is gone it ends everything and removes the cluster's
folder. Run as `python -m ftlab.cluster.launcher FOLDER OWNER_FD`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, NoReturn

from ftlab.cluster import private_network
from ftlab.cluster.delegation import settle
from ftlab.cluster.forks import describe_exit, ended_children, fork
from ftlab.cluster.gates import bridge_gate, file_gate, port_gate, url_of
from ftlab.cluster.launcher_settings import SETTINGS, SOCKET
from ftlab.cluster.nodes import Nodes
from ftlab.cluster.orphans import adopt_orphans, end_all_children, end_orphans
from ftlab.cluster.runs import write_card
from ftlab.cluster.socket_file import reachable
from ftlab.config import ClusterConfig
from ftlab.errors import FaultError, FtlabError

log = logging.getLogger(__name__)
_MAX_CONTROLLER_DEATHS = 10  # within a minute that nobody asked for: then something is wrong with the machine


class Launcher:
    """Owns all processes of one cluster."""

    def __init__(self, folder: Path, owner: Connection | None) -> None:
        settings = json.loads((folder / SETTINGS).read_text())
        self.folder, self.owner = folder, owner
        self.cluster: str = settings["cluster"]
        self.token: str = settings["token"]
        self.detached: bool = settings["detached"]
        self.config = ClusterConfig.from_dict(settings["config"])
        self.selector = selectors.DefaultSelector()
        self.over = False
        self._serving = False
        self.nodes: Nodes
        self.controller_pid = 0
        self._controller: Connection | None = None
        self._deaths: list[float] = []  # of controllers, that nobody had asked for
        self._victim = 0  # a controller that is killed on purpose

    def run(self) -> None:
        """Start everything and serve until the cluster is closed."""
        if self.config.backend == "process":
            settle()  # before it has children
        self._open_gates()
        self._watch_children()
        if self.config.backend == "docker":
            self._make_containers()  # they take a while, and need nothing of what is done meanwhile
        self._tell_owner(progress="importing torch")
        self._import_torch()
        self._tell_owner(progress="starting the controller and the nodes")
        with reachable(self.folder / SOCKET) as name:
            self.listener = Listener(name, family="AF_UNIX", authkey=self.token.encode())
        self._start_controller()
        if self.config.backend == "process":
            self._make_processes()
        else:
            self._tell_controller(alive=self.nodes.names())
        write_card(self.folder, {"cluster": self.cluster, "url": self.url, "token": self.token,
                                 "launcher_pid": os.getpid(), "config": self.config.to_dict(),
                                 "folder": str(self.folder), "detached": self.detached})
        self._tell_owner(ready=self.url)
        self._serve()

    def close(self) -> None:
        """End all processes and remove the folder; may be called twice."""
        self.over = True
        if self.controller_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.controller_pid, signal.SIGKILL)
        if hasattr(self, "nodes"):
            self.nodes.close()
        end_all_children()
        if hasattr(self, "listener"):
            with contextlib.suppress(FileNotFoundError):  # its name in a deep folder was only lent
                self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open_gates(self) -> None:
        """Listen for clients; then leave for the private network, and listen for nodes there."""
        try:
            self.gates = [file_gate(self.folder)]
            if self.config.port is not None:
                self.gates.append(port_gate(self.config.port))
            self.url = url_of(self.gates[-1], self.folder)
            if self.config.network == "private":
                private_network.enter()
                self.gates.append(port_gate())
            elif self.config.backend == "process" and self.config.port is None:
                self.gates.append(port_gate())
        except FtlabError as error:
            self._give_up(error)

    def _give_up(self, error: FtlabError) -> NoReturn:
        self._tell_owner(failed=error.to_dict())
        sys.exit(1)

    def _import_torch(self) -> None:
        if self.config.backend == "process":
            from ftlab.train.worker import warm_up

            warm_up()  # what is forked from here is warm
        else:
            import torch.distributed  # noqa: F401  the controller's store needs it; containers warm up themselves

    def _make_processes(self) -> None:
        from ftlab.cluster.processes import ProcessNodes

        self.nodes = ProcessNodes(subnet=1 + int(self.cluster[-2:], 16) % 254, token=self.token,
                                  controller=url_of(self.gates[-1], self.folder), config=self.config,
                                  logs=self.folder / "logs", gate=self.gates[-1], reap=self._reap,
                                  on_exit=self._node_exited)
        self._start_nodes()

    def _make_containers(self) -> None:
        from ftlab.cluster.container_faults import ContainerNodes

        self._tell_owner(progress="preparing the network and the image")
        try:
            self.nodes = nodes = ContainerNodes(
                cluster=self.cluster, folder=self.folder, config=self.config, token=self.token, reap=self._reap,
                watch=self._attend, unwatch=self._ignore, say=self._tell_controller)
            self.gates.append(bridge_gate(nodes.open()))
        except FtlabError as error:
            self._give_up(error)
        nodes.join_at(url_of(self.gates[-1], self.folder))
        self._start_nodes()

    def _start_nodes(self) -> None:
        for number in range(self.config.nodes + self.config.spares):
            self.nodes.start(f"node-{number}")

    def _attend(self, fd: int, act: Callable[[], None]) -> None:
        self.selector.register(fd, selectors.EVENT_READ, act)

    def _ignore(self, fd: int) -> None:
        self.selector.unregister(fd)

    # ---- serving -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._serving = True
        listening = self.listener._listener._socket  # type: ignore[attr-defined]
        self.selector.register(listening, selectors.EVENT_READ, self._accept)
        if self.owner is not None:
            self.selector.register(self.owner, selectors.EVENT_READ, self._hear_owner)
        while not self.over:
            for key, _ in self.selector.select(self.nodes.next_chore(time.monotonic())):
                if not self.over:
                    key.data()
            self.nodes.do_chores(time.monotonic(), self._everybody_but)

    def _accept(self) -> None:
        try:
            client = self.listener.accept()
        except (OSError, EOFError, AuthenticationError):
            return
        self.selector.register(client, selectors.EVENT_READ, lambda: self._hear_client(client))

    def _hear_client(self, client: Connection) -> None:
        try:
            request = json.loads(client.recv_bytes())
        except (EOFError, OSError):
            self.selector.unregister(client)
            client.close()
            return
        try:
            answer = self._obey(request)
        except FtlabError as error:
            answer = {"failed": error.to_dict()}
        except Exception as error:
            answer = {"failed": FaultError(f"{type(error).__name__}: {error}").to_dict()}
        with contextlib.suppress(OSError):
            client.send_bytes(json.dumps(answer).encode())

    def _hear_owner(self) -> None:
        assert self.owner is not None
        try:
            self.owner.recv_bytes()
        except (EOFError, OSError):
            self.selector.unregister(self.owner)
            self.owner.close()
            self.owner = None
            if not self.detached:
                self.over = True

    def _hear_controller(self) -> None:
        assert self._controller is not None
        try:
            request = json.loads(self._controller.recv_bytes())
        except (EOFError, OSError):
            self.selector.unregister(self._controller)
            self._controller.close()
            self._controller = None
            return
        try:
            self._obey(request)
        except FtlabError as error:
            log.info("%s: %s", request, error.message)

    def _obey(self, request: dict[str, Any]) -> dict[str, Any]:
        from ftlab.train.trap import SIGNALS

        what, node = str(request.get("do")), str(request.get("node", ""))
        plain: dict[str, Callable[[str], dict[str, Any]]] = {
            "start_node": self.nodes.start, "remove_node": self.nodes.remove, "kill": self.nodes.kill,
            "hang": self.nodes.hang, "resume": self.nodes.resume, "heal": self.nodes.heal,
            "speed_up": self.nodes.speed_up, "make_room": self.nodes.make_room, "mend": self.nodes.mend,
            "disk": self.nodes.fill, "empty": self.nodes.empty}
        if what in plain:
            return plain[what](node)
        if what == "cut":
            return self.nodes.cut(node, str(request.get("way", "")), self._everybody_but)
        if what == "link":
            loss, delay_ms, rate_mbit = (float(request[name]) for name in ("loss", "delay_ms", "rate_mbit"))
            return self.nodes.worsen(node, loss, delay_ms, rate_mbit, self._everybody_but)
        if what == "crash":
            return self.nodes.crash(node, int(request["pid"]))
        if what in ("squeeze", "cage"):
            do = self.nodes.squeeze if what == "squeeze" else self.nodes.cage
            return do(node, int(request["pid"]), int(request["room_mb"]))
        if what == "straggler":
            return self.nodes.slow_down(node, int(request["pid"]), float(request["share"]))
        if what in SIGNALS:
            return self.nodes.spring(node, int(request["pid"]), what)
        if what in ("kill_all", "hang_all"):
            return (self.nodes.kill_all if what == "kill_all" else self.nodes.hang_all)()
        if what == "kill_controller":
            return self._kill_controller()
        if what == "close":
            self.close()
            return {"closed": self.cluster}
        raise FaultError(f"the launcher cannot {what!r}")

    # ---- children ------------------------------------------------------------------------------------------

    def _watch_children(self) -> None:
        adopt_orphans()  # of killed nodes
        waker, alarm = os.pipe()
        os.set_blocking(alarm, False)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_term)

        def wake() -> None:
            os.read(waker, 4096)
            self._reap()

        self.selector.register(waker, selectors.EVENT_READ, wake)

    def _on_term(self, number: int, frame: Any) -> None:
        self.over = True
        if not self._serving:
            sys.exit(1)  # while starting: `close` ends what is there

    def _start_controller(self) -> None:
        from ftlab.cluster.control import run_controller

        mine, theirs = Pipe()
        self.controller_pid = fork(
            lambda: run_controller(self.config, self.token, self.folder, self.gates, theirs),
            keep=(*(gate.fileno() for gate in self.gates), theirs.fileno()), new_session=True)
        theirs.close()
        self._controller = mine
        self.selector.register(mine, selectors.EVENT_READ, self._hear_controller)

    def _reap(self) -> None:
        """Collect all children that have ended: the controller, nodes, and orphans of killed nodes, which are ended."""
        ended = list(ended_children())
        for pid, status in ended:
            if pid == self.controller_pid:
                self._controller_ended(status)
            else:
                self.nodes.ended(pid, status)
        if ended and self.config.backend == "process":
            end_orphans({self.controller_pid, *(self.nodes.agents() if hasattr(self, "nodes") else ())})

    def _controller_ended(self, status: int) -> None:
        asked, self.controller_pid, self._victim = self.controller_pid == self._victim, 0, 0
        if self._controller is not None:
            self.selector.unregister(self._controller)
            self._controller.close()
            self._controller = None
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < 60] + ([] if asked else [now])
        log.warning("the controller %s", describe_exit(status))
        if len(self._deaths) > _MAX_CONTROLLER_DEATHS:
            self.over = True
        if not self.over:
            self._start_controller()
            self._tell_controller(alive=self.nodes.names())

    def _kill_controller(self) -> dict[str, Any]:
        victim, at = self.controller_pid, time.monotonic()
        self._victim = victim
        os.kill(victim, signal.SIGKILL)
        while self.controller_pid == victim:
            self._reap()
            time.sleep(0.001)
        return {"at": at, "pids": [victim], "status": "killed by SIGKILL", "restarted": self.controller_pid}

    def _node_exited(self, name: str, how: str) -> None:
        self._tell_controller(exited=name, how=how)

    def _tell_controller(self, **news: Any) -> None:
        if self._controller is not None:
            with contextlib.suppress(OSError):
                self._controller.send_bytes(json.dumps(news).encode())

    def _tell_owner(self, **news: Any) -> None:
        if self.owner is not None:
            with contextlib.suppress(OSError):
                self.owner.send_bytes(json.dumps(news).encode())

    def _everybody_but(self, group: Collection[str]) -> list[int]:
        others = [pid for name in self.nodes.names() if name not in group for pid in self.nodes.pids(name)]
        return [self.controller_pid, *others]


def serve_cluster(folder: Path, owner: Connection | None) -> None:
    """The whole life of a launcher."""
    launcher = Launcher(folder, owner)
    try:
        launcher.run()
    finally:
        launcher.close()


def main() -> None:
    """Entry point of the launcher process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    owner = int(sys.argv[2])
    serve_cluster(Path(sys.argv[1]), Connection(owner) if owner >= 0 else None)


if __name__ == "__main__":
    main()
