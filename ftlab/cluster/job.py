"""A job on a cluster, from the client's side: wait for it, look at it, get its report."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Any

import cloudpickle

from ftlab.errors import ClusterClosed, JobError, WaitTimeout, from_dict
from ftlab.events import Event
from ftlab.report.report import Report

if TYPE_CHECKING:
    from ftlab.cluster.cluster import Cluster


class Job:
    """What `cluster.submit` returns."""

    def __init__(self, cluster: Cluster, job: str, name: str, first_event: int) -> None:
        self.cluster, self.id, self.name = cluster, job, name
        self.first_event = first_event  # where its events begin in the cluster's log

    @property
    def events(self) -> list[Event]:
        """This job's part of the event log so far: up to its end, or to now."""
        events = self.cluster.events[self.first_event:]
        end = next((index for index, event in enumerate(events) if self._is_end(event)), None)
        return events if end is None else events[:end + 1]

    @property
    def step(self) -> int:
        """How many steps are committed."""
        return max((event.step or 0 for event in self.events if event.kind == "step.committed"), default=0)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return any(self._is_end(event) for event in reversed(self.events))

    def wait_for_step(self, step: int, timeout: float = 120.0) -> int:
        """Block until so many steps are committed; raises the job's error if it ends before."""
        self.cluster.expect_step(step)
        self._wait(lambda: self.step >= step or self.done, timeout, f"step {step}")
        if self.step < step:
            self._raise_error()
            raise JobError(f"job {self.name} ended at step {self.step}, before step {step}")
        return self.step

    def wait_for(self, kind: str, count: int = 1, timeout: float = 120.0) -> Event:
        """Block until the `count`-th event of a kind; that event."""
        def found() -> list[Event]:
            return [event for event in self.cluster.events[self.first_event:] if event.kind == kind]
        self._wait(lambda: len(found()) >= count, timeout, f"{count} x {kind}")
        return found()[count - 1]

    def result(self, timeout: float | None = None) -> Report:
        """Block until the job ends; its report, or the error that ended it."""
        self._wait(lambda: self.done, timeout, "the end of the job")
        self._raise_error()
        info = self.cluster.api.get(f"/api/jobs/{self.id}")
        values = {int(rank): self._value(row) for rank, row in info["results"].items()}
        return Report.of(self.name, self.events, config=self.cluster.config.to_dict(), values=values)

    def cancel(self) -> None:
        """End the job now."""
        self.cluster.api.post(f"/api/jobs/{self.id}/cancel")

    def __repr__(self) -> str:
        return f"<Job {self.name} {'done' if self.done else 'running'} step={self.step}>"

    def _is_end(self, event: Event) -> bool:
        return event.kind == "job.finished" and event.data["job"] == self.id

    def _value(self, row: dict[str, Any]) -> Any:
        if row["error"]:
            raise JobError(row["error"])
        return cloudpickle.loads(base64.b64decode(row["result"]))

    def _raise_error(self) -> None:
        end = next((event for event in reversed(self.events) if self._is_end(event)), None)
        if end is not None and end.data.get("error"):
            raise from_dict(end.data["error"])

    def _wait(self, condition: Any, timeout: float | None, what: str) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        follower = self.cluster.follower
        while True:
            self.cluster.show_output()
            with follower.changed:
                if condition():
                    break
                follower.changed.wait(0.2)
            if not self.cluster.running:
                raise ClusterClosed(f"the cluster ended while waiting for {what}", seen=self.cluster.last_words())
            if deadline is not None and time.monotonic() > deadline:
                raise WaitTimeout(f"{what} did not come within {timeout:g} s",
                                  seen=f"{self!r}; last event: {self._last_event()}")
        self.cluster.show_output()

    def _last_event(self) -> str:
        return self.cluster.events[-1].to_json() if self.cluster.events else "none"
