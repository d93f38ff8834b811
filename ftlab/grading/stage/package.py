"""What a sandbox sees of ftlab: a copy without the judges, and without the reference of what a lab asks for.

Checks, cases, situations and hidden modules are left out, for every lab: what is not there cannot be read, whatever
student's code does to its own process. Of the lab that is graded only the scenes are there, which are given all that
they need as arguments. The bodies of the reference's functions are replaced by an error that says so; their names stay,
as other modules of ftlab import them.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import ftlab

SCENES = ("__init__", "scenes", "groups", "loops")  # what a lab has in the sandbox; all else of it judges
_GRADING = ("__init__", "check", "draws", "hidden", "stage", "crash")  # of ftlab.grading, besides the labs
_MARKING = ("__init__", "play")
_LAB = re.compile(r"lab\d\d")

REFERENCE: dict[str, dict[str, tuple[str, ...]]] = {  # lab → file → classes and functions that it asks for
    "lab01": {"checkpoint/distributed.py": ("DistributedCheckpointManager",),
              "checkpoint/manager.py": ("CheckpointManager",)},
    "lab02": {"health/monitor.py": ("HealthMonitor",), "health/detector.py": ("TimeoutDetector", "PhiDetector")},
    "lab03": {"policy.py": ("decide", "_grow", "_refuse", "_mend_step", "_mend_crash", "_mend_numbers", "_mend_memory",
                            "_replace_straggler", "_lost_nodes"),
              "train/autorecovery.py": ("train_with_auto_recovery", "_Run")},
}


def copy_package(target: Path, labs: Collection[str]) -> None:
    """Copy ftlab to a folder as student's code may see it while these labs are graded."""
    root = Path(ftlab.__file__).parent
    hollow = {file: (lab, names) for lab in labs for file, names in REFERENCE.get(lab, {}).items()}
    for file in _seen(root, labs):
        name = file.relative_to(root)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if str(name) in hollow:
            (target / name).write_text(without_bodies(file.read_text(encoding="utf-8"), name, *hollow[str(name)]),
                                       encoding="utf-8")
        elif not (file.suffix == ".pyc" and f"{name.parent.parent / file.name.split('.')[0]}.py" in hollow):
            shutil.copy2(file, target / name)


def _seen(root: Path, labs: Collection[str]) -> Iterator[Path]:
    for file in root.rglob("*"):
        parts = [part for part in file.relative_to(root).parts if part != "__pycache__"]
        if file.is_file() and not file.is_symlink() and _may_be_seen(parts, labs):
            yield file


def _may_be_seen(parts: list[str], labs: Collection[str]) -> bool:
    """`parts` of a path below the package; compiled files count as their sources."""
    names = [part.split(".")[0] for part in parts]
    if names[0] != "grading" or len(names) < 2:
        return True
    if names[1] == "marking":
        return len(names) == 3 and names[2] in _MARKING
    if _LAB.fullmatch(names[1]):
        return names[1] in labs and len(names) == 3 and names[2] in SCENES
    return names[1] in _GRADING


def without_bodies(source: str, file: Path, lab: str, names: Collection[str]) -> str:
    """A module whose functions of these names, and all methods of classes of these names, only raise."""
    tree = ast.parse(source)
    module = ".".join(["ftlab", *file.with_suffix("").parts])
    missing = set(names) - {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    if missing:
        raise ValueError(f"{module} has no {', '.join(sorted(missing))}: name the reference of {lab} anew")
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names:
            words = (f"{module}.{node.name} is the reference of what {lab} asks for: while that lab is graded, it "
                     "cannot be used. Write your own.")
            for each in ast.walk(node):
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    each.body = [ast.parse(f"raise ImportError({words!r})").body[0]]
    return ast.unparse(ast.fix_missing_locations(tree))
