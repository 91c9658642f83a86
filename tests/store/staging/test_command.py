"""`voxlane stage` of any source."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import Bucket
from voxlane.cli.main import main, parse
from voxlane.cli.stage import srun_words
from voxlane.errors import ClusterError, ConfigError


@pytest.fixture
def command(gcs: Bucket, tmp_path: Path) -> list[str]:
    """Return the command that stages a small source."""
    for name in ("a", "b/c"):
        gcs.store.put(f"src/{name}", name.encode())
    return ["stage", "gs://bkt/src", str(tmp_path / "disk"), "--endpoint", str(gcs.config.endpoint)]


def test_stage_copies_lists_and_removes(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    assert main([*command, "--name", "data"]) == 0
    assert f"2 objects, 4 B in {disk}/datasets/data; copied 2, 4 B in " in capsys.readouterr().out
    assert (disk / "datasets" / "data" / "b" / "c").read_bytes() == b"b/c"
    assert main([*command, "--name", "data", "--verify"]) == 0
    assert "all were there" in capsys.readouterr().out
    assert main(command) == 0
    assert "2 from other copies here" in capsys.readouterr().out
    assert main(["stage", "--list", str(disk)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0].split() == ["NAME", "OBJECTS", "SIZE", "LAST", "USED", "SOURCE"]
    assert listed[1].startswith("data  ")
    assert listed[1].endswith("gs://bkt/src")
    assert main([*command, "--remove", "--name", "data"]) == 0
    assert "0 B free" in capsys.readouterr().out
    assert main([*command, "--remove"]) == 0
    assert "4 B free" in capsys.readouterr().out
    assert main([*command, "--remove"]) == 0
    assert f"nothing of it was in {disk}" in capsys.readouterr().out
    assert main(["stage", "--list", str(disk)]) == 0
    assert capsys.readouterr().out == f"nothing is staged in {disk}\n"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--capacity", "3"], "the source has 4 B, more than the capacity of 3 B"),
        (["--capacity", "lots"], "--capacity: expected a size such as 100Gi, got 'lots'"),
        (["--name", "a/b"], "'a/b' is not a valid name for a copy"),
        (["--nodes", "x"], "--nodes x. Give a number of nodes"),
        (["--nodes"], "--nodes without a number needs a SLURM allocation"),
    ],
)
def test_each_mistake_is_reported_on_one_line(
    command: list[str],
    more: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main([*command, *more]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_missing_arguments_and_folders_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stage"]) == 2
    assert "missing SOURCE" in capsys.readouterr().err
    for command, message in (
        (["stage", str(tmp_path / "none"), str(tmp_path)], "no such folder"),
        (["stage", "--list", str(tmp_path / "none")], "no such folder"),
        (["stage", "a", "b", "--list", "c"], "Leave out SOURCE and FOLDER"),
    ):
        assert main(command) == 1
        assert message in capsys.readouterr().err


def test_stage_runs_on_nodes_of_an_allocation_or_on_others() -> None:
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    python = [sys.executable, "-m", "voxlane", "stage", "gs://b/x", "/scratch", "--no-progress"]
    start = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]

    def srun_command(*more: str, environment: dict[str, str]) -> list[str]:
        return srun_words(parse(["stage", "gs://b/x", "/scratch", *more]), environment)

    assert srun_command("--nodes", environment=inside) == [*start, "--overlap", "--nodes=3", *python]
    assert srun_command("--nodes", "2", environment={}) == [*start, "--nodes=2", *python]
    assert srun_command("--nodelist", "n[1-2]", environment={}) == [*start, "--nodelist=n[1-2]", *python]
    assert srun_command("--nodelist", "n1", "--nodes", environment={}) == [*start, "--nodelist=n1", *python]
    more = ["--if-room", "--verify", "--remove", "--anonymous", "--name=x", "--capacity=1Gi", "--endpoint=http://e"]
    assert srun_command("--nodes", "1", *more, environment={}) == [*start, "--nodes=1", *python, *more]
    relative = srun_words(parse(["stage", "data", "/scratch", "--config", "c.yaml", "--nodes", "1"]), {})
    assert str(Path.cwd() / "data") in relative
    assert f"--config={Path.cwd() / 'c.yaml'}" in relative
    with pytest.raises(ClusterError):
        srun_command("--nodes", environment={})
    with pytest.raises(ConfigError):
        srun_command("--nodes", "0", environment={})
