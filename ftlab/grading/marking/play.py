"""What runs in the sandbox: the cells of a submission, one after the other, in IPython's own shell.

It is a play (`ftlab.grading.stage`) that tells after every cell what came out of it, and at the place of every graded
cell the parts that this one needs, as bytes. All of this is in the student's hands: nothing that is told here is
believed, it is only shown, or unpickled again in the same sandbox.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

MAX_TEXT = 64 << 10  # characters of one stream, one result or one error of a cell
MAX_PICTURE = 1 << 20  # bytes
MAX_PICTURES = 4  # of one cell
MAX_PART = 16 << 20  # bytes

Tell = Callable[..., None]


class CellTimeout(BaseException):
    """The time of a cell is up; no Exception, so that `except Exception` in a loop does not swallow it."""


def play_cells(*, steps: list[dict[str, Any]], cell_s: float, folder: str, tell: Tell) -> None:
    """Run cells ({"index", "code"}) and dump parts ({"index", "names"}) in this order; told as it goes.

    A part that is not there yet is looked for once more at the end: a check that stands too early costs nothing.
    """
    os.chdir(folder)
    sys.path.insert(0, folder)
    shell, late = _shell(), dict[int, list[str]]()
    for step in steps:
        index = step["index"]
        tell(begun=index)
        if "code" in step:
            tell(cell=index, **_run(shell, step["code"], cell_s))
            continue
        found = {name: _dump(name, shell.user_ns[name]) for name in step["names"] if name in shell.user_ns}
        tell(parts=index, found=found)
        late[index] = [name for name in step["names"] if name not in found]
    for index, names in late.items():
        for name in names:
            if name in shell.user_ns:
                tell(begun=index)
                tell(parts=index, found={name: _dump(name, shell.user_ns[name])})
    tell(done=True)


def _dump(name: str, part: Any) -> dict[str, str]:
    try:
        raw = bytes(cloudpickle.dumps(part))
    except BaseException as error:
        return {"absent": f"{name} cannot be sent to another process: {type(error).__name__}: {error}"[:1000]}
    if len(raw) > MAX_PART:
        return {"absent": f"{name} carries {len(raw) >> 20} MB with it, the limit is {MAX_PART >> 20} MB"}
    return {"raw": base64.b64encode(raw).decode()}


class _Sink:
    """Where everything that a cell shows ends up."""

    def __init__(self) -> None:
        self.empty()

    def empty(self) -> None:
        self.streams = {"stdout": _Limited(), "stderr": _Limited()}
        self.result, self.pictures, self.shown, self.error = "", list[str](), _Limited(), dict[str, str]()

    def show(self, data: Any) -> None:
        """Text and PNG are kept; no HTML, no scripts."""
        picture = data.get("image/png") if isinstance(data, dict) else None
        if picture is not None and len(self.pictures) < MAX_PICTURES:
            raw = base64.b64decode(picture) if isinstance(picture, str) else bytes(picture)
            if len(raw) <= MAX_PICTURE:
                self.pictures.append(base64.b64encode(raw).decode())
        elif isinstance(data, dict):
            self.shown.write(f"{data.get('text/plain', '')}\n")

    def facts(self) -> dict[str, Any]:
        return {"stdout": self.streams["stdout"].text(), "stderr": self.streams["stderr"].text(),
                "shown": self.shown.text(), "result": self.result[:MAX_TEXT], "pictures": self.pictures,
                "error": self.error}


class _Limited(io.TextIOBase):
    """Text up to a limit; the rest is only counted."""

    def __init__(self) -> None:
        self._parts, self._kept, self._dropped = list[str](), 0, 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        kept = text[:max(0, MAX_TEXT - self._kept)]
        if kept:
            self._parts.append(kept)
        self._kept += len(kept)
        self._dropped += len(text) - len(kept)
        return len(text)

    def text(self) -> str:
        return "".join(self._parts) + (f"\n[... {self._dropped} characters left out ...]\n" if self._dropped else "")


_sink = _Sink()


class _Publisher(DisplayPublisher):
    """display(...)"""

    def publish(self, data: Any, *args: Any, **kwargs: Any) -> None:
        _sink.show(data)


class _Hook(DisplayHook):
    """The value of a cell's last expression."""

    def __call__(self, result: Any = None) -> None:
        if result is not None and not self.quiet():
            data, _ = self.compute_format_data(result)
            _sink.result = str(data.get("text/plain", ""))[:MAX_TEXT]
            if "image/png" in data:
                _sink.show(data)
            self.update_user_ns(result)
            self.fill_exec_result(result)


def _shell() -> InteractiveShell:
    quiet = Config()
    quiet.HistoryManager.enabled = False
    quiet.InteractiveShell.colors = "NoColor"
    shell = InteractiveShell.instance(config=quiet, display_pub_class=_Publisher, displayhook_class=_Hook)

    def told(kind: type, value: BaseException, lines: list[str]) -> None:
        _sink.error = {"ename": kind.__name__, "evalue": str(value)[:1000], "traceback": "\n".join(lines)[-MAX_TEXT:]}

    setattr(shell, "_showtraceback", told)  # noqa: B010
    setattr(shell, "_tee", lambda channel: contextlib.nullcontext())  # noqa: B010  # it keeps all that is printed
    signal.signal(signal.SIGALRM, _time_is_up)
    return shell


def _run(shell: InteractiveShell, code: str, seconds: float) -> dict[str, Any]:
    _sink.empty()
    raised: BaseException | None = CellTimeout()
    with contextlib.suppress(CellTimeout):  # one that comes a moment too late
        with _streams(), _deadline(seconds):
            try:
                result = shell.run_cell(code, store_history=False)
                raised = result.error_before_exec or result.error_in_exec
            except BaseException as error:
                raised = error
    if raised is not None and not _sink.error:
        _sink.error = {"ename": type(raised).__name__, "evalue": str(raised)[:1000], "traceback": ""}
    if isinstance(raised, CellTimeout):
        _sink.error = {"ename": "CellTimeout", "evalue": f"the cell did not end within {seconds:g} s", "traceback": ""}
    with contextlib.suppress(Exception):
        _take_figures()
    return _sink.facts()


def _time_is_up(*_: Any) -> None:
    raise CellTimeout


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)  # again and again, for code that swallows it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def _streams() -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _sink.streams["stdout"], _sink.streams["stderr"]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _take_figures() -> None:
    """What `%matplotlib inline` would show."""
    plots = sys.modules.get("matplotlib.pyplot")
    if plots is None:
        return
    for number in plots.get_fignums():
        picture = io.BytesIO()
        plots.figure(number).savefig(picture, format="png")
        _sink.show({"image/png": picture.getvalue()})
    plots.close("all")
