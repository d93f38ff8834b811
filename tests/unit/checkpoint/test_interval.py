"""How often to checkpoint: the formulas against numbers worked out by hand, and against simulated runs."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

from ftlab.checkpoint.interval import DEFAULT_STEPS, PRIOR_MTBF_S, AutoInterval, CostModel, fit, simulate
from ftlab.errors import ConfigError
from ftlab.events import Event

INF, NAN = math.inf, math.nan
MINUTE, HOUR = 60.0, 3600.0


def model(**changes: Any) -> CostModel:
    return CostModel(**{"k0": 2.0, "s0": 10.0, "mtbf": 10_000.0, "step_s": 0.5, **changes})


# --- the formulas


def test_youngs_interval_by_hand():
    assert model().best() == pytest.approx(200.0)  # sqrt(2 * 2 * 10000)
    assert model().best_steps() == 400


@pytest.mark.parametrize(("mtbf", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_dalys_interval_is_the_one_of_his_paper(mtbf: float, minutes: float):
    # figures 3 to 5 of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps"
    daly = model(k0=5 * MINUTE, s0=10 * MINUTE, mtbf=mtbf, step_s=1.0, longest_s=24 * HOUR).best_daly()
    assert daly / MINUTE == pytest.approx(minutes, rel=0.006)  # the paper gives two or three digits


def test_daly_by_hand_and_where_a_checkpoint_costs_more_than_two_mtbf():
    # sqrt(2*2*10000) * (1 + sqrt(2/20000)/3 + 2/20000/9) - 2 = 200 * (1 + 0.01/3 + 0.0001/9) - 2
    assert model().best_daly() == pytest.approx(198.66889, abs=1e-5)
    assert model().best_steps_daly() == 397
    assert model(k0=20.0, mtbf=9.0).best_daly() == 20.0  # he says 9, but a save takes longer


def test_overhead_by_hand():
    # of 10000 s, 10 go to the recovery and 51 are done again; of 102 s, 100 are training
    assert model().overhead(100.0) == pytest.approx(1 - (1 - 61 / 10_000) * 100 / 102)
    # the save: 20 s more are lost with the failure, and it slows training by a tenth of its 20 s
    slower = model(k1=20.0, slowdown=0.1)
    assert slower.overhead(100.0) == pytest.approx(1 - (1 - (10 + 52 + 20) / 10_000) * 100 / 104)


def test_for_small_costs_the_overhead_is_the_formula_of_the_lab():
    cheap = model(k0=0.01, s0=1.0, mtbf=1e5)
    for interval in (10.0, 44.7, 200.0):
        assert cheap.overhead(interval) == pytest.approx(0.01 / interval + (1.0 + interval / 2) / 1e5, rel=0.02)


def test_a_save_that_does_not_finish_in_time_makes_the_loop_wait():
    busy = model(k0=1.0, k1=9.0, mtbf=INF)
    assert busy.period(4.0) == 10.0 and busy.overhead(4.0) == pytest.approx(0.6)
    assert busy.period(20.0) == 21.0


@pytest.mark.parametrize("changes", [{}, {"k0": 20.0}, {"k0": 0.01, "mtbf": 600.0}, {"k1": 30.0, "slowdown": 0.2}])
def test_no_interval_is_much_better_than_the_best(changes: dict[str, float]):
    costs = model(**changes)
    lowest = min(costs.overhead(costs.best() * 10 ** (power / 50)) for power in range(-50, 51))
    # the bowl is flat: Young's error of the order of k0 in the interval costs second order in the share
    assert costs.overhead(costs.best()) <= lowest * 1.01
    assert costs.overhead(costs.best_daly()) <= lowest * 1.01


# --- the edges


@pytest.mark.parametrize(("changes", "seconds", "steps"), [
    ({"mtbf": INF}, 600.0, 1200),
    ({"mtbf": INF, "longest_s": 30.0}, 30.0, 60),
    ({"mtbf": INF, "k0": 0.0}, 600.0, 1200),
    ({"mtbf": 1e300, "k0": 1e10}, 1e10, 2 * 10**10),
    ({"k0": 0.0}, 0.5, 1),
    ({"k0": 0.0, "k1": 3.2}, 3.2, 7),
    ({"k0": 0.0, "k1": 40.0, "slowdown": 0.05}, 200.0, 400),
    ({"k0": 0.001, "detection_s": 10.0}, 10.0, 20),
    ({"step_s": 900.0}, 900.0, 1),
    ({"mtbf": 0.001}, 2.0, 4),
], ids=["no failures", "no failures, own bound", "free and no failures", "huge", "free: every step", "the save rules",
        "only the slowdown costs", "slow detection rules", "steps longer than the longest", "fails all the time"])
def test_the_bounds_of_the_best_interval(changes: dict[str, float], seconds: float, steps: int):
    costs = model(**changes)
    assert costs.best() == pytest.approx(seconds) and costs.best_steps() == steps
    assert costs.best_daly() == pytest.approx(seconds, rel=0.02), "the bounds hold for Daly's formula as well"
    assert 0 <= costs.overhead(costs.best()) <= 1


def test_whole_steps_do_not_suffer_from_rounding_errors():
    assert model(k0=0.0, k1=0.1 + 0.2, step_s=0.1).best_steps() == 3  # 0.30000000000000004 / 0.1


@pytest.mark.parametrize(("changes", "reason"), [
    ({"k0": -1.0}, "k0 must be a time"), ({"k0": NAN}, "k0 must be a time"), ({"k1": INF}, "k1 must be a time"),
    ({"s0": -0.1}, "s0 must be a time"), ({"detection_s": 11.0}, "recovery begins with the detection"),
    ({"slowdown": 1.1}, "a share of k1"), ({"slowdown": NAN}, "a share of k1"),
    ({"mtbf": 0.0}, "always fails"), ({"mtbf": NAN}, "always fails"),
    ({"step_s": 0.0}, "it bounds the interval"), ({"longest_s": INF}, "it bounds the interval"),
])
def test_nonsense_is_refused_with_the_reason(changes: dict[str, float], reason: str):
    with pytest.raises(ConfigError, match=reason):
        model(**changes)


@pytest.mark.parametrize("interval", [0.0, -1.0, INF, NAN])
def test_an_interval_that_cannot_be_is_refused(interval: float):
    with pytest.raises(ConfigError, match="interval_s must be positive"):
        model().overhead(interval)
    with pytest.raises(ConfigError, match="interval_s must be positive"):
        simulate(model(), interval, 100.0, seed=0)


# --- the model against simulated runs


@pytest.mark.parametrize("interval", [5.0, 14.0, 28.0, 56.0, 112.0, 224.0])
@pytest.mark.parametrize("changes", [
    {}, {"k1": 4.0}, {"k1": 4.0, "slowdown": 0.3}, {"s0": 30.0}, {"k0": 0.0, "k1": 8.0},
], ids=["blocking", "overlapped", "slowing", "slow recovery", "back-pressure"])
def test_the_model_predicts_simulated_runs(changes: dict[str, float], interval: float):
    """As close as it claims to be, and on the side that it claims.

    A run that keeps exp(-y) * x/(exp(x)-1) of its periods (x = period/MTBF, y = (s0+k1)/MTBF) is predicted to keep
    1 - y - x/2, which is less by at most y²/2 + xy/2 + x²/12. To that come four standard errors of the
    mean of the seeds, and the last stretch of a run, which the simulation does not take away.
    """
    costs = model(**{"k0": 0.5, "s0": 6.0, "mtbf": 600.0, **changes})
    duration = 2000 * costs.mtbf
    lost = [simulate(costs, interval, duration, seed) for seed in range(24)]
    noise = 4 * statistics.stdev(lost) / math.sqrt(len(lost)) + (costs.s0 + costs.redone(interval)) / duration
    x, y = costs.period(interval) / costs.mtbf, (costs.s0 + costs.k1) / costs.mtbf
    pessimism = costs.overhead(interval) - statistics.mean(lost)
    assert -noise <= pessimism <= y**2 / 2 + x * y / 2 + x**2 / 12 + noise
    assert noise < 0.005, "else this test would not see much"


def test_a_simulation_can_be_repeated_and_needs_no_failures():
    assert simulate(model(), 100.0, 1e6, seed=3) == simulate(model(), 100.0, 1e6, seed=3)
    assert simulate(model(), 100.0, 1e6, seed=3) != simulate(model(), 100.0, 1e6, seed=4)
    assert simulate(model(mtbf=INF), 98.0, 1000.0, seed=0) == pytest.approx(0.02)
    assert simulate(model(mtbf=1.0), 100.0, 1000.0, seed=0) == pytest.approx(1.0, abs=0.01)
    with pytest.raises(ConfigError, match="duration_s must be positive"):
        simulate(model(), 100.0, 0.0, seed=0)


# --- from events


def event(kind: str, at: float, **fields: Any) -> Event:
    head = {name: fields.pop(name) for name in ("generation", "rank", "step") if name in fields}
    return Event(kind=kind, at=at, data=fields, **head)


def step(at: float, number: int, generation: int = 1) -> Event:
    return event("step.committed", at, step=number, generation=generation)


def saved(at: float, number: int, blocking_s: float, seconds: float) -> list[Event]:
    return [event("checkpoint.snapshot", at, step=number, blocking_s=blocking_s, bytes=1000),
            event("checkpoint.committed", at + seconds, step=number, seconds=seconds, bytes=1000)]


def failed(verdict: float, went_on: float, generation: int, cause: str = "node", detect: float = 0.5) -> list[Event]:
    return [event("recovery.started", verdict, generation=generation, cause=cause),
            event("recovery.finished", went_on, generation=generation, cause=cause, phases={"detect": detect})]


def job() -> list[Event]:
    """80 steps of 1 s; each tenth is followed by a save: 0.2 s of waiting, then three steps of 1.25 s beside it."""
    events, at = [], 0.0
    for number in range(1, 81):
        beside = (number - 1) % 10
        if beside == 0 and number > 1:
            events += saved(at + 0.2, number - 1, 0.2, 4.9)
        at += 1.2 if beside == 0 else 1.25 if beside in (1, 2, 3) else 1.0
        events.append(step(at, number))
    return events


def test_the_fit_reads_checkpoints_and_steps():
    fitted = fit(job())
    assert fitted.k0 == pytest.approx(0.2) and fitted.k1 == pytest.approx(4.9)
    assert fitted.step_s == pytest.approx(1.0) and fitted.slowdown == pytest.approx(0.2)
    assert fitted.mtbf == PRIOR_MTBF_S and fit(job(), mtbf=INF).mtbf == INF
    assert fitted.best() == pytest.approx(math.sqrt(2 * (0.2 + 0.2 * 4.9) * 3600))


def test_the_wait_for_a_checkpoint_is_no_part_of_a_step_where_it_can_be_told():
    steps = [step(at, number) for number, at in enumerate((0.0, 3.0, 10.0, 17.0, 24.0, 27.0))]
    waits = [each for number, at in ((1, 7.0), (2, 14.0), (3, 21.0)) for each in saved(at, number, 4.0, 1.0)]
    assert fit([*steps, *waits]).step_s == pytest.approx(3.0)
    each_step = [each for number in range(8) for each in saved(5.0 * number + 4.0, number, 4.0, 0.5)]
    assert fit([*(step(5.0 * number, number) for number in range(9)), *each_step]).step_s == pytest.approx(5.0)


def test_the_fit_reads_failures():
    events = [step(0.0, 1), *failed(30.0, 31.0, 2), *failed(60.0, 62.0, 3), *failed(90.0, 110.0, 4), step(120.0, 2, 4)]
    fitted = fit(events)
    assert fitted.s0 == pytest.approx(2.5) and fitted.detection_s == pytest.approx(0.5)
    assert fitted.mtbf == pytest.approx(40.0)


def test_a_failure_during_a_recovery_belongs_to_it_and_growing_is_no_failure():
    events = [step(0.0, 1), event("recovery.started", 10.0, cause="node", evidence=9.5),
              event("recovery.abandoned", 11.0), *failed(11.0, 14.0, 3),
              *failed(50.0, 51.0, 4, cause="grow", detect=0.0), step(60.0, 2, 4)]
    fitted = fit(events)
    assert fitted.s0 == pytest.approx(4.5) and fitted.mtbf == pytest.approx(60.0)


def test_one_strange_checkpoint_does_not_move_the_fit_and_the_slowest_rank_counts():
    events = [each for number in range(5) for each in saved(10.0 * number, number, 0.2, 1.0)]
    events += saved(50.0, 5, 30.0, 300.0)
    events += [event("checkpoint.snapshot", 10.0 * number, step=number, rank=1, blocking_s=0.3) for number in range(5)]
    events += [event("checkpoint.snapshot", 51.0, step=6, blocking_s=broken) for broken in (NAN, -1.0, "soon", None)]
    events += [event("checkpoint.snapshot", 52.0, step=7), event("checkpoint.failed", 53.0, step=7)]
    fitted = fit(events)
    assert (fitted.k0, fitted.k1) == (0.3, 1.0)


def test_without_measurements_the_fit_says_the_default():
    assert fit([]).best_steps() == DEFAULT_STEPS
    assert fit([step(float(number) / 4, number) for number in range(9)]).best_steps() == DEFAULT_STEPS
    with pytest.raises(ConfigError, match="always fails"):
        fit([], mtbf=0.0)


# --- every="auto"


def checkpoints(auto: AutoInterval, blocking_s: float, count: int, step_s: float = 0.1) -> list[int]:
    """The interval after each of `count` checkpoints."""
    found = []
    for _ in range(count):
        auto.observe_step(step_s)
        auto.observe_snapshot(blocking_s)
        found.append(auto.steps())
    return found


def test_auto_starts_with_the_default_and_at_most_doubles():
    auto = AutoInterval(mtbf=3600.0)
    assert auto.steps() == DEFAULT_STEPS
    auto.observe_step(0.1)
    assert auto.steps() == DEFAULT_STEPS, "the checkpoint's cost is not known yet"
    # sqrt(2 * 0.05 * 3600) = 18.97 s
    assert checkpoints(auto, 0.05, 7) == [20, 40, 80, 160, 190, 190, 190]


def test_auto_at_most_halves_and_never_goes_below_one_step_or_the_save():
    assert checkpoints(AutoInterval(), 0.0, 6) == [5, 3, 2, 1, 1, 1]
    slow_store = AutoInterval()
    slow_store.observe_commit(0.4)
    assert checkpoints(slow_store, 0.0, 4) == [5, 4, 4, 4]


def test_auto_checkpoints_more_often_once_it_sees_failures():
    auto = AutoInterval()
    calm = checkpoints(auto, 0.05, 8)[-1]
    for _ in range(3):
        auto.observe_failure(2.0)
    assert auto.model().mtbf == pytest.approx((8 * (0.1 + 0.05) + 3 * 2.0) / 3)
    assert auto.model().s0 == 2.0
    busy = checkpoints(auto, 0.05, 8)
    assert busy[0] == calm // 2 and busy[-1] == auto.model().best_steps() < 10


def test_auto_follows_the_medians_of_the_last_measurements_only():
    auto = AutoInterval()
    usual = checkpoints(auto, 0.05, 16)[-1]
    assert checkpoints(auto, 60.0, 1) == [usual], "one hiccup"
    assert checkpoints(auto, 0.2, 10)[-1] == 379, "sqrt(2 * 0.2 * 3600) = 37.9 s: the old ones are forgotten"


@pytest.mark.parametrize("broken", [NAN, INF, -1.0])
def test_auto_leaves_out_measurements_that_cannot_be(broken: float):
    auto = AutoInterval()
    for observe in (auto.observe_step, auto.observe_snapshot, auto.observe_commit):
        observe(broken)
    auto.observe_step(0.0)
    auto.observe_snapshot(0.05)
    assert auto.steps() == DEFAULT_STEPS


def test_auto_refuses_settings_that_cannot_work_at_once():
    with pytest.raises(ConfigError, match="always fails"):
        AutoInterval(mtbf=-1.0)
    with pytest.raises(ConfigError, match="longest_s"):
        AutoInterval(longest_s=0.0)
