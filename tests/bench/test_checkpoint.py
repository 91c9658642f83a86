"""Test `voxlane bench checkpoint` as a user runs it: a separate process that starts ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from voxlane.bench.checkpoint import demo_model

EVERY_STRATEGY = ("--strategy", "voxlane", "--strategy", "fsspec", "--strategy", "filesystem")


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "voxlane.cli.main", "bench", "checkpoint", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=400, cwd=folder
    )


def fails(folder: Path, *arguments: str, status: int = 1, **environment: str) -> str:
    done = run(folder, *arguments, **environment)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("voxlane: " if status == 1 else "voxlane bench checkpoint: missing")
    return done.stderr


def test_sharded_on_two_ranks_by_every_strategy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "result.json"
    arguments = ("--dir", str(tmp_path / "c"), "--ranks", "2", "--layers", "1", "--saves", "2", "--loads", "1")
    done = run(tmp_path, *arguments, *EVERY_STRATEGY, "--out", str(out))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        [strategy, operation, calls]
        for operation, calls in (("save", "2"), ("load", "1"))
        for strategy in ("voxlane", "fsspec", "filesystem")
    ]
    assert "save 2, voxlane:" in done.stderr
    result = json.loads(out.read_text())
    assert result["setting"]["num_ranks"] == 2
    assert result["checkpoint_bytes"] == 55_961_912
    assert len(result["calls"]) == 9
    assert all(call["seconds"] > 0 for call in result["calls"])
    assert result["hardware"]["cores"] == os.cpu_count()
    assert result["versions"]["torch"]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.rglob("ckpt-*"))


def test_single_file_saved_then_loaded_alone_with_the_environment_for_flags(tmp_path: Path) -> None:
    variables = {"NUM_LAYERS": "1", "NUM_DEVICES": "2", "NUM_NODES": "1", "ACCELERATOR": "cpu"}
    folder = str(tmp_path / "c")
    saved = run(
        *(tmp_path, "--format", "single", "--save-only", "--no-plot", *EVERY_STRATEGY),
        **(variables | {"CKPT_DIR_PATH": folder, "NUM_SAVE_CALLS": "1"}),
    )
    assert saved.returncode == 0, saved.stderr
    result = json.loads((tmp_path / "checkpoint-bench.json").read_text())
    assert result["setting"]["num_ranks"] == 2
    assert [call["operation"] for call in result["calls"]] == ["save"] * 3
    uri = f"{folder}/checkpoints/voxlane-single/ckpt-0"
    assert f"kept {uri}" in saved.stdout
    # Any strategy reads what ours wrote; a flag wins over its variable.
    loaded = run(
        *(tmp_path, "--format", "single", "--load-only", "--no-plot", "--loads", "2", "--ranks", "1", *EVERY_STRATEGY),
        **(variables | {"CKPT_RESTORE_PATH": uri, "NUM_LOAD_CALLS": "7"}),
    )
    assert loaded.returncode == 0, loaded.stderr
    result = json.loads((tmp_path / "checkpoint-bench.json").read_text())
    assert result["setting"]["num_ranks"] == 1
    assert [(call["operation"], call["uri"]) for call in result["calls"]] == [("load", uri)] * 6
    assert Path(uri).exists()


def test_one_rank_of_a_job(tmp_path: Path) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run(
        tmp_path, "--dir", "c", "--layers", "1", "--saves", "1", "--loads", "1", "--ranks", "5", "--no-plot", **job
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "checkpoint-bench.json").read_text())["setting"]["num_ranks"] == 1


def test_user_mistakes_give_one_line(tmp_path: Path) -> None:
    assert "Give --dir URI (or CKPT_DIR_PATH)" in fails(tmp_path, status=2)
    assert "--restore URI (or CKPT_RESTORE_PATH)" in fails(tmp_path, "--load-only", "--dir", "c", status=2)
    message = "--saves: expected a value greater than or equal to 1, got 0"
    assert message in fails(tmp_path, "--dir", "c", "--saves", "0")
    message = "NUM_LAYERS: expected an integer, 1 or more, got 'ten'"
    assert message in fails(tmp_path, "--dir", "c", NUM_LAYERS="ten")
    assert "unknown accelerator 'tpu'" in fails(tmp_path, "--dir", "c", "--no-plot", ACCELERATOR="tpu")
    assert "Give --mount DIR" in fails(tmp_path, "--dir", "gs://b/c", "--strategy", "filesystem")
    assert "cannot write the result file" in fails(tmp_path, "--dir", "c", "--out", "nowhere/r.json")
    if not torch.cuda.is_available():
        assert "no CUDA device" in fails(tmp_path, "--dir", "c", "--no-plot", "--accelerator", "gpu")


def test_error_in_a_rank_is_one_line(tmp_path: Path) -> None:
    message = fails(tmp_path, "--load-only", "--restore", "empty", "--layers", "1", "--no-plot")
    assert "no complete checkpoint here" in message


def test_model_equals_the_one_in_lightnings_demos() -> None:
    lightning = pytest.importorskip("lightning.pytorch.demos")
    lightning_shapes = [
        (name, tensor.shape) for name, tensor in sorted(lightning.Transformer(nlayers=2).state_dict().items())
    ]
    for state in (demo_model.DemoTransformer(2).state_dict(), demo_model.full_state(2, torch.device("cpu"))):
        assert [(name, tensor.shape) for name, tensor in sorted(state.items())] == lightning_shapes


def test_wrong_value_is_detected() -> None:
    state = demo_model.full_state(1, torch.device("cpu"))
    assert demo_model.first_difference(state) is None
    state["decoder.bias"][-1] += 1e-6
    assert demo_model.first_difference(state) == "decoder.bias"
    demo_model.scramble(state)
    assert demo_model.first_difference(state) == "embedding.weight"
