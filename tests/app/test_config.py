"""app.yaml: what is right is taken, what is wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from voxlane import settings
from voxlane.app.config import App, Stage, name_limit, overrides, staged_data
from voxlane.errors import ConfigError

TRAIN = {"data": "gs://b/kits", "run": "gs://b/runs/a"}
LOADING = ["voxlane", "bench", "loading", "gs://b/kits"]
BASE: dict[str, Any] = {"name": "kits", "image": "registry.example/team/kits"}


def app(**values: Any) -> App:
    given = {**BASE, **values}
    if not {"train", "tune", "command", "run"} & set(values):
        given["train"] = TRAIN
    return settings.build(App, given, origin="app.yaml")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "Kits"}, "name: 'Kits' is no name"),
        ({"name": "1kits"}, "name: '1kits' is no name"),
        ({"name": "k" * 49}, "has 49 characters, and names of JobSet's pods leave it 48"),
        ({"name": "k" * 48, "nodes": 11}, "leave it 47"),
        ({"name": "k" * 48, "template": "rayjob", "train": None, "tune": TRAIN}, "RayJob's pods leave it 47"),
        ({"image": "Registry/Team Kits"}, "is no image's name"),
        ({"train": None}, "exactly one of train, tune and command is wanted, not none"),
        ({"train": TRAIN, "command": ["x"]}, "not train and command"),
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
        ({"command": LOADING}, "run: missing; the result of `voxlane bench loading` goes with its pod"),
        ({"command": [*LOADING, "--out", "a.json"], "run": "gs://b/r"}, "command: --out a.json goes with the pod"),
        ({"command": [*LOADING, "--out=/tmp/a.json"]}, "command: --out /tmp/a.json goes with the pod"),
        ({"train": TRAIN, "template": "tensorboard"}, "give `run` alone"),
        ({"train": None, "template": "tensorboard"}, "run: missing"),
        ({"train": {**TRAIN, "run": "runs/a"}}, "train.run: 'runs/a' is in no bucket"),
        ({"train": {**TRAIN, "data": "/data/kits"}}, "train.data: '/data/kits' is in no bucket"),
        ({"train": {**TRAIN, "rum": "x"}}, "train.rum: no such field"),
        ({"nodes": 0}, "nodes: "),
        ({"nodes": "two"}, "nodes: a whole number is wanted, not 'two'"),
        ({"nods": 2}, "Did you mean nodes?"),
        ({"device": "tpu"}, "device: "),
        ({"device": "gpu", "gpu_resource": "gpu"}, "give it as nvidia.com/gpu"),
        ({"resources": {"memory": "16GB"}}, "resources.memory: '16GB' is no size; write one such as 100Gi"),
        ({"resources": {"cpu": "4 cores"}}, "resources.cpu: '4 cores' is no number of cores"),
        ({"resources": {"memory": "2Gi"}}, "shared_memory: 2Gi is part of resources.memory, 2Gi"),
        ({"shared_memory": "0"}, "shared_memory: '0'; give more than nothing"),
        ({"node_selector": {"a b": "c"}}, "is no label's key"),
        ({"node_selector": {"a": "b c"}}, "is no label's value"),
        ({"node_selector": {"staged.voxlane.dev/x": "ready"}}, "use `stage` for data"),
        ({"topology": {"required": "a/b", "preferred": "a/c"}}, "give one of them"),
        ({"queue": "Team Queue"}, "queue: 'Team Queue' is no name of an object"),
        ({"grace_s": 5}, "grace_s: "),
        ({"env": {"AWS_SECRET_ACCESS_KEY": "x"}}, "env: the name AWS_SECRET_ACCESS_KEY is a secret's"),
        ({"env": {"HF_TOKEN": "x"}}, "env: the name HF_TOKEN is a secret's"),
        ({"env": {"AZURE_STORAGE_CONNECTION_STRING": "x"}}, "the name AZURE_STORAGE_CONNECTION_STRING is a secret's"),
        ({"env": {"DB_PASS": "x"}}, "env: the name DB_PASS is a secret's"),
        ({"env": {"BLOBS": "AccountName=a;AccountKey=Zm9v"}}, "env.BLOBS: it holds a secret"),
        ({"env": {"READ": "https://a.example/b?sv=1&sig=abc"}}, "env.READ: it holds a secret"),
        ({"env": {"HUB": "glpat-abcdefghijklmnopqrst"}}, "env.HUB: it holds a secret"),
        ({"env": {"PROXY": "http://me:pass@proxy.example"}}, "env.PROXY: it holds a secret"),
        ({"env": {"A B": "x"}}, "'A B' is no variable's name"),
        ({"command": ["curl", "-u", "AKIAABCDEFGHIJKLMNOP"]}, "command.2: it holds a secret"),
        ({"credentials": {"file": "key.json"}}, "credentials: file: key.json is a key of a Secret"),
        ({"credentials": {"secret": "-----BEGIN PRIVATE KEY"}}, "credentials.secret: this is no name of an object"),
        ({"credentials": {"endpoint": "minio:9000"}}, "credentials.endpoint: this is no server"),
        ({"stage": [{"name": "kits", "source": "/disk"}]}, "stage.0.source: '/disk' cannot be staged"),
        ({"stage": [{"name": "kits", "source": "nfs://server"}]}, "names no folder of a server"),
        ({"stage": [{"name": "kits", "source": "gs://b/k", "timeout": "soon"}]}, "stage.0.timeout: 'soon' is no time"),
        ({"stage": [{"name": "kits", "capacity": "1Gi"}]}, "capacity is for data that the app stages itself"),
        ({"stage": [{"name": "kits"}, {"name": "kits"}]}, "two of them have the name kits"),
        ({"stage": [{"name": "a", "path": "/d"}, {"name": "b", "path": "/d/"}]}, "two of them have the path /d"),
        ({"stage": [{"name": "kits", "path": "data"}]}, "is no absolute path"),
        ({"nodes": 3, "stage": [{"name": "k", "source": "gs://b/k", "replicas": 2}]}, "the app runs on 3"),
        ({"device": "gpu", "stage": [{"name": "k", "source": "gs://b/k"}]}, "could land on nodes without GPUs"),
        ({"template": "trainjob", "priority_class": "high"}, "priority_class: a TrainJob takes none"),
        ({"template": "trainjob", "ttl_s": 5}, "ttl_s: a TrainJob takes none"),
        ({"runtime": "mine"}, "runtime: it is for template trainjob"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        app(**values)
    assert said in str(caught.value)
    assert str(caught.value).startswith("app.yaml: ")
    assert "App:" not in str(caught.value)


def test_a_secret_is_not_repeated_in_the_error() -> None:
    with pytest.raises(ConfigError) as caught:
        app(credentials={"secret": "AbC/secret+value="})
    assert "AbC" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "NCCL_DEBUG", "MONKEY", "AWS_WEB_IDENTITY_TOKEN_FILE"]
)
def test_variables_that_are_no_secret_are_taken(name: str) -> None:
    assert app(env={name: 1}).env == {name: "1"}


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
def test_an_image_without_a_tag_is_built(image: str, built: bool) -> None:
    assert app(image=image).built is built


def test_names_fill_what_pods_leave_them() -> None:
    for template, nodes in (("jobset", 1), ("jobset", 10), ("jobset", 1000), ("trainjob", 11)):
        limit = name_limit(template, nodes)  # type: ignore[arg-type]
        pod = f"{'k' * limit}-node-0-{nodes - 1}-abcde"
        assert len(pod) == 63
        app(name="k" * limit, template=template, nodes=nodes)


def test_overrides_come_back_as_they_were() -> None:
    values = {"epochs": 3, "optimizer.name": "adamw", "fold": None, "patch": [8, 8, 8], "loader.disk_cache": "1e3"}
    said: dict[str, Any] = {}
    for word in overrides(values):
        settings.set_dotted(said, word)
    assert said == {
        "epochs": 3,
        "optimizer": {"name": "adamw"},
        "fold": None,
        "patch": [8, 8, 8],
        "loader": {"disk_cache": "1e3"},
    }


def test_the_staged_copy_of_the_data_is_found_by_its_source() -> None:
    other, same = {"name": "other", "source": "gs://b/other"}, {"name": "same", "source": "gs://b/kits/"}
    assert staged_data(app(stage=[other, same])) == Stage(name="same", source="gs://b/kits/")
    assert staged_data(app(stage=[other])) is None
    assert staged_data(app(stage=[other, {"name": "there"}])) == Stage(name="there")
    assert staged_data(app(stage=[{"name": "a"}, {"name": "b"}])) is None
    assert staged_data(app(command=["x"], stage=[same])) is None


def write(folder: Path, text: str, **files: str) -> Path:
    folder.joinpath("app.yaml").write_text(text)
    for name, content in files.items():
        folder.joinpath(f"{name}.yaml").write_text(content)
    return folder


HEAD = "name: kits\nimage: kits\n"


def test_files_are_read_and_checked(tmp_path: Path) -> None:
    text = HEAD + "train: {data: gs://b/kits, run: gs://b/r, config: train.yaml, set: {epochs: 3}}\n"
    folder = write(tmp_path, text, train="preset: small\n")
    assert App.load(folder).files == {"train.yaml": "preset: small\n"}
    assert App.load(folder, deep=False).files == {}
    write(tmp_path, text, train="preset: small\noptimizer: {lrr: 1}\n")
    with pytest.raises(ConfigError, match=r"train.yaml: optimizer.lrr: no such field. Did you mean optimizer.lr\?"):
        App.load(folder)
    write(tmp_path, text.replace("epochs: 3", "epochs: none"), train="preset: small\n")
    with pytest.raises(ConfigError, match=r"epochs: a whole number is wanted"):
        App.load(folder)
    write(tmp_path, text, train="store: {}\n# -----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(ConfigError, match="it holds a secret"):
        App.load(folder)
    write(tmp_path, text, train="store: {secret_access_key: x}\n")
    with pytest.raises(ConfigError, match=r"train.yaml: store.secret_access_key: a secret, which would end in a man"):
        App.load(folder)
    write(tmp_path, text, train="store: {regoin: x}\n")
    with pytest.raises(ConfigError, match="regoin"):
        App.load(folder)
    tmp_path.joinpath("train.yaml").unlink()
    with pytest.raises(ConfigError, match=r"train.config: cannot read train.yaml: No such file"):
        App.load(folder)
    write(tmp_path, text.replace("train.yaml", "../train.yaml"))
    with pytest.raises(ConfigError, match="no file of the app's folder"):
        App.load(folder)


def test_a_space_is_checked(tmp_path: Path) -> None:
    text = HEAD + "template: rayjob\ntune: {data: gs://b/kits, run: gs://b/r}\n"
    folder = write(tmp_path, text, space="optimizer: {lr: {loguniform: [0.001, 0.1]}}\n")
    assert list(App.load(folder).files) == ["space.yaml"]
    write(tmp_path, text, space="epochs: 3\n")
    with pytest.raises(ConfigError, match="nothing to search"):
        App.load(folder)


def test_what_is_no_app_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no app here. Make one with `voxlane app init NAME`"):
        App.load(tmp_path)
    write(tmp_path, "name: [")
    with pytest.raises(ConfigError, match="not YAML or JSON"):
        App.load(tmp_path)
    write(tmp_path, "<<<<<<< yours\nname: a\n=======\nname: b\n>>>>>>> template\n")
    with pytest.raises(ConfigError, match="conflict is not resolved"):
        App.load(tmp_path)
    write(tmp_path, HEAD + "command: [x]\nfiles: {a: b}\n")
    with pytest.raises(ConfigError, match="files: no such field"):
        App.load(tmp_path)
