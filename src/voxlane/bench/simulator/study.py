"""The studies of `voxlane bench simulate`: scenarios beside the public table, checks and plans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from voxlane.bench.report import describe_run, print_progress
from voxlane.bench.simulator import measured_runs, planner, public_benchmark
from voxlane.bench.simulator.settings import MOST_NODES, Mode, SimulatorSettings
from voxlane.bench.simulator.simulate import simulate

KIND = "voxlane bench simulate"
TOLERANCE = 0.15
"""Accepted relative error of samples/s and of egress."""


def scale(settings: SimulatorSettings) -> dict[str, Any]:
    """Simulate all modes at all numbers of nodes; return the content of the result file."""
    rows = []
    for mode in settings.modes:
        for nodes in settings.nodes:
            epochs = simulate_point(settings, mode, nodes)
            print_progress(
                f"{mode}, {nodes:,} nodes: {epochs[0]['simulated']['events']:,} events in {epochs[0]['wall_s']:.1f} s"
            )
            rows += epochs
    return {**_facts("scale"), "setting": settings.to_json(), "public": _compare_public(settings, rows), "rows": rows}


def simulate_point(settings: SimulatorSettings, mode: Mode, nodes: int) -> list[dict[str, Any]]:
    """Return a row per epoch, with its price and the duration of the simulation."""
    start = time.perf_counter()
    simulated_nodes = min(nodes, settings.thin or MOST_NODES[mode])
    rows = simulate(settings.scenario(mode, nodes), nodes=simulated_nodes, warm=settings.warm)
    wall_s = time.perf_counter() - start
    return [{**row, **settings.prices.of(row["requests"], row["bytes"]), "wall_s": wall_s} for row in rows]


def _compare_public(settings: SimulatorSettings, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the public table beside the simulated one; None if the settings differ from those of the table."""
    published = SimulatorSettings()
    names = ("batch", "workers", "prefetch", "step_time_s", "volumes", "ranks", "steps", "cache_bytes")
    if any(getattr(settings, name) != getattr(published, name) for name in names):
        return None
    compared = []
    for row in public_benchmark.TABLE:
        own = next((r for r in rows if (r["mode"], r["nodes"], r["epoch"]) == ("whole-object", row.nodes, 1)), None)
        if own is not None:
            compared.append(
                {
                    **asdict(row),
                    "simulated_gbps": own["max_gbps"],
                    "simulated_gbps_at_worst": own["max_gbps_at_worst"],
                    "simulated_requests_per_s": own["max_requests_per_s"],
                    "simulated_step_s": own["step_s"],
                    "simulated_steps": own["steps"],
                    "errors": [own["max_gbps"] / gbps - 1 for gbps in row.gbps],
                }
            )
    if not compared:
        return None
    return {
        "source": public_benchmark.SOURCE,
        "fitted": public_benchmark.fit_rates(settings.network.latency),
        "observed_step_s": list(public_benchmark.STEP_S),
        "rows": compared,
    }


def check(paths: Sequence[str]) -> dict[str, Any]:
    """Compare measured runs with simulated ones; return the content of the result file."""
    rows = []
    for path in paths:
        rows += measured_runs.compare(path)
        print_progress(f"{path}: simulated")
    errors = [abs(row["error"]) for row in rows]
    return {
        **_facts("check"),
        "rows": rows,
        "tolerance": TOLERANCE,
        "within": sum(error <= TOLERANCE for error in errors),
        "mean_error": sum(errors) / len(errors),
        "largest_error": max(errors),
    }


def plan(settings: SimulatorSettings) -> dict[str, Any]:
    """Plan for each mode and number of nodes; return the content of the result file."""
    rows = []
    for mode in settings.modes:
        for nodes in settings.nodes:
            samples = settings.samples_per_epoch(nodes)
            row = planner.make_plan(settings.plan_scenario(mode, nodes), samples, settings.prices)
            rows.append({"mode": mode, "nodes": nodes, **row})
    return {**_facts("plan"), "setting": settings.to_json(), "rows": rows}


def _facts(kind: str) -> dict[str, Any]:
    return {**describe_run(KIND, ("voxlane", "numpy")), "kind": kind}
