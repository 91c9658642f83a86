"""Where the next configuration comes from: Optuna, chance or a grid; and what they are told of those before.

What is proposed follows from the seed and the trial's number, and with Optuna from the trials that ended before, so
that a search which was killed goes on as if it had not been, from nothing but its record.
"""

from __future__ import annotations

import math
import random
import warnings
from typing import Any

from voxlane.tune.space import Distribution, Space
from voxlane.tune.trials import Trial

_STARTUP = 10
"""Trials drawn at random before Optuna has seen enough to model."""


class Proposals:
    """Configurations by trial number. Not for several threads."""

    def __init__(self, space: Space, ended: list[Trial] | None = None) -> None:
        """`ended`: trials of the same space that are over."""
        self._space = space
        self._combinations = space.combinations() if space.search == "grid" else []
        self._study = _study(space) if space.search == "optuna" else None
        self._asked: dict[int, Any] = {}
        for trial in ended or []:
            self.tell(trial)

    def ask(self, number: int) -> dict[str, Any]:
        """The values of trial `number`, by dotted name."""
        fields = self._space.fields
        if self._study is None:
            draw = random.Random(f"{self._space.tune.seed}/{number}")
            drawn = {name: _drawn(distribution, draw) for name, distribution in fields.items()}
            if self._combinations:
                drawn |= self._combinations[number % len(self._combinations)]
            return drawn
        self._study.sampler = _sampler(self._space.tune.seed, number)
        asked = self._study.ask({name: _optuna(distribution) for name, distribution in fields.items()})
        self._asked[number] = asked
        return {
            name: d.values[asked.params[name]] if d.listed else d.nearest(asked.params[name])
            for name, d in fields.items()
        }

    def tell(self, trial: Trial) -> None:
        """Take in a trial that ended, whether it was asked for here or before."""
        if self._study is None:
            return
        import optuna

        states = optuna.trial.TrialState
        if asked := self._asked.pop(trial.number, None):
            # What was asked is put aside, and what came of it added whole: the one way for both.
            self._study.tell(asked, state=states.FAIL)
        if trial.state == "failed" or (trial.dice is None and trial.state != "infeasible"):
            return  # says nothing about the values
        fields = self._space.fields
        coded = {name: _coded(fields[name], value) for name, value in trial.params.items()}
        self._study.add_trial(
            optuna.trial.create_trial(
                state=states.PRUNED if trial.state == "stopped" else states.COMPLETE,
                value=0.0 if trial.state == "infeasible" else trial.dice,
                params=coded,
                distributions={name: _optuna(fields[name]) for name in coded},
                intermediate_values=dict(trial.curve),
            )
        )


def _drawn(distribution: Distribution, draw: random.Random) -> Any:
    if distribution.listed:
        return draw.choice(distribution.values)
    low, high = distribution.values[:2]
    if distribution.whole and not distribution.log:
        return draw.randint(low, high)
    if distribution.log:
        # Half a step beyond whole ends, so that they are drawn as often as what lies between.
        half = 0.5 if distribution.whole else 0.0
        return distribution.nearest(math.exp(draw.uniform(math.log(low - half), math.log(high + half))))
    return distribution.nearest(draw.uniform(low, high))


def _study(space: Space) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(direction="maximize", sampler=_sampler(space.tune.seed, 0))


def _sampler(seed: int, number: int) -> Any:
    """A sampler of its own for every trial, so that what is drawn does not depend on how many were drawn before."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            n_startup_trials=_STARTUP,
            multivariate=True,
            constant_liar=True,  # several are under way at once: they keep away from each other
            seed=random.Random(f"{seed}/{number}").getrandbits(31),
        )


def _optuna(distribution: Distribution) -> Any:
    """Optuna's word for it. Listed values are numbered, because they may be lists or records."""
    import optuna.distributions as words

    if distribution.listed:
        return words.CategoricalDistribution(range(len(distribution.values)))
    low, high = distribution.values[:2]
    if distribution.whole:
        return words.IntDistribution(low, high, log=distribution.log)
    if distribution.kind == "quniform":
        return words.FloatDistribution(low, high, step=distribution.values[2])
    return words.FloatDistribution(low, high, log=distribution.log)


def _coded(distribution: Distribution, value: Any) -> Any:
    if distribution.listed:
        same = [i for i, v in enumerate(distribution.values) if v == value and type(v) is type(value)]
        return same[0] if same else distribution.values.index(value)
    return value
