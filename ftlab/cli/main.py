"""The `ftlab` command. For people by default; with `--json` exactly one JSON object on stdout, all else on stderr.

Exit code 0: what was asked happened and every expectation held; 1: it ran and something did not hold; 2: bad usage.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ftlab import __version__
from ftlab.config import NETWORKS
from ftlab.errors import ConfigError, FtlabError, UnknownFault

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        print("\nftlab: interrupted; everything it started is ended", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    except FtlabError as error:
        return _tell(error, arguments)
    except OSError as error:  # the machine refused: a full disk, a folder of somebody else
        place = f": {error.filename}" if error.filename else ""
        return _tell(FtlabError(f"{error.strerror or error}{place}", hint="`ftlab doctor` looks this machine over"),
                     arguments)


def _tell(error: FtlabError, arguments: argparse.Namespace) -> int:
    if getattr(arguments, "json", False):
        print(json.dumps(error.to_dict()))
    print(f"ftlab: {error}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError | UnknownFault) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ftlab", description="Break a training cluster on this machine, and watch it heal.",
        epilog="example: ftlab drill kill --report kill.html", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"ftlab {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_doctor(commands)
    _add_clusters(commands)
    _add_drill(commands)
    _add_bench(commands)
    _add_checkpoints(commands)
    _add_image(commands)
    lab = _add(commands, "lab", _lab, "open JupyterLab on the labs; its terminals and kernels find ftlab",
               "ftlab lab -- --no-browser --port 9000")
    lab.add_argument("jupyter", metavar="-- ARGUMENT", nargs="*", help="passed on to JupyterLab, after two dashes")
    _add_labs(commands)
    _add_grade(commands)
    _add_submissions(commands)
    demo = _add(commands, "demo", _demo, "a tour of about two minutes; what this machine cannot do is named and left "
                "out", "ftlab demo")
    demo.add_argument("--quick", action="store_true", help="only the first fault")
    demo.add_argument("--report", default="", metavar="FILE.html", help="where the tour's report goes (default "
                      "ftlab-demo.html, here)")
    return parser


def _add(commands: Any, name: str, run: Command, text: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text,
                                                          epilog=f"example: {example}")
    parser.set_defaults(run=run)
    return parser


def _add_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=4, help="nodes that train (default 4)")
    parser.add_argument("--spares", type=int, default=1, help="warm nodes that wait for a rank (default 1)")
    parser.add_argument("--procs-per-node", type=int, default=1, help="workers on each node (default 1)")
    parser.add_argument("--backend", choices=("auto", "process", "docker"), default="process",
                        help="what a node is: a process group or a container; auto: a container if an engine answers "
                             "(default process)")


def _add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--network", choices=NETWORKS, default="auto",
                        help="of processes: the host's, or a private one, which nobody else can reach; auto: private "
                             "where packets can be dropped only there")


def _add_doctor(commands: Any) -> None:
    doctor = _add(commands, "doctor", _doctor, "what this machine can run, and what to do about each gap",
                  "ftlab doctor --json")
    doctor.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _add_clusters(commands: Any) -> None:
    up = _add(commands, "up", _up, "start a cluster that outlives this command", "ftlab up --nodes 4 --spares 1")
    _add_size(up)
    _add_network(up)
    up.add_argument("--port", type=int, help="a port on 127.0.0.1 for the controller, such as for Prometheus; 0: a "
                    "free one (default: none, but a socket file that other users cannot open)")
    status = _add(commands, "status", _status, "the clusters that are up", "ftlab status")
    down = _add(commands, "down", _down, "end a cluster that `ftlab up` started", "ftlab down ft-1a2b3c4d")
    down.add_argument("name", nargs="?", help="its name (not needed if there is only one)")
    reap = _add(commands, "reap", _reap, "remove what earlier runs left behind, and nothing else", "ftlab reap")
    for each in (up, status, down, reap):
        each.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _add_drill(commands: Any) -> None:
    drill = _add(commands, "drill", _drill, "one experiment: break a cluster, measure, compare with an undisturbed "
                 "twin", "ftlab drill kill --seed 3 --json")
    drill.add_argument("name", metavar="NAME", help="kill, crash, hang, stall, nan, oom, straggler, partition, split, "
                       "link, disk, controller, blackout, corrupt; `random` for a random schedule, `all` for one of "
                       "each that this machine can do")
    _add_size(drill)
    _add_network(drill)
    drill.add_argument("--steps", type=int, default=150, help="steps to train (default 150)")
    drill.add_argument("--step-ms", type=float, default=20.0, help="length of a step (default 20)")
    drill.add_argument("--seed", type=int, default=0, help="of victims and moments (default 0)")
    drill.add_argument("--faults", type=int, default=3, help="for random: how many (default 3)")
    drill.add_argument("--exact", action="store_true", help="identical bits even when the world changes size")
    drill.add_argument("--way", default="", help="of a fault that has several, e.g. nan: once, again; oom: allocation, "
                                                 "kernel; corrupt: flip, truncate, swap (default: by the seed); "
                                                 "partition and split: sends, receives (default: both ways)")
    drill.add_argument("--report", metavar="FILE.html", help="write the report as one self-contained file")
    drill.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _add_bench(commands: Any) -> None:
    bench = _add(commands, "bench", _bench, "measure: recovery (per fault), overhead (when nothing breaks), "
                 "checkpoint (beside torch's own), interval (predicted, measured), detectors (latency, false alarms)",
                 "ftlab bench recovery --runs 5 --json")
    bench.add_argument("what", choices=("recovery", "overhead", "checkpoint", "interval", "detectors"))
    _add_size(bench)
    bench.set_defaults(nodes=None)  # 4 for recovery, 2 for the others: a worker per core
    bench.add_argument("--runs", type=int, default=5, help="for recovery: runs per fault (default 5)")
    bench.add_argument("--faults", default="", help="for recovery: only these, separated by commas")
    bench.add_argument("--size-mb", default="12,120,1200", help="for checkpoint: sizes of the state, separated by "
                       "commas (default 12,120,1200)")
    bench.add_argument("--repeats", type=int, default=0, help="for checkpoint: per size (default 5)")
    bench.add_argument("--blocks", type=int, default=20, help="for checkpoint: pairs of 50 training steps with and "
                       "without a save (default 20; 0: none)")
    bench.add_argument("--dir", default="", help="for checkpoint: a folder on the disk to be measured (default: here)")
    bench.add_argument("--every", default="2,5,10,20,50", help="for interval: steps between two checkpoints, separated "
                       "by commas (default 2,5,10,20,50)")
    bench.add_argument("--steps", type=int, default=0, help="for interval: steps to train (default: enough for the "
                       "longest interval)")
    bench.add_argument("--kills", type=int, default=4, help="for interval: blackouts per run (default 4)")
    bench.add_argument("--report", default="", metavar="FILE.html", help="for interval and detectors: write a "
                       "self-contained file")
    bench.add_argument("--record", action="store_true", help="for detectors: record heartbeats now (idle, loaded, with "
                       "pauses) instead of using those that came with ftlab")
    bench.add_argument("--seconds", type=float, default=60.0, help="for detectors: of each recording (default 60)")
    bench.add_argument("--seed", type=int, default=0)
    bench.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _add_checkpoints(commands: Any) -> None:
    text = "look at what a run has saved, check it, export it, remove it"
    group = commands.add_parser("checkpoints", help=text, description=text,
                                epilog="example: ftlab checkpoints ls --dir runs/checkpoints")
    inner = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
    ls = _add(inner, "ls", _checkpoints("ls"), "list all checkpoints, the newest first", "ftlab checkpoints ls --json")
    verify = _add(inner, "verify", _checkpoints("verify"), "read checkpoints and compare their digests; exit code 1 if "
                  "one is not good", "ftlab checkpoints verify 1200 --dir s3://bucket/run")
    show = _add(inner, "show", _checkpoints("show"), "what one checkpoint holds: manifest, digests, tensors",
                "ftlab checkpoints show 1200")
    export = _add(inner, "export", _checkpoints("export"), "write one checkpoint as a single torch.save file (epoch, "
                  "model_state_dict, optimizer_state_dict, loss)", "ftlab checkpoints export 1200 model.pt")
    rm = _add(inner, "rm", _checkpoints("rm"), "remove checkpoints by hand", "ftlab checkpoints rm 50 100 --yes")
    verify.add_argument("which", metavar="STEP|NAME", nargs="*", help="only these (default: all)")
    show.add_argument("which", metavar="STEP|NAME")
    export.add_argument("which", metavar="STEP|NAME")
    export.add_argument("file", metavar="FILE.pt")
    export.add_argument("--force", action="store_true", help="replace the file if it is there")
    rm.add_argument("which", metavar="STEP|NAME", nargs="+")
    rm.add_argument("--yes", action="store_true", help="do not ask")
    rm.add_argument("--force", action="store_true", help="even if no good one is left")
    for each in (ls, verify, show, export, rm):
        each.add_argument("--dir", default="", metavar="PATH_OR_URL", help="the run's folder (default: CHECKPOINT_DIR)")
        each.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _add_image(commands: Any) -> None:
    text = "the image of a node, for where this machine's own environment cannot be bound into containers"
    group = commands.add_parser("image", help=text, description=text, epilog="example: ftlab image build --base BASE")
    inner = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
    build = _add(inner, "build", _image_build, "build it from cluster/Dockerfile, with packages that pip fetches here",
                 "ftlab image build --base ftlab-base")
    build.add_argument("--base", default="ftlab-base", help="an image with Python 3.11 or newer and venv, the same "
                       "minor version as here (default ftlab-base, which cluster/base.sh makes)")
    build.add_argument("--tag", default="ftlab-node", help="what to call it (default ftlab-node)")
    build.add_argument("--no-wheels", action="store_true", help="let pip inside the build fetch the packages")
    build.add_argument("--forget", action="store_true", help="remove what the build's stages left; the next build is "
                       "slower")
    build.add_argument("--verbose", action="store_true", help="show the builder's lines on stderr")
    build.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _add_labs(commands: Any) -> None:
    text = "for authors: generate labs/ from solutions/, check both, run and render them"
    group = commands.add_parser("labs", help=text, description=text, epilog="example: ftlab labs check")
    inner = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
    release = _add(inner, "release", _labs("release"), "generate labs/ from solutions/: first into a temporary folder, "
                   "then swapped in", "ftlab labs release lab01")
    check = _add(inner, "check", _labs("check"), "drift, ids, points, metadata, leaked solutions, links, names of "
                 "tasks; exit code 1 if something is wrong", "ftlab labs check --json")
    run = _add(inner, "run", _labs("run"), "execute the solutions from fresh kernels; exit code 1 unless all checks "
               "give full points", "ftlab labs run lab01")
    points = _add(inner, "points", _labs("show_points"), "write docs/points.md and list the graded cells",
                  "ftlab labs points")
    render = _add(inner, "render", _labs("render"), "execute the solutions and write the students' view as HTML pages",
                  "ftlab labs render lab00 --to build/labs")
    pack = _add(inner, "pack", _labs("pack"), "write the bundle for students: labs, ftlab, pinned versions; nothing of "
                "solutions, hidden tests or tests", "ftlab labs pack lab00 lab01 --to week1.zip")
    pack.add_argument("--to", default="", metavar="FILE.zip", help="where it goes (default build/ftlab-labs.zip)")
    for each in (release, check, run, render, pack):
        each.add_argument("lab", metavar="LAB", nargs="*", help="only these, such as lab01 (default: all)")
    for each in (run, render):
        each.add_argument("--cell-timeout", type=float, default=600.0, metavar="S",
                          help="the longest that one cell may take (default 600)")
    release.add_argument("--force", action="store_true", help="replace labs that somebody has edited")
    render.add_argument("--to", default="", metavar="FOLDER", help="where the pages go (default build/labs)")
    for each in (release, check, run, points, render, pack):
        each.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _add_submissions(commands: Any) -> None:
    submit = _add(commands, "submit", _submissions("submit"), "for students: run a lab from a fresh kernel, repair "
                  "what can be repaired, say what fails, pack one file", "ftlab submit lab01 --student alice")
    submit.add_argument("what", metavar="LAB|NOTEBOOK", help="such as lab01, its folder, or the notebook")
    submit.add_argument("--student", default="", metavar="NAME", help="who hands it in (default: the login name)")
    submit.add_argument("--to", default="", metavar="FOLDER", help="where the file goes (default: here)")
    submit.add_argument("--quick", action="store_true", help="leave out the cells that only show something")
    submit.add_argument("--cell-timeout", type=float, default=600.0, metavar="S",
                        help="the longest that one cell may take (default 600)")
    collect = _add(commands, "collect", _submissions("collect"), "for instructors: take files of ftlab submit, or "
                   "plain notebooks, into submitted/", "ftlab collect downloads/lab01.zip")
    collect.add_argument("place", nargs="?", default="", metavar="FOLDER|ARCHIVE")
    collect.add_argument("--download", action="store_true", help="it is the download of a course (Moodle, Canvas, "
                         "nbgrader), not a student's: it may hold the work of many, and its paths say whose")
    collect.add_argument("--choose", default="", metavar="LAB/STUDENT/HAND-IN", help="let this one of received/ count, "
                         "whatever comes later; LAB/STUDENT/newest takes it back")
    collect.add_argument("--pattern", default="", metavar="REGEX", help="whose a file is, by its path: a regular "
                         "expression with the group (?P<student>...), perhaps (?P<lab>...)")
    for each in (submit, collect):
        each.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _add_grade(commands: Any) -> None:
    grade = _add(commands, "grade", _grade, "for instructors: grade what was submitted for a lab, each submission in a "
                 "sandbox, several at once; what was graded before is not graded again",
                 "ftlab grade lab01 --csv lab01.csv; one student, even if nothing changed: ftlab grade lab01 --student "
                 "alice --again")
    grade.add_argument("lab", metavar="LAB", help="such as lab01")
    grade.add_argument("--jobs", type=int, default=0, metavar="N", help="submissions at once (default: one per core)")
    grade.add_argument("--student", action="append", default=[], metavar="S", help="only this one (may be repeated)")
    grade.add_argument("--csv", default="", metavar="FILE", help="write the marks of this lab as CSV")
    grade.add_argument("--again", action="store_true", help="even what was graded before")
    grade.add_argument("--similar", action="store_true",
                       help="grade nothing: show pairs of submissions that are alike beyond the given cells")
    grade.add_argument("--sandbox", default="auto", choices=("auto", "container", "namespaces", "limits"),
                       help="where student's code runs (default auto: the strongest that works here)")
    grade.add_argument("--memory-mb", type=int, default=3072, metavar="MB", help="for each submission (default 3072)")
    grade.add_argument("--json", action="store_true", help="one JSON object on stdout")


# The commands import what they need themselves, so that `ftlab --help` answers at once.


def _doctor(arguments: argparse.Namespace) -> int:
    from ftlab.cli.doctor import run
    return run(arguments)


def _up(arguments: argparse.Namespace) -> int:
    from ftlab.cli.clusters import up
    return up(arguments)


def _status(arguments: argparse.Namespace) -> int:
    from ftlab.cli.clusters import status
    return status(arguments)


def _down(arguments: argparse.Namespace) -> int:
    from ftlab.cli.clusters import down
    return down(arguments)


def _reap(arguments: argparse.Namespace) -> int:
    from ftlab.cli.clusters import reap
    return reap(arguments)


def _drill(arguments: argparse.Namespace) -> int:
    from ftlab.cli.drills import drill
    return drill(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    from ftlab.cli.benches import bench
    return bench(arguments)


def _checkpoints(name: str) -> Command:
    def run(arguments: argparse.Namespace) -> int:
        from ftlab.cli import checkpoints
        return int(getattr(checkpoints, name)(arguments))

    return run


def _image_build(arguments: argparse.Namespace) -> int:
    from ftlab.cli.images import build
    return build(arguments)


def _lab(arguments: argparse.Namespace) -> int:
    from ftlab.cli.lab import lab
    return lab(arguments)


def _labs(name: str) -> Command:
    return lambda arguments: int(getattr(_course("labs"), name)(arguments))


def _submissions(name: str) -> Command:
    return lambda arguments: int(getattr(_course("submissions"), name)(arguments))


def _course(module: str) -> Any:
    """A module that needs what the extra `labs` installs."""
    try:
        return importlib.import_module(f"ftlab.cli.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ftlab"):
            raise
        raise ConfigError(f"{error.name} is not installed, and the labs need it",
                          hint="make setup, or pip install 'ftlab[labs]'") from None


def _grade(arguments: argparse.Namespace) -> int:
    return int(_course("grading").grade(arguments))


def _demo(arguments: argparse.Namespace) -> int:
    from ftlab.cli.demo import demo
    return demo(arguments)


if __name__ == "__main__":
    sys.exit(main())
