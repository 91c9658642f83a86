"""Test that `voxlane bench checkpoint` accepts the variables, flags and strategies of Dataflux's benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Bucket
from tests.servers import free_ports
from voxlane.bench.checkpoint import demo_model
from voxlane.bench.checkpoint.dataflux_names import JobNode, find_node
from voxlane.cli.bench import BenchCheckpointCommand
from voxlane.cli.flags import CommandParser
from voxlane.errors import ConfigError, UsageError

TINY = {"LAYER_SIZE": "5", "PADDING_SIZE": "3"}
VARIABLES = (
    *("CKPT_DIR_PATH", "CKPT_RESTORE_PATH", "ACCELERATOR", "NUM_LAYERS", "NUM_SAVE_CALLS", "NUM_LOAD_CALLS"),
    *("NUM_NODES", "NUM_DEVICES", "SAMPLE_COUNT", "LAYER_SIZE", "PADDING_SIZE", "USE_FSSPEC", "USE_ASYNC"),
    *("STEPS_PER_SAVE", "SIMULATED_WORKLOAD_DURATION", "COORDINATOR_ADDRESS", "MASTER_PORT", "JOB_INDEX"),
    *("JOB_COMPLETION_INDEX", "PROCESSES_IN_JOB", "RANK", "WORLD_SIZE", "MASTER_ADDR"),
)


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that parses a command line in an environment with these variables only."""

    def parse_command(*words: str, **environment: str) -> Any:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return CommandParser("bench checkpoint", BenchCheckpointCommand).parse(words)

    return parse_command


def start(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "voxlane.cli.main", "bench", "checkpoint", "--no_plot", *words]
    variables = {**os.environ, **environment}
    return subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=variables, cwd=folder)


def run(folder: Path, *words: str, **environment: str) -> dict[str, Any]:
    """Run the benchmark and return its result."""
    process = start(folder, *words, "--out", "result.json", **environment)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return dict(json.loads((folder / "result.json").read_text()))


# -- settings ----------------------------------------------------------------------------------------------------------


def test_every_variable_of_the_multinode_benchmark(parse: Any) -> None:
    settings = parse(
        PROJECT="p",
        CKPT_DIR_PATH="gs://b/d/",
        CKPT_RESTORE_PATH="gs://b/d/checkpoints",
        NUM_LAYERS="7",
        ACCELERATOR="cpu",
        NUM_SAVE_CALLS="4",
        NUM_LOAD_CALLS="6",
        NUM_NODES="2",
        NUM_DEVICES="auto",
        PJRT_DEVICE="CPU",
    )
    assert (settings.layers, settings.saves, settings.loads, settings.ranks) == (7, 4, 6, 2)
    assert settings.restore_uri == ""  # it loads what it saves
    # Six loads of four checkpoints start again with the first.
    loaded = [settings.checkpoint_uri("voxlane", index) for index in range(6)]
    assert loaded[0] == loaded[4] == "gs://b/d/checkpoints/voxlane-distributed/ckpt-0"


def test_async_and_simulated_variables(parse: Any) -> None:
    settings = parse(CKPT_DIR_PATH="d", USE_ASYNC="1", STEPS_PER_SAVE="5", SIMULATED_WORKLOAD_DURATION="1.5")
    assert (settings.use_async, settings.steps_per_save, settings.step_time) == (True, 5, 1.5)
    settings = parse(CKPT_DIR_PATH="d", LAYER_SIZE="100", PADDING_SIZE="9", SAMPLE_COUNT="8", USE_FSSPEC="True")
    assert (settings.layer_size, settings.padding_size, settings.saves, settings.loads) == (100, 9, 8, 8)
    assert settings.strategies == ("fsspec",)
    assert parse(CKPT_DIR_PATH="d", USE_FSSPEC="False").strategies == ("voxlane",)


@pytest.mark.parametrize(
    ("name", "own_name"), [("dataflux_fsdp", "voxlane"), ("fsspec_fsdp", "fsspec"), ("fsdp", "filesystem")]
)
def test_strategy_names(parse: Any, name: str, own_name: str) -> None:
    assert parse("--dir", "d", f"--strategy={name}").strategies == (own_name,)


