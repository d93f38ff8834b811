"""The bench of what protection costs runs, and its figures belong together; how large they are is not judged here."""

from __future__ import annotations

from ftlab.bench.overhead import bench_overhead, overhead_table


def test_a_short_run_gives_every_figure():
    result = bench_overhead(nodes=2, spares=0, steps=150, step_s=0.004)
    shares = {name: result[f"{name}_cost_share"] * result["step_s"] for name in ("step", "heartbeat", "monitor")}
    for name, seconds in shares.items():
        assert abs(seconds - result[f"{name}_cost_s"]) < 1e-6, name
    assert 0 < result["heartbeat_cost_share"] < 1 and 0 < result["controller_cores"] < 1
    assert abs(result["step_cost_s"]) < 0.05, "a step that costs more than ten steps of work measures something else"
    assert result["warm_step_cost_s"] > 0, "what runs, takes time"
    assert abs(result["cost_share"] - result["step_cost_share"] - result["heartbeat_cost_share"]) < 1e-4
    table = overhead_table(result)
    assert "µs to a step of 4 ms" in table and "heartbeats take" in table and "2 + 0 nodes" in table
