"""nbgrader's Autograde with student's code in a sandbox; `nbgrader_config.py` names these in the place of its own.

`Restore` comes before nbgrader's own sanitizing: what a cell is (graded, locked, how many points) is what the gradebook
says it is, whatever stands in the submission. `SandboxedExecute` takes the place of `Execute`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell
from nbgrader.api import Gradebook
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Float, Integer, Unicode

from ftlab.cluster.sandbox import Limits, Sandbox, choose
from ftlab.errors import FtlabError
from ftlab.grading.course import cells as kinds
from ftlab.grading.draws import course_secret
from ftlab.grading.marking.marking import mark
from ftlab.grading.marking.record import Records
from ftlab.grading.marking.sheet import Sheet, sheet_of

STATE = ".ftlab/grading"  # in the course's folder
_ATTACHED = ("image/png", "image/jpeg")
_LANGUAGE = {"name": "python", "pygments_lexer": "ipython3", "file_extension": ".py", "mimetype": "text/x-python"}

SANITIZE = ["nbgrader.preprocessors.ClearOutput", "ftlab.grading.marking.preprocessors.Restore",
            "nbgrader.preprocessors.DeduplicateIds", "nbgrader.preprocessors.OverwriteKernelspec",
            "nbgrader.preprocessors.OverwriteCells", "nbgrader.preprocessors.CheckCellMetadata"]
AUTOGRADE = ["ftlab.grading.marking.preprocessors.SandboxedExecute", "nbgrader.preprocessors.LimitOutput",
             "nbgrader.preprocessors.SaveAutoGrades", "nbgrader.preprocessors.AssignLatePenalties",
             "nbgrader.preprocessors.CheckCellMetadata"]


class Restore(NbGraderPreprocessor):
    """Every graded and every locked cell is there once and is what the gradebook says; all else is the student's."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """The whole notebook."""
        _refuse_links(_submission(self, resources))
        with Gradebook(resources["nbgrader"]["db_url"]) as gradebook:
            source = gradebook.find_notebook(resources["nbgrader"]["notebook"], resources["nbgrader"]["assignment"])
            released = {cell.name: cell for cell in source.source_cells}
            marking = {name: _marking(cell, source) for name, cell in released.items()}
            nb.metadata = NotebookNode({"language_info": NotebookNode(_LANGUAGE)})
            found = self._restore_present(nb, marking)
            self._put_back(nb, released, marking, found)
        return nb, resources

    def _restore_present(self, nb: NotebookNode, marking: dict[str, dict[str, Any]]) -> set[str]:
        """From the end on, as nbgrader does: of two cells with one name the last counts."""
        found: set[str] = set()
        for cell in reversed(nb.cells):
            name = kinds.grade_id(cell) or str(cell.get("id", ""))
            tags = [kinds.EXPERIMENT] if kinds.tagged(cell, kinds.EXPERIMENT) else []
            cell.metadata = NotebookNode({"tags": tags} if tags else {})
            _drop_attachments(cell)
            if name in marking and name not in found:
                found.add(name)
                cell.metadata["nbgrader"] = NotebookNode(marking[name])
        return found

    def _put_back(self, nb: NotebookNode, released: dict[str, Any], marking: dict[str, dict[str, Any]],
                  found: set[str]) -> None:
        """Graded and locked cells that are missing, each behind the one that it followed."""
        place = 0
        for name, cell in released.items():
            if name in found:
                place = 1 + next(index for index, each in enumerate(nb.cells) if kinds.grade_id(each) == name)
            elif cell.locked or marking[name]["grade"] or marking[name]["task"]:
                made = (new_code_cell if cell.cell_type == "code" else new_markdown_cell)(cell.source)
                made.metadata["nbgrader"] = NotebookNode(marking[name])
                nb.cells.insert(place, made)
                self.log.warning("the cell %s was missing and was put back", name)
                place += 1


