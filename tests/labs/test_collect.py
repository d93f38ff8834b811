"""`ftlab collect`: what students handed in, whatever they did to it, ends in submitted/ or is refused with a reason."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
import zipfile
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import pytest

from ftlab.cli.main import main
from ftlab.errors import ConfigError
from ftlab.grading.course import parcel as parcels
from ftlab.grading.course.collecting import Rules, collect
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


def outcomes(course, place, pattern="", download=False) -> dict[str, tuple[str, str]]:
    return {each.file: (each.outcome, "; ".join([each.why, *each.notes]).strip("; "))
            for each in collect(course, place, Rules(pattern=pattern, download=download))}


def received(path: Path, at: str) -> Path:
    """Have a file be written to this machine at a time."""
    moment = datetime.fromisoformat(at).timestamp()
    os.utime(path, (moment, moment))
    return path


def handed_in(course, inbox, student="alice", at=EARLY, file="", **other) -> Path:
    path = inbox / (file or f"lab90-{student}.zip")
    parcel(course, student, **other).write(path)
    return received(path, at)


def text_of(course, student="alice") -> str:
    return (course.submitted / student / "lab90" / "small.ipynb").read_text()


def test_parcels_of_a_folder_are_filed_by_student_and_lab(course, inbox, capsys):
    for name in ("alice", "bob.b@uni-x.example"):
        handed_in(course, inbox, name, text=name, made="2099-01-01T00:00:00+00:00")
    assert main(["collect", str(inbox), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [each["outcome"] for each in facts["files"]] == ["taken", "taken"]
    place = course.submitted / "bob.b@uni-x.example" / "lab90"
    assert (place / "small.ipynb").read_text() == "bob.b@uni-x.example"
    assert (place / "timestamp.txt").read_text() == "2026-11-16 10:00:00 UTC\n"
    assert sorted(each.name for each in course.submitted.iterdir()) == ["alice", "bob.b@uni-x.example"]
    assert set(outcomes(course, inbox).values()) == {("as before", "")}


def test_the_last_one_received_counts_whatever_the_students_clock_says_and_all_are_kept(course, inbox):
    handed_in(course, inbox, text="first", at=LATE, made="2099-01-01T00:00:00+00:00", file="lab90-alice (2).zip")
    handed_in(course, inbox, text="second", at=EARLY, made="1999-01-01T00:00:00+00:00")
    told = outcomes(course, inbox)
    assert told["lab90-alice.zip"] == ("taken", "in place of the one received 2026-11-16 09:30:00 UTC in "
                                                "lab90-alice (2).zip")
    assert told["lab90-alice (2).zip"][0] == "older" and "newer: received 2026-11-16 10:00:00" in \
        told["lab90-alice (2).zip"][1]
    assert text_of(course) == "second"
    newer = inbox / "again"
    newer.mkdir()
    handed_in(course, newer, text="third", at="2026-11-17T00:00:00+00:00", file="x.zip")
    assert outcomes(course, newer)["x.zip"][0] == "taken" and text_of(course) == "third"
    received(inbox / "lab90-alice.zip", "2026-11-18T00:00:00+00:00")  # copied: the same files are not handed in again
    outcome, why = outcomes(course, inbox / "lab90-alice.zip")["lab90-alice.zip"]
    assert outcome == "as before" and "the one that counts is newer" in why and text_of(course) == "third"
    kept = [(each / "small.ipynb").read_text() for each in sorted((course.root / "received/lab90/alice").iterdir())]
    assert kept == ["first", "second", "third"]


def test_the_instructor_chooses_another_one_until_he_takes_it_back(course, inbox, capsys):
    handed_in(course, inbox, text="first", at=LATE)
    assert main(["collect", str(inbox)]) == 0
    [first] = (course.root / "received/lab90/alice").iterdir()
    handed_in(course, inbox, text="second", at=EARLY)
    assert main(["collect", str(inbox)]) == 0 and text_of(course) == "second"
    assert main(["collect", "--choose", str(first)]) == 0 and text_of(course) == "first"
    handed_in(course, inbox, text="third", at="2026-11-17T00:00:00+00:00")
    assert outcomes(course, inbox)["lab90-alice.zip"][1].startswith("kept; the one that counts is chosen by you")
    assert text_of(course) == "first"
    assert main(["collect", "--choose", "lab90/alice/newest"]) == 0 and text_of(course) == "third"
    assert main(["collect", "--choose", "lab90/alice/none"]) == 2 and main(["collect"]) == 2
    assert "one of 2026" in capsys.readouterr().err


def test_what_lay_in_submitted_by_hand_is_kept_before_it_is_replaced(course, inbox):
    place = course.submitted / "alice" / "lab90"
    place.mkdir(parents=True)
    (place / "small.ipynb").write_text("by hand")
    received(place / "small.ipynb", LATE)
    handed_in(course, inbox, text="new")
    assert outcomes(course, inbox)["lab90-alice.zip"][0] == "taken" and text_of(course) == "new"
    kept = {(each / "small.ipynb").read_text() for each in (course.root / "received/lab90/alice").iterdir()}
    assert kept == {"by hand", "new"}


def test_an_archive_of_one_student_replaces_nobody_elses_work(course, inbox):
    handed_in(course, inbox, "alice", text="alice's own")
    outcomes(course, inbox)
    parcel(course, "alice", text="nothing", made="2099-01-01T00:00:00+00:00").write(inbox / "one")
    raw = (inbox / "one").read_bytes()
    (inbox / "one").unlink()
    raw_zip(inbox / "lab90-mallory.zip", {"lab90-alice.zip": raw})
    raw_zip(inbox / "mine.zip", {"lab90-alice.ipynb": b"nothing", "lab90-mallory.ipynb": b"{}"})
    raw_zip(inbox / "deep.zip", {"Mallory_1_assignsubmission_file_/x/alice/lab90/small.ipynb": b"no",
                                 "Bob_2_assignsubmission_file_/lab90.ipynb": b"{}", "x/lab90-eve.ipynb": b"{}"})
    (inbox / "lab90-trudy.zip").write_bytes(raw)
    told = outcomes(course, inbox)
    assert told.pop("lab90-alice.zip")[0] == "as before"
    assert {outcome for outcome, _ in told.values()} == {"refused"}, told
    assert "named for 'mallory'" in told["lab90-mallory.zip/lab90-alice.zip"][1]
    assert "work of 2 students" in told["mine.zip/lab90-alice.ipynb"][1]
    assert "its name says 'trudy', its manifest 'alice'" in told["lab90-trudy.zip"][1]
    assert "look like those of moodle" in told["deep.zip/x/lab90-eve.ipynb"][1]
    assert text_of(course) == "alice's own" and sorted(os.listdir(course.submitted)) == ["alice"]


def test_only_students_of_the_roster_are_taken(course, inbox):
    (course.root / "students.csv").write_text("id,first_name,last_name,email\nalice,Alice,Liddell,\n")
    handed_in(course, inbox, "alice")
    handed_in(course, inbox, "Alice", file="a.zip")
    handed_in(course, inbox, "nobody")
    assert outcomes(course, inbox) == {
        "lab90-alice.zip": ("taken", ""), "a.zip": ("refused", "'Alice' is not in students.csv: is 'alice' meant?"),
        "lab90-nobody.zip": ("refused", "'nobody' is not in students.csv")}
    (course.root / "students.csv").write_text("name\nalice\n")
    with pytest.raises(ConfigError, match="needs a column id"):
        collect(course, inbox)


def test_the_download_of_a_platform_is_filed_by_what_the_platform_says(course, inbox):
    (course.root / "students.csv").write_text(
        "id,first_name,last_name,email,lms\nam,Anna,Müller,,\nbb,Bob,Builder,,\ncc,Carl,Cox,,777\ndd,D,D,,\n")
    parcel(course, "bb", text="by anna").write(inbox / "one")
    raw = (inbox / "one").read_bytes()
    (inbox / "one").unlink()
    raw_zip(inbox / "moodle.zip", {
        "Anna Müller_12_assignsubmission_file_/Bob Builder_13_assignsubmission_file_/lab90-bb.zip": raw,
        "Bob Builder_13_assignsubmission_file_/bb/lab90.ipynb": b"by bob",
        "Eve Nobody_14_assignsubmission_file_/lab90.ipynb": b"by eve"})
    raw_zip(inbox / "canvas.zip", {"coxc_LATE_777_99_lab90-dd.ipynb": b"by carl"})
    raw_zip(inbox / "nbgrader.zip", {"submitted/dd/lab90/am/lab90/small.ipynb": b"by dd"})
    told = outcomes(course, inbox, download=True)
    by_archive = {name: [why for file, (_, why) in told.items() if file.startswith(name)] for name in
                  ("moodle", "canvas", "nbgrader")}
    assert "IDENTITY: its manifest says 'bb', its path 'am'" in " ".join(by_archive["moodle"]), told
    assert "is not in students.csv" in " ".join(by_archive["moodle"])
    assert {who: text_of(course, who) for who in os.listdir(course.submitted)} == {
        "am": "by anna", "bb": "by bob", "cc": "by carl", "dd": "by dd"}


def test_one_damaged_file_is_told_of_and_the_others_are_taken(course, inbox, capsys):
    handed_in(course, inbox, "alice")
    raw_zip(inbox / "whole.zip", {"x/lab90-bob.ipynb": b"{}" * 5000, "x/note.txt": b"1"})
    raw = bytearray((inbox / "whole.zip").read_bytes())
    raw[45:60] = b"\xff" * 15
    (inbox / "damaged.zip").write_bytes(raw)
    (inbox / "whole.zip").unlink()
    with tarfile.open(inbox / "whole.tar.gz", "w:gz") as tar:
        for name, size, at in (("lab90-carol.ipynb", 4000, 0), ("lab90-carol.zip", 10, 1 << 62)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = size, at
            tar.addfile(entry, io.BytesIO(os.urandom(size)))
    (inbox / "cut.tar.gz").write_bytes((inbox / "whole.tar.gz").read_bytes()[:-600])
    big = tarfile.TarInfo("pax")
    big.type, big.size = tarfile.XHDTYPE, 60 << 30
    (inbox / "bomb.tar").write_bytes(big.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    (inbox / "text.tar.xz").write_text("no archive")
    with (inbox / "huge.zip").open("wb") as file:
        file.truncate(60 << 30)
    handed_in(course, inbox, "dave", made="0001-01-01T00:00:00+14:00")
    handed_in(course, inbox, "erin", made="[" * 100)
    (Path(os.fsdecode(os.fsencode(inbox) + b"/lab90-M\xfcller.ipynb"))).write_text("{}")
    assert main(["collect", str(inbox)]) == 1
    told = {line.split(" (")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert sorted(os.listdir(course.submitted)) == ["alice", "carol", "dave", "erin"], told
    refused = " ".join(line for line in told.values() if line.startswith("refused"))
    for name in ("damaged.zip", "cut.tar.gz", "bomb.tar", "text.tar.xz", "huge.zip", "lab90-M?ller.ipynb"):
        assert name in refused, told
    assert "would unpack to too much" in refused


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
    assert {outcome for outcome, _ in outcomes(course, inbox / f"all.{kind}").values()} == {"refused"}
    told = outcomes(course, inbox / f"all.{kind}", download=True)
    assert {name.partition("/")[2]: outcome for name, (outcome, _) in told.items()} == {
        "down/loads/Alice_123.zip": "taken", "carol/lab90/my lab.ipynb": "taken", "x/lab90-dave.ipynb": "taken",
        "who.ipynb": "refused"}
    assert (course.submitted / "carol/lab90/small.ipynb").read_bytes() == b"{}"


def test_a_pattern_decides_whose_it_is_and_a_difference_is_told(course, inbox):
    parcel(course, "mallory").write(inbox / "s123_lab90.zip")
    told = outcomes(course, inbox, r"(?P<student>s\d+)_")
    assert told == {"s123_lab90.zip": ("taken", "IDENTITY: its manifest says 'mallory', its path 's123', "
                                                  "which counts")}
    assert (course.submitted / "s123").is_dir() and not (course.submitted / "mallory").exists()
    with pytest.raises(ConfigError, match="needs a group of the name student"):
        collect(course, inbox, Rules(pattern=r"\d+"))


@pytest.mark.parametrize(("other", "words"), [
    ({"student": "../../evil"}, "cannot be a student's name"), ({"student": ".."}, "cannot be a student's name"),
    ({"student": "a/b"}, "cannot be a student's name"), ({"lab": "../lab90"}, "it is for '../lab90'"),
    ({"lab": "lab91"}, "the labs are lab90"),
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
    assert "only its manifest says whose it is" in told["path.zip"][1]
    assert told["path.zip"][0] == "taken" and "changed after packing" in told["path.zip"][1]
    assert "holds a link" in told["link.zip"][1] and "larger than" in told["bomb.zip"][1]
    assert "201 files" in told["many.zip"][1] and "only a part of one" in told["cut.zip"][1]
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