def test_flags_with_underscores(parse: Any) -> None:
    assert parse("--strategy=fsdp", "--save_only", CKPT_DIR_PATH="d").save_only
    assert parse("--load_only", "--strategy", "fsdp", CKPT_RESTORE_PATH="/d/checkpoints").load_only
    assert parse("--strategy=fsdp", "--distributed_filesystem", CKPT_DIR_PATH="/d").strategies == ("filesystem",)


def test_flags_of_the_single_node_benchmark(parse: Any) -> None:
    words = ("--project=p", "--ckpt-dir-path=gs://b/d/", "--layers=12", "--steps=5")
    settings = parse(*words, "--checkpoint=async_df_lightning", "--save_only_latest")
    assert (settings.dir, settings.layers, settings.saves, settings.loads) == ("gs://b/d/", 12, 5, 5)
    assert (settings.format, settings.use_async, settings.strategies) == ("single", True, ("voxlane",))
    assert settings.checkpoint_uri("voxlane", 4).endswith("/ckpt-0")
    assert parse(*words, "--checkpoint", "no_df").strategies == ("fsspec",)
    assert parse(*words, "--checkpoint", "no_lightning", "--disable-multipart").disable_multipart
    assert parse("--ckpt_dir_path=/mnt", "--strategy=fsdp", "--clear-kernel-cache").clear_kernel_cache


def test_own_flag_wins_over_other_names(parse: Any) -> None:
    settings = parse("--ckpt_dir_path=a", "--dir=b", "--steps=5", "--saves=2", CKPT_DIR_PATH="c", SAMPLE_COUNT="9")
    assert (settings.dir, settings.saves, settings.loads) == ("b", 2, 5)


def test_auto_devices_are_gpus_or_one(parse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("--dir=d", NUM_DEVICES="auto").ranks == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert parse("--dir=d", NUM_DEVICES="auto", ACCELERATOR="gpu", NUM_NODES="2").ranks == 8
    assert parse("--dir=d", ACCELERATOR="gpu").ranks == 4  # auto is the default
    assert parse("--dir=d", ACCELERATOR="gpu", NUM_DEVICES="3").ranks == 3


def test_node_of_a_jobset(parse: Any) -> None:
    jobset = {"COORDINATOR_ADDRESS": "job-0-0.job", "MASTER_PORT": "1234", "PROCESSES_IN_JOB": "15"}
    jobset |= {"JOB_INDEX": "0", "JOB_COMPLETION_INDEX": "14", "CKPT_DIR_PATH": "gs://b"}
    assert parse(**jobset, NUM_NODES="15", NUM_DEVICES="2").ranks == 30
    assert find_node() == JobNode(14, 15, "job-0-0.job:1234")
    assert parse(**jobset, WORLD_SIZE="15").ranks == 15
    with pytest.raises(ConfigError, match="make this node 14 of 3"):
        parse(**jobset, NUM_NODES="3")


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        ((), {"NUM_DEVICES": "many"}, "NUM_DEVICES: expected an integer, 1 or more, or auto, got .many."),
        ((), {"NUM_SAVE_CALLS": "0"}, "NUM_SAVE_CALLS: expected an integer, 1 or more, got .0."),
        ((), {"USE_ASYNC": "maybe"}, "USE_ASYNC: expected 1 or 0, got .maybe."),
        (
            (),
            {"SIMULATED_WORKLOAD_DURATION": "long"},
            "SIMULATED_WORKLOAD_DURATION: expected a number",
        ),
        ((), {"CKPT_RESTORE_PATH": "gs://other/checkpoints"}, "cannot load its checkpoints from elsewhere"),
        (("--strategy=fsspec_fsdp",), {"USE_ASYNC": "1"}, "only the strategy 'voxlane' saves in the background"),
        (("--disable-multipart",), {}, "Add --format single"),
        (("--distributed_filesystem",), {}, "needs the strategy filesystem"),
        (("--strategy=ddp",), {}, "--strategy: expected voxlane, fsspec, .* or fsdp, got 'ddp'"),
    ],
)
def test_mistakes_are_reported_before_anything_starts(
    parse: Any, words: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    with pytest.raises((ConfigError, UsageError), match=message):
        parse("--dir=gs://b/d", *words, **environment)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "own_name"), [("dataflux_fsdp", "voxlane"), ("fsspec_fsdp", "fsspec")])
