"""The file of `--report`."""

from __future__ import annotations

from pathlib import Path

from ftlab.errors import ConfigError


def check_folder(report: str | None) -> None:
    """Whether the file can be written, before minutes of measuring and not after them; raises ConfigError."""
    if report and not Path(report).absolute().parent.is_dir():
        raise ConfigError(f"--report cannot be written: there is no folder {Path(report).absolute().parent}")
