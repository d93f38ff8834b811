"""A worker's output: all of it in the file, a bounded part of it on the screen, the rest counted."""

from __future__ import annotations

import re

import pytest

from ftlab.cluster import output
from ftlab.cluster.output import BURST_LINES, LINES_PER_S, MAX_LINE, OutputFilter

NOTICE = re.compile(r"\.\.\. (\d+) lines not shown")


def hidden(lines: list[str]) -> int:
    """How many lines the notices among these tell of."""
    return sum(int(found[1]) for line in lines if (found := NOTICE.match(line)))


def chunks(data: bytes, size: int) -> list[bytes]:
    return [data[begin:begin + size] for begin in range(0, len(data), size)]


def test_quiet_output_passes_as_it_is():
    told = OutputFilter(refilled=0.0)
    assert told.feed(b"loss 1\nloss 2\n", now=0.0) == ["loss 1", "loss 2"]
    assert told.finish() == []


def test_a_line_is_shown_when_it_is_complete():
    told = OutputFilter(refilled=0.0)
    assert told.feed(b"lo", 0.0) == [] and told.feed(b"ss", 0.0) == []
    assert told.feed(b" 1\nrest", 0.0) == ["loss 1"]
    assert told.finish() == ["rest"] and told.finish() == []


def test_megabytes_of_lines_are_written_whole_and_shown_in_part(tmp_path):
    log = tmp_path / "worker.log"
    printed = b"".join(b"line %07d and some words to fill it up\n" % number for number in range(60_000))
    assert len(printed) > 2 << 20
    told = OutputFilter(log, refilled=0.0)
    seconds = 5.0
    parts = chunks(printed, 1 << 18)
    shown: list[str] = []
    for index, part in enumerate(parts):
        shown += told.feed(part, now=seconds * index / len(parts))
    shown += told.finish()
    lines = [line for line in shown if not NOTICE.match(line)]
    assert BURST_LINES <= len(lines) <= BURST_LINES + seconds * LINES_PER_S + 1
    assert len(lines) + hidden(shown) == 60_000
    assert log.read_bytes() == printed
    assert any(str(log) in line for line in shown), "the notice tells where all of it is"


def test_after_a_burst_a_steady_trickle_is_shown():
    told = OutputFilter(refilled=0.0)
    assert len(told.feed(b"x\n" * 1000, now=0.0)) == BURST_LINES
    later = told.feed(b"y\n" * 1000, now=1.0)
    assert later[0] == "... 800 lines not shown" and later[1:] == ["y"] * int(LINES_PER_S)
    assert told.finish() == ["... 980 lines not shown"]


def test_after_a_long_rest_a_whole_burst_is_shown_but_not_more():
    told = OutputFilter(refilled=0.0)
    told.feed(b"x\n" * BURST_LINES, now=0.0)
    assert len(told.feed(b"y\n" * 1000, now=3600.0)) == BURST_LINES


def test_a_flood_without_an_end_of_line_is_cut_and_neither_kept_nor_lost(tmp_path):
    log = tmp_path / "worker.log"
    told = OutputFilter(log, refilled=0.0)
    shown: list[str] = []
    for _ in range(256):
        shown += told.feed(b"#" * (1 << 14), now=0.0)
        assert len(told._rest) <= 1 << 16, "memory stays bounded"
    shown += told.finish()
    assert log.stat().st_size == 4 << 20
    assert 0 < len(shown) <= BURST_LINES + 2 and all(len(line) < MAX_LINE + 100 for line in shown)


def test_long_lines_are_clipped_with_their_length():
    told = OutputFilter(refilled=0.0)
    exact, longer = told.feed(b"a" * MAX_LINE + b"\n" + b"b" * 2000 + b"\n", 0.0)
    assert exact == "a" * MAX_LINE
    assert longer == "b" * MAX_LINE + "... (2000 characters)"


@pytest.mark.parametrize(("raw", "shown"), [
    (b"\xff\xfe broken\n", "\ufffd\ufffd broken"), (b"caf\xc3\xa9\n", "café"), (b"cut \xc3\n", "cut \ufffd"),
    (b"windows\r\n", "windows"), (b"\n", ""), (b"nul \x00\n", "nul \x00"),
])
def test_any_bytes_can_be_shown(raw, shown):
    assert OutputFilter(refilled=0.0).feed(raw, 0.0) == [shown]


def test_a_character_that_is_split_between_two_reads_is_whole():
    told = OutputFilter(refilled=0.0)
    assert told.feed(b"caf\xc3", 0.0) == []
    assert told.feed(b"\xa9\n", 0.0) == ["café"]


def test_the_file_stops_growing_at_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "MAX_LOG_BYTES", 1000)
    log = tmp_path / "worker.log"
    told = OutputFilter(log, refilled=0.0)
    for _ in range(100):
        told.feed(b"x" * 99 + b"\n", 0.0)
    assert 1000 <= log.stat().st_size <= 1100


def test_without_a_file_nothing_is_written_and_lines_are_shown_all_the_same():
    told = OutputFilter(None, refilled=0.0)
    assert told.feed(b"a\n", 0.0) == ["a"] and told.written == 0
