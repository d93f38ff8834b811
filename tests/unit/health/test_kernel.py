"""The kernel's small files: what is there is read whole, what is not reads as empty."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ftlab.health.kernel import Cgroup, entries, folder, read, word_after


def test_a_file_is_read_whole_however_long_it_is(tmp_path):
    (tmp_path / "long").write_text("line\n" * 50_000)
    assert read(tmp_path / "long") == ("line\n" * 50_000).strip()


def test_what_is_not_there_or_not_readable_is_empty(tmp_path):
    assert read(tmp_path / "nothing") == "" and read(tmp_path) == "" and entries(tmp_path / "nothing") == {}


def test_letters_that_are_none_do_no_harm(tmp_path):
    (tmp_path / "odd").write_bytes(b"name \xff\xfe\n")
    assert read(tmp_path / "odd").startswith("name ")


def test_a_process_that_ended_meanwhile_is_empty():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert read(f"{folder(child.pid)}/stat") == ""


def test_entries_are_the_lines_with_a_number(tmp_path):
    (tmp_path / "stat").write_text("oom_kill 3\nname word\nempty\nthrottled_usec 12\n")
    assert entries(tmp_path / "stat") == {"oom_kill": 3, "throttled_usec": 12}


def test_the_word_after_a_title_stands_at_the_beginning_of_a_line():
    text = "Max data size             unlimited            bytes\nNot Max cpu time 3\nVmData:\t  123 kB"
    assert word_after(text, "Max data size") == "unlimited" and word_after(text, "VmData:") == "123"
    assert word_after(text, "Max cpu time") == "" and word_after("VmData:", "VmData:") == ""


def test_this_process_has_a_folder_of_its_own():
    assert folder() == "/proc/self" and folder(7, Path("/fake")) == "/fake/7"
    assert read(f"{folder(os.getpid())}/stat").startswith(f"{os.getpid()} (")


def test_the_levels_of_a_cgroup_end_where_its_hierarchy_is_mounted():
    group = Cgroup(version=2, path=Path("/sys/fs/cgroup/a/b"), top=Path("/sys/fs/cgroup"))
    assert group.levels() == (Path("/sys/fs/cgroup/a/b"), Path("/sys/fs/cgroup/a"), Path("/sys/fs/cgroup"))
