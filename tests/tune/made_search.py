"""Searches as `voxlane tune` would keep them, made from a seed."""

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
BEGUN = 1_790_000_000.0


def search(trials: int = 30, *, seed: int = 3, devices: int = 4, epochs: int = 27) -> Search:
    """A search of which the learning rate decides most and the norm some: large networks on large patches do not fit,
    two trials raise, one is running, and those that are bad at epochs 3 and 9 were stopped there."""
    chance = random.Random(seed)
    free = [(0.0, slot) for slot in range(devices)]
    made: list[Trial] = []
    for number in range(trials):
        params = _drawn(chance)
        at, slot = min(free)
        reachable = 0.88 - 0.09 * math.log10(params["optimizer.lr"] / 4e-3) ** 2
        reachable -= {"instance": 0.0, "group": 0.015, "batch": 0.05}[params["norm"]]
        reachable -= 0.02 * abs(params["augment.strength"] - 0.6)
        reachable = max(0.03, reachable + chance.gauss(0, 0.006))
        cost = 2.2 * (params["base_features"] / 16) ** 0.6 * (params["patch"][0] / 32) * chance.uniform(0.9, 1.1)
        curve = [
            (e, round(max(0.01, reachable * (1 - math.exp(-e / 5)) + chance.gauss(0, 0.008)), 4))
            for e in range(1, epochs + 1)
        ]
        state, why, kept = "done", "", curve
        if params["base_features"] > 44 and params["patch"][0] == 64:
            state, kept = "infeasible", []
            why = "The GPU has too little memory: lower batch, patch or base_features"
        elif number in (11, 21):
            state, kept = "failed", curve[: 2 if number == 21 else 0]
            why = "gs://demo/prepared/cases/case_00012.zarr: it changed after it was prepared. Prepare again"
        elif number == trials - 1 and trials > 20:
            state, kept = "running", curve[:14]
        elif number > 2 and curve[2][1] < 0.36:
            state, kept, why = "stopped", curve[:3], "at epoch 3 it was not among the best third"
        elif number > 4 and curve[8][1] < 0.7:
            state, kept, why = "stopped", curve[:9], "at epoch 9 it was not among the best third"
        took = 8 + cost * max(len(kept), 0.5)
        made.append(
            Trial(
                id=f"t{number:05d}",
                number=number,
                params=params,
                state=state,  # type: ignore[arg-type]
                dice=max((d for _, d in kept), default=None),
                epochs=len(kept),
                curve=kept,
                started=BEGUN + at,
                ended=None if state == "running" else BEGUN + at + took,
                node=f"node-{slot // 2 + 1}",
                why=why,
                run=f"gs://demo/searches/kidneys/trials/t{number:05d}",
            )
        )
        free[free.index((at, slot))] = (at + took + chance.uniform(0.3, 1.4), slot)
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
        trials=made,
    )


def _drawn(chance: random.Random) -> dict[str, Any]:
    drawn: dict[str, Any] = {}
    for name, spec in SPACE.items():
        kind, of = next(iter(spec.items()))
        if kind == "choice":
            drawn[name] = chance.choice(of)
        elif kind == "int":
            drawn[name] = chance.randint(*of)
        elif kind == "uniform":
            drawn[name] = chance.uniform(*of)
        else:
            value = math.exp(chance.uniform(*map(math.log, of)))
            drawn[name] = round(value) if kind == "logint" else value
    return drawn


def only(kept: Search, *states: str) -> Search:
    """The same with the trials of these states alone."""
    return replace(kept, trials=[t for t in kept.trials if t.state in states])
