"""Pauses that clients ask for: training stops when so many steps are committed, and goes on at the client's word.

A client that wants to do something at one step exactly asks for a hold, waits for `hold.reached`, does it, and lets go.
All ranks must pause: if one is already beyond the step, nobody does, and the hold is missed. Holds belong to the job
that runs, or to the next one; what is left of them when it ends is missed as well. They are in the journal, so a
controller that was killed still knows them. What a hold is for is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftlab import messages
from ftlab.events import Event, EventLog
from ftlab.recovery.job import Job
from ftlab.recovery.roster import Roster


@dataclass
class Hold:
    """One client's wish."""

    step: int
    reached: bool = False


class Holds:
    """The holds of one controller, by the names that clients gave them."""

    def __init__(self, log: EventLog, roster: Roster) -> None:
        self._log, self._roster = log, roster
        self.holds: dict[str, Hold] = {}
        self._paused: dict[int, set[int]] = {}  # step → ranks that pause there, in this generation
        self._generation = 0

    def place(self, job: Job | None, name: str, step: int) -> int | None:
        """Have training pause after a step; if it is already beyond it, nothing is done, and where it is returned."""
        if name in self.holds:  # asked again, because the answer was lost
            return None
        if job is not None and not job.over and job.ledger.step > step:
            return job.ledger.step
        self.holds[name] = Hold(step)
        self._log.record("hold.placed", hold=name, step=step)
        self._tell(job)
        return None

    def release(self, job: Job | None, name: str) -> None:
        """Let training go on, as far as this hold is concerned."""
        if self.holds.pop(name, None) is not None:
            self._log.record("hold.released", hold=name)
            self._tell(job)

    def waiting(self) -> list[int]:
        """The steps that were not reached yet: what a new generation has to know."""
        return sorted({hold.step for hold in self.holds.values() if not hold.reached})

    def heard(self, job: Job, rank: int | None, message: messages.Held) -> None:
        """A rank pauses, or cannot any more."""
        if job.table is None or rank is None or message.generation not in (0, job.generation):
            return
        if message.missed:
            self._miss(job, message.asked, f"step {message.asked} has passed: the job is at step {message.step}")
            return
        if self._generation != job.generation:
            self._generation, self._paused = job.generation, {}
        paused = self._paused.setdefault(message.asked, set())
        paused.add(rank)
        if len(paused) == job.table.world:
            for name, hold in self.holds.items():
                if hold.step == message.asked and not hold.reached:
                    hold.reached = True
                    self._log.record("hold.reached", hold=name, step=hold.step, generation=job.generation)

    def job_ended(self, job: Job) -> None:
        """Nothing can pause any more."""
        for step in self.waiting():
            self._miss(job, step, f"the job ended at step {job.ledger.step}, before step {step} was reached")
        self.holds.clear()

    def welcome(self, job: Job, node: str) -> None:
        """A node that was away learns what was asked for meanwhile."""
        if node in job.plan and self.holds:
            self._tell(job)

    def replay(self, event: Event) -> None:
        """What the journal says; a pause that was reached ended with the controller that had asked for it."""
        if event.kind == "hold.placed" and event.step is not None:
            self.holds[event.data["hold"]] = Hold(event.step)
        else:
            self.holds.pop(event.data["hold"], None)

    def _miss(self, job: Job, step: int, reason: str) -> None:
        for name in [name for name, hold in self.holds.items() if hold.step == step and not hold.reached]:
            del self.holds[name]
            self._log.record("hold.missed", hold=name, step=step, reason=reason)
        self._tell(job)

    def _tell(self, job: Job | None) -> None:
        if job is None or job.over:
            return
        body = messages.encode(messages.Hold(steps=sorted({hold.step for hold in self.holds.values()})))
        for node in self._roster.seated(job.plan):
            node.send(messages.ToWorkers(job=job.id, body=body))
