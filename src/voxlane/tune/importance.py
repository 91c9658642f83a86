"""Estimate which searched fields decided how good a trial became.

Uses Optuna's PED-ANOVA (Watanabe et al., 2023): how differently the best quarter of the trials is distributed along a
field than all trials are. Only membership of that quarter counts, not by how much the others missed it. That suits
early stopping: a stopped trial's Dice is from fewer epochs than a finished one's, so their difference says nothing, but
a stopped trial is by definition not among the best. It also needs no further package (fANOVA needs scikit-learn).
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from typing import Any

from voxlane.pages.formatting import as_number, value_key
from voxlane.tune.trials import Search, Trial

MIN_TRIALS = 12
"""With fewer scored trials the best quarter is one or two of them, and any ranking would be chance."""
BEST_SHARE = 0.25
"""Share of the trials that count as the best."""
_RESAMPLES = 30


def importance(search: Search) -> dict[str, float]:
    """Return the share of each searched field, largest first; the shares sum to 1.

    The result is empty if too few trials have a score, or if neither fields nor Dice differ between them.
    """
    trials = scored_trials(search)
    return _shares(search.space, trials) if len(trials) >= MIN_TRIALS else {}


def importance_range(search: Search) -> dict[str, tuple[float, float]]:
    """Return the range of each field's share when a random third of the trials is left out (10th to 90th percentile).

    A share that depends on a few trials has a wide range. The result is the same in every call.
    """
    trials = scored_trials(search)
    rng = random.Random(0)
    shares = importance(search)
    resampled: dict[str, list[float]] = {name: [] for name in shares}
    for _ in range(_RESAMPLES if shares else 0):
        subset = _shares(search.space, rng.sample(trials, k=len(trials) - len(trials) // 3))
        for name, values in resampled.items():
            values.append(subset.get(name, 0.0))
    tenth = _RESAMPLES // 10
    return {
        name: (min(shares[name], sorted(v)[tenth]), max(shares[name], sorted(v)[-1 - tenth]))
        for name, v in resampled.items()
    }


def scored_trials(search: Search) -> list[Trial]:
    """Return the trials that ended with a Dice, also those stopped early, and have a value of every field."""
    return [
        t
        for t in search.trials
        if t.state in ("done", "stopped") and t.score is not None and search.space.keys() <= t.params.keys()
    ]


def _shares(space: dict[str, Any], trials: Sequence[Trial]) -> dict[str, float]:
    if len({t.score for t in trials}) < 2:
        return {}
    import optuna
    from optuna.distributions import CategoricalDistribution
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    fields = {
        name: distribution
        for name in space
        if (distribution := _make_distribution(space[name], [t.params.get(name) for t in trials])) is not None
    }
    if len(fields) < 2:  # a single field decides everything
        return dict.fromkeys(fields, 1.0)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.ERROR)
    try:
        study = optuna.create_study(direction="maximize")
        study.add_trials(
            [
                optuna.trial.create_trial(
                    params={
                        name: value_key(t.params[name])
                        if isinstance(field, CategoricalDistribution)
                        else t.params[name]
                        for name, field in fields.items()
                    },
                    distributions=fields,
                    value=t.score,
                )
                for t in trials
            ]
        )
        evaluator = PedAnovaImportanceEvaluator(target_quantile=BEST_SHARE, evaluate_on_local=True)
        weights = get_param_importances(study, evaluator=evaluator, params=list(fields))
    finally:
        optuna.logging.set_verbosity(verbosity)
    total = sum(v for v in weights.values() if math.isfinite(v) and v > 0)
    if not total > 0:
        return {}
    shares = {name: max(0.0, v) / total if math.isfinite(v) else 0.0 for name, v in weights.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _make_distribution(spec: Any, values: Sequence[Any]) -> Any:
    """Return Optuna's distribution of a field, wide enough for `values`; None if all values are equal."""
    from optuna import distributions

    if len({value_key(v) for v in values}) < 2:
        return None
    kind = next(iter(spec), "") if isinstance(spec, dict) else ""
    numbers = [n for n in map(as_number, values) if n is not None]
    if kind in ("choice", "grid") or len(numbers) < len(values):
        return distributions.CategoricalDistribution(list(dict.fromkeys(value_key(v) for v in values)))
    ends = spec.get(kind) if kind else ()
    bounds = [n for n in map(as_number, ends[:2] if isinstance(ends, (list, tuple)) else []) if n is not None]
    low, high = min(numbers + bounds), max(numbers + bounds)
    log = kind in ("loguniform", "logint") and low > 0
    if kind in ("int", "logint"):
        return distributions.IntDistribution(math.floor(low), math.ceil(high), log=log)
    return distributions.FloatDistribution(low, high, log=log)
