"""The one file that a student hands in: a zip with the notebook, a manifest, and the event logs of the run.

It is read in memory, by the names that we look for: no name in it ever becomes a path, nothing is unpacked. What is too
large, encrypted or a link is refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import stat
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ftlab.errors import ConfigError

MANIFEST = "manifest.json"
EVIDENCE = ".events.jsonl"  # how the names of event logs end
MAX_FILE = 16 << 20  # bytes of one file in a parcel, unpacked
MAX_PARCEL = 64 << 20  # bytes of all of them
MAX_FILES = 100
STUDENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a parcel says of itself. It was in the student's hands: nothing in it earns marks."""

    lab: str
    notebook: str  # the name of its file, as it was released
    student: str
    made: str  # UTC, as 2026-11-16T13:05:00+00:00
    release: str = ""  # which release it was made from
    versions: dict[str, str] = field(default_factory=dict)  # ftlab, python, torch, platform
    files: dict[str, str] = field(default_factory=dict)  # each other file → SHA-256
    repairs: list[str] = field(default_factory=list)
    earned: float = 0.0  # on the visible checks, on the student's machine
    points: float = 0.0


@dataclass(frozen=True)
class Parcel:
    """A manifest and the files, by their plain names."""

    manifest: Manifest
    files: dict[str, bytes]

    def write(self, path: Path) -> None:
        """The whole file or none."""
        whole = io.BytesIO()
        with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(MANIFEST, json.dumps(asdict(self.manifest), indent=1))
            for name, raw in self.files.items():
                archive.writestr(name, raw)
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(whole.getvalue())
        part.replace(path)

    @property
    def altered(self) -> list[str]:
        """Files that are not what the manifest says."""
        told = self.manifest.files
        return sorted(name for name, raw in self.files.items() if told.get(name) != digest(raw))

    @classmethod
    def read(cls, raw: bytes, name: str) -> Parcel:
        """From the bytes of a zip. Raises ConfigError with the reason if it is no parcel, or not a safe one."""
        try:
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                _refuse_bombs(archive, name)
                manifest = _manifest(_take(archive, MANIFEST), name)
                wanted = [manifest.notebook, *(each.filename for each in archive.infolist() if _is_log(each.filename))]
                return cls(manifest, {each: _take(archive, each) for each in dict.fromkeys(wanted)})
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError) as error:
            raise ConfigError(f"{name} is no zip that can be read: {error}") from None


def is_parcel(raw: bytes) -> bool:
    """Whether these bytes are a zip with a manifest on top."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            return MANIFEST in archive.namelist()
    except (zipfile.BadZipFile, OSError, EOFError):
        return False


def digest(raw: bytes) -> str:
    """SHA-256."""
    return hashlib.sha256(raw).hexdigest()


def _refuse_bombs(archive: zipfile.ZipFile, name: str) -> None:
    listed = archive.infolist()
    if len(listed) > MAX_FILES:
        raise ConfigError(f"{name} holds {len(listed)} files; {MAX_FILES} are the limit")
    if sum(each.file_size for each in listed) > MAX_PARCEL:
        raise ConfigError(f"{name} would unpack to more than {MAX_PARCEL >> 20} MB")
    for each in listed:
        if stat.S_ISLNK(each.external_attr >> 16):
            raise ConfigError(f"{name} holds a link ({each.filename[:60]!r}): links are not taken")
        if each.flag_bits & 1:
            raise ConfigError(f"{name} is encrypted")


def _take(archive: zipfile.ZipFile, name: str) -> bytes:
    """One file, never more of it than the limit, whatever its header says."""
    try:
        with archive.open(name) as file:
            raw = file.read(MAX_FILE + 1)
    except KeyError:
        raise ConfigError(f"there is no {name[:60]!r} in it", hint="ftlab submit makes such files") from None
    if len(raw) > MAX_FILE:
        raise ConfigError(f"{name[:60]!r} in it is larger than {MAX_FILE >> 20} MB")
    return raw


def _manifest(raw: bytes, name: str) -> Manifest:
    try:
        data = json.loads(raw)
        known = {key: data[key] for key in Manifest.__dataclass_fields__ if key in data}
        manifest = Manifest(**known)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the manifest of {name} is damaged: {error}") from None
    plain: list[Any] = [manifest.lab, manifest.notebook, manifest.student, manifest.made]
    if not all(isinstance(each, str) for each in plain) or not isinstance(manifest.files, dict):
        raise ConfigError(f"the manifest of {name} is damaged: a field has the wrong type")
    if not re.fullmatch(r"[\w.-]+\.ipynb", manifest.notebook) or manifest.notebook.startswith("."):
        raise ConfigError(f"{name} names a notebook {manifest.notebook[:60]!r}: that is no plain file name")
    return manifest


def _is_log(name: str) -> bool:
    return bool(re.fullmatch(r"evidence/[\w-][\w.-]*", name)) and name.endswith(EVIDENCE)
