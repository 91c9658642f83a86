"""Test trials of several workers, and searches whose trials do not get their resources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tune import fake_work
from tests.tune.spaces import space
from tests.tune.test_runner import QUICK, read_history, states
from voxlane.errors import ClusterError, TuneError
from voxlane.tune import ray_tune
from voxlane.tune.capacity import TrialCapacity
from voxlane.tune.runner import load_search, tune

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def occupy(cpus: int) -> Any:
    """Take CPUs of the running Ray for as long as the returned handle exists."""
    import ray

    @ray.remote(num_cpus=cpus)
    class Occupant:
        def ready(self) -> bool:
            return True

    occupant = Occupant.remote()
    assert ray.get(occupant.ready.remote())
    return occupant


def test_trials_of_two_workers(ray_4_cpus: None, data: str, tmp_path: Path) -> None:
    settings = {**QUICK, "trials": 2, "workers_per_trial": 2, "max_concurrent": 1}
    search = tune(space(settings, epochs=2), data, str(tmp_path / "out"), progress=False)
    for trial in search.trials:
        assert trial.state in ("done", "stopped"), trial.reason
        entries = read_history(trial)
        assert [entry["ranks"] for entry in entries] == [2] * trial.epochs
        assert [(entry["epoch"] + 1, entry["mean_dice"]) for entry in entries] == trial.curve


def test_search_without_resources_fails_with_the_reason(
    ray_4_cpus: None, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    occupant = occupy(4)
    values = space({"search": "random", "scheduler": "none", "trials": 2})
    message = r"no trial got its resources within 8 s: a trial needs 1 CPU, and 0 CPU of the cluster's 4 CPU are free"
    with monkeypatch.context() as limits, pytest.raises(ClusterError, match=message):
        limits.setattr(ray_tune, "WAIT_NOTICE_S", 1.0)
        limits.setattr(ray_tune, "WAIT_LIMIT_S", 8.0)
        tune(values, data, str(tmp_path / "out"), work=fake_work.Scored(tmp_path))
    assert "waiting for resources since" in capsys.readouterr().out
    del occupant
    resumed = tune(values, data, str(tmp_path / "out"), resume=True, progress=False, work=fake_work.Scored(tmp_path))
    assert states(resumed) == ["done", "done"], "the search continues once the resources are free"


def test_trials_whose_workers_do_not_start_fail(ray_4_cpus: None, data: str, tmp_path: Path) -> None:
    occupant = occupy(3)
    capacity = TrialCapacity(trials=1, workers=2, cpus=1, gpus=0, limited_by_cluster=False)
    training = ray_tune.Training(data, None, capacity, None, start_limit_s=5)
    values = space({"search": "random", "trials": 9, "workers_per_trial": 2, "max_concurrent": 1}, epochs=1)
    with pytest.raises(TuneError, match=r"none of 3 trials has a Dice: its 2 workers of 1 CPU each did not start"):
        tune(values, data, str(tmp_path / "out"), progress=False, work=training)
    assert states(load_search(str(tmp_path / "out"))) == ["failed"] * 3
    del occupant
