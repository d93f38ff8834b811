"""The pictures of a drill, drawn from made-up logs whose every moment is known.

To look at them: `python tests/unit/report/test_picture.py /tmp/pictures` writes one page per scene.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ftlab.events import Event
from ftlab.messages import PHASES
from ftlab.report.canvas import duration, text_width
from ftlab.report.page import figures, report_fragment, report_page, verdict_badge
from ftlab.report.picture import close_ups, timeline_svg, waterfall_svg
from ftlab.report.story import read_story

SVG = "{http://www.w3.org/2000/svg}"


class Scene:
    """Writes a plausible log: a clock that moves by itself, and verbs for what can happen."""

    def __init__(self, nodes: int, spares: int = 0, *, procs: int = 1, at: float = 1000.0) -> None:
        self.now, self.at0, self.step, self.generation, self.procs = at, at, 0, 0, procs
        self.random = random.Random(nodes)
        self.events: list[Event] = []
        self.members: list[str] = []
        for index in range(nodes + spares):
            self.now += 0.05
            role = "member" if index < nodes else "spare"
            self.record("node.joined", source=f"node-{index}", address=f"127.0.3.{index + 2}", role=role)
        self.now += 0.4
        self.record("controller.started", at=at, restored=False)
        self.record("job.submitted")
        self.now += 0.12
        self.membership([f"node-{index}" for index in range(nodes)])
        self.now += 0.2

    def record(self, kind: str, *, at: float | None = None, source: str = "controller", generation: int | None = None,
               step: int | None = None, rank: int | None = None, **data: Any) -> Event:
        event = Event(kind=kind, seq=len(self.events), at=self.now if at is None else at, source=source,
                      generation=generation, step=step, rank=rank, data=data)
        self.events.append(event)
        return event

    def membership(self, members: Sequence[str]) -> None:
        self.members, self.generation = list(members), self.generation + 1
        seats = [{"rank": index * self.procs + local, "node": node, "address": "127.0.3.2", "local_rank": local}
                 for index, node in enumerate(members) for local in range(self.procs)]
        self.record("membership.changed", generation=self.generation, world=len(seats),
                    table={"generation": self.generation, "seats": seats})

    def train(self, steps: int, pace: float = 0.012) -> None:
        for _ in range(steps):
            self.now += pace * self.random.uniform(0.85, 1.25)
            self.step += 1
            self.record("step.committed", step=self.step, generation=self.generation, loss=2.0 / self.step)

    def inject(self, fault: str, target: str, **receipt: Any) -> float:
        self.now += 0.004
        self.record("fault.injected", source="faults", fault=fault, target=target, receipt=receipt)
        return self.now

    def die(self, node: str, after: float, reason: str) -> None:
        if after > 0.1:
            self.record("node.suspected", at=self.now + after * 0.55, source=node, reason=reason)
        self.now += after
        self.record("node.died", source=node, reason=reason, cause="node")

    def recover(self, members: Sequence[str], lost: Sequence[str], *, speed: float = 1.0, source: str = "live",
                cause: str = "node") -> list[dict[str, Any]]:
        """Run the three phases, record the new membership at `ranktable`, and commit the first step."""
        self.record("recovery.started", generation=self.generation + 1, cause=cause, nodes=list(lost))
        spans: list[dict[str, Any]] = [self._span("node reschedule", "detect", self.now - 0.03, self.now, "controller")]
        for phase, names in PHASES.items():
            for name in names[1:] if phase == "node reschedule" else names:
                length = _COST_MS[name] / 1000 * speed
                if name == "ranktable":
                    self.now += length
                    spans.append(self._span(phase, name, self.now - length, self.now, "controller"))
                    self.membership(members)
                    continue
                everyone = phase != "node reschedule" and name not in ("strategy", "store")
                who = [f"{node} rank={rank}" for rank, node in enumerate(members)] if everyone else ["controller"]
                spans += [self._span(phase, name, self.now, self.now + length * self.random.uniform(0.6, 1), one)
                          for one in who]
                self.now += length
        self.step += 1
        self.record("step.committed", step=self.step, generation=self.generation)
        self.record("recovery.finished", generation=self.generation, spans=spans, source=source, phases={})
        return spans

    def finish(self, status: str = "succeeded") -> list[Event]:
        self.now += 0.02
        self.record("job.finished", status=status)
        self.now += 0.3
        for node in self.members:  # the cluster closes; that is not part of the run
            self.record("node.died", source=node, reason="closed", cause="closed")
        return self.events

    @staticmethod
    def _span(phase: str, name: str, begin: float, end: float, by: str) -> dict[str, Any]:
        return {"phase": phase, "name": name, "begin": begin, "end": end, "by": by}


_COST_MS = {
    "terminate": 6, "replace": 3, "ranktable": 1.5, "continue": 4, "agent": 8, "store": 3, "load_ranktable": 2,
    "connect": 24, "strategy": 5, "send_state": 18, "receive_state": 21, "rollback_data": 0.04, "load_data": 2,
    "first_step": 14,
}


def kill_with_spare() -> list[Event]:
    scene = Scene(4, 1)
    scene.train(160)
    scene.inject("kill", "node-2", pid=4711, signal="SIGKILL", exit_code=-9)
    scene.die("node-2", 0.042, "link closed")
    scene.recover(["node-0", "node-1", "node-4", "node-3"], ["node-2"])
    scene.train(190)
    return scene.finish()


def hang_of_five() -> list[Event]:
    scene = Scene(5, 1)
    scene.train(110)
    scene.inject("hang", "node-3", pid=991, signal="SIGSTOP")
    scene.die("node-3", 0.8, "no heartbeat for 0.8 s")
    scene.recover(["node-0", "node-1", "node-2", "node-5", "node-4"], ["node-3"])
    scene.train(150)
    return scene.finish()


def controller_and_kill() -> list[Event]:
    scene = Scene(4, 1)
    scene.train(80)
    scene.inject("kill", "controller", pid=12, signal="SIGKILL")
    scene.train(30)
    scene.record("controller.started", restored=True)
    for node in scene.members:
        scene.record("node.joined", source=node, role="member")
    scene.train(60)
    scene.inject("kill", "node-1", pid=77, signal="SIGKILL")
    scene.die("node-1", 0.03, "link closed")
    scene.recover(["node-0", "node-4", "node-2", "node-3"], ["node-1"], speed=2)
    scene.train(120)
    return scene.finish()


def shrink() -> list[Event]:
    scene = Scene(4)
    scene.train(120)
    scene.inject("partition", "node-3", rule="drop")
    scene.die("node-3", 0.5, "lease ran out")
    scene.recover(["node-0", "node-1", "node-2"], ["node-3"])
    scene.train(90, 0.016)
    scene.record("fault.healed", source="faults", fault="partition", target="node-3", receipt={"rule": "removed"})
    scene.now += 0.03
    scene.record("node.joined", source="node-3", role="spare")
    scene.train(70, 0.016)
    return scene.finish()


def storm() -> list[Event]:
    """Eight nodes, two ranks each, six faults, the second during the first one's recovery."""
    scene = Scene(8, 1, procs=2)
    scene.train(60)
    scene.inject("kill", "node-6", pid=6)
    scene.die("node-6", 0.04, "link closed")
    scene.record("recovery.started", generation=2, cause="node", nodes=["node-6"])
    scene.now += 0.03
    scene.inject("kill", "node-2", pid=2)
    scene.record("recovery.abandoned", generation=2)
    scene.die("node-2", 0.03, "link closed")
    scene.generation += 1
    scene.recover(["node-0", "node-1", "node-8", "node-3", "node-4", "node-5", "node-7"], ["node-6", "node-2"])
    scene.train(50)
    scene.inject("slow", "node-0", delay_ms=20)
    scene.train(30, 0.03)
    scene.record("fault.healed", source="faults", fault="slow", target="node-0", receipt={})
    scene.train(10)
    scene.inject("nan", "node-1", step=scene.step)
    scene.now += 0.01
    scene.record("worker.failed", source="node-1", rank=1, cause="nan", detail="loss is NaN")
    scene.recover(scene.members, ["node-1"], cause="nan")
    scene.record("worker.restarted", source="node-1", at=scene.now - 0.05)
    scene.train(6)
    scene.inject("kill", "controller", pid=1)
    scene.train(12)
    scene.record("controller.started", restored=True)
    scene.train(20)
    scene.inject("blackout", "all", pids=14)
    scene.die("node-0", 0.05, "link closed")
    scene.recover([node for node in scene.members if node != "node-0"], ["node-0"], speed=3, source="checkpoint")
    scene.train(60)
    return scene.finish()


