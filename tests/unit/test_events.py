"""The event log: append-only, readable after a crash, and the only record there is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ftlab import events
from ftlab.events import LONGEST, Event, EventLog, read_events
from ftlab.report.measure import measure


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def test_events_are_numbered_from_one():
    log = EventLog(None)
    assert [log.record("node.died").seq for _ in range(3)] == [1, 2, 3]
    assert [event.seq for event in log.events] == [1, 2, 3]


def test_known_fields_go_to_the_head_and_the_rest_to_the_data():
    event = EventLog(None).record("step.committed", at=5.5, source="node-1", generation=2, rank=0, step=7, loss=0.5,
                                  digest=None)
    assert event == Event(kind="step.committed", seq=1, at=5.5, source="node-1", generation=2, rank=0, step=7,
                          data={"loss": 0.5})


def test_without_a_source_and_a_time_it_is_the_controllers_and_now():
    log = EventLog(None)
    first, second = log.record("job.submitted"), log.record("job.finished")
    assert first.source == "controller" and first.generation is None
    assert 0 < first.at <= second.at


def test_an_event_survives_the_way_through_its_line():
    event = Event(kind="node.died", seq=3, at=1.25, source="node-1", step=4, data={"reason": "grüße\n", "x": [1, None]})
    assert "\n" not in event.to_json() and Event.from_json(event.to_json()) == event
    assert json.loads(event.to_json())["kind"] == "node.died"


def test_every_event_is_in_the_file_before_record_returns(path):
    log = EventLog(path)
    for number in range(3):
        log.record("step.committed", step=number)
        assert [event.step for event in read_events(path)] == list(range(number + 1))
    log.close()


def test_a_log_that_is_opened_again_goes_on_with_the_next_number(path):
    first = EventLog(path)
    first.record("job.submitted", job="a")
    first.record("job.finished", job="a")
    first.close()
    second = EventLog(path)
    assert second.events == first.events
    assert second.record("job.submitted", job="b").seq == 3
    second.close()
    assert [event.seq for event in EventLog(path).events] == [1, 2, 3]


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_last_line_that_a_crash_cut_short_is_ignored(path, cut):
    log = EventLog(path)
    for number in range(3):
        log.record("step.committed", step=number)
    log.close()
    path.write_bytes(path.read_bytes()[:-cut])
    again = EventLog(path)
    assert [event.step for event in again.events] == [0, 1]
    again.close()


def test_a_log_with_a_torn_line_can_be_continued_and_read_again(path):
    log = EventLog(path)
    log.record("job.submitted")
    log.close()
    with path.open("ab") as file:
        file.write(b'{"kind":"x')
    again = EventLog(path)
    assert again.record("job.finished").seq == 2
    again.close()
    assert [(event.seq, event.kind) for event in read_events(path)] == [(1, "job.submitted"), (2, "job.finished")]


def test_a_broken_line_in_the_middle_is_not_passed_over_in_silence(path):
    path.write_text('{"kind":"a.b","seq":1,"at":1.0}\nrubbish\n{"kind":"c.d","seq":3,"at":1.0}\n')
    with pytest.raises(ValueError):
        list(read_events(path))


def test_listeners_hear_of_every_new_event_after_it_was_written(path):
    log, heard = EventLog(path), []
    log.record("node.joined")
    log.listeners.append(lambda event: heard.append((event.seq, len(list(read_events(path))))))
    log.record("node.died")
    log.record("node.reclaimed")
    log.close()
    assert heard == [(2, 2), (3, 3)]


def test_what_is_recorded_together_is_written_and_told_at_the_end(path):
    log, heard = EventLog(path), []
    log.listeners.append(lambda event: heard.append((event.seq, len(list(read_events(path))))))
    with log.together():
        log.record("step.committed", step=1)
        with log.together():  # part of the outer one
            log.record("step.committed", step=2)
        assert not heard and not list(read_events(path)) and [event.step for event in log.events] == [1, 2]
    assert heard == [(1, 2), (2, 2)]
    log.record("job.finished")
    assert [event.seq for event in read_events(path)] == [1, 2, 3]


def test_an_error_in_between_loses_nothing_that_was_recorded(path):
    log = EventLog(path)
    with pytest.raises(KeyError), log.together():
        log.record("step.committed", step=1)
        raise KeyError("garbage in the next record")
    log.record("message.refused")
    assert [event.kind for event in read_events(path)] == ["step.committed", "message.refused"]


def test_closing_twice_is_fine_and_a_closed_log_still_remembers(path):
    log = EventLog(path)
    log.record("job.submitted")
    log.close()
    log.close()
    log.record("job.finished")
    assert len(log.events) == 2 and len(list(read_events(path))) == 1


def test_an_event_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Event(kind="node.died").kind = "node.joined"


def test_an_event_in_brief_says_what_happened_and_leaves_its_data_in_the_log():
    event = Event(kind="job.started", source="controller", generation=2, step=7, data={"spans": ["long"] * 1000})
    assert event.brief() == "job.started (from controller, generation 2, step 7)"
    assert Event(kind="job.submitted").brief() == "job.submitted (from controller)"


def _feed(log: EventLog, steps: int, *, first: int = 1, batch: int = 1000) -> None:
    """Steps as a job commits them, with a save now and then."""
    for begin in range(first, first + steps, batch):
        with log.together():
            for step in range(begin, min(begin + batch, first + steps)):
                log.record("step.committed", at=float(step), generation=1, step=step, loss=1.0 / step, world=3, ranks=3)
                if step % 100 == 0:
                    for node in range(3):
                        log.record("checkpoint.snapshot", source=f"node-{node}", step=step, blocking_s=0.01)
                        log.record("checkpoint.replicated", source=f"node-{node}", step=step)
                    log.record("checkpoint.committed", source="node-0", step=step, bytes=1, seconds=0.1)
                    log.record("checkpoint.retired", source="node-0", step=step)


@pytest.mark.parametrize("steps", [60_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_a_long_run_stays_short_in_memory_and_in_its_journal(tmp_path, steps):
    log = EventLog(tmp_path / "journal.jsonl")
    log.record("job.submitted", job="j")
    _feed(log, steps)
    log.close()
    assert len(log.events) <= LONGEST and (tmp_path / "journal.jsonl").stat().st_size < 200 * LONGEST
    again = EventLog(tmp_path / "journal.jsonl")
    again.close()
    assert again.events == log.events and again.seq == log.seq
    assert list(tmp_path.iterdir()) == [tmp_path / "journal.jsonl"]
    figures = measure(log.events)
    assert figures["steps"] == steps and figures["checkpoints"] == steps // 100 and figures["steps_lost"] == 0
    assert figures["goodput"] == 1.0
    kept = [event for event in log.events if event.kind == "step.committed"]
    assert sum(event.stands_for for event in kept) == steps, "each step is there, or another one stands for it"
    assert kept[0].step == 1 and kept[-1].step == steps
    widest = max(event.stands_for for event in kept)
    assert widest <= 8 * steps / LONGEST, "the curve is as fine at its begin as at its end"
    assert [event.step for event in kept[-1000:]] == list(range(steps - 999, steps + 1)), "nothing new is left out"


def test_what_is_rare_stays_and_so_do_the_steps_around_it():
    log = EventLog(longest=400)
    _feed(log, 1000)
    log.record("fault.injected", at=1000.5, fault="kill")
    log.record("recovery.started", at=1000.6, generation=2, cause="node", nodes=[])
    _feed(log, 2000, first=1001)
    rare = [event for event in log.events if event.kind in ("fault.injected", "recovery.started")]
    assert [event.at for event in rare] == [1000.5, 1000.6]
    before = max((event for event in log.events if event.kind == "step.committed" and event.seq < rare[0].seq),
                 key=lambda event: event.seq)
    after = min((event for event in log.events if event.kind == "step.committed" and event.seq > rare[1].seq),
                key=lambda event: event.seq)
    assert (before.step, after.step, after.stands_for) == (1000, 1001, 1)


def test_a_skipped_batch_is_never_left_out():
    log = EventLog(longest=100)
    for step in range(1, 1000):
        log.record("step.committed", step=step, generation=1, skipped="nan" if step % 250 == 0 else None)
    assert [event.step for event in log.events if event.data.get("skipped")] == [250, 500, 750]


def test_an_old_recovery_keeps_its_phases_and_one_span_for_each_step():
    log = EventLog(longest=40)
    spans = [{"phase": "p", "name": name, "begin": float(rank), "end": 5.0 + rank, "by": f"rank {rank}"}
             for rank in range(3) for name in ("connect", "first_step")]
    log.record("recovery.finished", generation=2, spans=spans, phases={"connect": 7.0})
    for step in range(100):
        log.record("step.committed", step=step, generation=2)
    (old,) = [event for event in log.events if event.kind == "recovery.finished"]
    assert [(span["name"], span["begin"], span["end"]) for span in old.data["spans"]] == [
        ("connect", 0.0, 7.0), ("first_step", 0.0, 7.0)]
    assert old.data["phases"] == {"connect": 7.0}


def test_a_log_of_rare_events_only_is_not_compacted_again_and_again(monkeypatch):
    calls = []
    monkeypatch.setattr(events, "compact", lambda old, longest: calls.append(len(old)) or list(old))
    log = EventLog(longest=10)
    for _ in range(200):
        log.record("node.died")
    assert calls == [11, 23, 47, 95, 191]


def test_a_writer_that_dies_while_it_compacts_leaves_the_whole_journal(tmp_path, monkeypatch):
    log = EventLog(tmp_path / "journal.jsonl", longest=100)
    _feed(log, 90)
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        _feed(log, 30, first=91)
    assert [event.step for event in read_events(tmp_path / "journal.jsonl") if event.kind == "step.committed"] == list(
        range(1, 121))
