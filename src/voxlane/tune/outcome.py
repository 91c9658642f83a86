"""What a search leaves at its end: the best config, where its checkpoints are, the page and TensorBoard's events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import yaml

from voxlane import settings
from voxlane.errors import TuneError
from voxlane.train.config import TrainConfig
from voxlane.train.fit import BEST
from voxlane.train.run import Run
from voxlane.tune import board, page
from voxlane.tune.trials import Search, Trial


def so_far(search: Search, place: Run) -> None:
    """The page of a search that is not over."""
    place.write("report.html", page.page(search).encode())


def publish(search: Search, place: Run, config_of: Callable[[Trial], TrainConfig], folds: Sequence[int]) -> Search:
    """Write all of it; TuneError where no trial has a Dice. `folds`: those that every trial trained."""
    so_far(search, place)
    best = search.best
    if best is None:
        raise nothing_found(search, place)
    board.write(search, place)
    place.write("best.yaml", best_yaml(best, place, config_of(best)).encode())
    place.write_json("best.json", best_json(best, search, place, folds))
    return search


def nothing_found(search: Search, place: Run) -> TuneError:
    """Why no trial has a Dice."""
    reasons = [trial.why for trial in search.trials if trial.why and trial.state in ("failed", "infeasible")]
    why = f": {reasons[0]}" if reasons else ""
    return TuneError(f"none of {len(search.trials)} trials has a Dice{why}", uri=place.where)


def best_yaml(best: Trial, place: Run, config: TrainConfig) -> str:
    """The whole config of a trial, without what it had from where it ran."""
    head = f"# Trial {best.id} of {place.where}, mean Dice {best.dice:.4f}.\n"
    text: str = yaml.safe_dump(settings.plain(config), sort_keys=False, default_flow_style=None)
    return head + text


def best_json(best: Trial, search: Search, place: Run, folds: Sequence[int]) -> dict[str, Any]:
    """Where the best trial is, and what to do with it."""
    runs = [best.run] if len(folds) == 1 else [f"{best.run}/fold_{fold}" for fold in folds]
    return {
        "trial": best.id,
        "dice": best.dice,
        "epochs": best.epochs,
        "params": best.params,
        "run": best.run,
        "checkpoints": [f"{run}/checkpoints/{BEST}.ckpt" for run in runs],
        "config": place.file_uri("best.yaml"),
        "commands": commands(best, search, place),
    }


def commands(best: Trial, search: Search, place: Run) -> dict[str, str]:
    """What to do next."""
    return {
        "evaluate": f"voxlane evaluate {best.run}",
        "predict": f"voxlane predict {best.run} SCAN -o masks",
        "train": f"voxlane train {search.data} --run RUN --config {place.file_uri('best.yaml').removeprefix('file://')}",
    }
