"""A worker process: one rank's training thread, forked from a warm process.

It fetches nothing and imports nothing heavy: the code of the train function is handed in, torch is already there.
The main thread runs the train function; the link's thread listens to the agent.
"""

from __future__ import annotations

import base64
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from ftlab import messages
from ftlab.config import JobConfig
from ftlab.errors import FtlabError, StateLost
from ftlab.health.memory import is_out_of_memory
from ftlab.messages import Place
from ftlab.policy import decide
from ftlab.train.context import TrainContext
from ftlab.train.ladder import Ladder
from ftlab.train.link import WorkerLink
from ftlab.train.mending import Mender
from ftlab.train.own import OwnManager
from ftlab.train.session import Released, Session
from ftlab.train.status import StatusPage
from ftlab.train.trap import set_trap

MAX_RESULT_BYTES = 1 << 20
STACK_SIGNAL = signal.SIGQUIT  # asks for the stacks of all threads, as it does of other runtimes


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker is told when it is forked."""

    node: str
    local_rank: int
    code: bytes  # cloudpickle of (train function, its arguments by position and by name, policy, checkpoint manager)
    path: list[str]  # the notebook's sys.path
    config: dict[str, Any]  # JobConfig
    job: str = ""
    busy: list[int] = field(default_factory=list)  # slots of its memory that are still being written


def run_worker(spec: WorkerSpec, connection: Connection, page: StatusPage, memory: list[int]) -> int:
    """The whole life of a worker; returns its exit code. `memory` holds the files for its snapshots."""
    link = WorkerLink(connection)
    config = JobConfig.from_dict(spec.config)
    ladder = Ladder(config.checkpoint, spec.job, memory, spec.busy)
    session = Session(link, page, spec.node, spec.local_rank, ladder)
    set_trap(page, session.state)
    link.start()
    try:
        _train(spec, session, page, config)
        return 0
    except Released:
        return 0
    except BaseException as error:
        _report_failure(error, session)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def warm_up() -> None:
    """Import and run once what every train function needs, so that forked workers need not."""
    import numpy as np
    import torch
    import torch.distributed  # imported for its side effect: workers find it loaded

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    torch.nn.functional.cross_entropy(model(torch.zeros(2, 4)), torch.zeros(2, dtype=torch.int64)).backward()
    optimizer.step()
    np.random.seed(0)


def _train(spec: WorkerSpec, session: Session, page: StatusPage, config: JobConfig) -> None:
    sys.path[:] = [*spec.path, *(entry for entry in sys.path if entry not in spec.path)]
    train, args, kwargs, policy, manager = cloudpickle.loads(spec.code)
    if manager is not None:
        session.use(OwnManager(manager, config.save_every))
    session.mender = session.state.rider = Mender(config, policy or decide)
    value = _call(lambda: TrainContext(session, page, config), lambda ctx: train(ctx, *args, **kwargs), session)
    session.join()
    page.move(Place.FINISHED)
    if session.saver is not None:
        session.saver.finish(session)
    result, problem = _pack_result(value)
    digest = _digest(session)
    while True:  # stay as a live replica until all ranks are done
        page.move(Place.FINISHED)
        session.link.send(messages.Finished(generation=session.generation, step=session.state.step, digest=digest,
                                            result=result, error=problem))
        session.wait_out()


def _call(make_context: Callable[[], TrainContext], train: Callable[[TrainContext], Any], session: Session) -> Any:
    """What the train function returns. Code below a step that failed may stumble over what the step left undone: the
    function then begins anew in this very process, and the state that it held is carried over."""
    while True:
        context = make_context()
        try:
            return train(context)
        except Exception as error:
            if isinstance(error, FtlabError) or not context.below_failed_step:
                raise
            context.stop_rehearsal()
            if not session.begin_anew():
                raise


def _digest(session: Session) -> str:
    """Of the final state; with sharded state all ranks take part, and may have to recover once more for it."""
    step = session.state.step
    while True:
        try:
            return session.state.digest()
        except Exception as error:
            if not session.lost(error):
                raise
        session.join()
        if session.state.step < step:
            raise StateLost(f"a rank was lost after the train function had returned, and only step "
                            f"{session.state.step} of {step} could be had back")


def _pack_result(value: Any) -> tuple[str, str]:
    try:
        raw = cloudpickle.dumps(value)
    except Exception as error:
        return "", f"the return value cannot be pickled: {error}"
    if len(raw) > MAX_RESULT_BYTES:
        return "", f"the return value is {len(raw)} bytes, the limit is {MAX_RESULT_BYTES}: write it to a file instead"
    return base64.b64encode(raw).decode(), ""


def _report_failure(error: BaseException, session: Session) -> None:
    trace = "".join(traceback.format_exception(type(error), error, _own_frames(error)))
    session.link.send(messages.Failed(
        cause="oom" if is_out_of_memory(error) else "crash", detail=f"{type(error).__name__}: {str(error)[:2000]}",
        traceback=trace[-20000:],
        fatal=error.to_dict() if isinstance(error, FtlabError) else None,
        generation=session.generation, step=session.state.step))


def _own_frames(error: BaseException) -> Any:
    """The traceback from the train function on: the frames above it are ftlab's and teach nothing."""
    trace = error.__traceback__
    here = os.path.dirname(__file__)
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(here):
        trace = trace.tb_next
    return trace or error.__traceback__
