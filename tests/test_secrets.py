"""Secrets appear in nothing that is written or printed, whatever way they were given."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RETRY, Bucket
from tests.train import tiny_runs
from tests.tune import spaces
from voxlane import RetryConfig, Store, StoreConfig
from voxlane.bench.report import ResultFile
from voxlane.cli.main import COMMANDS, is_group, load_parser, main
from voxlane.errors import ConfigError, UnavailableError, VoxlaneError
from voxlane.redaction import (
    find_secrets,
    hide_from_process_list,
    is_secret_field,
    looks_secret,
    name_redacted,
    redact,
    redact_text,
    redact_words,
)
from voxlane.settings import iterate_fields, record_fields
from voxlane.store.counters import RequestCounters
from voxlane.store.retry import Retrier
from voxlane.store.staging.local_store import CopyOrigin
from voxlane.store.translate import TransientError
from voxlane.testing import Access, Emulator
from voxlane.train.run import Run
from voxlane.tune import runner
from voxlane.tune.space import parse_space

SECRET = "S3CR3T-value"


def test_fields_that_their_record_marks_are_secret() -> None:
    marked = [name for name, field in record_fields(StoreConfig).items() if field.repr is False]
    assert {"secret_access_key", "session_token", "account_key", "token"} <= set(marked)
    assert all(is_secret_field(f"store.{name}") for name in marked)


def test_no_other_setting_is_taken_for_a_secret() -> None:
    from pkgutil import resolve_name

    records = {cls for name in COMMANDS if not is_group(name) for cls in [load_parser(name).command_class]}
    configs = {resolve_name(cls.config_class) for cls in records if getattr(cls, "config_class", "")}
    names = {name for cls in [*records, *configs] for name, _, _ in iterate_fields(cls)}
    assert {name for name in names if is_secret_field(name) and not name.startswith("store.")} == set()
    assert {name for name, _, _ in iterate_fields(StoreConfig) if looks_secret(name)} == {
        *("access_key_id", "secret_access_key", "session_token", "account_key", "token", "credential_provider"),
    }


WORDS = [
    ([f"store.secret_access_key={SECRET}"], ["store.secret_access_key=***"]),
    (["store.secret_access_key=s"], ["store.secret_access_key=***"]),
    (["--bearer-token", SECRET, "x"], ["--bearer-token", "***", "x"]),
    ([f"--bearer-token={SECRET}"], ["--bearer-token=***"]),
    (["--endpoint", f"http://user:{SECRET}@host:9000"], ["--endpoint", "http://***@host:9000"]),
    ([f"store.endpoint=https://user:{SECRET}/x@host/p"], ["store.endpoint=https://***@host/p"]),
    ([f"--endpoint=https://h/?sv=1&sig={SECRET}&se=2"], ["--endpoint=https://h/?sv=1&sig=***&se=2"]),
    ([f"store={{token: {SECRET} x, anonymous: false}}"], ["store={token: '***', anonymous: false}"]),
    (
        [f"store={{retry: {{deadline_s: 1}}, account_key: {SECRET}}}"],
        ["store={retry: {deadline_s: 1}, account_key: '***'}"],
    ),
]


@pytest.mark.parametrize(("words", "redacted"), WORDS)
def test_command_lines(words: list[str], redacted: list[str]) -> None:
    assert redact_words(words) == redacted
    assert find_secrets(words)
    assert name_redacted(redacted)


@pytest.mark.parametrize(
    "text",
    [
        f"unexpected argument 'store.token={SECRET} and more'",
        f"got {{'secret_access_key': '{SECRET}', 'region': 'x'}}",
        f"expected fields, got {{token: {SECRET}}}",
        f"GET https://a.blob.core.windows.net/c?sv=1&sig={SECRET}&se=2 failed",
        f"GET http://user:{SECRET}@host:9000/b/k failed",
        f"Authorization: Bearer {SECRET}",
        f"AccountName=a;AccountKey={SECRET}==;EndpointSuffix=x",
        f"--sbatch=--export=AWS_SECRET_ACCESS_KEY={SECRET}",
    ],
)
def test_messages(text: str) -> None:
    assert SECRET not in redact_text(text)
    assert SECRET not in str(VoxlaneError(text, uri=f"http://u:{SECRET}@h/x", fix=text))
    assert SECRET not in json.dumps(redact({"error": [text], "store": {"session_token": SECRET}}))


@pytest.mark.parametrize(
    "text",
    [
        "http://host:9000/bucket/key@version",
        "gs://b/a@b/c.nii.gz",
        "store.token: expected text",
        "epochs=5 lr=0.1",
        "s3://b/c",
        "kubectl create secret generic x --from-literal=AWS_SECRET_ACCESS_KEY=...",
    ],
)
def test_other_messages_stay(text: str) -> None:
    assert redact_text(text) == text
    assert redact_words(text.split()) == text.split()


def test_wrong_values_of_secret_fields_are_not_repeated() -> None:
    for values in (
        {"token": [SECRET]},
        {"retry": {"token": SECRET}},
        {"retry": SECRET + "://u:p@h"},
        {"acount_key": SECRET},
    ):
        with pytest.raises(ConfigError) as caught:
            StoreConfig.from_dict(values)
        if "retry" not in values or isinstance(values["retry"], dict):
            assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        StoreConfig(endpoint=f"user:{SECRET}@host:9000")
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(StoreConfig(endpoint=f"http://user:{SECRET}@host", token=SECRET))


def test_usage_errors_do_not_repeat_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    main(["ls", "gs://b", f"store.token={SECRET}"])
    main(["train", "gs://b", "--run", "gs://r", f"store={{token: {SECRET}"])
    assert SECRET not in "".join(capsys.readouterr())


def test_warnings_about_retries_do_not_repeat_secrets(caplog: pytest.LogCaptureFixture) -> None:
    uri = f"https://h/k?sig={SECRET}"
    retrier = Retrier(RetryConfig(deadline_s=1.0, initial_delay_s=0.001, max_delay_s=0.001))

    def fail() -> None:
        raise TransientError(f"GET {uri} failed", uri)

    with pytest.raises(UnavailableError) as caught:
        retrier.call("get", uri, fail, RequestCounters())
    assert "retrying for up to 1 s" in caplog.text
    assert SECRET not in caplog.text + str(caught.value)


def test_records_of_copies_and_benchmarks(tmp_path: Path) -> None:
    assert CopyOrigin("gs://b", f"http://user:{SECRET}@host").endpoint == "http://***@host"
    result = {
        "setting": {"endpoint": f"http://u:{SECRET}@h"},
        "command": f"voxlane bench step --endpoint http://u:{SECRET}@h",
    }
    ResultFile(str(tmp_path / "result.json"), plot=False).save(result, lambda *_: None)
    assert SECRET not in (tmp_path / "result.json").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["slurm", "render", "--", "train", "gs://b/p", "--run", "gs://b/r", f"store.token={SECRET}"],
        ["slurm", "render", "--", "train", "gs://b/p", "--run", "gs://b/r", "--endpoint", f"http://u:{SECRET}@h"],
        [
            "slurm",
            "render",
            "--setup",
            f"export AWS_SECRET_ACCESS_KEY={SECRET}",
            "--",
            "train",
            "gs://b/p",
            "--run",
            "gs://b/r",
        ],
        ["stage", "s3://b/p", "/scratch", "--endpoint", f"http://u:{SECRET}@h", "--nodelist", "n1"],
    ],
)
def test_scripts_and_other_nodes_get_no_secrets(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert "must not hold a secret" in err
    assert "AWS_SECRET_ACCESS_KEY" in err, "a safer way"
    assert SECRET not in out + err


def test_the_process_list_does_not_show_secrets() -> None:
    code = (
        "import sys; from voxlane.redaction import *; hide_from_process_list(find_secrets(sys.argv[1:]));"
        "print(sys.argv[1]); print(open('/proc/self/cmdline').read())"
    )
    words = [f"store.token={SECRET}", "epochs=3"]
    out = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout
    own, shown = out.splitlines()
    assert own == words[0]
    assert SECRET not in shown
    assert "store.token=" + "*" * len(SECRET) in shown
    assert "epochs=3" in shown
    hide_from_process_list(())  # nothing to do


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_runs.prepare_balls(tmp_path_factory.mktemp("balls"))


@pytest.fixture
def protected(emulator: Emulator) -> Iterator[Bucket]:
    """Return a bucket that needs the access key `AKEY-1`."""
    emulator.set_access(Access(access_key_id="AKEY-1"))
    config = StoreConfig(endpoint=emulator.url, access_key_id="AKEY-1", secret_access_key=SECRET, retry=RETRY)
    yield Bucket("s3", "s3://bkt", config)
    emulator.set_access(Access())


def test_a_run_stores_none_and_says_what_to_give_again(
    prepared: str, protected: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "another")
    (tmp_path / "config.json").write_text(json.dumps({**tiny_runs.CONFIG, "fold": 0}))
    words = ["train", prepared, "--run", "s3://bkt/run", "--config", str(tmp_path / "config.json"), "--no-progress"]
    words += [f"store.endpoint={protected.config.endpoint}", "store.retry.deadline_s=0"]
    secrets = ["store.access_key_id=AKEY-1", f"store.secret_access_key={SECRET}"]

    def run(words: list[str]) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["voxlane", *words])
        status = main(words)
        return status, "".join(capfd.readouterr())

    status, printed = run([*words, *secrets])
    assert status == 0, printed
    assert printed.count("can read store.access_key_id, store.secret_access_key on the command line") == 1
    assert "--config FILE" in printed
    status, report_printed = run(["report", "s3://bkt/run", "--config", _write_store(tmp_path, protected.config)])
    assert status == 0, report_printed
    objects = {key: bytes(protected.store.get(key)) for key in _keys(protected.store)}
    assert {"run/run.json", "run/report.html", "run/history.json"} <= set(objects)
    assert b"store.secret_access_key=***" in objects["run/run.json"]
    assert [key for key, body in objects.items() if SECRET.encode() in body] == []
    assert SECRET not in printed + report_printed

    status, printed = run([*words, "--resume"])
    assert status == 1
    assert "Secrets are not stored with s3://bkt/run" in printed
    assert "give them again" in printed
    status, printed = run([*words, *secrets, "--resume", "epochs=2"])
    assert status == 0, printed


def test_a_search_stores_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = spaces.space({"trials": 2})
    command = ["voxlane", "tune", "space.yaml", "d", "--endpoint", f"http://u:{SECRET}@h", f"store={{token: {SECRET}}}"]
    search = runner._new_search(Run(str(tmp_path)), parse_space(values), "d", command)
    assert SECRET not in search.to_json()
    (tmp_path / "space.json").write_text(json.dumps(values))
    words = ["tune", str(tmp_path / "space.json"), "d", "--run", str(tmp_path / "out")]
    assert main([*words, f"store.token={SECRET}"]) == 1
    printed = "".join(capsys.readouterr())
    assert "store: settings of the bucket are no part of a space. Give them with --config FILE" in printed
    assert SECRET not in printed


def _write_store(folder: Path, config: StoreConfig) -> str:
    path = folder / "store.toml"
    lines = [f'{name} = "{getattr(config, name)}"' for name in ("endpoint", "access_key_id", "secret_access_key")]
    path.write_text("\n".join(["[store]", *lines]))
    return str(path)


def _keys(store: Store) -> list[str]:
    return [key for page in store.list_pages("") for key in page.column("path").to_pylist()]


def test_pages_of_older_runs_show_none(tmp_path: Path) -> None:
    from tests.train import fake_run
    from voxlane.train.report import report

    run = fake_run.write(tmp_path / "run", evaluated=False)
    content: dict[str, Any] = json.loads((run / "run.json").read_text(encoding="utf-8"))
    content["command"] += [f"store.secret_access_key={SECRET}", "--endpoint", f"http://u:{SECRET}@h"]
    content["config"]["store"] = {"session_token": SECRET}
    (run / "run.json").write_text(json.dumps(content))
    report(str(run))
    assert SECRET not in (run / "report.html").read_text(encoding="utf-8")
