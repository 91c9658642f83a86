"""Propose the config of each trial: from Optuna, at random or from a grid.

A proposal follows from the seed and the trial's number, and with Optuna also from the trials that ended before. A
search that was killed therefore continues from its record alone as if it had not been interrupted.
"""

from __future__ import annotations

import math
import random
import warnings
from typing import Any

from voxlane.tune.space import Distribution, Space
from voxlane.tune.trials import Trial

_STARTUP_TRIALS = 10
"""Number of trials drawn at random before Optuna starts to model."""


class Proposals:
    """Configs by trial number. Not thread-safe."""

    def __init__(self, space: Space, ended: list[Trial] | None = None) -> None:
        """Propose configs of `space`; `ended` are its trials that have ended."""
        self._space = space
        self._combinations = space.combinations() if space.search == "grid" else []
        self._study: Any = None
        self._pending: dict[int, Any] = {}
        if space.search == "optuna":
            import optuna

            optuna.logging.set_verbosity(optuna.logging.ERROR)
            self._study = optuna.create_study(direction="maximize", sampler=_create_sampler(space.tune.seed, 0))
        for trial in ended or []:
            self.add_result(trial)

    def propose(self, number: int) -> dict[str, Any]:
        """Return the values of trial `number` by dotted name."""
        fields = self._space.fields
        if self._study is None:
            rng = random.Random(f"{self._space.tune.seed}/{number}")
            values = {name: _draw(distribution, rng) for name, distribution in fields.items()}
            if self._combinations:
                values |= self._combinations[number % len(self._combinations)]
            return values
        self._study.sampler = _create_sampler(self._space.tune.seed, number)
        optuna_trial = self._study.ask({name: _to_optuna(distribution) for name, distribution in fields.items()})
        self._pending[number] = optuna_trial
        return {
            name: d.values[optuna_trial.params[name]] if d.listed else d.nearest(optuna_trial.params[name])
            for name, d in fields.items()
        }

    def add_result(self, trial: Trial) -> None:
        """Add a trial that ended, whether it was proposed by this object or by an earlier one."""
        if self._study is None:
            return
        import optuna

        states = optuna.trial.TrialState
        if pending := self._pending.pop(trial.number, None):
            # The pending trial is discarded and the result added as a new one, as for trials of an earlier process.
            self._study.tell(pending, state=states.FAIL)
        if trial.state == "failed" or (trial.dice is None and trial.state != "infeasible"):
            return  # says nothing about the values
        fields = self._space.fields
        params = {name: _encode(fields[name], value) for name, value in trial.params.items()}
        self._study.add_trial(
            optuna.trial.create_trial(
                state=states.PRUNED if trial.state == "stopped" else states.COMPLETE,
                value=0.0 if trial.state == "infeasible" else trial.dice,
                params=params,
                distributions={name: _to_optuna(fields[name]) for name in params},
                intermediate_values=dict(trial.curve),
            )
        )


def _draw(distribution: Distribution, rng: random.Random) -> Any:
    if distribution.listed:
        return rng.choice(distribution.values)
    low, high = distribution.values[:2]
    if distribution.log:
        # Half a step beyond integer ends, so that the ends are drawn as often as the values between them.
        half = 0.5 if distribution.integer else 0.0
        return distribution.nearest(math.exp(rng.uniform(math.log(low - half), math.log(high + half))))
    return rng.randint(low, high) if distribution.integer else distribution.nearest(rng.uniform(low, high))


def _create_sampler(seed: int, number: int) -> Any:
    """Return a sampler for one trial, so that a proposal does not depend on the number of earlier draws."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            n_startup_trials=_STARTUP_TRIALS,
            multivariate=True,
            constant_liar=True,  # keeps trials that run at the same time away from each other
            seed=random.Random(f"{seed}/{number}").getrandbits(31),
        )


def _to_optuna(distribution: Distribution) -> Any:
    """Return Optuna's distribution. Listed values are numbered, because they may be lists or records."""
    from optuna import distributions

    if distribution.listed:
        return distributions.CategoricalDistribution(range(len(distribution.values)))
    low, high = distribution.values[:2]
    if distribution.integer:
        return distributions.IntDistribution(low, high, log=distribution.log)
    if distribution.kind == "quniform":
        return distributions.FloatDistribution(low, high, step=distribution.values[2])
    return distributions.FloatDistribution(low, high, log=distribution.log)


def _encode(distribution: Distribution, value: Any) -> Any:
    if not distribution.listed:
        return value
    same = [i for i, v in enumerate(distribution.values) if v == value and type(v) is type(value)]
    return same[0] if same else distribution.values.index(value)
