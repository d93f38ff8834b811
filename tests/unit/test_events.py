"""The event log: append-only, readable after a crash, and the only record there is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ftlab.events import Event, EventLog, read_events


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