def test_documented_environment_on_a_bucket(
    gcs: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, own_name: str
) -> None:
    monkeypatch.delenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", raising=False)  # other tests set it
    bucket = f"{gcs.uri}/run"
    variables = {"CKPT_DIR_PATH": bucket, "CKPT_RESTORE_PATH": f"{bucket}/checkpoints", "NUM_DEVICES": "auto"}
    endpoint = gcs.config.endpoint
    assert endpoint is not None
    result = run(tmp_path, f"--strategy={name}", "--endpoint", endpoint, **variables, **TINY, SAMPLE_COUNT="2")
    assert [call["operation"] for call in result["calls"]] == ["save", "save", "load", "load"]
    assert result["calls"][3]["uri"] == f"{bucket}/checkpoints/{own_name}-distributed/ckpt-1"
    assert list(gcs.store.list_folder(gcs.key("run"))) == []


def test_saves_alone_then_loads_alone_with_one_environment(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    variables = {"CKPT_DIR_PATH": str(folder), "CKPT_RESTORE_PATH": f"{folder}/checkpoints", "SAMPLE_COUNT": "2"}
    saved = run(tmp_path, "--strategy=fsdp", "--save_only", **variables, **TINY)
    assert [call["operation"] for call in saved["calls"]] == ["save", "save"]
    run(tmp_path, "--strategy=fsdp", **variables, **TINY)  # keeps what was there before
    loaded = run(tmp_path, "--strategy=fsdp", "--load_only", "--clear_kernel_cache", **variables, **TINY)
    assert [(call["operation"], call["uri"]) for call in loaded["calls"]] == [
        ("load", f"{folder}/checkpoints/filesystem-distributed/ckpt-{index}") for index in range(2)
    ]


def test_missing_checkpoint_is_noticed_before_the_saves(tmp_path: Path) -> None:
    process = start(tmp_path, "--dir=c", f"--restore={tmp_path}/other/ckpt-0", "--keep", **TINY)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "no complete checkpoint here" in errors
    assert "save 1" not in errors
    assert not (tmp_path / "c").exists()


def test_two_nodes_of_a_jobset_save_in_the_background(tmp_path: Path) -> None:
    jobset = {"COORDINATOR_ADDRESS": "localhost", "MASTER_PORT": str(free_ports(1)[0]), "PROCESSES_IN_JOB": "2"}
    jobset |= {"JOB_INDEX": "0", "WORLD_SIZE": "2", "NUM_DEVICES": "1", "SAMPLE_COUNT": "1", "USE_ASYNC": "1"}
    jobset |= {"CKPT_DIR_PATH": str(tmp_path / "c"), "SIMULATED_WORKLOAD_DURATION": "0.5", **TINY}
    nodes = [
        start(tmp_path, "--out", f"node-{index}.json", **jobset, JOB_COMPLETION_INDEX=str(index)) for index in range(2)
    ]
    for node in nodes:
        _, errors = node.communicate(timeout=300)
        assert node.returncode == 0, errors
    result = json.loads((tmp_path / "node-0.json").read_text())
    assert result["setting"]["num_ranks"] == 2
    seconds = {call["operation"]: call["seconds"] for call in result["calls"]}
    assert list(seconds) == ["blocked", "stored", "load"]
    assert not (tmp_path / "node-1.json").exists()


def test_single_file_in_one_request_and_in_the_background(gcs: Bucket, tmp_path: Path) -> None:
    endpoint = gcs.config.endpoint
    assert endpoint is not None
    words = ("--ckpt-dir-path", gcs.uri, "--steps=2", "--save-only-latest", "--keep", "--endpoint", endpoint)
    words = (*words, "--checkpoint=async_df_lightning", "--disable-multipart")
    result = run(tmp_path, *words, **TINY)
    assert [call["operation"] for call in result["calls"]] == ["blocked", "stored"] * 2 + ["load"] * 2
    keys = [entry.key for entry in gcs.store.list_folder(gcs.key("checkpoints/voxlane-single"))]
    assert keys == [gcs.key("checkpoints/voxlane-single/ckpt-0")]  # without the checksums that our own uploads have


def test_values_of_large_tensors_are_checked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_PIECE", 700)
    state = demo_model.padding_state(3, 2, torch.device("cpu"))
    assert demo_model.first_difference(state) is None
    assert state["dummy_tensor_1"].unique().numel() > 2900
    state["dummy_tensor_1"][-1, -1] += 1e-6
    assert demo_model.first_difference(state) == "dummy_tensor_1"
