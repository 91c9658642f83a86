"""Collect and plot the accuracy of trained and evaluated runs on the Decathlon's Hippocampus dataset.

    voxlane prepare Task04_Hippocampus prepared split=hash
    voxlane train prepared --run runs/cpu preset=small
    voxlane evaluate runs/cpu
    python benchmarks/hippocampus.py runs/cpu --name cpu

copies the run's config, history and scores to results/hippocampus/NAME and plots the curves of all collected runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results" / "hippocampus"
NNUNET = 0.891
"""Mean Dice of nnU-Net 2.8.1 with its defaults after 299 s on one H200, trained on all 217 cases; others held out."""


def keep(run: Path, name: str) -> None:
    """Copy the result files of a run, without the paths of this machine."""
    folder = RESULTS / name
    folder.mkdir(parents=True, exist_ok=True)
    scores = run / "evaluation" / "validation"
    for file in (
        run / "run.json",
        run / "history.json",
        run / "stall.json",
        *scores.glob("*.json"),
        *scores.glob("*.csv"),
    ):
        shutil.copy(file, folder / file.name)
    summary = json.loads((folder / "summary.json").read_text())
    summary.pop("runs")
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    facts = json.loads((folder / "run.json").read_text())
    public_facts = {
        name: facts[name] for name in ("config", "plan", "network", "cases", "fold", "parameters", "environment")
    }
    (folder / "run.json").write_text(json.dumps(public_facts, indent=1))  # without the paths of this machine


def draw() -> None:
    """Plot validation Dice over seconds of training, and the Dice of held-out cases, for every collected run."""
    figure, (curve, cases) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    folders = sorted(p for p in RESULTS.iterdir() if p.is_dir())
    for folder in folders:
        history = [e for e in json.loads((folder / "history.json").read_text()) if e["mean_dice"] is not None]
        device = json.loads((folder / "run.json").read_text())["environment"]["device"]
        curve.plot(
            [e["seconds"] for e in history], [e["mean_dice"] for e in history], "o-", label=f"{folder.name} ({device})"
        )
    curve.axhline(NNUNET, color="grey", linestyle=":", label="nnU-Net, other held-out cases")
    curve.set(xlabel="seconds of training", ylabel="mean Dice while training", ylim=(0.5, 0.92))
    curve.legend(fontsize=8)
    scored = []
    for folder in folders:
        rows = (folder / "cases.csv").read_text().splitlines()
        columns = [i for i, head in enumerate(rows[0].split(",")) if head.endswith("/dice")]
        scored.append([sum(float(r.split(",")[i]) for i in columns) / len(columns) for r in rows[1:]])
    cases.boxplot(scored, tick_labels=[folder.name for folder in folders])
    cases.set(ylabel="mean Dice of each held-out case")
    figure.savefig(RESULTS / "hippocampus.png", dpi=110)


def main() -> None:
    """Collect a run, if one is given, and plot all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="folder of an evaluated run")
    parser.add_argument("--name", help="name of the run in the results")
    options = parser.parse_args()
    if options.run is not None:
        if not options.name:
            parser.error("--name is needed with a run")
        keep(options.run, options.name)
    draw()


if __name__ == "__main__":
    main()
