"""Sources of settings and credentials, and the errors for wrong ones."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.conftest import Bucket
from voxlane import RetryConfig, Store, StoreConfig, errors
from voxlane.store import translate
from voxlane.testing import Access, Emulator
from voxlane.uri import from_path, parse


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"endpiont": "http://x"}, "store.endpiont: no such field. Did you mean store.endpoint?"),
        ({"retry": {"deadline": 3}}, "store.retry.deadline: no such field. Did you mean store.retry.deadline_s?"),
        ({"max_concurrency": "many"}, "store.max_concurrency: expected an integer, got 'many'"),
        ({"max_concurrency": "64"}, "store.max_concurrency: expected an integer, got '64'"),
        ({"max_parts": True}, "store.max_parts: expected an integer, got True"),
        ({"retry": {"deadline_s": True}}, "store.retry.deadline_s: expected a number, got True"),
        ({"anonymous": "yes"}, "store.anonymous: expected true or false, got 'yes'"),
        ({"max_concurrency": 0}, "store.max_concurrency: expected a value greater than or equal to 1, got 0"),
        ({"access_key_id": "a"}, "store: access_key_id and secret_access_key belong together. Set both or neither"),
        ({"endpoint": "localhost:80"}, "store: endpoint 'localhost:80' has no scheme. Write http://localhost:80"),
        (
            {"retry": {"multiplier": 0.5}},
            "store.retry.multiplier: expected a value greater than or equal to 1, got 0.5",
        ),
        ({"read_timeout_s": 0}, "store.read_timeout_s: expected a value greater than 0, got 0"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=re.escape(message)):
        StoreConfig.from_dict(values)


def test_settings_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "voxlane.toml"
    path.write_text('[store]\nendpoint = "http://127.0.0.1:1"\nread_timeout_s = 5\n[store.retry]\ndeadline_s = 2.5\n')
    config = StoreConfig.load(path)
    assert config == StoreConfig(endpoint="http://127.0.0.1:1", read_timeout_s=5, retry=RetryConfig(deadline_s=2.5))
    path.write_text("[store\n")
    with pytest.raises(errors.ConfigError, match=r"voxlane.toml: not valid TOML"):
        StoreConfig.load(path)
    with pytest.raises(errors.ConfigError, match="cannot read"):
        StoreConfig.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("gz://b/k", r"unknown scheme 'gz'. Did you mean gs://"),
        ("http://b/k", "Known schemes"),
        ("s3:///k", "names no bucket"),
        ("file://relative/k", "absolute path"),
        ("", "the URI is empty"),
    ],
)
def test_wrong_uris_are_explained(uri: str, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        parse(uri)


def test_uris_and_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(parse("gs://b/a//b?c")) == "gs://b/a//b?c"
    assert str(parse("gcs://b")) == "gs://b/"
    assert str(parse("data/scans/")) == f"file://{tmp_path}/data/scans/"
    assert parse("data").key == f"{tmp_path}/data"[1:]


def test_standard_variables_name_the_endpoint(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.put("bkt", "k", b"v")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator.url.removeprefix("http://"))
    assert bytes(Store("gs://bkt").get("k")) == b"v"
    monkeypatch.setenv("AWS_ENDPOINT_URL", emulator.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    assert bytes(Store("s3://bkt").get("k")) == b"v"


def test_endpoint_of_a_bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for name in ("STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert [Store(uri).endpoint for uri in ("gs://b", "s3://b", "file:///tmp")] == [None, None, None]
    chosen = StoreConfig(endpoint="http://server:1/", account="me")
    assert [Store(uri, chosen).endpoint for uri in ("gs://b", "s3://b")] == ["http://server:1"] * 2
    assert Store("az://b", StoreConfig(account="me")).endpoint == "https://me.blob.core.windows.net"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://other")
    assert Store("s3://b").endpoint == "http://other"


def test_aws_profiles(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[lab]\naws_access_key_id = labkey\naws_secret_access_key = s\n")
    (tmp_path / ".aws/config").write_text(f"[profile lab]\nendpoint_url = {emulator.url}\nregion = eu-west-1\n")
    emulator.put("bkt", "k", b"v")
    emulator.set_access(Access(access_key_id="labkey"))
    assert bytes(Store("s3://bkt", StoreConfig(profile="lab")).get("k")) == b"v"
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert bytes(Store("s3://bkt").get("k")) == b"v"
    with pytest.raises(errors.CredentialsError, match="no AWS profile 'lba'"):
        Store("s3://bkt", StoreConfig(profile="lba")).get("k")


def test_google_credential_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(errors.CredentialsError, match=r"none.json: cannot read the Google credentials file"):
        Store("gs://b").get("k")
    (tmp_path / "none.json").write_text("not json")
    with pytest.raises(errors.CredentialsError, match="not a Google credentials file"):
        Store("gs://b").get("k")


def test_secrets_are_not_printed(s3: Bucket) -> None:
    assert "testtest" not in repr(s3.config)


def test_every_exception_of_the_engine_is_translated() -> None:
    engine = importlib.import_module("obstore.exceptions")
    kinds = [kind for kind in vars(engine).values() if isinstance(kind, type)]
    assert {kind.__name__ for kind in kinds} == {
        "GenericError",
        "NotFoundError",
        "InvalidPathError",
        "JoinError",
        "NotSupportedError",
        "AlreadyExistsError",
        "PreconditionError",
        "NotModifiedError",
        "PermissionDeniedError",
        "UnauthenticatedError",
        "UnknownConfigurationKeyError",
        "BaseError",
    }
    for kind in kinds:
        error = kind("status code: 418")
        assert translate.is_foreign(error)
        assert isinstance(translate.translate(error, "s3://b/k"), errors.StoreError)


def test_from_path_restores_a_uri_that_pathlib_changed() -> None:
    assert from_path(Path("gs://bucket/run/x.ckpt")) == "gs://bucket/run/x.ckpt"
    assert from_path("s3://bucket/x") == "s3://bucket/x"
    assert from_path(Path("file:///data/x")) == "file:///data/x"
    assert from_path("/data/x") == "/data/x"
