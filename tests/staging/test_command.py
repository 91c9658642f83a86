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
def words(gcs: Bucket, tmp_path: Path) -> list[str]:
    """The command for a small source."""
    for name in ("a", "b/c"):
        gcs.store.put(f"src/{name}", name.encode())
    return ["stage", "gs://bkt/src", str(tmp_path / "disk"), "--endpoint", str(gcs.config.endpoint)]


def test_copies_lists_and_removes(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    assert main([*words, "--name", "data"]) == 0
    assert f"2 objects, 4 B in {disk}/datasets/data; copied 2, 4 B in " in capsys.readouterr().out
    assert (disk / "datasets" / "data" / "b" / "c").read_bytes() == b"b/c"
    assert main([*words, "--name", "data", "--verify"]) == 0
    assert "all were there" in capsys.readouterr().out
    assert main(words) == 0
    assert "2 from other copies here" in capsys.readouterr().out
    assert main(["stage", "--list", str(disk)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0].split() == ["NAME", "OBJECTS", "SIZE", "LAST", "USED", "SOURCE"]
    assert listed[1].startswith("data  ")
    assert listed[1].endswith("gs://bkt/src")
    assert main([*words, "--remove", "--name", "data"]) == 0
    assert "0 B free" in capsys.readouterr().out
    assert main([*words, "--remove"]) == 0
    assert "4 B free" in capsys.readouterr().out
    assert main([*words, "--remove"]) == 0
    assert f"nothing of it was in {disk}" in capsys.readouterr().out
    assert main(["stage", "--list", str(disk)]) == 0
    assert capsys.readouterr().out == f"nothing is staged in {disk}\n"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--capacity", "3"], "its 4 B are more than the 3 B that it may take"),
        (["--capacity", "lots"], "--capacity: 'lots' is no size"),
        (["--name", "a/b"], "'a/b' cannot name a copy"),
        (["--nodes", "x"], "--nodes x. Give a number of nodes"),
        (["--nodes"], "this runs in no SLURM allocation"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], more: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main([*words, *more]) == 1
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["stage"], "Write: voxlane stage SOURCE FOLDER"),
        (["stage", str(tmp_path / "none"), str(tmp_path)], "no such folder"),
        (["stage", "--list", str(tmp_path / "none")], "no such folder"),
        (["stage", "a", "b", "--list", "c"], "Leave out SOURCE and FOLDER"),
    ):
        assert main(words) == 1
        assert said in capsys.readouterr().err


def test_on_nodes_of_an_allocation_or_others() -> None:
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    python = [sys.executable, "-m", "voxlane", "stage", "gs://b/x", "/scratch", "--no-progress"]
    start = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]

    def given(*more: str, environment: dict[str, str]) -> list[str]:
        return srun_words(parse(["stage", "gs://b/x", "/scratch", *more]), environment)

    assert given("--nodes", environment=inside) == [*start, "--overlap", "--nodes=3", *python]
    assert given("--nodes", "2", environment={}) == [*start, "--nodes=2", *python]
    assert given("--nodelist", "n[1-2]", environment={}) == [*start, "--nodelist=n[1-2]", *python]
    assert given("--nodelist", "n1", "--nodes", environment={}) == [*start, "--nodelist=n1", *python]
    more = ["--if-room", "--verify", "--remove", "--anonymous", "--name=x", "--capacity=1Gi", "--endpoint=http://e"]
    assert given("--nodes", "1", *more, environment={}) == [*start, "--nodes=1", *python, *more]
    relative = srun_words(parse(["stage", "data", "/scratch", "--config", "c.yaml", "--nodes", "1"]), {})
    assert str(Path.cwd() / "data") in relative
    assert f"--config={Path.cwd() / 'c.yaml'}" in relative
    with pytest.raises(ClusterError):
        given("--nodes", environment={})
    with pytest.raises(ConfigError):
        given("--nodes", "0", environment={})
