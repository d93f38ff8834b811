"""Every metric of ftlab, once: events in, Prometheus text out.

Metrics only read the event log. A restarted controller replays its journal, so counters go on where they were.
"""

from __future__ import annotations

from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ftlab.config import DEFAULT_BUDGETS
from ftlab.detection import read_failures
from ftlab.events import Event

_TELLING = ("fault.", "recovery.", "node.died", "worker.failed", "step.spoiled")
_REMEMBERED = 200  # of these: more than any recovery has
_RESULTS = ("committed", "failed", "refused", "delayed", "damaged")  # of a checkpoint
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 2.0, 5.0, 15.0, 60.0)


class Exporter:
    """The metrics of one cluster, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.steps = Counter("ftlab_steps_total", "Committed steps.", registry=registry)
        self.world = Gauge("ftlab_world_size", "Ranks in the present generation.", registry=registry)
        self.generation = Gauge("ftlab_generation", "Number of the present membership.", registry=registry)
        self.nodes = Gauge("ftlab_nodes", "Nodes that live, spares included.", registry=registry)
        self.loss = Gauge("ftlab_loss", "Mean loss of the last committed step.", registry=registry)
        self.detections = Counter("ftlab_detections_total", "Failures noticed, by cause.", ["cause"], registry=registry)
        self.recoveries = Counter("ftlab_recoveries_total", "Recoveries that led to a step.", ["cause"],
                                  registry=registry)
        self.recovery = Histogram("ftlab_recovery_seconds", "Verdict to the first step in the restored world.",
                                  ["cause"], buckets=_SECONDS, registry=registry)
        self.phase = Histogram("ftlab_recovery_phase_seconds", "Duration of each step of a recovery.", ["phase"],
                               buckets=_SECONDS, registry=registry)
        self.faults = Counter("ftlab_faults_injected_total", "Faults injected, by kind.", ["fault"], registry=registry)
        self.refused = Counter("ftlab_messages_refused_total", "Messages refused: stale, garbage or too large.",
                               registry=registry)
        self.checkpoints = Counter("ftlab_checkpoints_total", "Checkpoints, by what became of them.", ["result"],
                                   registry=registry)
        self.blocking = Histogram("ftlab_checkpoint_blocking_seconds", "How long training waited for a snapshot.",
                                  buckets=_SECONDS, registry=registry)
        self.durable = Histogram("ftlab_checkpoint_durable_seconds", "From a snapshot to its commit in storage.",
                                 buckets=_SECONDS, registry=registry)
        self.saved_step = Gauge("ftlab_checkpoint_step", "Step of the newest checkpoint.", registry=registry)
        self.saved_bytes = Gauge("ftlab_checkpoint_size_bytes", "Size of the newest checkpoint.", registry=registry)
        self.spoiled = Counter("ftlab_steps_spoiled_total", "Steps that were undone, by cause and what was done.",
                               ["cause", "action"], registry=registry)
        self.skipped = Counter("ftlab_batches_skipped_total", "Batches passed over on purpose.", registry=registry)
        self.stragglers = Counter("ftlab_stragglers_total", "Ranks found to hold the others up.", registry=registry)
        self.warnings = Counter("ftlab_memory_warnings_total", "Memory limits that were about to be hit.",
                                registry=registry)
        self._alive: set[str] = set()
        self._failures: deque[Event] = deque(maxlen=_REMEMBERED)  # what tells when a failure began
        for cause in DEFAULT_BUDGETS:  # from 0 on: else the first failure of a cause would be no increase
            self.detections.labels(cause)
            self.recoveries.labels(cause)
        for result in _RESULTS:
            self.checkpoints.labels(result)

    def observe(self, event: Event) -> None:
        """Take one event into account."""
        data = event.data
        if event.kind.startswith(_TELLING):
            self._failures.append(event)
        match event.kind:
            case "step.committed":
                self.steps.inc(event.stands_for)
                if "loss" in data:
                    self.loss.set(data["loss"])
                if data.get("skipped"):
                    self.skipped.inc()
            case "membership.changed":
                self.world.set(data["world"])
                self.generation.set(event.generation or 0)
            case "node.joined":
                self._alive.add(event.source)
                self.nodes.set(len(self._alive))
            case "node.died":
                self._alive.discard(event.source)
                self.nodes.set(len(self._alive))
            case "recovery.started":
                self.detections.labels(data["cause"]).inc()
            case "recovery.finished":
                self._observe_recovery(event)
            case "step.spoiled":
                self.spoiled.labels(data["cause"], data["action"]).inc()
            case "straggler.found":
                self.stragglers.inc()
            case "memory.warned":
                self.warnings.inc(event.stands_for)
            case "fault.injected":
                self.faults.labels(data["fault"]).inc()
            case "message.refused" | "node.fenced":
                self.refused.inc(event.stands_for)
            case "checkpoint.snapshot":
                for _ in range(event.stands_for):
                    self.blocking.observe(data["blocking_s"])
            case kind if kind.removeprefix("checkpoint.") in _RESULTS:
                self._observe_checkpoint(event)

    def render(self) -> tuple[str, bytes]:
        """Content type and body for /metrics."""
        return CONTENT_TYPE_LATEST, generate_latest(self.registry)

    def _observe_checkpoint(self, event: Event) -> None:
        result = event.kind.removeprefix("checkpoint.")
        self.checkpoints.labels(result).inc(event.stands_for)
        if result == "committed":
            self.durable.observe(event.data["seconds"])
            self.saved_step.set(event.step or 0)
            self.saved_bytes.set(event.data["bytes"])

    def _observe_recovery(self, event: Event) -> None:
        data = event.data
        self.recoveries.labels(data["cause"]).inc()
        recovery = next((one for one in reversed(read_failures(self._failures).recoveries)
                         if one.generation == event.generation), None)
        steps = [span["end"] for span in data["spans"] if span["name"] == "first_step"]
        if recovery and steps:
            self.recovery.labels(data["cause"]).observe(max(steps) - recovery.noticed)
        for name, seconds in (recovery.phases if recovery else data["phases"]).items():
            self.phase.labels(name).observe(seconds)
