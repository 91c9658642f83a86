"""What the fault matrix runs: each command reads or writes a bucket and returns what it got, to compare with the same
command without faults."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import torch

from tests.train.tiny_runs import CONFIG, FOLDS, PLAN, case_ids, write_cases
from voxlane import Checkpoint, IterableDataset, Manifest, MapDataset, Store, StoreConfig, list_objects
from voxlane.checkpoint import lifecycle
from voxlane.store.staging import stage
from voxlane.train.evaluate import EvaluateConfig, evaluate
from voxlane.train.fit import train
from voxlane.train.predictor import PredictConfig, Predictor, plan_predictions, predict
from voxlane.train.run import Run
from voxlane.volume.prepare import PrepareConfig, prepare

SAMPLES = {f"data/{i:02d}": hashlib.shake_128(b"%d" % i).digest(3000 + 1000 * i) for i in range(12)}
LARGE_SAMPLE = "data/large", hashlib.shake_128(b"large").digest((11 << 20) + 17)
"""A sample that is read in parts."""


def checkpoint_state() -> dict[str, Any]:
    """Return a state of 12 MB, which is uploaded in parts."""
    return {"step": 7, "weights": torch.arange(3_000_000, dtype=torch.int32), "bias": torch.full((10,), 7.0)}


@dataclass(frozen=True)
class Bench:
    """A bucket behind a faulty proxy, and directly."""

    uri: str
    faulty: StoreConfig
    direct: StoreConfig
    folder: Path

    def new_name(self) -> str:
        """Return a new name, so that no cell finds what another one wrote."""
        return uuid.uuid4().hex


def fill(bench: Bench) -> None:
    """Write what the commands read."""
    store = Store(bench.uri, bench.direct)
    for key, body in [*SAMPLES.items(), LARGE_SAMPLE]:
        store.put(key, body)
    Checkpoint(f"{bench.uri}/saved", bench.direct).save(checkpoint_state(), "a.ckpt")
    list_objects(f"{bench.uri}/data/", config=bench.direct).save(f"{bench.uri}/listed.parquet", config=bench.direct)


def fill_training(bench: Bench) -> None:
    """Write scans, a prepared dataset of them and trained runs."""
    scans = bench.folder / "scans"
    write_cases(scans, case_ids())
    store = Store(bench.uri, bench.direct)
    for path in sorted(scans.iterdir()):
        store.put(f"scans/{path.name}", path.read_bytes())
    options = PrepareConfig(folds=FOLDS, workers=1, plan=PLAN)
    prepare(f"{bench.uri}/scans/list.json", f"{bench.uri}/prepared", options, bench.direct, progress=False)
    data = f"{bench.uri}/prepared"
    for fold in range(FOLDS):
        train(data, f"{bench.uri}/runs/fold_{fold}", {**CONFIG, "fold": fold}, bench.direct, progress=False)


def _digests(items: Any) -> dict[str, str]:
    return {name: hashlib.sha256(bytes(body)).hexdigest() for name, body in items}


def run_ls(bench: Bench) -> Any:
    """List, in pages of a few keys."""
    return list_objects(f"{bench.uri}/data/", config=bench.faulty).keys()


def run_map(bench: Bench) -> Any:
    """Read every sample by its index."""
    dataset = MapDataset(f"{bench.uri}/data/", config=bench.faulty)
    return _digests((dataset.uris(i)[""], dataset[i]) for i in range(len(dataset)))


def run_iterable(bench: Bench) -> Any:
    """Stream all samples."""
    dataset = IterableDataset(f"{bench.uri}/data/", config=bench.faulty, shuffle=False)
    return [hashlib.sha256(sample).hexdigest() for sample in dataset]


def run_manifest(bench: Bench) -> Any:
    """Load a manifest, read its samples, and save another one."""
    manifest = Manifest.load(f"{bench.uri}/listed.parquet", config=bench.faulty)
    dataset = MapDataset(manifest, config=bench.faulty)
    target = f"{bench.uri}/{bench.new_name()}.parquet"
    manifest.save(target, config=bench.faulty)
    saved = Manifest.load(target, config=bench.direct).keys()
    return saved, [hashlib.sha256(dataset[i]).hexdigest() for i in range(4)]


def run_save(bench: Bench) -> Any:
    """Save a checkpoint; it is read without faults."""
    uri = f"{bench.uri}/{bench.new_name()}"
    Checkpoint(uri, bench.faulty).save(checkpoint_state(), "a.ckpt")
    loaded = Checkpoint(uri, bench.direct).load("a.ckpt")
    return {name: torch.as_tensor(value).sum().item() for name, value in loaded.items()}


def run_load(bench: Bench) -> Any:
    """Load a checkpoint."""
    loaded = Checkpoint(f"{bench.uri}/saved", bench.faulty).load("a.ckpt")
    expected = checkpoint_state()
    assert all(torch.equal(torch.as_tensor(loaded[n]), torch.as_tensor(expected[n])) for n in expected)
    return sorted(loaded)


def run_verify(bench: Bench) -> Any:
    """Verify a checkpoint."""
    report = lifecycle.verify(lifecycle.find_checkpoint(f"{bench.uri}/saved/a.ckpt", bench.faulty))
    return report.problems


def run_stage(bench: Bench) -> Any:
    """Copy the samples to a disk."""
    root = bench.folder / bench.new_name()
    report = stage(f"{bench.uri}/data/", root, name="data", config=bench.faulty, reserve_bytes=0)
    files = sorted(path for path in (root / "datasets" / "data").rglob("*") if path.is_file())
    names = {key.removeprefix("data/") for key in (*SAMPLES, LARGE_SAMPLE[0])}
    return report.objects, _digests((path.name, path.read_bytes()) for path in files if path.name in names)


def run_prepare(bench: Bench) -> Any:
    """Prepare scans."""
    name = bench.new_name()
    options = PrepareConfig(folds=FOLDS, workers=1, plan=PLAN)
    prepare(f"{bench.uri}/scans/list.json", f"{bench.uri}/{name}", options, bench.faulty, progress=False)
    store = Store(bench.uri, bench.direct)
    keys = [
        info.key for info in store.list_folder(f"{name}/") if "/cases/" in info.key and not info.key.endswith("json")
    ]
    return _digests((key.removeprefix(name), store.get(key)) for key in keys)


def run_train(bench: Bench) -> Any:
    """Train for two steps."""
    uri = f"{bench.uri}/{bench.new_name()}"
    train(f"{bench.uri}/prepared", uri, {**CONFIG, "fold": 0}, bench.faulty, progress=False)
    state = Checkpoint(f"{uri}/checkpoints", bench.direct).load("last.ckpt", map_location="cpu")["state_dict"]
    return {name: round(value.double().sum().item(), 4) for name, value in state.items()}


def run_predict(bench: Bench) -> Any:
    """Predict one scan."""
    name = bench.new_name()
    predictor = Predictor.load([Run(f"{bench.uri}/runs/fold_0", bench.faulty)], PredictConfig(mirror=False))
    (job,) = plan_predictions([f"{bench.uri}/scans/{case_ids()[0]}.nii.gz"], f"{bench.uri}/{name}")
    predict(predictor, job, bench.faulty, progress=False)
    body = Store(bench.uri, bench.direct).get(job.mask.removeprefix(f"{bench.uri}/"))
    path = bench.folder / f"{name}.nii.gz"
    path.write_bytes(body)
    image: Any = nibabel.load(path)
    return hashlib.sha256(image.get_fdata().tobytes()).hexdigest()


def run_evaluate(bench: Bench) -> Any:
    """Evaluate a run on its held-out cases."""
    out = Run(f"{bench.uri}/{bench.new_name()}", bench.faulty)
    result = evaluate([Run(f"{bench.uri}/runs/fold_0", bench.faulty)], out, EvaluateConfig(), progress=False)
    return [(case["case"], str(case)) for case in result.cases]


LIGHT: dict[str, Callable[[Bench], Any]] = {
    "ls": run_ls,
    "map": run_map,
    "iterable": run_iterable,
    "manifest": run_manifest,
    "save": run_save,
    "load": run_load,
    "verify": run_verify,
    "stage": run_stage,
}
HEAVY: dict[str, Callable[[Bench], Any]] = {
    "prepare": run_prepare,
    "train": run_train,
    "predict": run_predict,
    "evaluate": run_evaluate,
}
