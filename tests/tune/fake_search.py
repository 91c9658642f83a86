"""Searches as `voxlane tune` records them, generated from a seed."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from voxlane.tune.trials import Search, Trial

SPACE: dict[str, Any] = {
    "optimizer.lr": {"loguniform": [1e-4, 1e-1]},
    "optimizer.name": {"choice": ["sgd", "adamw"]},
    "norm": {"choice": ["instance", "batch", "group"]},
    "base_features": {"logint": [8, 64]},
    "depth": {"int": [3, 6]},
    "patch": {"choice": [[32, 64, 64], [48, 96, 96], [64, 128, 128]]},
    "augment.strength": {"uniform": [0.0, 1.5]},
}
START = 1_790_000_000.0


def search(trials: int = 30, *, seed: int = 3, devices: int = 4, epochs: int = 27) -> Search:
    """Return a search in which the learning rate decides most and the norm some.

    Large networks on large patches do not fit, two trials raise, one is running, and bad trials were stopped at epochs
    3 and 9.
    """
    rng = random.Random(seed)
    free = [(0.0, slot) for slot in range(devices)]
    results: list[Trial] = []
    for number in range(trials):
        params = _draw_params(rng)
        at, slot = min(free)
        reachable = 0.88 - 0.09 * math.log10(params["optimizer.lr"] / 4e-3) ** 2
        reachable -= {"instance": 0.0, "group": 0.015, "batch": 0.05}[params["norm"]]
        reachable -= 0.02 * abs(params["augment.strength"] - 0.6)
        reachable = max(0.03, reachable + rng.gauss(0, 0.006))
        cost = 2.2 * (params["base_features"] / 16) ** 0.6 * (params["patch"][0] / 32) * rng.uniform(0.9, 1.1)
        curve = [
            (e, round(max(0.01, reachable * (1 - math.exp(-e / 5)) + rng.gauss(0, 0.008)), 4))
            for e in range(1, epochs + 1)
        ]
        state, reason, reported = "done", "", curve
        if params["base_features"] > 44 and params["patch"][0] == 64:
            state, reported = "infeasible", []
            reason = "The GPU has too little memory: lower batch, patch or base_features"
        elif number in (11, 21):
            state, reported = "failed", curve[: 2 if number == 21 else 0]
            reason = "gs://demo/prepared/cases/case_00012.zarr: it changed after it was prepared. Prepare again"
        elif number == trials - 1 and trials > 20:
            state, reported = "running", curve[:14]
        elif number > 2 and curve[2][1] < 0.36:
            state, reported, reason = "stopped", curve[:3], "at epoch 3 it was not among the best third"
        elif number > 4 and curve[8][1] < 0.7:
            state, reported, reason = "stopped", curve[:9], "at epoch 9 it was not among the best third"
        took = 8 + cost * max(len(reported), 0.5)
        results.append(
            Trial(
                id=f"t{number:05d}",
                number=number,
                params=params,
                state=state,  # type: ignore[arg-type]
                dice=max((d for _, d in reported), default=None),
                epochs=len(reported),
                curve=reported,
                started=START + at,
                ended=None if state == "running" else START + at + took,
                node=f"node-{slot // 2 + 1}",
                reason=reason,
                run=f"gs://demo/searches/kidneys/trials/t{number:05d}",
            )
        )
        free[free.index((at, slot))] = (at + took + rng.uniform(0.3, 1.4), slot)
    return Search(
        name="kidneys",
        data="gs://demo/prepared/kits",
        space=SPACE,
        config={
            "trials": trials,
            "search": "optuna",
            "scheduler": "asha",
            "folds": [0, 1],
            "max_concurrent": None,
            "cpus_per_trial": 4,
            "gpus_per_trial": 1,
            "workers_per_trial": 1,
            "grace_epochs": 3,
            "reduction": 3,
            "seed": 0,
        },
        command=["voxlane", "tune", "space.yaml", "gs://demo/prepared/kits", "--run", "gs://demo/searches/kidneys"],
        created="2026-09-21T15:33:20+00:00",
        devices=float(devices),
        trials=results,
    )


def _draw_params(rng: random.Random) -> dict[str, Any]:
    drawn: dict[str, Any] = {}
    for name, spec in SPACE.items():
        kind, of = next(iter(spec.items()))
        if kind == "choice":
            drawn[name] = rng.choice(of)
        elif kind == "int":
            drawn[name] = rng.randint(*of)
        elif kind == "uniform":
            drawn[name] = rng.uniform(*of)
        else:
            value = math.exp(rng.uniform(*map(math.log, of)))
            drawn[name] = round(value) if kind == "logint" else value
    return drawn


def only(search: Search, *states: str) -> Search:
    """Return the search with only the trials of these states."""
    return replace(search, trials=[t for t in search.trials if t.state in states])
