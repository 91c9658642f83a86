"""`app.yaml`: what an app is, checked when it is loaded.

name: kits19
image: registry.example/team/kits19
train: {data: gs://bucket/kits19-prepared, run: gs://bucket/runs/a, config: train.yaml}
nodes: 2
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import pydantic

from voxlane import settings
from voxlane.app.hidden import looks_secret, says_where
from voxlane.errors import ConfigError
from voxlane.kube.credentials import Credentials
from voxlane.launch import parallel
from voxlane.settings import record
from voxlane.sizes import bytes_of, seconds_of

FILE = "app.yaml"
Template = Literal["jobset", "rayjob", "trainjob", "tensorboard"]
REPLICATED = "node"
"""Of an app's one replicated job, also in Trainer's own runtimes; part of every pod's name."""
BOARD = "board"
DATA_PATH = "/var/lib/voxlane"
"""Folder on the nodes' disks for what is staged, where nobody says another."""
_LABEL = 63
_RAYJOB = 47
"""Characters that KubeRay's webhook leaves a RayJob's name."""

_NAME = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
_CORES = re.compile(r"^(\d+(\.\d+)?|\d+m)$")
_LABEL_KEY = re.compile(r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?$")
_LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?$")
_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_IMAGE = re.compile(
    r"^(?P<name>(?:[A-Za-z0-9][-A-Za-z0-9.]*(?::\d+)?/)?[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
    r"(?:/[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*)*)(?P<tag>:\w[\w.-]{0,127})?(?P<digest>@sha256:[0-9a-f]{64})?$"
)
_SECRET_NAME = re.compile(
    r"SECRET|PASSW|CREDENTIAL|PRIVATE|(^|_)TOKEN($|_)|API_?KEY|ACCESS_KEY|ACCOUNT_KEY|(^|_)KEY(_ID)?$", re.IGNORECASE
)
_SECRET_VALUE = re.compile(
    r"-----BEGIN|\"private_key\"\s*:|\bA(KIA|SIA)[A-Z0-9]{16}\b|\bgh[pousr]_\w{30,}|://[^/\s:@]+:[^/\s@]+@"
    r"|\bgithub_pat_\w{20,}|\bglpat-[-\w]{16,}|\bhf_[A-Za-z0-9]{30,}|\bxox[abprs]-[-\w]{10,}"
    r"|\bAccountKey=[A-Za-z0-9+/]|[?&]sig=[A-Za-z0-9%]"
)
_BUCKETS = ("gs://", "s3://", "az://")
_RESERVED = ("app.kubernetes.io/", "voxlane.dev/", "staged.voxlane.dev/")


def cores(text: str) -> float:
    """CPU cores of a quantity such as 4 or 500m."""
    return float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)


def _size(value: Any) -> Any:
    return value if isinstance(value, bool) or not isinstance(value, (int, str)) else _taken(bytes_of, value)


def _cores(value: Any) -> Any:
    text = str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
    if isinstance(text, str) and not (_CORES.match(text) and cores(text) > 0):
        raise ValueError(f"{text!r} is no number of cores; give it as 4 or 500m")
    return text


def _duration(value: Any) -> Any:
    return _taken(seconds_of, value) if isinstance(value, str) else value


def _taken(read: Callable[[Any], int], value: Any) -> str:
    """The value as text, if `read` takes it and it is above zero."""
    try:
        if read(value) > 0:
            return str(value)
        raise ValueError(f"{value!r}; give more than nothing")
    except ConfigError as error:
        raise ValueError(str(error).split(": ", 1)[1].replace(". Write one", "; write one")) from None


