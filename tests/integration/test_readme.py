"""README's example, as it stands there, in a real kernel: it ends with a report and its verdict on the screen."""

from __future__ import annotations

import re
from pathlib import Path

from jupyter_client.manager import start_new_kernel

from tests.limits import JOB_S

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_example_shows_a_report_with_its_verdict():
    [example] = re.findall(r"```python\n(.*?)```", README, re.S)
    manager, client = start_new_kernel()
    shown: list[dict] = []

    def hook(message: dict) -> None:
        if message["msg_type"] in ("execute_result", "error"):
            shown.append(message["content"])

    try:
        client.execute_interactive(example, timeout=JOB_S, output_hook=hook)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    [report] = shown
    assert "data" in report, report
    html = report["data"]["text/html"]
    assert "identical" in html and "the same bits as an undisturbed run" in html and "<svg" in html
    assert "kill" in html, "the fault left its receipt"
