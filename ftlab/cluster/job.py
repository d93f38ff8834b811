"""A job on a cluster, from the client's side: wait for it, look at it, get its report."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from ftlab.cluster.interrupts import told
from ftlab.cluster.twin import Shipment, run_twin
from ftlab.errors import ClusterClosed, ConfigError, JobError, WaitInterrupted, WaitTimeout, from_dict
from ftlab.events import Event, events_after, in_order_of_time
from ftlab.report.report import Report
from ftlab.report.verdict import judged
from ftlab.validation import check, check_least, check_seconds

if TYPE_CHECKING:
    from ftlab.cluster.cluster import Cluster

T = TypeVar("T")


class Job:
    """What `cluster.submit` returns."""

    def __init__(self, cluster: Cluster, job: str, name: str, first_event: int) -> None:
        self.cluster, self.id, self.name = cluster, job, name
        self.first_event = first_event  # the number of the last event before it in the cluster's log
        self._seen, self._step = first_event, 0  # what is behind this event is news
        self._end: Event | None = None
        self.abandoned = False  # somebody stopped waiting for it
        self._values: dict[int, Any] | None = None  # what the ranks returned, once it was asked for
        self.sent: Shipment | None = None  # what it was started from, if that was here

    @property
    def events(self) -> list[Event]:
        """This job's part of the event log so far, up to its end or to now, in the order of time."""
        self._read_news()
        events, end = events_after(self.cluster.events, self.first_event), self._end
        return in_order_of_time(event for event in events if end is None or event.seq <= end.seq)

    @property
    def step(self) -> int:
        """How many steps are committed."""
        self._read_news()
        return self._step

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        self._read_news()
        return self._end is not None

    def _read_news(self) -> None:
        """Take in what is new in the log up to the job's end, and only that: this is asked again and again."""
        if self._end is not None or self.cluster.follower.seq == self._seen:
            return
        for event in events_after(self.cluster.events, self._seen):
            self._seen = event.seq
            if event.kind == "step.committed":
                self._step = max(self._step, event.step or 0)
            elif self._is_end(event):
                self._end = event
                return

    def wait_for_step(self, step: int, timeout: float = 120.0) -> int:
        """Block until so many steps are committed; raises the job's error if it ends before."""
        check_least("step", step, 0)
        if self.step < step and not self.done:
            self._waiting(lambda: self.cluster.expect_step(step))
        self._wait(lambda: self.step >= step or self.done, timeout, f"step {step}")
        if self.step < step:
            self._raise_error()
            raise JobError(f"job {self.name} ended at step {self.step}, before step {step}")
        return self.step

    def wait_for(self, kind: str, count: int = 1, timeout: float = 120.0) -> Event:
        """Block until the `count`-th event of a kind; that event."""
        check("kind", kind, str)
        if not re.fullmatch(r"[a-z]+\.[a-z_]+", kind):
            raise ConfigError(f"kind must be that of an event, such as \"node.died\" (got {kind!r})")
        check_least("count", count, 1)

        found: list[Event] = []
        seen = self.first_event

        def enough() -> bool:
            nonlocal seen
            for event in events_after(self.cluster.events, seen):
                seen = event.seq
                found.extend([event] * event.stands_for if event.kind == kind else ())
            return len(found) >= count
        self._wait(enough, timeout, f"{count} x {kind}")
        return found[count - 1]

    def result(self, timeout: float | None = None, *, verify: bool = False) -> Report:
        """Block until the job ends; its report, or the error that ended it.

        With `verify` the job is then trained once more, undisturbed and without checkpoints, and the report carries the
        verdict: the same bits, or not. That takes as long again; `timeout` is for each of the two.
        """
        self._wait(lambda: self.done, timeout, "the end of the job")
        self._raise_error()
        if self._values is None:
            self._values = self._waiting(self._fetch_values)
        report = Report.of(self.name, self.events, config=self.cluster.config.to_dict(), values=self._values)
        return judged(report, self._twin(report, timeout)) if verify else report

    def _twin(self, report: Report, timeout: float | None) -> Report:
        if self.sent is None:
            raise JobError(f"what {self.name} was started from is not known here", hint="verify where you submitted it")
        return run_twin(self.cluster, self.sent, report, timeout)

    def cancel(self) -> None:
        """End the job now; one that has ended stays as it is."""
        if not self.done:
            self.cluster.must_be_open(f"job {self.name} ended with it")
            with told(f"stopped while job {self.name} was being cancelled: it may go on", hint="job.cancel() again"):
                self.cluster.api.post(f"/api/jobs/{self.id}/cancel")

    def wait_for_end(self, timeout: float = 10.0) -> None:
        """Block until the job has ended, well or not."""
        self._wait(lambda: self.done, timeout, "the end of the job")

    def __repr__(self) -> str:
        return f"<Job {self.name} {'done' if self.done else 'running'} step={self.step}>"

    def _is_end(self, event: Event) -> bool:
        return event.kind == "job.finished" and event.data["job"] == self.id

    def _fetch_values(self) -> dict[int, Any]:
        self.cluster.must_be_open(f"what the ranks of job {self.name} returned is gone with it: call result() before "
                                  f"close()")
        info = self.cluster.api.get(f"/api/jobs/{self.id}")
        return {int(rank): self._value(row) for rank, row in info["results"].items()}

    def _value(self, row: dict[str, Any]) -> Any:
        if row["error"]:
            raise JobError(row["error"])
        return cloudpickle.loads(base64.b64decode(row["result"]))

    def _raise_error(self) -> None:
        self._read_news()
        if self._end is not None and self._end.data.get("error"):
            raise from_dict(self._end.data["error"])

    def _wait(self, condition: Callable[[], bool], timeout: float | None, what: str) -> None:
        deadline = None if timeout is None else time.monotonic() + check_seconds("timeout", timeout)
        self._waiting(lambda: self._poll(condition, deadline, timeout, what))

    def _waiting(self, work: Callable[[], T]) -> T:
        """Do something that takes time; who stops it is told that the job goes on, and how to end it."""
        self.abandoned = False
        try:
            return work()
        except KeyboardInterrupt:
            if self.done or not self.cluster.running:
                raise WaitInterrupted(f"stopped; job {self.name} has ended at step {self.step}") from None
            self.abandoned = True
            raise WaitInterrupted(
                f"only the wait was stopped: job {self.name} goes on, at step {self.step}",
                hint="job.cancel() ends it, job.result() waits again, cluster.close() ends everything; the next "
                     "submit takes its place") from None

    def _poll(self, condition: Callable[[], bool], deadline: float | None, timeout: float | None, what: str) -> None:
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
        return self.cluster.events[-1].brief() if self.cluster.events else "none"