def _text(value: Any) -> Any:
    """What YAML takes for a number or a truth value, as Kubernetes wants it: text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, (int, float)) else value


def _label(value: Any) -> Any:
    text = _text(value)
    if isinstance(text, str) and not _LABEL_VALUE.match(text):
        raise ValueError(f"{text!r} is no label's value: at most 63 letters, digits, -, _ and .")
    return text


def _key(value: Any) -> Any:
    if isinstance(value, str) and not _LABEL_KEY.match(value):
        raise ValueError(f"{value!r} is no label's key; give one such as cloud.google.com/gke-nodepool")
    return value


def _object_name(value: Any) -> Any:
    if isinstance(value, str) and not (_SUBDOMAIN.match(value) and len(value) <= 253):
        raise ValueError(f"{value!r} is no name of an object: small letters, digits, - and .")
    return value


def _short_name(value: Any) -> Any:
    if isinstance(value, str) and not _NAME.match(value):
        raise ValueError(f"{value!r} is no name: small letters, digits and -, beginning with a letter")
    return value


def _no_secret(value: Any) -> Any:
    if isinstance(value, str) and _SECRET_VALUE.search(value):
        raise ValueError("it holds a secret, which manifests must not; put it into a Secret and name that")
    return value


def _bucket(value: Any) -> Any:
    if isinstance(value, str) and not value.startswith(_BUCKETS):
        raise ValueError(f"{value!r} is in no bucket, which all pods reach; give it as gs://, s3:// or az://")
    return _no_secret(value)


Size = Annotated[str, pydantic.BeforeValidator(_size)]
Cores = Annotated[str, pydantic.BeforeValidator(_cores)]
Duration = Annotated[str, pydantic.BeforeValidator(_duration)]
Text = Annotated[str, pydantic.BeforeValidator(_no_secret), pydantic.BeforeValidator(_text)]
Key = Annotated[str, pydantic.BeforeValidator(_key)]
Label = Annotated[str, pydantic.BeforeValidator(_label)]
ObjectName = Annotated[str, pydantic.BeforeValidator(_object_name)]
ShortName = Annotated[str, pydantic.Field(max_length=_LABEL), pydantic.BeforeValidator(_short_name)]
Bucket = Annotated[str, pydantic.BeforeValidator(_bucket)]


@record
class Train:
    """`voxlane train` on every device of every node."""

    data: Text
    """The prepared dataset: gs://, s3:// or az://, or the path of a staged one, such as /data/NAME."""
    run: Bucket
    """Where the run is kept; it goes on there after a restart."""
    config: str | None = None
    """A file of the app's folder, as for `voxlane train --config`."""
    set: dict[str, Any] = pydantic.Field(default_factory=dict)
    """Fields over those of the file, such as epochs: 100 or optimizer.lr: 0.001."""


@record
class Tune:
    """`voxlane tune` on a Ray cluster of the app's own."""

    space: str = "space.yaml"
    """A file of the app's folder: fields and distributions."""
    data: Text
    """The prepared dataset: gs://, s3:// or az://, or the path of a staged one, such as /data/NAME."""
    run: Bucket
    """Where the search is kept; it goes on there after a restart."""
    set: dict[str, Any] = pydantic.Field(default_factory=dict)
    """Fields over those of the space, such as tune.trials: 40."""


@record
class Resources:
    """What a pod asks for."""

    cpu: Cores | None = None
    """Cores, such as 8 or 500m; they may be exceeded where the node has more."""
    memory: Size | None = None
    """Memory, such as 32Gi, with what is in shared_memory; more ends the pod."""
    disk: Size | None = None
    """The node's disk that the pod may fill, such as 50Gi, without staged data."""


@record
class Toleration:
    """A taint of nodes that the app's pods may run on all the same."""

    key: str | None = None
    operator: Literal["Exists", "Equal"] = "Exists"
    value: Label | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


@record
class Topology:
    """That the app's nodes lie near one another."""

    required: Key | None = None
    """A node label all of whose pods must have the same value, such as cloud.google.com/gce-topology-block."""
    preferred: Key | None = None
    """The same, where it can be had."""

    @pydantic.model_validator(mode="after")
    def _one(self) -> Topology:
        if self.required and self.preferred:
            raise ValueError("required and preferred; give one of them")
        return self


