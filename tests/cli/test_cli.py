"""The command line as a process: output, exit statuses, errors without tracebacks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import voxlane
from tests.conftest import Bucket
from voxlane import Manifest
from voxlane.cli import main as main_module
from voxlane.cli.main import main
from voxlane.testing import Emulator

Put = Callable[[Bucket, dict[str, bytes]], None]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "voxlane"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=180)


def fails(*arguments: str, **environment: str) -> str:
    done = run(*arguments, **environment)
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


def test_help_imports_nothing_heavy() -> None:
    for arguments in ((), ("--help",), ("ls", "--help"), ("clean", "--help"), ("emulator", "--help")):
        done = run(*arguments)
        assert done.returncode == 0
        assert "Usage: voxlane" in done.stdout
    code = "import sys; from voxlane.cli.main import main; main(%s); print('MODULES', *sys.modules)"
    for words, absent in (
        (["--help"], {"torch", "numpy", "yaml", "pydantic", "cyclopts", "argparse"}),
        (["ls", "--help"], {"torch", "obstore", "pyarrow", "numpy"}),
    ):
        done = subprocess.run([sys.executable, "-c", code % words], capture_output=True, text=True, check=True)
        assert not absent & set(done.stdout.rpartition("MODULES")[2].split())


def test_ls(gcs: Bucket, put: Put, emulator: Emulator, tmp_path: Path) -> None:
    put(gcs, {"scans/a.nii.gz": b"123", "scans/b.json": b"1", "scans/sub/c.nii.gz": b"12"})
    environment = {"STORAGE_EMULATOR_HOST": emulator.url}
    assert run("ls", "gs://bkt/scans/", **environment).stdout.splitlines() == [
        "gs://bkt/scans/a.nii.gz",
        "gs://bkt/scans/b.json",
        "gs://bkt/scans/sub/c.nii.gz",
    ]
    assert run("ls", "gs://bkt/scans/", "--total", "--match", "*.nii.gz", **environment).stdout.startswith(
        "2 objects, 5 B"
    )
    assert '3  "202cb962ac59075b964b07152d234b70"' in run("ls", "-l", "gs://bkt/scans/a", **environment).stdout
    target = str(tmp_path / "m.parquet")
    assert run("ls", "gs://bkt/scans/", "--save", target, **environment).stdout == f"3 objects, 6 B -> {target}\n"
    assert len(Manifest.load(target)) == 3
    assert run("ls", "gs://bkt/scans/", "--save", "gs://bkt/m.parquet", **environment).returncode == 0
    assert len(Manifest.load("gs://bkt/m.parquet", gcs.config)) == 3


def test_ls_of_odd_keys(gcs: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    contents = {"a//b": b"1", "a/../b": b"2", "x?y#z": b"3", "a%20b": b"4", "line\nfeed\x1b[31m": b"5", "todo/": b""}
    emulator.put_many("bkt", contents)
    environment = {"STORAGE_EMULATOR_HOST": emulator.url}
    done = run("ls", "gs://bkt", **environment)
    assert done.stdout.splitlines() == [
        "gs://bkt/a%20b",
        "gs://bkt/a/../b",
        "gs://bkt/a//b",
        r"gs://bkt/line\nfeed\x1b[31m",
        "gs://bkt/x?y#z",
    ]
    assert done.stderr == "1 folder marker left out; see --folder-markers\n"
    assert "gs://bkt/todo/\n" in run("ls", "gs://bkt", "--folder-markers", **environment).stdout
    for key in ("a//b", "a/../b", "x?y#z", "a%20b"):
        assert run("ls", f"gs://bkt/{key}", **environment).stdout == f"gs://bkt/{key}\n"
    target = f"{tmp_path}/a#b?c%41.parquet"
    assert run("ls", "gs://bkt/", "--save", target, **environment).returncode == 0
    assert Manifest.load(target).keys() == sorted(contents.keys() - {"todo/"})


def test_config_file(gcs: Bucket, put: Put, emulator: Emulator, tmp_path: Path) -> None:
    put(gcs, {"a": b"1"})
    config = tmp_path / "voxlane.toml"
    config.write_text(f'[store]\nendpoint = "{emulator.url}"\n')
    assert run("ls", "gs://bkt", "--config", str(config)).stdout == "gs://bkt/a\n"
    config.write_text('[store]\nendpont = "x"\n')
    error = fails("ls", "gs://bkt", "--config", str(config))
    assert "store.endpont: no such field. Did you mean store.endpoint?" in error
    assert "cannot read the config file" in fails("ls", "gs://bkt", "--config", str(tmp_path / "none"))
    for text in ('[stor]\nendpoint = "x"\n', 'endpoint = "x"\n', "store = 3\n"):
        config.write_text(text)
        assert "one table named [store]" in fails("ls", "gs://bkt", "--config", str(config))
    config.write_bytes(b"\xff\xfe")
    assert "not valid TOML" in fails("ls", "gs://bkt", "--config", str(config))
    config.write_text('[store]\nendpoint = "http://127.0.0.1:9"\nretry = {deadline_s = 3.0}\n')
    lines = fails("ls", "gs://bkt", "--config", str(config)).splitlines()
    assert "connection refused); retrying for up to 3 s" in lines[0]
    assert "connection refused)" in lines[-1]


def test_mistakes_are_one_line(emulator: Emulator, tmp_path: Path) -> None:
    environment = {"STORAGE_EMULATOR_HOST": emulator.url}
    assert fails("ls", "gs://nope", **environment) == (
        "voxlane: gs://nope: no such bucket. Check its spelling, project and region\n"
    )
    assert "gs://bkt/x: no objects under this prefix" in fails("ls", "gs://bkt/x", **environment)
    assert "unknown scheme 'gss'. Did you mean gs://?" in fails("ls", "gss://bkt")
    assert "no such folder" in fails("ls", str(tmp_path / "missing/x"))
    assert "no objects" in fails("ls", str(tmp_path / "missing"))
    assert "Write gs://bkt/x" in fails("ls", "gs:/bkt/x")
    assert "no Azure storage account" in fails("ls", "az://c", AZURE_STORAGE_ACCOUNT_NAME="", AZURE_STORAGE_ACCOUNT="")
    assert fails("lss") == "voxlane: unknown command 'lss'. Did you mean ls?\n"
    assert "--concurrency: expected a value greater than or equal to 1, got 0" in fails(
        "ls", "gs://bkt", "--concurrency", "0", **environment
    )
    assert "GCS" in fails("clean", "s3://bkt")
    assert "expected a bucket without a prefix" in fails("clean", "gs://bkt/x", **environment)
    for minutes in ("nan", "-5", "1e18"):
        assert "--older-than" in fails("clean", "gs://bkt", f"--older-than={minutes}", **environment)
    emulator.put("bkt", "k", b"v")
    assert "names no object" in fails("ls", "gs://bkt", "--save", "gs://bkt", **environment)
    assert "the URI is a folder" in fails("ls", "gs://bkt", "--save", str(tmp_path), **environment)
    assert "cannot write here" in fails("ls", "gs://bkt", "--save", "/proc/m.parquet", **environment)


def test_missing_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text("raise ImportError('not here', name='aiohttp')")
    assert "pip install 'voxlane[testing]'" in fails("emulator", "--port", "0", PYTHONPATH=str(tmp_path))


def test_closed_pipe_is_not_an_error(gcs: Bucket, emulator: Emulator) -> None:
    emulator.fill("bkt", count=50_000, key="key-{:06d}", size_bytes=1)
    command = f"{Path(sys.executable).parent / 'voxlane'} ls gs://bkt | head -1"
    environment = {**os.environ, "STORAGE_EMULATOR_HOST": emulator.url}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment, timeout=180)
    assert (done.stdout, done.stderr) == ("gs://bkt/key-000000\n", "")


def test_emulator_without_a_port_fails(emulator: Emulator) -> None:
    port = emulator.url.rpartition(":")[2]
    assert "Choose another --port" in fails("emulator", "--port", port)
    assert "Choose another --port" in fails("emulator", "--port", "99999")


def test_emulator_command_serves(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "voxlane"), "emulator", "--port", "0", "--bucket", "b"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        voxlane.Store("gs://b", voxlane.StoreConfig(endpoint=url)).put("k", b"v")
        assert run("ls", "gs://b", "--endpoint", url).stdout == "gs://b/k\n"
        server.terminate()


def test_public_names() -> None:
    assert set(voxlane.__all__) == set(voxlane._MODULES)
    for name in voxlane.__all__:
        assert getattr(voxlane, name) is not None
    with pytest.raises(AttributeError, match="MapDatset"):
        _ = voxlane.MapDatset  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_lack_of_memory_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: list[str]) -> int:
        raise error

    monkeypatch.setattr(main_module, "_run", fail)
    assert main(["ls", "x"]) == 1
    assert capsys.readouterr().err.startswith("voxlane: memory ran out. Use a machine with more")


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: list[str]) -> int:
        raise RuntimeError("a defect")

    monkeypatch.setattr(main_module, "_run", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        main(["ls", "x"])
