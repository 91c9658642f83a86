"""The command line, as a user meets it: a process of its own, no tracebacks, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import voxlane
from tests.conftest import Bucket
from voxlane import Manifest
from voxlane.testing import Emulator

Put = Callable[[Bucket, dict[str, bytes]], None]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "voxlane"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60)


def fails(*arguments: str, **environment: str) -> str:
    done = run(*arguments, **environment)
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


def test_help_teaches_and_imports_nothing_heavy() -> None:
    for arguments in ((), ("--help",), ("ls", "--help"), ("clean", "--help"), ("emulator", "--help")):
        done = run(*arguments)
        assert done.returncode == 0
        assert "usage: voxlane" in done.stdout
    code = "import sys, voxlane.cli.main as m; m._parser().format_help(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "obstore", "pyarrow", "numpy"} & set(loaded)


def test_ls(gcs: Bucket, put: Put, emulator: Emulator, tmp_path: Path) -> None:
    put(gcs, {"scans/a.nii.gz": b"123", "scans/b.json": b"1", "scans/sub/c.nii.gz": b"12"})
    here = {"STORAGE_EMULATOR_HOST": emulator.url}
    assert run("ls", "gs://bkt/scans/", **here).stdout.splitlines() == [
        "gs://bkt/scans/a.nii.gz",
        "gs://bkt/scans/b.json",
        "gs://bkt/scans/sub/c.nii.gz",
    ]
    assert run("ls", "gs://bkt/scans/", "--total", "--match", "*.nii.gz", **here).stdout.startswith("2 objects, 5 B")
    assert '3  "202cb962ac59075b964b07152d234b70"' in run("ls", "-l", "gs://bkt/scans/a", **here).stdout
    target = str(tmp_path / "m.parquet")
    assert run("ls", "gs://bkt/scans/", "--save", target, **here).stdout == f"3 objects, 6 B -> {target}\n"
    assert len(Manifest.load(target)) == 3
    assert run("ls", "gs://bkt/scans/", "--save", "gs://bkt/m.parquet", **here).returncode == 0
    assert len(Manifest.load("gs://bkt/m.parquet", gcs.config)) == 3


def test_config_file(gcs: Bucket, put: Put, emulator: Emulator, tmp_path: Path) -> None:
    put(gcs, {"a": b"1"})
    config = tmp_path / "voxlane.toml"
    config.write_text(f'[store]\nendpoint = "{emulator.url}"\n')
    assert run("ls", "gs://bkt", "--config", str(config)).stdout == "gs://bkt/a\n"
    config.write_text('[store]\nendpont = "x"\n')
    assert "Did you mean 'endpoint'?" in fails("ls", "gs://bkt", "--config", str(config))
    assert "cannot read the config file" in fails("ls", "gs://bkt", "--config", str(tmp_path / "none"))
    for text in ('[stor]\nendpoint = "x"\n', 'endpoint = "x"\n', "store = 3\n"):
        config.write_text(text)
        assert "one table named [store]" in fails("ls", "gs://bkt", "--config", str(config))
    config.write_bytes(b"\xff\xfe")
    assert "not valid TOML" in fails("ls", "gs://bkt", "--config", str(config))
    config.write_text('[store]\nendpoint = "http://127.0.0.1:9"\nretry = {deadline_s = 3.0}\n')
    said = fails("ls", "gs://bkt", "--config", str(config)).splitlines()
    assert "connection refused); trying again for up to 3 s" in said[0]
    assert "connection refused)" in said[-1]


def test_mistakes_are_one_line(emulator: Emulator, tmp_path: Path) -> None:
    here = {"STORAGE_EMULATOR_HOST": emulator.url}
    assert fails("ls", "gs://nope", **here) == (
        "voxlane: gs://nope: no such bucket. Check its spelling, project and region\n"
    )
    assert "gs://bkt/x: no objects under this prefix" in fails("ls", "gs://bkt/x", **here)
    assert "unknown scheme 'gss'. Did you mean gs://?" in fails("ls", "gss://bkt")
    assert "no such folder" in fails("ls", str(tmp_path / "missing/x"))
    assert "no objects" in fails("ls", str(tmp_path / "missing"))
    assert "Write gs://bkt/x" in fails("ls", "gs:/bkt/x")
    assert "no Azure storage account" in fails("ls", "az://c", AZURE_STORAGE_ACCOUNT_NAME="", AZURE_STORAGE_ACCOUNT="")
    assert "invalid choice: 'lss'" in fails("lss")
    assert "--concurrency 0. Give 1 or more" in fails("ls", "gs://bkt", "--concurrency", "0", **here)
    assert "GCS" in fails("clean", "s3://bkt")
    assert "cleaned as a whole" in fails("clean", "gs://bkt/x", **here)
    for minutes in ("nan", "-5", "1e18"):
        assert "--older-than" in fails("clean", "gs://bkt", f"--older-than={minutes}", **here)
    emulator.put("bkt", "k", b"v")
    assert "names no object" in fails("ls", "gs://bkt", "--save", "gs://bkt", **here)
    assert "this is a folder" in fails("ls", "gs://bkt", "--save", str(tmp_path), **here)
    assert "cannot write here" in fails("ls", "gs://bkt", "--save", "/proc/m.parquet", **here)


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text("raise ImportError('not here', name='aiohttp')")
    assert "pip install 'voxlane[testing]'" in fails("emulator", "--port", "0", PYTHONPATH=str(tmp_path))


def test_a_closed_pipe_is_no_error(gcs: Bucket, emulator: Emulator) -> None:
    emulator.fill("bkt", count=50_000, key="key-{:06d}", size_bytes=1)
    command = f"{Path(sys.executable).parent / 'voxlane'} ls gs://bkt | head -1"
    environment = {**os.environ, "STORAGE_EMULATOR_HOST": emulator.url}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.stdout, done.stderr) == ("gs://bkt/key-000000\n", "")


def test_an_emulator_that_cannot_serve_says_so(emulator: Emulator) -> None:
    port = emulator.url.rpartition(":")[2]
    assert "Choose another --port" in fails("emulator", "--port", port)
    assert "Choose another --port" in fails("emulator", "--port", "99999")


def test_the_emulator_command_serves(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "voxlane"), "emulator", "--port", "0", "--bucket", "b"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        voxlane.Store("gs://b", voxlane.StoreConfig(endpoint=url)).put("k", b"v")
        assert run("ls", "gs://b", "--endpoint", url).stdout == "gs://b/k\n"
        server.terminate()


def test_public_names() -> None:
    assert set(voxlane.__all__) == set(voxlane._HOMES)
    for name in voxlane.__all__:
        assert getattr(voxlane, name) is not None
    with pytest.raises(AttributeError, match="MapDatset"):
        _ = voxlane.MapDatset  # type: ignore[attr-defined]
