"""What `voxlane bench simulate` does with its setting: the scenarios, beside the public table; a check; a plan."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from voxlane.bench import report
from voxlane.bench.scale import measured, plan, public, works
from voxlane.bench.scale.setting import Mode, SimulateSetting
from voxlane.bench.scale.simulate import simulate

KIND = "voxlane bench simulate"
TOLERANCE = 0.15
"""Of samples/s and of egress: how far off a simulation may be."""


def scale(setting: SimulateSetting, say: Callable[[str], None]) -> dict[str, Any]:
    """All modes at all numbers of nodes, as plain data."""
    rows = []
    for mode in setting.modes:
        for nodes in setting.nodes:
            found = simulated(setting, mode, nodes)
            say(f"{mode}, {nodes:,} nodes: {found[0]['simulated']['events']:,} events in {found[0]['wall_s']:.1f} s")
            rows += found
    return {**_facts("scale"), "setting": setting.to_json(), "public": _public(setting, rows), "rows": rows}


def simulated(setting: SimulateSetting, mode: Mode, nodes: int) -> list[dict[str, Any]]:
    """One row an epoch, with what it costs and how long it took to simulate."""
    began = time.perf_counter()
    outcome = simulate(setting.scenario(mode, nodes), nodes=setting.simulated_nodes(mode, nodes), warm=setting.warm)
    wall_s = time.perf_counter() - began
    prices = setting.prices
    return [
        {
            **row,
            "requests_usd": prices.requests_usd(row["requests"]),
            "egress_usd": prices.egress_usd(row["bytes"]),
            "wall_s": wall_s,
        }
        for row in outcome.rows()
    ]


def _public(setting: SimulateSetting, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The public table beside ours; None where other things were simulated than it measured."""
    ours = (setting.batch, setting.workers, setting.prefetch, setting.step_time_s, setting.volumes, setting.ranks)
    theirs = (public.BATCH, public.WORKERS, public.PREFETCH, public.STEP_TIME_S, public.VOLUMES, 1)
    if ours != theirs or setting.steps is not None or setting.cache_bytes:
        return None
    compared = []
    for row in public.TABLE:
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
    fitted = {**asdict(works.fit(setting.network.latency))}
    return {"source": public.SOURCE, "fitted": fitted, "observed_step_s": list(public.STEP_S), "rows": compared}


def check(paths: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Measured runs beside simulated ones, as plain data."""
    rows = []
    for path in paths:
        rows += [{**asdict(each), "error": each.error} for each in measured.compare(path)]
        say(f"{path}: simulated")
    off = [abs(row["error"]) for row in rows]
    return {
        **_facts("check"),
        "rows": rows,
        "tolerance": TOLERANCE,
        "within": sum(error <= TOLERANCE for error in off),
        "mean_error": sum(off) / len(off),
        "largest_error": max(off),
    }


def planned(setting: SimulateSetting) -> dict[str, Any]:
    """A plan for each mode and number of nodes, as plain data."""
    rows = []
    for mode in setting.modes:
        for nodes in setting.nodes:
            made = plan.make(setting.wish(mode, nodes))
            rows.append({"mode": mode, "nodes": nodes, **made.to_json(setting.prices)})
    return {**_facts("plan"), "setting": setting.to_json(), "rows": rows}


def _facts(kind: str) -> dict[str, Any]:
    return {
        "benchmark": KIND,
        "kind": kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": report.commit(),
        "hardware": report.hardware(),
        "python": platform.python_version(),
        "versions": report.versions(("voxlane", "numpy")),
    }