class SandboxedExecute(NbGraderPreprocessor):
    """The student's cells run in a sandbox, the graded ones in this process with the student's parts as bytes."""

    sandbox = Unicode("auto", help="auto, container, namespaces or limits").tag(config=True)
    memory_mb = Integer(3072, help="what one submission may take").tag(config=True)
    cell_timeout = Float(60.0, help="seconds for one of the student's cells").tag(config=True)
    notebook_timeout = Float(300.0, help="seconds for all of the student's cells").tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """The whole notebook, from the records if it was marked before."""
        sandbox = _sandbox(self.sandbox, self.memory_mb)
        sheet = self.sheet(nb, resources)
        records, key = Records(_root(self) / STATE / "records"), sheet.key(sandbox.kind)
        record = records.find(key)
        if record is None:
            if sandbox.missing:
                self.log.warning("%s", sandbox.warning())
            record = mark(sheet, sandbox)
            if not record.troubles:
                records.keep(key, record)
        for each in [*record.notes, *record.troubles]:
            self.log.warning("%s: %s", resources["nbgrader"]["student"], each)
        record.put_into(nb)
        return nb, resources

    def sheet(self, nb: NotebookNode, resources: Any) -> Sheet:
        """What there is to do; sources and points of graded cells come from the gradebook."""
        marked = resources["nbgrader"]
        with Gradebook(marked["db_url"]) as gradebook:
            source = gradebook.find_notebook(marked["notebook"], marked["assignment"])
            points = {cell.name: float(cell.max_score) for cell in source.grade_cells}
            sources = {cell.name: (cell.source, points[cell.name]) for cell in source.source_cells
                       if cell.name in points and cell.locked and cell.cell_type == "code"}
        beside = resources.get("metadata", {}).get("path", "")
        return sheet_of(nb, sources, files=beside, cell_s=self.cell_timeout, notebook_s=self.notebook_timeout,
                        secret=course_secret(_root(self) / STATE / "secret"))


@cache
def _sandbox(kind: str, memory_mb: int) -> Sandbox:
    return choose(kind, Limits(memory_mb=memory_mb))


def _marking(cell: Any, source: Any) -> dict[str, Any]:
    """The metadata of a released cell, as the gradebook knows it."""
    graded = {each.name: float(each.max_score) for each in source.grade_cells}
    tasks = {each.name: float(each.max_score) for each in source.task_cells}
    found = {"schema_version": 3, "grade_id": cell.name, "grade": cell.name in graded, "task": cell.name in tasks,
             "solution": cell.name in {each.name for each in source.solution_cells}, "locked": bool(cell.locked),
             "cell_type": cell.cell_type}
    points = graded.get(cell.name, tasks.get(cell.name))
    return found if points is None else {**found, "points": points}


def _drop_attachments(cell: NotebookNode) -> None:
    """Pictures stay; whatever else a page could run does not."""
    attached = cell.get("attachments")
    if isinstance(attached, dict):
        cell.attachments = NotebookNode({name: NotebookNode({kind: raw for kind, raw in each.items()
                                                             if kind in _ATTACHED}) for name, each in attached.items()
                                         if isinstance(each, dict)})


def _submission(preprocessor: Any, resources: Any) -> Path | None:
    """The folder that was handed in, where nbgrader's converter can be asked for it."""
    converter = getattr(preprocessor.parent, "parent", None)
    course = getattr(converter, "coursedir", None)
    if course is None:
        return None
    marked = resources["nbgrader"]
    return Path(course.format_path(course.submitted_directory, marked["student"], marked["assignment"]))


def _refuse_links(folder: Path | None) -> None:
    """A link in a submission would have us read, and hand back, whatever it leads to."""
    if folder is None:
        return
    for each in [folder.parent, folder, *folder.rglob("*")]:
        if each.is_symlink():
            raise FtlabError(f"{each} is a symbolic link: a submission holds files only",
                             hint="ftlab grade leaves links out")


def _root(preprocessor: Any) -> Path:
    course = getattr(getattr(preprocessor.parent, "parent", None), "coursedir", None)
    return Path(course.root) if course is not None else Path.cwd()
