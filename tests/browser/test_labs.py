"""JupyterLab as a student sees it: lab 00 in headless Chromium, its first cells run, the cluster's view on the page."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from tests.limits import COMMAND_S, SOON_S, START_S

ROOT = Path(__file__).parents[2]
TOKEN = "only-for-this-test"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
PATIENCE_MS = 1000 * START_S  # of everything that waits for torch on a busy machine

pytestmark = [pytest.mark.browser]


@pytest.fixture
def jupyter(tmp_path: Path) -> Iterator[str]:
    """The address of a JupyterLab on a copy of labs/, as `make lab` starts it."""
    require("browser", bool(CHROMIUM), "there is no Chromium on this machine")
    require("browser", importlib.util.find_spec("playwright") is not None, "playwright is not installed")
    require("browser", importlib.util.find_spec("jupyterlab") is not None, "jupyterlab is not installed")
    shutil.copytree(ROOT / "labs", tmp_path / "labs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
               "--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}",
               f"--ServerApp.root_dir={tmp_path / 'labs'}"]
    homes = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
             "IPYTHONDIR": "ipython", "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces"}
    environment = {**os.environ, **{name: str(tmp_path / folder) for name, folder in homes.items()}}
    with (tmp_path / "jupyter.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(address, server, tmp_path / "jupyter.log")
        yield address
    finally:
        server.send_signal(signal.SIGTERM)  # it ends its kernels, and they their clusters
        try:
            server.wait(COMMAND_S)  # else the kernel is gone before its cluster
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_up(address: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/api/status?token={TOKEN}", timeout=SOON_S):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"JupyterLab did not come up:\n{log.read_text(errors='replace')[-3000:]}", pytrace=False)


def test_lab_00_shows_the_cluster_within_its_first_cells(no_leaks, jupyter):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            page = browser.new_page(viewport={"width": 1400, "height": 1800})
            page.set_default_timeout(PATIENCE_MS)
            page.goto(f"{jupyter}/lab/tree/lab00/first-contact.ipynb?token={TOKEN}", timeout=PATIENCE_MS)
            notebook = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
            notebook.locator(".jp-Cell").first.wait_for(timeout=PATIENCE_MS)
            page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").first.wait_for(
                state="attached", timeout=PATIENCE_MS)
            table = notebook.locator(".jp-OutputArea-output table", has_text="node-0")
            cells = notebook.locator(".jp-CodeCell")
            for number in range(5):  # the cluster comes within the first five cells
                _run(page, cells.nth(number))
                if "ftlab.Cluster(" in cells.nth(number).inner_text():
                    break
            _wait_for(table.first, notebook)
            text = table.first.inner_text()
            assert all(f"node-{number}" in text for number in range(4)), text
            assert notebook.locator(".jp-RenderedText[data-mime-type*='error']").count() == 0
            assert notebook.locator("[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
        finally:
            browser.close()


def _wait_for(output, notebook) -> None:
    """Until it is there; else the failure tells what the notebook shows instead."""
    from playwright.sync_api import Error

    try:
        output.wait_for(timeout=PATIENCE_MS)
    except Error as error:
        pytest.fail(f"{error}\nthe notebook shows:\n{notebook.inner_text()[:6000]}", pytrace=False)


def _run(page, cell) -> None:
    """Run a cell as a student does, and wait until it has its number. A busy browser may miss such quick keys, and a
    kernel that is still coming up drops what it was sent, so that the prompt is empty again: look and press again; but
    not soon, as one that is only slow would run the cell twice."""
    from playwright.sync_api import expect

    prompt = cell.locator(".jp-InputPrompt")
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not re.fullmatch(r"\[\d+\]:", text := prompt.inner_text().strip()):
        assert time.monotonic() < deadline, f"the cell does not run: {text}"
        if text == "[ ]:":
            prompt.click()
            page.keyboard.press("Shift+Enter")
        with contextlib.suppress(AssertionError):
            expect(prompt).not_to_have_text("[ ]:" if text == "[ ]:" else "[*]:", timeout=1000 * SOON_S)
