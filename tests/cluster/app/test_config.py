"""app.yaml: valid values are accepted, and errors name the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from voxlane import settings
from voxlane.cli.app import check_search_space
from voxlane.cluster.kubernetes.app.config import App, Stage, find_staged_copy, format_overrides, get_name_limit
from voxlane.errors import ConfigError

TRAIN = {"data": "gs://b/kits", "run": "gs://b/runs/a"}
LOADING = ["voxlane", "bench", "loading", "gs://b/kits"]
BASE: dict[str, Any] = {"name": "kits", "image": "registry.example/team/kits"}


def build_app(**values: Any) -> App:
    config_values = {**BASE, **values}
    if not {"train", "tune", "command", "run"} & set(values):
        config_values["train"] = TRAIN
    return settings.build(App, config_values, origin="app.yaml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "Kits"}, "name: 'Kits' is not a valid name"),
        ({"name": "1kits"}, "name: '1kits' is not a valid name"),
        ({"name": "k" * 49}, "has 49 characters; use at most 48, so that the pods of a JobSet"),
        ({"name": "k" * 48, "nodes": 11}, "use at most 47"),
        (
            {"name": "k" * 48, "template": "rayjob", "train": None, "tune": TRAIN},
            "47, so that the pods of a RayJob",
        ),
        ({"image": "Registry/Team Kits"}, "is not the name of an image"),
        ({"train": None}, "expected exactly one of train, tune and command, got none"),
        ({"train": TRAIN, "command": ["x"]}, "got train and command"),
        ({"train": TRAIN, "run": "gs://b/r"}, "run: give it as train.run"),
        ({"command": []}, "command"),
        ({"tune": TRAIN}, "tune: it runs on template rayjob, not jobset"),
        ({"train": TRAIN, "template": "rayjob"}, "train: it runs on template jobset or trainjob, not rayjob"),
        ({"command": ["x"], "template": "rayjob"}, "command: it runs on template jobset or trainjob, not rayjob"),
        (
            {"command": ["voxlane", "bench", "checkpoint"], "template": "rayjob"},
            "command: it runs on template jobset or trainjob, not rayjob",
        ),
        (
            {"command": ["voxlane", "bench", "scaling"], "nodes": 2},
            "command: it runs on template rayjob, not jobset",
        ),
        (
            {"command": LOADING},
            "run: missing; without a bucket, the result of `voxlane bench loading`",
        ),
        ({"command": [*LOADING, "--out", "a.json"], "run": "gs://b/r"}, "command: --out a.json is lost with the pod"),
        ({"command": [*LOADING, "--out=/tmp/a.json"]}, "command: --out /tmp/a.json is lost with the pod"),
        ({"train": TRAIN, "template": "tensorboard"}, "give `run` alone"),
        ({"train": None, "template": "tensorboard"}, "run: missing"),
        ({"train": {**TRAIN, "run": "runs/a"}}, "train.run: 'runs/a' is not in a bucket"),
        ({"train": {**TRAIN, "data": "/data/kits"}}, "train.data: '/data/kits' is not in a bucket"),
        ({"train": {**TRAIN, "rum": "x"}}, "train.rum: no such field"),
        ({"nodes": 0}, "nodes: "),
        ({"nodes": "two"}, "nodes: expected an integer, got 'two'"),
        ({"nods": 2}, "Did you mean nodes?"),
        ({"device": "tpu"}, "device: "),
        ({"device": "gpu", "gpu_resource": "gpu"}, "give it as nvidia.com/gpu"),
        ({"resources": {"memory": "16GB"}}, "resources.memory: '16GB' is not a size; give one such as 100Gi"),
        ({"resources": {"cpu": "4 cores"}}, "resources.cpu: '4 cores' is not a number of cores"),
        ({"resources": {"memory": "2Gi"}}, "shared_memory: 2Gi must be less than resources.memory, 2Gi"),
        ({"shared_memory": "0"}, "shared_memory: expected more than zero, got '0'"),
        ({"node_selector": {"a b": "c"}}, "is not the key of a label"),
        ({"node_selector": {"a": "b c"}}, "is not the value of a label"),
        ({"node_selector": {"staged.voxlane.dev/x": "ready"}}, "use `stage` for data"),
        ({"topology": {"required": "a/b", "preferred": "a/c"}}, "give one of them"),
        ({"queue": "Team Queue"}, "queue: 'Team Queue' is not the name of an object"),
        ({"grace_s": 5}, "grace_s: "),
        ({"env": {"AWS_SECRET_ACCESS_KEY": "x"}}, "env: variable AWS_SECRET_ACCESS_KEY looks like a secret"),
        ({"env": {"HF_TOKEN": "x"}}, "env: variable HF_TOKEN looks like a secret"),
        ({"env": {"AZURE_STORAGE_CONNECTION_STRING": "x"}}, "AZURE_STORAGE_CONNECTION_STRING looks like a secret"),
        ({"env": {"DB_PASS": "x"}}, "env: variable DB_PASS looks like a secret"),
        ({"env": {"BLOBS": "AccountName=a;AccountKey=Zm9v"}}, "env.BLOBS: it contains a secret"),
        ({"env": {"READ": "https://a.example/b?sv=1&sig=abc"}}, "env.READ: it contains a secret"),
        ({"env": {"HUB": "glpat-abcdefghijklmnopqrst"}}, "env.HUB: it contains a secret"),
        ({"env": {"PROXY": "http://me:pass@proxy.example"}}, "env.PROXY: it contains a secret"),
        ({"env": {"A B": "x"}}, "'A B' is not the name of a variable"),
        ({"command": ["curl", "-u", "AKIAABCDEFGHIJKLMNOP"]}, "command.2: it contains a secret"),
        ({"credentials": {"file": "key.json"}}, "credentials: file: key.json is a key of a Secret"),
        ({"credentials": {"secret": "-----BEGIN PRIVATE KEY"}}, "credentials.secret: not a valid name of an object"),
        ({"credentials": {"endpoint": "minio:9000"}}, "credentials.endpoint: not a valid URL"),
        ({"stage": [{"name": "kits", "source": "/disk"}]}, "stage.0.source: '/disk' cannot be staged"),
        ({"stage": [{"name": "kits", "source": "nfs://server"}]}, "does not name a folder of a server"),
        (
            {"stage": [{"name": "kits", "source": "gs://b/k", "timeout": "soon"}]},
            "timeout: 'soon' is not a duration",
        ),
        ({"stage": [{"name": "kits", "capacity": "1Gi"}]}, "capacity is for data that the app stages itself"),
        ({"stage": [{"name": "kits"}, {"name": "kits"}]}, "two of them have the name kits"),
        ({"stage": [{"name": "a", "path": "/d"}, {"name": "b", "path": "/d/"}]}, "two of them have the path /d"),
        ({"stage": [{"name": "kits", "path": "data"}]}, "is not the absolute path"),
        ({"nodes": 3, "stage": [{"name": "k", "source": "gs://b/k", "replicas": 2}]}, "the app runs on 3"),
        ({"device": "gpu", "stage": [{"name": "k", "source": "gs://b/k"}]}, "could be copied to nodes without GPUs"),
        ({"template": "trainjob", "priority_class": "high"}, "priority_class: a TrainJob does not have it"),
        ({"template": "trainjob", "ttl_s": 5}, "ttl_s: a TrainJob does not have it"),
        ({"runtime": "mine"}, "runtime: it is for template trainjob"),
    ],
)
def test_errors_name_the_field_and_the_fix(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_app(**values)
    assert message in str(caught.value)
    assert str(caught.value).startswith("app.yaml: ")
    assert "App:" not in str(caught.value)


def test_secret_is_not_shown_in_the_error() -> None:
    with pytest.raises(ConfigError) as caught:
        build_app(credentials={"secret": "AbC/secret+value="})
    assert "AbC" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "NCCL_DEBUG", "MONKEY", "AWS_WEB_IDENTITY_TOKEN_FILE"]
)
def test_variables_without_secrets_are_accepted(name: str) -> None:
    assert build_app(env={name: 1}).env == {name: "1"}


@pytest.mark.parametrize(
    ("image", "built"),
    [
        ("kits", True),
        ("localhost:5000/kits", True),
        ("registry.example/team/kits", True),
        ("kits:1.0", False),
        ("localhost:5000/kits:1.0", False),
        ("registry.example/kits@sha256:" + "0" * 64, False),
    ],
)
def test_image_without_a_tag_is_built(image: str, built: bool) -> None:
    assert build_app(image=image).is_built is built


def test_name_limit_leaves_room_for_pod_names() -> None:
    for template, nodes in (("jobset", 1), ("jobset", 10), ("jobset", 1000), ("trainjob", 11)):
        limit = get_name_limit(template, nodes)  # type: ignore[arg-type]
        pod = f"{'k' * limit}-node-0-{nodes - 1}-abcde"
        assert len(pod) == 63
        build_app(name="k" * limit, template=template, nodes=nodes)


def test_overrides_round_trip() -> None:
    values = {"epochs": 3, "optimizer.name": "adamw", "fold": None, "patch": [8, 8, 8], "loader.disk_cache": "1e3"}
    message: dict[str, Any] = {}
    for word in format_overrides(values):
        settings.set_dotted(message, word)
    assert message == {
        "epochs": 3,
        "optimizer": {"name": "adamw"},
        "fold": None,
        "patch": [8, 8, 8],
        "loader": {"disk_cache": "1e3"},
    }


def test_staged_copy_is_found_by_its_source() -> None:
    other, same = {"name": "other", "source": "gs://b/other"}, {"name": "same", "source": "gs://b/kits/"}
    assert find_staged_copy(build_app(stage=[other, same])) == Stage(name="same", source="gs://b/kits/")
    assert find_staged_copy(build_app(stage=[other])) is None
    assert find_staged_copy(build_app(stage=[other, {"name": "there"}])) == Stage(name="there")
    assert find_staged_copy(build_app(stage=[{"name": "a"}, {"name": "b"}])) is None
    assert find_staged_copy(build_app(command=["x"], stage=[same])) is None


def write_files(folder: Path, text: str, **files: str) -> Path:
    folder.joinpath("app.yaml").write_text(text)
    for name, content in files.items():
        folder.joinpath(f"{name}.yaml").write_text(content)
    return folder


HEAD = "name: kits\nimage: kits\n"


def test_files_are_read_and_checked(tmp_path: Path) -> None:
    text = HEAD + "train: {data: gs://b/kits, run: gs://b/r, config: train.yaml, set: {epochs: 3}}\n"
    folder = write_files(tmp_path, text, train="preset: small\n")
    assert App.load(folder).files == {"train.yaml": "preset: small\n"}
    assert App.load(folder, deep=False).files == {}
    write_files(tmp_path, text, train="preset: small\noptimizer: {lrr: 1}\n")
    with pytest.raises(ConfigError, match=r"train.yaml: optimizer.lrr: no such field. Did you mean optimizer.lr\?"):
        App.load(folder)
    write_files(tmp_path, text.replace("epochs: 3", "epochs: none"), train="preset: small\n")
    with pytest.raises(ConfigError, match=r"epochs: expected an integer"):
        App.load(folder)
    write_files(tmp_path, text, train="store: {}\n# -----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(ConfigError, match="it contains a secret"):
        App.load(folder)
    write_files(tmp_path, text, train="store: {secret_access_key: x}\n")
    with pytest.raises(ConfigError, match=r"train.yaml: store.secret_access_key: it is a secret, which would become"):
        App.load(folder)
    write_files(tmp_path, text, train="store: {regoin: x}\n")
    with pytest.raises(ConfigError, match="regoin"):
        App.load(folder)
    write_files(tmp_path, text, train="init_from: runs/a\n")
    with pytest.raises(
        ConfigError, match=r"train.yaml: init_from: pods do not have the path 'runs/a'. Give it as gs://"
    ):
        App.load(folder)
    for path in ("gs://b/runs/a", "/models/a"):
        write_files(tmp_path, text, train=f"init_from: {path}\n")
        App.load(folder)
    tmp_path.joinpath("train.yaml").unlink()
    with pytest.raises(ConfigError, match=r"train.config: cannot read train.yaml: No such file"):
        App.load(folder)
    write_files(tmp_path, text.replace("train.yaml", "../train.yaml"))
    with pytest.raises(ConfigError, match="not a file of the app's folder"):
        App.load(folder)


def test_search_space_is_checked(tmp_path: Path) -> None:
    text = HEAD + "template: rayjob\ntune: {data: gs://b/kits, run: gs://b/r}\n"
    folder = write_files(tmp_path, text, space="optimizer: {lr: {loguniform: [0.001, 0.1]}}\n")
    assert list(App.load(folder, check_space=check_search_space).files) == ["space.yaml"]
    write_files(tmp_path, text, space="epochs: 3\n")
    with pytest.raises(ConfigError, match="nothing to search"):
        App.load(folder, check_space=check_search_space)


def test_invalid_app_folders_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no app here. Create one with `voxlane app init NAME`"):
        App.load(tmp_path)
    write_files(tmp_path, "name: [")
    with pytest.raises(ConfigError, match="not YAML or JSON"):
        App.load(tmp_path)
    write_files(tmp_path, "<<<<<<< yours\nname: a\n=======\nname: b\n>>>>>>> template\n")
    with pytest.raises(ConfigError, match="unresolved conflict"):
        App.load(tmp_path)
    write_files(tmp_path, HEAD + "command: [x]\nfiles: {a: b}\n")
    with pytest.raises(ConfigError, match="files: no such field"):
        App.load(tmp_path)
