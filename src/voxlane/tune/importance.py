"""Which searched fields decided how good a trial became.

PED-ANOVA (Watanabe et al., 2023), as Optuna has it: how differently the best quarter of the trials lies along a field
than all of them do. Only who belongs to that quarter counts, not by how much the others missed it. That suits early
stopping: a stopped trial's Dice is of fewer epochs than a finished one's, so that their difference says nothing, but
that it is not among the best is what stopping it means. It needs no further package (fANOVA needs scikit-learn).
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from typing import Any

from voxlane.tune.axes import key, number
from voxlane.tune.trials import Search, Trial

MIN_TRIALS = 12
"""With fewer scored trials the best quarter is one or two of them, and any ranking would be chance."""
BEST_SHARE = 0.25
_RESAMPLES = 30


def importance(search: Search) -> dict[str, float]:
    """Share of each searched field, 0 to 1 and in all 1, the largest first; empty when too few trials were scored, or
    when no field, or no Dice, differs between them."""
    trials = scored(search)
    return _shares(search.space, trials) if len(trials) >= MIN_TRIALS else {}


def spread(search: Search) -> dict[str, tuple[float, float]]:
    """From where to where the share of each field goes when a random third of the trials is left out (10th to 90th
    percentile): a share that hangs on a few trials has a wide one. Drawn the same every time."""
    trials = scored(search)
    chance = random.Random(0)
    whole = importance(search)
    drawn: dict[str, list[float]] = {name: [] for name in whole}
    for _ in range(_RESAMPLES if drawn else 0):
        found = _shares(search.space, chance.sample(trials, k=len(trials) - len(trials) // 3))
        for name, values in drawn.items():
            values.append(found.get(name, 0.0))
    tenth = _RESAMPLES // 10
    return {
        name: (min(whole[name], sorted(v)[tenth]), max(whole[name], sorted(v)[-1 - tenth])) for name, v in drawn.items()
    }


def scored(search: Search) -> list[Trial]:
    """Trials with a value of every field that ended with a Dice, also those stopped early."""
    return [
        t
        for t in search.trials
        if t.state in ("done", "stopped") and _dice(t) is not None and search.space.keys() <= t.params.keys()
    ]


def _dice(trial: Trial) -> float | None:
    return trial.dice if trial.dice is not None and math.isfinite(trial.dice) else None


def _shares(space: dict[str, Any], trials: Sequence[Trial]) -> dict[str, float]:
    if len({_dice(t) for t in trials}) < 2:
        return {}
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    fields = {
        name: found
        for name in space
        if (found := _distribution(space[name], [t.params.get(name) for t in trials])) is not None
    }
    if len(fields) < 2:  # all of it is decided by the only one there is
        return dict.fromkeys(fields, 1.0)
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.ERROR)
    try:
        study = optuna.create_study(direction="maximize")
        study.add_trials(
            [
                optuna.trial.create_trial(
                    params={name: _value(t.params[name], fields[name]) for name in fields},
                    distributions=fields,
                    value=_dice(t),
                )
                for t in trials
            ]
        )
        evaluator = PedAnovaImportanceEvaluator(target_quantile=BEST_SHARE, evaluate_on_local=True)
        found = get_param_importances(study, evaluator=evaluator, params=list(fields))
    finally:
        optuna.logging.set_verbosity(before)
    total = sum(v for v in found.values() if math.isfinite(v) and v > 0)
    if not total > 0:
        return {}
    shares = {name: max(0.0, v) / total if math.isfinite(v) else 0.0 for name, v in found.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _distribution(spec: Any, values: Sequence[Any]) -> Any:
    """Optuna's distribution of a field, wide enough for `values`; None: it does not differ between the trials."""
    import optuna

    if len({key(v) for v in values}) < 2:
        return None
    kind = next(iter(spec), "") if isinstance(spec, dict) else ""
    numbers = [n for n in map(number, values) if n is not None]
    if kind in ("choice", "grid") or len(numbers) < len(values):
        return optuna.distributions.CategoricalDistribution(list(dict.fromkeys(key(v) for v in values)))
    given = spec.get(kind)
    bounds = [n for n in map(number, given[:2] if isinstance(given, (list, tuple)) else []) if n is not None]
    low, high = min(numbers + bounds), max(numbers + bounds)
    log = kind in ("loguniform", "logint") and low > 0
    if kind in ("int", "logint"):
        return optuna.distributions.IntDistribution(math.floor(low), math.ceil(high), log=log)
    return optuna.distributions.FloatDistribution(low, high, log=log)


def _value(value: Any, distribution: Any) -> Any:
    import optuna

    return key(value) if isinstance(distribution, optuna.distributions.CategoricalDistribution) else value
