"""`ftlab collect`: what students handed in, whatever they did to it, ends in submitted/ or is refused with a reason."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ftlab.cli.main import main
from ftlab.errors import ConfigError
from ftlab.grading.course import parcel as parcels
from ftlab.grading.course.collecting import collect
from ftlab.grading.course.parcel import Manifest, Parcel, digest
from ftlab.grading.course.record import Record
from ftlab.grading.course.release import tree

EARLY, LATE = "2026-11-16T10:00:00+00:00", "2026-11-16T12:00:00+02:30"  # the second is the earlier one


@pytest.fixture
def inbox(tmp_path) -> Path:
    (tmp_path / "inbox").mkdir()
    return tmp_path / "inbox"


def parcel(course, student="alice", text="{}", made=EARLY, **other) -> Parcel:
    files = {"small.ipynb": text.encode()}
    manifest = Manifest(lab="lab90", notebook="small.ipynb", student=student, made=made,
                        release=Record.read(course.releases / "lab90").digest,
                        files={name: digest(raw) for name, raw in files.items()})
    return Parcel(replace(manifest, **other), files)


def outcomes(course, place, pattern="") -> dict[str, tuple[str, str]]:
    return {each.file: (each.outcome, "; ".join([each.why, *each.notes]).strip("; "))
            for each in collect(course, place, pattern)}


def test_parcels_of_a_folder_are_filed_by_student_and_lab(course, inbox, capsys):
    for name in ("alice", "bob.b@uni-x.example"):
        parcel(course, name, text=name).write(inbox / f"lab90-{name}.zip")
    assert main(["collect", str(inbox), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [each["outcome"] for each in facts["files"]] == ["taken", "taken"]
    place = course.submitted / "bob.b@uni-x.example" / "lab90"
    assert (place / "small.ipynb").read_text() == "bob.b@uni-x.example"
    assert (place / "timestamp.txt").read_text() == "2026-11-16 10:00:00 UTC\n"
    assert sorted(each.name for each in course.submitted.iterdir()) == ["alice", "bob.b@uni-x.example"]
    assert set(outcomes(course, inbox).values()) == {("as before", "")}


def test_the_newest_of_two_wins_by_time_and_not_by_name(course, inbox):
    parcel(course, text="first", made=LATE).write(inbox / "lab90-alice (2).zip")
    parcel(course, text="second", made=EARLY).write(inbox / "lab90-alice.zip")
    assert outcomes(course, inbox) == {"lab90-alice (2).zip": ("older", "lab90-alice.zip is newer"),
                                       "lab90-alice.zip": ("taken", "")}
    assert (course.submitted / "alice/lab90/small.ipynb").read_text() == "second"
    newer = inbox / "again"
    newer.mkdir()
    parcel(course, text="third", made="2026-11-17T00:00:00+00:00").write(newer / "x.zip")
    assert outcomes(course, newer) == {"x.zip": ("taken", f"in place of the one of {EARLY}")}
    assert outcomes(course, inbox / "lab90-alice.zip")["lab90-alice.zip"][0] == "older"
    assert (course.submitted / "alice/lab90/small.ipynb").read_text() == "third"


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_an_archive_of_parcels_and_notebooks_is_taken_apart(course, inbox, kind):
    file = io.BytesIO()
    path = inbox / "one.zip"
    parcel(course).write(path)
    entries = {"down/loads/Alice_123.zip": path.read_bytes(), "carol/lab90/my lab.ipynb": b"{}",
               "x/lab90-dave.ipynb": b"{}", "__MACOSX/lab90-zed.ipynb": b"", "who.ipynb": b"{}", "readme.txt": b"hello"}
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as archive:
            for name, raw in entries.items():
                archive.writestr(name, raw)
    else:
        with tarfile.open(fileobj=file, mode="w:gz") as tar:
            for name, raw in entries.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(raw)
                tar.addfile(entry, io.BytesIO(raw))
    path.unlink()
    (inbox / f"all.{kind}").write_bytes(file.getvalue())
    told = outcomes(course, inbox / f"all.{kind}")
    assert {name.partition("/")[2]: outcome for name, (outcome, _) in told.items()} == {
        "down/loads/Alice_123.zip": "taken", "carol/lab90/my lab.ipynb": "taken", "x/lab90-dave.ipynb": "taken",
        "who.ipynb": "refused"}
    assert (course.submitted / "carol/lab90/small.ipynb").read_bytes() == b"{}"


def test_a_pattern_decides_whose_it_is_and_a_difference_is_told(course, inbox):
    parcel(course, "mallory").write(inbox / "s123_lab90.zip")
    told = outcomes(course, inbox, r"(?P<student>s\d+)_")
    assert told == {"s123_lab90.zip": ("taken", "its manifest says 'mallory', its path 's123'")}
    assert (course.submitted / "s123").is_dir() and not (course.submitted / "mallory").exists()
    with pytest.raises(ConfigError, match="needs a group of the name student"):
        collect(course, inbox, r"\d+")


@pytest.mark.parametrize(("other", "words"), [
    ({"student": "../../evil"}, "cannot be a student's name"), ({"student": ".."}, "cannot be a student's name"),
    ({"student": "a/b"}, "cannot be a student's name"), ({"lab": "../lab90"}, "it is for '../lab90'"),
    ({"lab": "lab91"}, "the labs are lab90"), ({"made": "yesterday"}, "is no time"),
    ({"notebook": "../../small.ipynb"}, "no plain file name"), ({"notebook": "/etc/passwd"}, "no plain file name"),
    ({"notebook": 3}, "wrong type"), ({"notebook": "other.ipynb"}, "there is no 'other.ipynb' in it"),
])
def test_a_manifest_that_lies_is_refused_and_nothing_is_written(course, inbox, other, words):
    before = tree(course.root)
    good = parcel(course)
    Parcel(replace(good.manifest, **other), good.files).write(inbox / "x.zip")
    [(outcome, why)] = outcomes(course, inbox).values()
    assert outcome == "refused" and words in why
    assert tree(course.root) == before and not list(inbox.parent.glob("evil*"))


def raw_zip(path: Path, entries: dict[str, bytes], link: str = "") -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in entries.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            if name == link:
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(info, raw)


def test_paths_links_and_bombs_in_a_parcel_do_no_harm(course, inbox, monkeypatch):
    manifest = json.dumps(asdict(parcel(course).manifest)).encode()
    monkeypatch.setattr(parcels, "MAX_FILE", 1 << 20)
    raw_zip(inbox / "path.zip", {"manifest.json": manifest, "small.ipynb": b"{}", "/abs.events.jsonl": b"x",
                                 "evidence/../../out.events.jsonl": b"x", "evidence/ok.events.jsonl": b"log"})
    raw_zip(inbox / "link.zip", {"manifest.json": manifest, "small.ipynb": b"/etc/passwd"}, link="small.ipynb")
    raw_zip(inbox / "bomb.zip", {"manifest.json": manifest, "small.ipynb": b"0" * (2 << 20)})
    raw_zip(inbox / "many.zip", {"manifest.json": manifest, **{f"f{number}": b"" for number in range(200)}})
    (inbox / "cut.zip").write_bytes((inbox / "path.zip").read_bytes()[:-30])
    told = outcomes(course, inbox)
    assert told["path.zip"][0] == "taken" and "changed after packing" in told["path.zip"][1]
    assert "holds a link" in told["link.zip"][1] and "larger than" in told["bomb.zip"][1]
    assert "201 files" in told["many.zip"][1] and "neither a notebook" in told["cut.zip"][1]
    assert sorted(tree(course.submitted)) == ["alice/lab90/evidence/ok.events.jsonl", "alice/lab90/manifest.json",
                                              "alice/lab90/small.ipynb", "alice/lab90/timestamp.txt"]


def test_links_in_a_folder_are_not_followed(course, inbox):
    outside = inbox.parent / "lab90-eve.ipynb"
    outside.write_text("{}")
    os.symlink(outside, inbox / "lab90-eve.ipynb")
    os.symlink("/", inbox / "root")
    assert outcomes(course, inbox) == {}


def test_nothing_to_collect_is_bad_usage(course, inbox, capsys):
    assert main(["collect", str(inbox)]) == 2 and main(["collect", str(inbox / "gone")]) == 2
    assert "nothing that was handed in" in capsys.readouterr().err