def never_recovered() -> list[Event]:
    scene = Scene(2)
    scene.train(40)
    scene.inject("kill", "node-1", pid=5)
    scene.die("node-1", 0.04, "link closed")
    scene.record("recovery.started", generation=2, cause="node", nodes=["node-1"])
    scene.now += 1.2
    return scene.finish("failed")


SCENES = {
    "kill": kill_with_spare, "hang": hang_of_five, "controller": controller_and_kill, "scale": shrink, "storm": storm,
    "blackout": never_recovered,
}


def a_report(**changes: Any) -> dict[str, Any]:
    return {
        "drill": "kill", "backend": "process", "nodes": 4, "spares": 1, "seed": 0, "injected": 1, "recovered": True,
        "detection_s": 0.0423, "stall_s": 0.1534, "phases": {}, "steps_lost": 0, "samples_lost": 0,
        "samples_repeated": 0, "worlds": [4, 4], "generations": 2, "source": "live", "verdict": "identical",
        "goodput": 0.9712, "leaked": 0, "repeat": "ftlab drill kill --seed 0", "failed_expectations": [],
    } | changes


def words(svg: str) -> list[str]:
    """All visible texts of a picture."""
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def left_edge(element: ElementTree.Element, reach: float) -> float:
    return float(element.attrib["x"]) - reach * {"start": 0, "middle": 0.5, "end": 1}[element.attrib["text-anchor"]]


