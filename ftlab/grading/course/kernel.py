"""A fresh kernel that runs cells, each with a deadline; it is ended in any case, with every cluster it has started."""

from __future__ import annotations

import queue
import subprocess
import time
from pathlib import Path
from typing import Any, Self

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from nbformat import NotebookNode
from nbformat.v4 import output_from_msg

from ftlab.errors import JobError

_START_S = 120.0
_LOOK_S = 0.5  # how often a silent kernel is looked at
_STOP_S = 10.0  # how long an interrupted cell may take to end


class Kernel:
    """`with Kernel(folder) as kernel: outputs, trouble = kernel.run(source, 60)`."""

    def __init__(self, folder: Path, name: str = "python3") -> None:
        self._manager = KernelManager(kernel_name=name)
        self._folder = folder
        self._client: BlockingKernelClient | None = None

    def __enter__(self) -> Self:
        null = subprocess.DEVNULL  # what cells print comes as messages; the kernel's own warnings are not for students
        self._manager.start_kernel(cwd=str(self._folder), stdout=null, stderr=null)
        try:
            self._client = self._manager.client()
            self._client.start_channels()
            self._client.wait_for_ready(timeout=_START_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let it end what it has started and remove its folders, or end it after a while; may be called twice."""
        client, self._client = self._client, None
        if client is not None:
            client.stop_channels()
        if self._manager.has_kernel:
            self._manager.shutdown_kernel()

    def run(self, source: str, seconds: float) -> tuple[list[NotebookNode], str]:
        """Run a cell: its outputs, and in words what kept it from its end. Raises JobError when the kernel is gone."""
        assert self._client is not None
        heard = _Heard()
        asked = self._client.execute(source, allow_stdin=False, stop_on_error=False)
        if self._listen(asked, heard, time.monotonic() + seconds):
            return heard.outputs, ""
        self._manager.interrupt_kernel()
        if not self._listen(asked, heard, time.monotonic() + _STOP_S):
            self._manager.shutdown_kernel(now=True)
            raise JobError("the kernel could not be interrupted, and was ended")
        heard.outputs = [each for each in heard.outputs if each.output_type != "error"]
        return heard.outputs, f"no end within {seconds:g} s"

    def _listen(self, asked: str, heard: _Heard, deadline: float) -> bool:
        """Hear what the cell puts out; False when the time is up before it ends."""
        assert self._client is not None
        while time.monotonic() < deadline:
            try:
                message = self._client.get_iopub_msg(timeout=min(_LOOK_S, max(0.01, deadline - time.monotonic())))
            except queue.Empty:
                if not self._manager.is_alive():
                    raise JobError("the kernel died") from None
                continue
            if message["parent_header"].get("msg_id") == asked and heard.take(message):
                return True
        return False


class _Heard:
    """The outputs of one cell, out of the kernel's messages."""

    def __init__(self) -> None:
        self.outputs: list[NotebookNode] = []
        self._shown: dict[str, NotebookNode] = {}  # display id → the output to be updated
        self._clear = False

    def take(self, message: dict[str, Any]) -> bool:
        """Note one message; whether it was the last."""
        kind, content = message["msg_type"], message["content"]
        if kind == "status":
            return bool(content["execution_state"] == "idle")
        if kind == "clear_output":
            self._clear = True
            if not content.get("wait"):
                self._empty()
        elif kind == "update_display_data":
            old = self._shown.get(content.get("transient", {}).get("display_id", ""))
            if old is not None:
                old.update(data=content["data"], metadata=content["metadata"])
        elif kind in ("stream", "display_data", "execute_result", "error"):
            self._add(message)
        return False

    def _add(self, message: dict[str, Any]) -> None:
        self._empty()
        output = output_from_msg(message)
        last = self.outputs[-1] if self.outputs else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
            return
        self.outputs.append(output)
        name = message["content"].get("transient", {}).get("display_id")
        if name:
            self._shown[name] = output

    def _empty(self) -> None:
        if self._clear:
            self.outputs, self._clear = [], False
