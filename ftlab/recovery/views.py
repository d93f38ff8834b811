"""What the controller knows of its nodes and their workers: what they said last, and when."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from ftlab import messages
from ftlab.health.detector import PhiDetector
from ftlab.health.own import OwnDetector
from ftlab.health.progress import Sighting, Standing
from ftlab.membership import Verdict
from ftlab.messages import Place

_TRAINING = {Place.OUTSIDE, Place.COMPUTING, Place.COMMUNICATING, Place.HELD}
_STANDINGS = {Place.OUTSIDE: Standing.OUTSIDE, Place.COMPUTING: Standing.COMPUTING,
              Place.COMMUNICATING: Standing.WAITING, Place.RECOVERING: Standing.RECOVERING,
              Place.FINISHED: Standing.DONE}


@dataclass
class WorkerView:
    """One worker, as last reported."""

    run: str  # the name it was started under; what was said under another name is about its predecessor
    pid: int = 0
    parked: bool = False  # has reached its first step
    failed: bool = False
    generation: int = 0  # of its last seat
    rank: int = -1
    step: int = 0
    place: Place = Place.STARTING
    since: float = 0.0
    seen: float = 0.0  # when its node last told of it
    slow: str = ""  # what slows it down, as far as its node can tell
    starved: bool = False  # it is ready to run and gets no CPU
    stuck_in: int = 0  # the ended generation in which a collective does not let it go, by its own word

    @property
    def ready(self) -> bool:
        """Whether it can take a seat: it waits for one, or has one in an ended generation."""
        return not self.failed and (self.parked or self.generation > 0)

    @property
    def holds_state(self) -> bool:
        """Whether it has trained."""
        return not self.failed and self.generation > 0

    def trains_in(self, generation: int) -> bool:
        """Whether it is on its seat in a generation, in or between steps."""
        return not self.failed and self.generation == generation and self.place in _TRAINING

    def is_stuck_before(self, generation: int, places: Collection[Place]) -> bool:
        """Whether it is in an ended generation, at one of these places, where nothing can hold it any more."""
        return not self.failed and 0 < self.generation < generation and self.place in places

    def says_it_is_stuck(self, generation: int) -> bool:
        """Whether a collective of a generation before this one does not let it go, by its own word."""
        return self.stuck_in == self.generation and self.is_stuck_before(generation, _TRAINING)

    def is_about(self, run: str) -> bool:
        """Whether a report is about this worker, and not about one that was given up."""
        return not self.failed and self.run == run

    def update(self, report: dict[str, Any]) -> None:
        """Take over what a heartbeat says."""
        self.pid, self.place, self.since = int(report["pid"]), Place(report["place"]), float(report["since"])
        self.generation, self.rank, self.step = int(report["generation"]), int(report["rank"]), int(report["step"])
        self.parked = self.parked or self.place == Place.PARKED
        self.slow, self.starved = str(report.get("slow") or ""), bool(report.get("starved"))


@dataclass
class NodeView:
    """One node: its link, when it was last heard, and its workers."""

    name: str
    address: str = ""
    pid: int = 0
    instance: str = ""
    replica_port: int = 0
    link: Callable[[messages.Message], None] | None = None
    drop_link: Callable[[str], None] | None = None
    heard: float = 0.0  # its silence counts from here: later than `spoke` where nobody listened for a while
    spoke: float = 0.0  # when it last said something: what is known of it is as old as that
    acked: float = 0.0  # when it was last told that it is heard
    rhythm: PhiDetector | OwnDetector | None = None  # of its heartbeats, where the cluster goes by that
    started: float = 0.0  # when it was asked for
    verdict: Verdict = Verdict.ALIVE
    born: int = 0  # the generation it joined in: it can have had no seat up to then
    job: str = ""  # the job its workers run
    workers: dict[int, WorkerView] = field(default_factory=dict)

    @property
    def joined(self) -> bool:
        """Whether it has ever said hello."""
        return bool(self.instance)

    @property
    def alive(self) -> bool:
        """Whether it can be counted on."""
        return self.joined and self.verdict != Verdict.DEAD

    @property
    def number(self) -> int:
        """The number in its name; the order in which nodes get seats."""
        tail = self.name.rsplit("-", 1)[-1]
        return int(tail) if tail.isdigit() else 0

    def ready(self, job: str, procs: int) -> bool:
        """Whether all its workers can take a seat in a job."""
        return self.alive and self.link is not None and self.job == job and len(self.workers) >= procs and \
            all(worker.ready for worker in self.workers.values())

    def take_progress(self, reports: list[dict[str, Any]], adopt: bool = False) -> None:
        """Take over what a heartbeat says of its workers; `adopt` also those this controller did not start."""
        for report in reports:
            local_rank, run = int(report["local_rank"]), str(report["run"])
            if adopt:
                self.workers.setdefault(local_rank, WorkerView(run))
            view = self.workers.get(local_rank)
            if view is not None and view.is_about(run):
                view.update(report)
                view.seen = self.spoke

    def send(self, message: messages.Message) -> None:
        """Send if there is a link; a node without one learns what it missed when it comes back."""
        if self.link is not None:
            self.link(message)

    def sightings(self) -> list[Sighting]:
        """Its workers as the progress watch sees them."""
        return [Sighting(who=(self.name, local_rank), since=worker.since, generation=worker.generation,
                         standing=_STANDINGS.get(worker.place, Standing.IDLE), step=worker.step,
                         starved=worker.starved)
                for local_rank, worker in self.workers.items() if not worker.failed]

    def role(self, ranks: tuple[int, ...], chosen: bool) -> str:
        """What it is to the job, or to the next one; `chosen` if it has or would get a seat."""
        if self.verdict == Verdict.DEAD:
            return "lost"
        if not self.joined:
            return "starting"
        return "member" if ranks else "ready" if chosen else "spare"

    def to_dict(self, table_ranks: tuple[int, ...], chosen: bool) -> dict[str, Any]:
        """For the status page."""
        return {"name": self.name, "address": self.address, "pid": self.pid, "verdict": str(self.verdict),
                "joined": self.joined, "ranks": list(table_ranks),
                "role": self.role(table_ranks, chosen),
                "workers": {str(local): {"pid": w.pid, "rank": w.rank, "step": w.step, "place": w.place,
                                         "generation": w.generation, "ready": w.ready}
                            for local, w in sorted(self.workers.items())}}
