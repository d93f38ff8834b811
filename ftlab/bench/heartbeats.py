"""Records heartbeats of real processes: on an idle machine, on one without a free core, of nodes that are stopped.

The controller keeps no record of single heartbeats, so this stands in for both ends of a node's link: one process per
node that sends the agent's heartbeat message and sleeps, as `NodeAgent` does, and one receiver that notes when each
arrived. Processes, sockets, load and SIGSTOP are real; the work of a real agent and a real controller beside the
heartbeats is missing, and so is the network between machines. How idle `idle` was depends on who else uses the machine:
how busy the processors were is noted in each trace.
"""

from __future__ import annotations

import ctypes
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import psutil

from ftlab import messages
from ftlab.errors import ClusterError, ConfigError, WaitTimeout
from ftlab.health.traces import CONDITIONS, Trace

INTERVAL_S = 0.1
NODES = 3
PAUSES_S = (0.3, 0.2, 0.4, 0.3, 0.8, 0.3, 0.2, 1.5)  # the dead limit is 0.7 s: most nodes are not given up
PAUSE_EVERY_S = 6.0  # on each node
_START_LIMIT_S = 30.0
_PR_SET_PDEATHSIG = 1


def record_traces(seconds: float = 60.0, nodes: int = NODES, conditions: Sequence[str] = CONDITIONS,
                  say: Callable[[str], None] = lambda text: None) -> list[Trace]:
    """One trace per condition and node, each so many seconds long; the conditions follow one another."""
    unknown = sorted(set(conditions) - set(CONDITIONS))
    if unknown or seconds <= 0 or nodes < 1:
        raise ConfigError(f"cannot record {nodes} nodes for {seconds:g} s under {', '.join(conditions) or 'nothing'}: "
                          f"conditions are {', '.join(CONDITIONS)}")
    traces = []
    for name in conditions:
        say(f"{name}: the heartbeats of {nodes} nodes for {seconds:g} s")
        with Receiver(nodes, busy=(os.cpu_count() or 1) + 1 if name == "loaded" else 0) as receiver:
            traces += receiver.record(name, seconds, pause_plan(seconds, nodes) if name == "paused" else [])
    return traces


def pause_plan(seconds: float, nodes: int) -> list[tuple[float, float, int]]:
    """Which node is stopped from when to when: short pauses, now and then a long one, never two nodes in step."""
    plan = []
    for node in range(nodes):
        begin, number = PAUSE_EVERY_S * (node + 1) / (nodes + 1), node
        while begin + PAUSES_S[number % len(PAUSES_S)] < seconds:
            plan.append((begin, begin + PAUSES_S[number % len(PAUSES_S)], node))
            begin, number = begin + PAUSE_EVERY_S, number + 1
    return sorted(plan)


class Receiver:
    """Owns the nodes' processes, and the busy ones that keep them from a core; notes when heartbeats arrive."""

    def __init__(self, nodes: int, busy: int) -> None:
        self.names = [f"node-{number}" for number in range(nodes)]
        self._busy_count = busy
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._arrivals: dict[str, list[float]] = {}
        self._pauses: dict[str, list[tuple[float, float]]] = {}
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        try:
            self._gate = socket.create_server(("127.0.0.1", 0))
            self._selector.register(self._gate, selectors.EVENT_READ, None)
            for number in range(self._busy_count):
                self._start(f"busy-{number}", "busy")
            for name in self.names:
                self._start(name, "beat", str(self._gate.getsockname()[1]), name)
            self._wait_for_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all processes and close all sockets; may be called twice."""
        for process in self._processes.values():
            process.kill()  # also ends a stopped one
        for process in self._processes.values():
            process.wait(_START_LIMIT_S)
        self._processes = {}
        for key in list((self._selector.get_map() or {}).values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def record(self, name: str, seconds: float, pauses: Sequence[tuple[float, float, int]] = ()) -> list[Trace]:
        """The heartbeats of all nodes for so long, while nodes are stopped as planned."""
        begin = time.monotonic()
        psutil.cpu_percent()  # the next call tells how busy the processors were since this one
        self._arrivals = {node: [] for node in self.names}
        self._pauses = {node: [] for node in self.names}
        steps = [step for start, end, node in pauses for step in
                 ((start, signal.SIGSTOP, self.names[node]), (end, signal.SIGCONT, self.names[node]))]
        for after, number, node in sorted(steps):
            self._receive(begin + after)
            self._signal(node, number)
        self._receive(begin + seconds)
        recorded = f"{platform.system()}, {os.cpu_count()} cores, {psutil.cpu_percent():.0f}% busy, loopback TCP"
        return [Trace(name=name, node=node, interval_s=INTERVAL_S, recorded=recorded,
                      arrivals=tuple(round(at - begin, 4) for at in self._arrivals[node]),
                      pauses=tuple((round(stop - begin, 4), round(go - begin, 4)) for stop, go in self._pauses[node]))
                for node in self.names]

    def _start(self, name: str, *order: str) -> None:
        command = [sys.executable, "-m", "ftlab.bench.heartbeats", str(os.getpid()), *order]
        self._processes[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while set(self._arrivals) != set(self.names):
            if time.monotonic() > deadline:
                raise WaitTimeout(f"{len(self._arrivals)}/{len(self.names)} nodes sent a heartbeat after "
                                  f"{_START_LIMIT_S:g} s", seen=", ".join(sorted(self._arrivals)) or "none")
            self._receive(time.monotonic() + 0.05)

    def _receive(self, until: float) -> None:
        """Note what arrives up to a moment."""
        while (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data is None:
                    link, _ = self._gate.accept()
                    self._selector.register(link, selectors.EVENT_READ, bytearray())
                else:
                    self._hear(key)

    def _hear(self, key: selectors.SelectorKey) -> None:
        """One read of a node's link; a line is a heartbeat, `NAME MESSAGE`."""
        assert isinstance(key.fileobj, socket.socket)
        data, now = key.fileobj.recv(1 << 16), time.monotonic()
        if not data:
            raise ClusterError("a node ended while its heartbeats were recorded")
        key.data.extend(data)
        while b"\n" in key.data:
            line, _, rest = bytes(key.data).partition(b"\n")
            key.data[:] = rest
            self._arrivals.setdefault(line.split(b" ")[0].decode(), []).append(now)

    def _signal(self, node: str, number: signal.Signals) -> None:
        self._processes[node].send_signal(number)
        now = time.monotonic()
        if number == signal.SIGSTOP:
            self._pauses[node].append((now, now))
        else:
            self._pauses[node][-1] = (self._pauses[node][-1][0], now)


def _beat(port: str, name: str) -> None:
    """A node: a heartbeat, a sleep, and again, until the receiver is gone."""
    line = f"{name} ".encode() + messages.dumps(messages.Heartbeat()) + b"\n"
    with socket.create_connection(("127.0.0.1", int(port)), timeout=_START_LIMIT_S) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            try:
                link.sendall(line)
            except OSError:
                return
            time.sleep(INTERVAL_S)


def _keep_busy(parent: int) -> None:
    while os.getppid() == parent:
        sum(range(10_000))


def _main(parent: str, order: str, *details: str) -> None:
    if sys.platform == "linux":  # a stopped process cannot notice by itself that its owner is gone
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == int(parent):
        _beat(*details) if order == "beat" else _keep_busy(int(parent))


if __name__ == "__main__":
    _main(*sys.argv[1:])
