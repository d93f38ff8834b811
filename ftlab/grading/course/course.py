"""Where a course keeps its things, as its `nbgrader_config.py` says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nbgrader.coursedir import CourseDirectory
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

from ftlab.errors import ConfigError

CONFIG = "nbgrader_config.py"
LAB = re.compile(r"lab\d\d")


@dataclass(frozen=True)
class Course:
    """A folder with an `nbgrader_config.py`; every path below it comes from that file."""

    root: Path

    @classmethod
    def find(cls, start: Path | None = None) -> Course:
        """The course that a folder (this one, if none is given) lies in. Raises ConfigError if there is none."""
        here = (start or Path.cwd()).absolute()
        for folder in (here, *here.parents):
            if (folder / CONFIG).is_file():
                return cls(folder)
        raise ConfigError(f"{here} lies in no course: there is no {CONFIG} here or above",
                          hint="go to the folder that holds solutions/ and labs/")

    @cached_property
    def config(self) -> Config:
        """The settings for nbgrader's own classes."""
        config = PyFileConfigLoader(CONFIG, path=str(self.root)).load_config()
        config.CourseDirectory.root = str(self.root)
        return config

    @cached_property
    def directory(self) -> CourseDirectory:
        """nbgrader's view of the course."""
        return CourseDirectory(config=self.config)

    @property
    def sources(self) -> Path:
        """The folder with one folder per lab, as authored."""
        return self.root / str(self.directory.source_directory)

    @property
    def releases(self) -> Path:
        """The folder with one folder per lab, as students get it."""
        return self.root / str(self.directory.release_directory)

    @property
    def submitted(self) -> Path:
        """The folder with `<student>/<lab>/`."""
        return self.root / str(self.directory.submitted_directory)

    def labs(self, chosen: list[str] | None = None) -> list[str]:
        """The names of the labs that have a source, or of those that were chosen. Raises ConfigError for others."""
        found = sorted(each.name for each in _folders(self.sources) if LAB.fullmatch(each.name))
        unknown = sorted(set(chosen or []) - set(found))
        if unknown:
            raise ConfigError(f"there is no lab {', '.join(unknown)} in {self.sources}",
                              hint=f"the labs are {', '.join(found) or '(none)'}")
        if not found:
            raise ConfigError(f"{self.sources} holds no labs", hint="a lab is a folder such as lab01 with a notebook")
        return [name for name in found if not chosen or name in chosen]

    def notebook(self, lab: str) -> Path:
        """The source of a lab. Raises ConfigError unless there is exactly one notebook."""
        found = sorted((self.sources / lab).glob("*.ipynb"))
        if len(found) != 1:
            raise ConfigError(f"{self.sources / lab} must hold exactly one notebook, it holds {len(found)}")
        return found[0]


def _folders(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if each.is_dir()] if folder.is_dir() else []
