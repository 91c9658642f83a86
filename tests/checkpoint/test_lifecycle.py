"""Listing, latest, verify, remove, retention, gc and copy, as functions and as commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.conftest import Bucket
from voxlane import errors
from voxlane.checkpoint import (
    Checkpoint,
    Retention,
    latest,
    list_checkpoints,
    load_sharded,
    prune,
    save_sharded,
    verify,
)
from voxlane.checkpoint.lifecycle import copy_checkpoint, find_checkpoint, find_orphans, remove_checkpoint
from voxlane.cli.main import main
from voxlane.testing import Emulator


def _fill(bucket: Bucket) -> None:
    ckpt = Checkpoint(f"{bucket.uri}/run", bucket.config)
    for step in (9, 10):
        ckpt.save({"w": torch.full((300_000,), float(step))}, f"step-{step}.ckpt")
    save_sharded({"w": torch.full((300_000,), 11.0)}, f"{bucket.uri}/run/step-11", bucket.config)


def _names(bucket: Bucket) -> list[str]:
    return [c.name for c in list_checkpoints(f"{bucket.uri}/run", bucket.config)]


def _keys(bucket: Bucket, prefix: str = "") -> list[str]:
    pages = bucket.store.list_pages(bucket.key(prefix))
    return sorted(key for page in pages for key in page.column("path").to_pylist())


def test_listing_tells_complete_and_incomplete_checkpoints_apart(bucket: Bucket) -> None:
    _fill(bucket)
    bucket.store.put(bucket.key("run/step-12/__0_0.0123456789ab.distcp"), b"half")
    checkpoints = list_checkpoints(f"{bucket.uri}/run", bucket.config)
    assert {c.name: c.complete for c in checkpoints} == {
        "step-9.ckpt": True,
        "step-10.ckpt": True,
        "step-11": True,
        "step-12": False,
    }
    assert [c.step for c in checkpoints] == [9, 10, 11, 12]
    assert latest(f"{bucket.uri}/run", bucket.config).name == "step-11"
    assert find_checkpoint(f"{bucket.uri}/run/step-10.ckpt", bucket.config).complete
    with pytest.raises(errors.NotFoundError, match="step-13"):
        find_checkpoint(f"{bucket.uri}/run/step-13", bucket.config)
    with pytest.raises(errors.IncompleteError, match="no complete checkpoint"):
        latest(f"{bucket.uri}/run/step-12", bucket.config)


def test_checkpoint_that_lost_a_file_is_not_complete(bucket: Bucket) -> None:
    _fill(bucket)
    gone = next(key for key in _keys(bucket, "run/step-11/") if key.endswith(".distcp"))
    bucket.store.delete(gone)
    checkpoint = find_checkpoint(f"{bucket.uri}/run/step-11", bucket.config)
    assert "is gone" in checkpoint.problem
    assert latest(f"{bucket.uri}/run", bucket.config).name == "step-10.ckpt"
    with pytest.raises(errors.IncompleteError, match="a file of the checkpoint is gone"):
        load_sharded({"w": torch.zeros(300_000)}, f"{bucket.uri}/run/step-11", bucket.config)


def _flip(bucket: Bucket, key: str) -> None:
    body = bytearray(bucket.store.get(key))
    body[len(body) // 2] ^= 1
    bucket.store.put(key, body)


@pytest.mark.parametrize("suffix", [".ckpt", ".distcp", ".metadata"])
def test_verify_and_load_name_the_damaged_object(gcs: Bucket, suffix: str) -> None:
    _fill(gcs)
    assert all(verify(c).problems == () for c in list_checkpoints(f"{gcs.uri}/run", gcs.config))
    key = next(key for key in _keys(gcs, "run/") if key.endswith(suffix))
    _flip(gcs, key)
    problems = [p for c in list_checkpoints(f"{gcs.uri}/run", gcs.config) for p in verify(c).problems]
    assert len(problems) == 1
    assert f"gs://bkt/{key}" in problems[0]
    with pytest.raises(errors.CorruptError, match=f"gs://bkt/{key}"):
        if suffix == ".ckpt":
            Checkpoint(gcs.uri, gcs.config).load(key)
        else:
            load_sharded({"w": torch.zeros(300_000)}, f"{gcs.uri}/run/step-11", gcs.config)


def test_removing_deletes_the_checkpoint_and_nothing_else(bucket: Bucket) -> None:
    _fill(bucket)
    for name in ("step-11", "step-9.ckpt"):
        remove_checkpoint(find_checkpoint(f"{bucket.uri}/run/{name}", bucket.config))
    assert _keys(bucket) == [bucket.key("run/step-10.ckpt"), bucket.key("run/step-10.ckpt.sums")]


def test_retention_keeps_the_last_and_every_nth(bucket: Bucket) -> None:
    ckpt = Checkpoint(f"{bucket.uri}/run", bucket.config)
    for step in range(0, 80, 10):
        ckpt.save({"n": step}, f"epoch={step // 20}-step={step}.ckpt")
    removed = prune(f"{bucket.uri}/run", Retention(keep_last=2, keep_every=30), bucket.config)
    assert [c.step for c in removed] == [10, 20, 40, 50]
    assert [c.step for c in list_checkpoints(f"{bucket.uri}/run", bucket.config)] == [0, 30, 60, 70]
    with pytest.raises(errors.ConfigError, match="keep_last"):
        Retention(keep_last=0)


def test_gc_removes_orphans_and_nothing_else(shared_bucket: Bucket) -> None:
    bucket = shared_bucket
    _fill(bucket)
    bucket.store.put(bucket.key("run/release.sums"), b"somebody else's")
    bucket.store.put(bucket.key("run/tokens.pt"), b"somebody else's")
    sound = _keys(bucket)
    save_sharded({"w": torch.ones(5)}, f"{bucket.uri}/run/step-12", bucket.config, attachments={"meta.pt": b"x"})
    bucket.store.delete_one(bucket.key("run/step-12/.metadata"))  # as if the save had been killed before this object
    bucket.store.put(bucket.key("run/step-11/__3_0.0123456789ab.distcp"), b"of a save that failed")
    Checkpoint(f"{bucket.uri}/run", bucket.config).save({}, "step-13.ckpt")
    bucket.store.delete_one(bucket.key("run/step-13.ckpt"))  # as if the file had never been written
    orphans = find_orphans(f"{bucket.uri}/run", bucket.config, older_than_s=3600)
    assert (len(orphans), orphans.younger) == (0, 4)
    orphans = find_orphans(f"{bucket.uri}/run", bucket.config, older_than_s=0)
    assert len(orphans.objects) == 4
    orphans.remove()
    assert _keys(bucket) == sound


def test_files_of_other_tools_are_neither_latest_nor_pruned(bucket: Bucket) -> None:
    _fill(bucket)
    bucket.store.put(bucket.key("run/tokenizer.pt"), b"somebody else's, the newest")
    assert latest(f"{bucket.uri}/run", bucket.config).name == "step-11"
    prune(f"{bucket.uri}/run", Retention(keep_last=1), bucket.config)
    assert sorted(_names(bucket)) == ["step-11", "tokenizer.pt"]


def test_lightnings_own_file_is_removed_with_the_folder(folder: Bucket) -> None:
    path = folder.uri.removeprefix("file://")
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.save({"w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(f"{path}/a"))
    torch.save({"epoch": 1}, f"{path}/a/meta.pt")
    copied = copy_checkpoint(find_checkpoint(f"{path}/a"), f"{path}/b")
    assert torch.load(f"{path}/b/meta.pt") == {"epoch": 1}
    remove_checkpoint(copied)
    assert [c.name for c in list_checkpoints(path)] == ["a"]


def test_copy_in_another_bucket_is_identical(gcs: Bucket, folder: Bucket) -> None:
    _fill(gcs)
    for name in ("step-11", "step-9.ckpt"):
        copied = copy_checkpoint(
            find_checkpoint(f"{gcs.uri}/run/{name}", gcs.config), f"{folder.uri}/copy/{name}", folder.config
        )
        assert verify(copied).problems == ()
    loaded = {"w": torch.zeros(300_000)}
    load_sharded(loaded, f"{folder.uri}/copy/step-11", folder.config)
    assert loaded["w"][0] == 11
    assert Checkpoint(f"{folder.uri}/copy", folder.config).load("step-9.ckpt")["w"][0] == 9
    with pytest.raises(errors.AlreadyExistsError, match="copy/step-11"):
        copy_checkpoint(
            find_checkpoint(f"{gcs.uri}/run/step-11", gcs.config), f"{folder.uri}/copy/step-11", folder.config
        )


def test_damaged_checkpoint_is_not_copied(gcs: Bucket) -> None:
    _fill(gcs)
    _flip(gcs, "run/step-9.ckpt")
    with pytest.raises(errors.CorruptError, match=r"step-9\.ckpt"):
        copy_checkpoint(find_checkpoint(f"{gcs.uri}/run/step-9.ckpt", gcs.config), f"{gcs.uri}/copy.ckpt", gcs.config)
    assert not gcs.store.exists("copy.ckpt")


# -- the command -------------------------------------------------------------------------------------------------------


def test_command_runs(gcs: Bucket, emulator: Emulator, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator.url)
    _fill(gcs)

    def run(*words: str) -> tuple[int, str, str]:
        status = main(["checkpoint", *words])
        out, err = capsys.readouterr()
        return status, out, err

    status, out, _ = run("ls", "gs://bkt/run")
    assert status == 0
    listed = [line.split()[5] for line in out.splitlines()]
    assert listed == [f"gs://bkt/run/step-{n}" for n in ("9.ckpt", "10.ckpt", "11")]
    assert run("latest", "gs://bkt/run") == (0, "gs://bkt/run/step-11\n", "")
    assert "3 of 3 checkpoints are sound" in run("verify", "--strict", "gs://bkt/run")[1]
    assert run("cp", "gs://bkt/run/step-11", "gs://bkt/copy")[0] == 0
    damaged = next(key for key in _keys(gcs, "run/step-11/") if key.endswith(".distcp"))
    _flip(gcs, damaged)
    status, out, _ = run("verify", "gs://bkt/run")
    assert status == 1
    assert "DAMAGED" in out
    assert f"gs://bkt/{damaged}: bytes" in out
    assert "would delete" in run("rm", "gs://bkt/run", "--keep-last", "1", "--dry-run")[1]
    assert len(_names(gcs)) == 3
    assert run("rm", "gs://bkt/run", "--keep-last", "1")[0] == 0
    assert _names(gcs) == ["step-11"]
    gcs.store.put("run/__0_0.0123456789ab.distcp", b"x")
    assert "1 younger ones kept" in run("gc", "gs://bkt/run")[1]
    assert "1 orphaned files removed" in run("gc", "gs://bkt/run", "--older-than", "0")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ls", "gs://bkt/none"], "gs://bkt/none: no checkpoints here"),
        (["latest", "gs://bkt/none"], "gs://bkt/none: no complete checkpoint here"),
        (["latest", "gs://no-such-bucket/run"], "gs://no-such-bucket: no such bucket"),
        (["verify", "gs://bkt/none"], "no checkpoints here"),
        (["rm", "gs://bkt/none"], "no checkpoints here"),
        (["rm", "gs://bkt/run"], "not a checkpoint, but 3 are below it"),
        (["rm", "gs://bkt/run", "--keep-every", "2"], "--keep-every needs --keep-last"),
        (["rm", "gs://bkt/run", "--keep-last", "0"], "keep_last must be at least 1, got 0"),
        (
            ["gc", "gs://bkt/run", "--older-than", "-1"],
            "--older-than: expected a value greater than or equal",
        ),
        (["cp", "gs://bkt/none", "gs://bkt/x"], "no checkpoint of this name"),
        (["cp", "gs://bkt/run/step-9.ckpt", "gs://bkt/run/step-10.ckpt"], "a checkpoint exists already"),
    ],
)
def test_errors_are_one_line_and_status_1(
    gcs: Bucket, emulator: Emulator, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: list[str], message: str
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator.url)
    _fill(gcs)
    assert main(["checkpoint", *words]) == 1
    _, err = capsys.readouterr()
    assert message in err
    assert len(err.splitlines()) == 1
    assert len(_names(gcs)) == 3


def test_verify_tells_sound_from_readable(tmp_path: Path, capsys: Any) -> None:
    Checkpoint(str(tmp_path)).save({"w": torch.zeros(10)}, "ours.ckpt")
    torch.save({"w": torch.zeros(10)}, tmp_path / "other.ckpt")
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    states = {
        line.split()[-1].rpartition("/")[2]: line.split()[0] for line in lines if ".ckpt" in line and "only" not in line
    }
    assert states == {"ours.ckpt": "sound", "other.ckpt": "readable"}
    assert any(line.strip() == f"no checksums, only readable: file://{tmp_path}/other.ckpt" for line in lines)
    assert lines[-1] == "1 of 2 checkpoints are sound; without checksums, only readable: 1"
    assert main(["checkpoint", "verify", "--strict", str(tmp_path)]) == 1
    assert main(["checkpoint", "verify", "--strict", str(tmp_path / "ours.ckpt")]) == 0