@pytest.mark.parametrize("name", SCENES)
def test_every_scene_is_well_formed_and_asks_the_network_for_nothing(name: str) -> None:
    page = report_page([(a_report(drill=name), SCENES[name]())])
    ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("name", SCENES)
def test_a_log_cut_short_anywhere_still_gives_a_picture(name: str) -> None:
    events = SCENES[name]()
    for index, event in enumerate(events):
        if event.kind != "step.committed":
            ElementTree.fromstring(timeline_svg(events[: index + 1]))


@pytest.mark.parametrize("name", SCENES)
def test_no_text_is_smaller_than_eleven_pixels_or_leaves_the_picture(name: str) -> None:
    root = ElementTree.fromstring(timeline_svg(SCENES[name]()))
    for element in root.iter(f"{SVG}text"):
        reach = text_width(element.text or "") * 0.85
        left = left_edge(element, reach)
        assert float(element.attrib["font-size"]) >= 11
        assert left >= 0, element.text
        assert left + reach <= 960, element.text
        assert 0 < float(element.attrib["y"]) < float(root.attrib["height"])


@pytest.mark.parametrize("name", SCENES)
def test_labels_of_marks_generations_and_stalls_do_not_overlap(name: str) -> None:
    bold = [element for element in ElementTree.fromstring(timeline_svg(SCENES[name]())).iter(f"{SVG}text")
            if element.attrib.get("font-weight")]
    boxes = []
    for element in bold:
        reach = text_width(element.text or "", bold=True) * 0.95
        left = left_edge(element, reach)
        boxes.append((left, left + reach, float(element.attrib["y"]), element.text))
    for index, (left, right, y, label) in enumerate(boxes):
        for other_left, other_right, other_y, other in boxes[:index]:
            apart = right <= other_left or left >= other_right or abs(y - other_y) >= 10
            assert apart, f"{label!r} lies on {other!r}"


def test_the_timeline_names_the_fault_the_generations_and_the_stall() -> None:
    scene = kill_with_spare()
    (fault,) = read_story(scene).faults
    assert fault.stalled_until is not None
    said = words(timeline_svg(scene))
    assert {"DEAD +42.0 ms", "step 160", "step 161"} <= set(said)
    assert {"#1 kill", "gen 1 \N{MIDDLE DOT} 4 ranks", "gen 2 \N{MIDDLE DOT} 4 ranks", "spare", "silent"} <= set(said)
    assert said.count(f"stalled {duration(fault.stalled_until - fault.at)}") == 2  # overview and close-up


def test_a_stall_ends_with_the_first_step_of_the_restored_generation() -> None:
    events = kill_with_spare()
    started = next(event for event in events if event.kind == "recovery.started")
    stale = Event(kind="step.committed", at=started.at + 0.001, generation=1, step=161)  # a straggler's last word
    first = next(event for event in events if event.kind == "step.committed" and event.generation == 2)
    assert read_story([*events, stale]).faults[0].stalled_until == first.at


def test_a_recovery_answers_the_newest_fault_on_its_node() -> None:
    scene = Scene(3, 1)
    for fault in ("slow", "kill"):
        scene.inject(fault, "node-1")
        scene.train(5)
    scene.die("node-1", 0.03, "link closed")
    scene.recover(["node-0", "node-3", "node-2"], ["node-1"])
    slow, kill = read_story(scene.finish()).faults
    assert slow.recovery is None and kill.recovery is not None


