"""Puts the checks of lab 91 among those of ftlab.grading, in every Python that finds this folder on its path."""

from pathlib import Path

try:
    import ftlab.grading
except ImportError:  # the interpreter of some tool
    pass
else:
    ftlab.grading.__path__.append(str(Path(__file__).parents[1] / "grading"))
