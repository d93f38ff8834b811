"""Workers that mark sheets, several at once: each a process of its own, each with one sandbox at a time.

Checks print, redirect and keep one stage per process, so threads would not do. A worker that dies costs one sheet. On
Ctrl-C the workers are told to end, and take their sandboxes down; if this process is killed, they notice.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from ftlab.cluster import engine
from ftlab.cluster.sandbox import Limits
from ftlab.cluster.temporary import TemporaryFolder
from ftlab.errors import JobError, from_dict
from ftlab.grading.marking.record import Record
from ftlab.grading.marking.sheet import Sheet

_SHEET_S = 1800.0  # for one sheet; every wait below has its own limit, so this is never reached
_END_S = 60.0  # for a worker to take its sandbox down
_MAIN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from ftlab.grading.marking.worker import main; main()"


class Worker:
    """One process that marks one sheet after the other."""

    def __init__(self, sandbox: str, limits: Limits, folder: Path) -> None:
        settings = json.dumps({"sandbox": sandbox, "limits": asdict(limits), "folder": str(folder)})
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, json.dumps([each for each in sys.path if each]), settings],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)

    def mark(self, sheet: Sheet) -> Record:
        """Raises JobError if the worker ends or takes for ever, else what it raised itself."""
        assert self._process.stdin is not None and self._process.stdout is not None
        watch = threading.Timer(_SHEET_S, self._process.kill)
        watch.start()
        try:
            self._process.stdin.write(sheet.to_json().encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = b""
        finally:
            watch.cancel()
        if not line:
            raise JobError(f"the process that graded it ended ({self._process.wait(_END_S)})", hint="--again")
        reply = json.loads(line)
        if "error" in reply:
            raise from_dict(reply["error"])
        return Record(**reply)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it, and with it its sandbox; may be called twice, and from another thread."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Pool:
    """So many workers, started when they are needed."""

    def __init__(self, jobs: int, sandbox: str, limits: Limits) -> None:
        self._jobs, self._sandbox, self._limits = jobs, sandbox, limits
        self._folder = TemporaryFolder("grade")  # of all stages
        self._folder.path.chmod(0o711)
        self._idle: list[Worker] = []
        self._all: list[Worker] = []
        self._closed = False

    def marked(self, sheets: Sequence[tuple[str, Sheet]], done: Callable[[str, Record], None]
               ) -> Generator[tuple[str, Record | Exception], None, None]:
        """(name, record or what went wrong) of each sheet, as they come; `done` is called first, in a thread."""

        def work(name: str, sheet: Sheet) -> Record:
            worker = self._take()
            record = worker.mark(sheet)
            done(name, record)
            self._idle.append(worker)
            return record

        threads = ThreadPoolExecutor(max_workers=self._jobs, thread_name_prefix="ftlab-grade")
        futures: dict[Future[Record], str] = {threads.submit(work, name, sheet): name for name, sheet in sheets}
        try:
            for future in as_completed(futures):
                error = future.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield futures[future], error if error is not None else future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            self.close()
            threads.shutdown(wait=True)

    def close(self) -> None:
        """End all workers at once; may be called twice."""
        self._closed = True
        for worker in self._all:
            if worker.alive:
                worker._process.send_signal(signal.SIGTERM)
        for worker in self._all:
            worker.close()
        if self._folder.path.exists():
            _remove_sandboxes(self._folder.path)
            self._folder.close()

    def _take(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
        if self._closed:
            raise JobError("grading was stopped")
        worker = Worker(self._sandbox, self._limits, self._folder.path)
        self._all.append(worker)
        return worker


def _remove_sandboxes(folder: Path) -> None:
    """Containers of workers that could not take them down themselves."""
    left = [each for each in engine.look() if folder in each.folder.parents]
    if left:
        with contextlib.closing(engine.connect()) as client:
            for each in left:
                engine.remove(client, each)