def test_a_replacement_takes_the_rank_and_the_dead_node_leaves_a_gap() -> None:
    lanes = {lane.name: lane for lane in read_story(kill_with_spare()).lanes}
    assert [spell.state for spell in lanes["node-2"].spells] == ["waiting", "member", "silent"]
    assert [(spell.state, spell.ranks) for spell in lanes["node-4"].spells] == [("spare", ()), ("member", (2,))]


def test_losing_the_controller_stalls_nothing() -> None:
    story = read_story(controller_and_kill())
    controller, kill = story.faults
    assert controller.recovery is None and kill.recovery is not None
    assert len(story.controller.spells) == 2  # it was away in between
    assert [spell.state for spell in story.lanes[0].spells] == ["waiting", "member", "member"]  # asked again, not new


def test_a_second_fault_during_recovery_shares_the_stall_and_the_close_up() -> None:
    story = read_story(storm())
    first, second = story.faults[:2]
    assert first.recovery is not None and first.recovery.abandoned
    assert first.stalled_until == second.stalled_until
    assert story.stalls()[0][:2] == (first.at, second.stalled_until)
    assert [len(window.faults) for window in close_ups(story)] == [2, 1]
    assert close_ups(story)[1].end < story.faults[3].at  # the next fault is not half in view


def test_a_fault_that_healed_is_not_blamed_for_a_later_recovery() -> None:
    slow = read_story(storm()).faults[2]
    assert slow.name == "slow node-0"
    assert slow.recovery is None and slow.healed_at is not None


def test_a_log_of_many_nodes_or_of_none_is_in_order() -> None:
    assert [lane.name for lane in read_story(Scene(11).finish()).lanes][-2:] == ["node-9", "node-10"]
    assert words(timeline_svg([])) == ["no nodes in this log"]


def test_a_run_that_never_trains_again_says_so() -> None:
    assert "never trained again" in words(timeline_svg(never_recovered()))
    assert verdict_badge(a_report(recovered=False))[:2] == ("bad", "not recovered")


def test_a_waterfall_that_is_mostly_waiting_breaks_its_axis_and_keeps_true_values() -> None:
    story = read_story(hang_of_five())
    svg = waterfall_svg(story.recoveries[0].spans)
    bars = [float(bar.attrib["width"]) for bar in ElementTree.fromstring(svg).iter(f"{SVG}rect")]
    assert "800 ms" in words(svg)
    assert bars[1] == 130  # the paper is the first


def test_what_comes_from_outside_is_escaped() -> None:
    scene = Scene(2)
    scene.inject("<b>&kill", "node-1", note="<script>alert(1)</script>")
    card = report_fragment(a_report(drill="<i>", repeat="a && b"), scene.finish())
    assert "<script" not in card and "<i>" not in card and "<b>&kill" not in card
    assert "a &amp;&amp; b" in card


def test_the_card_shows_human_units_and_a_dash_for_what_is_unknown() -> None:
    shown = {name: value for name, value, _ in figures(a_report(detection_s=None, stall_s=1.2345, worlds=[4, 3]))}
    assert shown["detected after"] == "\N{EN DASH}"
    assert shown["stalled"] == "1234 ms"
    assert shown["goodput"] == "97.1%"
    assert shown["world"] == "4 \N{RIGHTWARDS ARROW} 3"
    assert shown["leaked"] == "nothing"
    assert all(value == "\N{EN DASH}" for _, value, _ in figures({}))


def test_the_badge_has_the_tone_of_the_verdict() -> None:
    tones = [verdict_badge(a_report(verdict=one))[0] for one in ("identical", "equivalent", "diverged", None)]
    assert tones == ["good", "fair", "bad", "plain"]


def test_later_recoveries_are_folded_and_several_drills_get_an_overview() -> None:
    assert report_fragment(a_report(), storm()).count("<details>") == 2
    one, two = (a_report(), kill_with_spare()), (a_report(drill="hang"), hang_of_five())
    assert 'href="#drill-1"' in report_page([one, two])
    assert "href=" not in report_page([one])


def write_pages(folder: Path) -> None:
    """One page per scene, and one with all, for a person to look at."""
    folder.mkdir(parents=True, exist_ok=True)
    reports = [(a_report(drill=name, recovered=name != "blackout"), scene()) for name, scene in SCENES.items()]
    for report, events in reports:
        (folder / f"{report['drill']}.html").write_text(report_page([(report, events)]), encoding="utf-8")
    (folder / "all.html").write_text(report_page(reports), encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