@record
class Stage:
    """Data on the nodes' own disks before the app starts. With `name` alone: a StagedDataset that exists."""

    name: ShortName
    """The StagedDataset's name."""
    source: Text | None = None
    """gs://, s3:// or az:// prefix, or nfs://SERVER/PATH."""
    capacity: Size | None = None
    """A source larger than this is refused."""
    replicas: int | None = pydantic.Field(default=None, ge=1)
    """Nodes that get it; null: as many as the app has, or, with node_selector, all that it selects."""
    node_selector: dict[Key, Label] | None = None
    """Labels of those nodes; null: the app's."""
    path: str | None = None
    """Where pods find it; null: /data/NAME."""
    data_path: str = DATA_PATH
    """Folder on the nodes' disks."""
    timeout: Duration | None = None
    """How long a node's copy may take, such as 30m or 2h."""
    keep: bool = False
    """It stays when the app is undeployed, and is never evicted."""

    @pydantic.field_validator("source")
    @classmethod
    def _is_source(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith((*_BUCKETS, "nfs://")):
            raise ValueError(f"{value!r} cannot be staged; give gs://, s3://, az:// or nfs://SERVER/PATH")
        if value is not None and value.startswith("nfs://") and not re.match(r"^nfs://[^/]+/.", value):
            raise ValueError(f"{value!r} names no folder of a server; give nfs://SERVER/PATH")
        return value

    @pydantic.field_validator("path", "data_path")
    @classmethod
    def _is_path(cls, value: str | None) -> str | None:
        if value is not None and (not value.startswith("/") or ".." in value.split("/") or value.strip("/") == ""):
            raise ValueError(f"{value!r} is no absolute path of a folder")
        return value

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Stage:
        made = ("capacity", "replicas", "node_selector", "timeout")
        if self.source is None and (said := [name for name in made if getattr(self, name) is not None]):
            raise ValueError(f"{said[0]} is for data that the app stages itself; give its source, or the name alone")
        return self

    @property
    def mount(self) -> str:
        """Where pods find it."""
        return (self.path or f"/data/{self.name}").rstrip("/")


@record
class App:
    """A training app: what runs, on what, with which data."""

    name: ShortName
    """Of everything that it makes in the cluster."""
    template: Template = "jobset"
    """jobset: train or a command, on JobSet. rayjob: tune, or a command such as voxlane bench loading, on KubeRay.
    trainjob: train or a command, on Kubeflow Trainer. tensorboard: TensorBoard of `run`."""
    namespace: ObjectName | None = None
    """null: the one that kubectl is set to."""
    image: str
    """Without a tag: built from the folder's Dockerfile and tagged by its content. With one: used as it is."""
    pull_secret: ObjectName | None = None
    """A Secret with which nodes pull the image; null: nodes may pull it."""
    train: Train | None = None
    """Train a model. Exactly one of train, tune and command is given."""
    tune: Tune | None = None
    """Search for the config that scores best."""
    command: tuple[Text, ...] | None = pydantic.Field(default=None, min_length=1)
    """Words of any other program; `torchrun train.py` needs no more: its ranks find each other. voxlane's own, such as
    [voxlane, bench, loading, gs://bucket/data], need no torchrun."""
    run: Bucket | None = None
    """command: a bucket below which logs and a benchmark's result are kept, by the image's own voxlane. tensorboard:
    the run, search or folder of runs to show."""
    nodes: int = pydantic.Field(default=1, ge=1, le=1000)
    """Machines; of rayjob: Ray's workers, beside its head."""
    devices_per_node: int = pydantic.Field(default=1, ge=1, le=64)
    """GPUs, or processes on a CPU, of each."""
    device: Literal["cpu", "gpu"] = "cpu"
    """What it computes on."""
    gpu_resource: Key = "nvidia.com/gpu"
    """gpu: what nodes call them."""
    resources: Resources = Resources()
    """Of each node's pod."""
    head: Resources = Resources(cpu="2", memory="8Gi")
    """rayjob: of Ray's head, which drives the others and trains nothing."""
    shared_memory: Size | None = "2Gi"
    """Of /dev/shm, through which a loader's processes pass patches; null: the container engine's 64 MiB."""
    node_selector: dict[Key, Label] = pydantic.Field(default_factory=dict)
    """Labels of the nodes to run on."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes to run on all the same."""
    queue: ObjectName | None = None
    """Kueue's LocalQueue; null: started at once."""
    priority_class: ObjectName | None = None
    """Of its pods."""
    topology: Topology = Topology()
    """That its nodes lie near one another."""
    restarts: int = pydantic.Field(default=3, ge=0)
    """How often it starts again after a failure; preemptions and lost nodes do not count. trainjob: the runtime's own
    rule holds."""
    grace_s: int = pydantic.Field(default=120, ge=10, le=3600)
    """Seconds that a pod has to save when it is told to stop."""
    ttl_s: int | None = pydantic.Field(default=None, ge=0)
    """Seconds after which what has finished is removed; null: it stays until undeploy."""
    runtime: ObjectName = "torch-distributed"
    """trainjob: the ClusterTrainingRuntime."""
    credentials: Credentials = Credentials()
    """How pods reach buckets."""
    env: dict[str, Text] = pydantic.Field(default_factory=dict)
    """Variables of the container; values that are no secret."""
    stage: tuple[Stage, ...] = ()
    """Data on the nodes' own disks."""
    files: dict[str, str] = pydantic.Field(default_factory=dict)
    """Text of the folder's files that pods read; filled by `load`."""

    @classmethod
    def load(cls, folder: str | os.PathLike[str] = ".", *, deep: bool = True) -> App:
        """The app of a folder, checked. `deep`: the files that it names are read and checked too, which takes the
        seconds that torch loads in; without, it cannot be rendered."""
        path = os.path.join(os.fspath(folder), FILE)
        if not os.path.isfile(path):
            raise ConfigError(
                "there is no app here", uri=path, fix="Make one with `voxlane app init NAME`, or name its folder"
            )
        with open(path, encoding="utf-8", errors="replace") as file:
            if any(line.startswith("<<<<<<< ") for line in file):
                raise ConfigError("an update's conflict is not resolved", uri=path, fix="Look for <<<<<<< in it")
        values = settings.read_file(path)
        if "files" in values:
            raise ConfigError("files: no such field", uri=path)
        app = settings.build(cls, values, origin=path)
        return dataclasses.replace(app, files=_files(app, os.fspath(folder), path)) if deep else app

    @pydantic.field_validator("image")
    @classmethod
    def _is_image(cls, value: str) -> str:
        if not _IMAGE.match(value):
            raise ValueError(f"{value!r} is no image's name; give it as registry.example/team/name")
        return value

    @pydantic.field_validator("env")
    @classmethod
    def _are_plain(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not _VARIABLE.match(name):
                raise ValueError(f"{name!r} is no variable's name")
            if looks_secret(name) or (_SECRET_NAME.search(name) and not says_where(name)):
                raise ValueError(
                    f"the name {name} is a secret's, and values here end in manifests; put it into a Secret and name "
                    "that as credentials.secret"
                )
        return value

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> App:
        for check in (_check_work, _check_name, _check_resources, _check_stage):
            check(self)
        return self

    @property
    def run_uri(self) -> str | None:
        """Where its run is kept, without a slash at the end."""
        work = self.train or self.tune
        found = work.run if work else self.run
        return found.rstrip("/") if found else None

    @property
    def parallel(self) -> parallel.Parallel | None:
        """What it runs on all its nodes, if that is a command of voxlane's; None: any other program, or none."""
        if self.command is not None:
            return parallel.found(self.command[1:]) if self.command[0] == "voxlane" else None
        said = [name for name in ("train", "tune") if getattr(self, name) is not None]
        return parallel.found(said)

    @property
    def file_names(self) -> list[str]:
        """The folder's files that pods read."""
        named = [self.train.config if self.train else None, self.tune.space if self.tune else None]
        return [name for name in named if name is not None]

    @property
    def built(self) -> bool:
        """Whether its image is built from the folder: whether it names neither tag nor digest."""
        found = _IMAGE.match(self.image)
        return found is not None and not found["tag"] and not found["digest"]

    @property
    def workload(self) -> tuple[str, str]:
        """apiVersion and kind of what runs."""
        return WORKLOADS[self.template]


WORKLOADS: Mapping[Template, tuple[str, str]] = {
    "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    "rayjob": ("ray.io/v1", "RayJob"),
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
    "tensorboard": ("apps/v1", "Deployment"),
}


def name_limit(template: Template, nodes: int) -> int:
    """Characters that an app's name may have: its longest pod's name, host and service are labels of 63."""
    if template == "rayjob":
        return _RAYJOB
    if template == "tensorboard":
        return _LABEL - len(f"-{BOARD}")
    return _LABEL - len(f"-{REPLICATED}-0-{nodes - 1}-xxxxx")


def _check_work(app: App) -> None:
    said = [name for name in ("train", "tune", "command") if getattr(app, name) is not None]
    if app.template == "tensorboard":
        if said:
            raise ValueError(f"{said[0]}: template tensorboard shows a run and trains nothing; give `run` alone")
        if app.run is None:
            raise ValueError("run: missing; template tensorboard shows it")
        return
    if len(said) != 1:
        what = " and ".join(said) if said else "none"
        raise ValueError(f"exactly one of train, tune and command is wanted, not {what}")
    if app.command is None and app.run is not None:
        raise ValueError(f"run: give it as {said[0]}.run")
    if app.template not in (fitting := _templates(app)):
        raise ValueError(f"{said[0]}: it runs on template {' or '.join(fitting)}, not {app.template}")
    _check_result(app)
    for field in ("priority_class", "ttl_s"):
        if app.template == "trainjob" and getattr(app, field) is not None:
            raise ValueError(f"{field}: a TrainJob takes none; give it in the runtime, or use template jobset")
    if app.template != "trainjob" and app.runtime != "torch-distributed":
        raise ValueError("runtime: it is for template trainjob")


def _templates(app: App) -> list[str]:
    """What can run the app's work."""
    known = app.parallel
    if app.tune is not None:
        return ["rayjob"]
    on_ray = app.command is not None and known is not None and known.ray is not None
    # One process alone is any program's; several of a command that knows only Ray would each do all of its work.
    as_ranks = known is None or known.torchrun or app.nodes * app.devices_per_node == 1
    return [*(["jobset", "trainjob"] if as_ranks else []), *(["rayjob"] if on_ray else [])]


def _check_result(app: App) -> None:
    """What a benchmark writes must be where it outlives the pod."""
    if app.command is None or app.parallel is None or not app.parallel.result:
        return
    out = parallel.options(app.command).get("--out")
    if out is None and app.run is None:
        raise ValueError(
            f"run: missing; the result of `voxlane {app.parallel.name}` goes with its pod unless a bucket keeps it"
        )
    if out is not None and not out.startswith(_BUCKETS):
        raise ValueError(f"command: --out {out} goes with the pod; give it as gs://, s3:// or az://, or give `run`")


def _check_name(app: App) -> None:
    limit = name_limit(app.template, app.nodes)
    if len(app.name) > limit:
        raise ValueError(
            f"name: {app.name!r} has {len(app.name)} characters, and names of {app.workload[1]}'s pods leave it {limit}"
        )


def _check_resources(app: App) -> None:
    memory, shared = app.resources.memory, app.shared_memory
    if memory and shared and bytes_of(shared) >= bytes_of(memory):
        raise ValueError(f"shared_memory: {shared} is part of resources.memory, {memory}; give less")
    for key in app.node_selector:
        if key.startswith(_RESERVED):
            raise ValueError(f"node_selector: {key} is set by voxlane; use `stage` for data")
    if app.device == "gpu" and "/" not in app.gpu_resource:
        raise ValueError(f"gpu_resource: {app.gpu_resource!r}; give it as nvidia.com/gpu or amd.com/gpu")


def _check_stage(app: App) -> None:
    if app.stage and app.template == "tensorboard":
        raise ValueError("stage: TensorBoard reads the bucket")
    names = [one.name for one in app.stage]
    mounts = [one.mount for one in app.stage]
    for what, values in (("name", names), ("path", mounts)):
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"stage: two of them have the {what} {twice[0]}")
    for one in app.stage:
        if one.replicas is not None and one.replicas < app.nodes:
            raise ValueError(
                f"stage: {one.name} on {one.replicas} nodes, and the app runs on {app.nodes}; give as many replicas"
            )
        if one.source and app.device == "gpu" and not (app.node_selector or one.node_selector):
            raise ValueError(
                f"stage: {one.name} could land on nodes without GPUs; give node_selector, such as "
                '{nvidia.com/gpu.present: "true"}'
            )
    for work, name in ((app.train, "train"), (app.tune, "tune")):
        if work is None or work.data.startswith(_BUCKETS):
            continue
        if not any(work.data == mount or work.data.startswith(f"{mount}/") for mount in mounts):
            fix = f", or the path of staged data: {', '.join(mounts)}" if mounts else ""
            raise ValueError(f"{name}.data: {work.data!r} is in no bucket; give it as gs://, s3:// or az://{fix}")


def staged_data(app: App) -> Stage | None:
    """The staged copy of the bucket's data that the app trains on: the one with that source, or the only one that
    exists already."""
    work = app.train or app.tune
    if work is None or not work.data.startswith(_BUCKETS):
        return None
    same = [one for one in app.stage if one.source and one.source.rstrip("/") == work.data.rstrip("/")]
    known = [one for one in app.stage if one.source is None]
    return same[0] if same else known[0] if len(known) == 1 else None


def overrides(values: Mapping[str, Any]) -> list[str]:
    """`field=value` words for the command line."""
    import json

    import yaml

    words = []
    for name, value in values.items():
        text = value if isinstance(value, str) and yaml.safe_load(value) == value else json.dumps(value)
        words.append(f"{name}={text}")
    return words


def _files(app: App, folder: str, origin: str) -> dict[str, str]:
    """The files that pods read, by name; each is checked as the command that reads it will."""
    field = "train.config" if app.train is not None else "tune.space"
    found = {name: _read(folder, name, field, origin) for name in app.file_names}
    if app.train is not None and (app.train.config or app.train.set):
        _check_train(app.train, folder, origin)
    if app.tune is not None:
        _check_space(app.tune, folder, origin)
    return found


def _read(folder: str, name: str, field: str, origin: str) -> str:
    if os.path.basename(name) != name or not re.match(r"^[-\w.]+$", name):
        raise ConfigError(f"{field}: {name!r} is no file of the app's folder", uri=origin, fix="Give its name alone")
    path = os.path.join(folder, name)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise ConfigError(f"{field}: cannot read {name}: {why}", uri=origin) from None
    if _SECRET_VALUE.search(text):
        raise ConfigError(
            "it holds a secret, and pods read it from a ConfigMap", uri=path, fix="Use credentials.secret"
        )
    return text


def _said(folder: str, name: str | None, values: Mapping[str, Any]) -> dict[str, Any]:
    said = settings.read_file(os.path.join(folder, name)) if name else {}
    for override in overrides(values):
        settings.set_dotted(said, override)
    return said


def _check_train(train: Train, folder: str, origin: str) -> None:
    from voxlane.store import StoreConfig
    from voxlane.train import config as configs

    path = os.path.join(folder, train.config) if train.config else origin
    said = _said(folder, train.config, train.set)
    _refuse_secrets(said, "", path)
    part = said.pop("store", None) or {}
    if not isinstance(part, dict):
        raise ConfigError(f"store: it holds fields, not {part!r}", uri=path)
    StoreConfig.from_dict({str(name): value for name, value in part.items()})
    configs.build(said, origin=path)


def _check_space(tune: Tune, folder: str, origin: str) -> None:
    from voxlane.tune import space

    path = os.path.join(folder, tune.space)
    said = _said(folder, tune.space, tune.set)
    _refuse_secrets(said, "", path)
    space.parse(said, origin=path)


def _refuse_secrets(values: Mapping[str, Any], prefix: str, origin: str) -> None:
    """Config fields become arguments and a ConfigMap, which everybody who may look at the app can read."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            _refuse_secrets(value, f"{prefix}{name}.", origin)
        elif value is not None and (_SECRET_NAME.search(str(name)) or _SECRET_VALUE.search(str(value))):
            raise ConfigError(
                f"{prefix}{name}: a secret, which would end in a manifest",
                uri=origin,
                fix="Put it into a Secret and name that as credentials.secret",
            )
