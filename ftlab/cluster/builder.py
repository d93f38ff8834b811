"""Building the image of a node from `cluster/Dockerfile` (way b), with the engine's own builder.

The build is sent exactly what the Dockerfile names: the source, the pins, and wheels that this machine's pip has
fetched (see the wheelhouse). Nothing of this machine's configuration goes along. The finished image is labelled with
the Python and the source that it holds, so that a cluster can tell when it does not fit.
"""

from __future__ import annotations

import contextlib
import json
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ftlab.cluster import wheelhouse
from ftlab.cluster.image import IMAGE, PYTHON, SOURCE, source_digest
from ftlab.errors import ClusterError

_FILES = ("cluster/Dockerfile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
_PROBE = "import json, platform; print(json.dumps([platform.python_version(), platform.machine()]))"
_STAGES = ("packages", "product")
_LAST_LINES = 12
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Built:
    """An image that was built."""

    tag: str
    id: str
    python: str  # the minor version inside
    megabytes: int
    layers: int
    offline: bool  # from wheels that were sent along; else pip inside fetched them


def find_root() -> Path:
    """The folder of the project; raises ClusterError if only the package is here, without the Dockerfile."""
    for folder in (Path(__file__).parents[2], Path.cwd()):
        if all((folder / name).exists() for name in _FILES):
            return folder
    raise ClusterError("an image is built from the project's source, and only the package is here",
                       hint="run it inside a clone of the repository")


def build(client: Any, *, base: str, tag: str, wheels: bool, say: Say, detail: Say) -> Built:
    """Build an image on `base` and name it `tag`; raises ClusterError. `say` hears of stages, `detail` of every line
    of the builder."""
    root = find_root()
    say(f"looking at {base}")
    version, machine = look_at_base(client, base)
    python = ".".join(version.split(".")[:2])
    offline = wheels and wheelhouse.fits(python, machine)
    if offline:
        wheelhouse.fetch(root, say)
    labels = {IMAGE: "node", PYTHON: python, SOURCE: source_digest(root / "ftlab")}
    say("sending the source and the packages to the engine")
    with tempfile.TemporaryFile() as context:
        _pack(root, offline, context)
        context.seek(0)
        lines = client.build(fileobj=context, custom_context=True, encoding=None, dockerfile=_FILES[0], tag=tag,
                             buildargs={"BASE": base}, labels=labels, rm=True, forcerm=True, decode=True)
        _follow(_unbroken(lines), say, detail)
    found = client.inspect_image(tag)
    return Built(tag=tag, id=found["Id"], python=python, megabytes=round(found["Size"] / 1e6),
                 layers=len(found["RootFS"]["Layers"]), offline=offline)


def forget_stages(client: Any) -> int:
    """Remove what the stages of our builds left, 1 GB or so, at the price of a slower next build; the bytes gained."""
    gained = 0
    for stage in reversed(_STAGES):
        pruned = client.prune_images(filters={"dangling": True, "label": f"ftlab.stage={stage}"})
        gained += int(pruned.get("SpaceReclaimed") or 0)
    return gained


def look_at_base(client: Any, base: str) -> tuple[str, str]:
    """Python's version and the architecture of a base; raises ClusterError if it cannot be used."""
    from docker.errors import APIError, ImageNotFound

    _need_image(client, base)
    try:
        made = client.create_container(base, ["python3", "-c", _PROBE], network_disabled=True)["Id"]
    except ImageNotFound:
        raise ClusterError(f"there is no image {base}") from None
    try:
        client.start(made)
        client.wait(made)
        version, machine = json.loads(client.logs(made, stderr=False))
    except (APIError, ValueError) as error:
        raise ClusterError(f"{base} cannot be a base: python3 does not run in it",
                           seen=str(getattr(error, "explanation", "") or error)[:300],
                           hint="take a base with Python 3.11 or newer and its venv module") from None
    finally:
        client.remove_container(made, force=True, v=True)
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 11):
        raise ClusterError(f"{base} cannot be a base: it holds Python {version}", hint="ftlab needs 3.11 or newer")
    return version, machine


def _need_image(client: Any, base: str) -> None:
    """Nothing is pulled by surprise: the base must be here."""
    from docker.errors import ImageNotFound

    with contextlib.suppress(ImageNotFound):
        client.inspect_image(base)
        return
    raise ClusterError(f"the engine has no image {base}", hint=f"docker pull {base}, or on Debian without a registry: "
                                                               f"cluster/base.sh, then --base ftlab-base")


def _pack(root: Path, offline: bool, context: IO[bytes]) -> None:
    """Write the build's context: what the Dockerfile names, and nothing else."""
    with tarfile.open(fileobj=context, mode="w") as tar:
        for path in (*(root / name for name in _FILES), *_sources(root)):
            tar.add(path, str(path.relative_to(root)), filter=_plain)
        if offline:
            for wheel in sorted((root / wheelhouse.FOLDER).glob("*.whl")):
                tar.add(wheel, f"{wheelhouse.FOLDER}/{wheel.name}", filter=_plain)


def _sources(root: Path) -> Iterator[Path]:
    for path in sorted((root / "ftlab").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without owner and time: the same files find the builder's cache again."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.mode & 0o100 else 0o644
    return entry


def _unbroken(lines: Any) -> Iterator[dict[str, Any]]:
    """The builder's lines; a link that breaks is an error in words. (urllib3's errors pass docker's wrapping by.)"""
    try:
        yield from lines
    except Exception as error:
        raise ClusterError("the engine went away while it was building", seen=str(error)[:300],
                           hint="docker info; then build again: what was finished is kept") from None


def _follow(lines: Any, say: Say, detail: Say) -> None:
    said: list[str] = []
    for line in lines:
        text = str(line.get("stream", "")).strip()
        if text.startswith("Step "):
            step, _, what = text.partition(" : ")
            say(f"{step.lower()}: {what.split(chr(10))[0][:60]}")
        if text:
            detail(text)
            said = [*said, text][-_LAST_LINES:]
        if "error" in line:
            raise ClusterError(f"the image could not be built: {str(line['error']).strip()[:300]}",
                               seen="\n".join(said)[-1500:], hint="ftlab image build --verbose shows all of it")
