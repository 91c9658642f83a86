"""A run's folder as training and evaluation write it, with figures generated from a seed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from voxlane.settings import to_plain
from voxlane.train import pictures
from voxlane.volume.description import Description
from voxlane.volume.plan import Network, Normalisation, Plan

DESCRIPTION = Description(name="Phantom KiTS", channels=("CT",), labels={"background": 0, "kidney": 1, "tumour": 2})
PLAN = Plan(
    spacing=(5.0, 3.83, 3.83),
    normalisation=(Normalisation(scheme="ct", lower=-41.0, upper=262.0, mean=128.4, std=61.2),),
    patch=(32, 64, 64),
    batch=2,
    network=Network(
        features=(16, 32, 64, 128),
        strides=((1, 1, 1), (1, 2, 2), (2, 2, 2), (2, 2, 2)),
        kernels=((1, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3)),
    ),
)


def write(folder: Path, *, epochs: int = 30, cases: int = 12, evaluated: bool = True, overlay: bytes = b"") -> Path:
    """Write a complete run into `folder`; `overlay` is the picture of every case."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    ids = [f"case_{i:05d}" for i in range(40)]
    dump(
        folder / "run.json",
        {
            "version": 1,
            "created": "2026-03-02T09:41:07+00:00",
            "command": ["voxlane", "train", "gs://demo/prepared", "--run", "gs://demo/runs/first run", "epochs=30"],
            "config": {
                "epochs": epochs,
                "optimizer": {"kind": "sgd", "lr": 0.01, "momentum": 0.99, "weight_decay": 3e-5},
                "augment": {"preset": "nnunet", "strength": 1.0},
                "precision": "bf16",
                "seed": 0,
                "patch": [32, 64, 64],
            },
            "plan": to_plain(PLAN),
            "description": to_plain(DESCRIPTION),
            "data": {"uri": "gs://demo/prepared", "name": "Phantom KiTS", "fingerprint": "5d41402abc4b2a76"},
            "cases": {"train": ids[: 40 - cases], "validation": ids[40 - cases :]},
            "fold": 0,
            "parameters": 1_402_979,
            "environment": {"voxlane": "0.1.0", "torch": "2.13.0", "device": "cpu", "cpu_count": 2, "python": "3.11.7"},
        },
    )
    dump(folder / "history.json", [epoch(i, epochs, rng) for i in range(epochs)])
    shares = {"bucket": 4.1, "decode": 6.8, "augment": 19.2, "step": 148.0, "validate": 21.5, "other": 3.9}
    dump(
        folder / "stall.json",
        {
            "steps": 600,
            "seconds": sum(shares.values()),
            "shares": shares,
            "bottleneck": "step",
            "sentence": "The training step is the bottleneck: 73% of the time; waiting for data took 5%.",
            "bytes_read": 412_345_678,
            "requests": 5321,
            "patches": 1200,
            "cost_usd": 0.0021284,
        },
    )
    if evaluated:
        evaluate(folder / "evaluation" / "validation", ids[40 - cases :], rng, overlay)
    return folder


def epoch(index: int, epochs: int, rng: np.random.Generator) -> dict[str, Any]:
    progress = 1 - math.exp(-index / (epochs / 5))
    dice = {
        "kidney": 0.93 * progress + rng.normal(0, 0.012),
        "tumour": max(0.0, 0.62 * progress**2 + rng.normal(0, 0.03)),
    }
    scored = index % 3 == 2 or index == epochs - 1
    return {
        "epoch": index,
        "step": 20 * (index + 1),
        "seconds": 6.8 * (index + 1),
        "lr": 0.01 * (1 - index / epochs) ** 0.9,
        "loss": 1.25 - 1.6 * progress + rng.normal(0, 0.03),
        "dice": dice if scored else None,
        "mean_dice": sum(dice.values()) / 2 if scored else None,
        "patches_per_s": 6.1 + rng.normal(0, 0.15),
        "wait_share": 0.05,
        "memory_bytes": 1_820_000_000,
    }


def evaluate(folder: Path, ids: list[str], rng: np.random.Generator, overlay: bytes) -> None:
    """Write generated scores; the last case has no tumour, and none was predicted."""
    rows = []
    for index, case in enumerate(ids):
        row: dict[str, Any] = {"case": case, "fold": 0}
        for target, quality, volume in (("kidney", 0.92, 310.0), ("tumour", 0.63, 42.0)):
            dice = float(np.clip(quality - rng.gamma(1.0, 0.05 if target == "kidney" else 0.16), 0, 1))
            true_ml = volume * float(rng.lognormal(0, 0.3))
            row[target] = {
                "dice": dice,
                "hd95_mm": 4 + 60 * (1 - dice) ** 1.5,
                "surface_dice": min(1.0, dice + 0.03),
                "volume_true_ml": true_ml,
                "volume_predicted_ml": true_ml * float(rng.normal(1, 0.1)),
            }
        if index == len(ids) - 1:
            row["tumour"] = {"dice": math.nan, "hd95_mm": math.nan, "surface_dice": math.nan}
            row["tumour"] |= {"volume_true_ml": 0.0, "volume_predicted_ml": 0.0}
        rows.append(row)
        if overlay:
            (folder / "overlays").mkdir(parents=True, exist_ok=True)
            (folder / "overlays" / f"{case}.png").write_bytes(overlay)
    targets = {}
    for target in ("kidney", "tumour"):
        targets[target] = {}
        for name in ("dice", "hd95_mm", "surface_dice"):
            values = np.array([row[target][name] for row in rows])
            values = values[np.isfinite(values)]
            figures = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
            targets[target][name] = {k: float(v) for k, v in figures.items()} | {"count": len(values)}
    rule = (
        "A target that is neither in the truth nor in the prediction is not scored; one that is in only one of them "
        "has Dice 0, surface Dice 0 and the case's diagonal as HD95."
    )
    mean = sum(t["dice"]["mean"] for t in targets.values()) / 2
    dump(folder / "cases.json", rows)
    dump(folder / "summary.json", {"targets": targets, "mean_dice": mean, "cases": len(ids), "rule": rule})


def small_overlay() -> bytes:
    """Return a picture of a square in a square."""
    image = np.zeros((3, 24, 24), np.float32)
    label = np.zeros((3, 24, 24), np.uint8)
    image[:, 2:22, 2:22] = 60
    label[1, 8:14, 8:14] = 1
    return pictures.encode_png(pictures.draw_row(image, label, np.roll(label, 1, 2), (5, 1, 1), (0, 100), height_px=48))


def dump(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
