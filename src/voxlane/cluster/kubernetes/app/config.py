"""The config of an app, `app.yaml`, checked when it is loaded.

name: kits19
image: registry.example/team/kits19
train: {data: gs://bucket/kits19-prepared, run: gs://bucket/runs/a, config: train.yaml}
nodes: 2
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import pydantic
import yaml

from voxlane import settings
from voxlane.cluster import commands
from voxlane.cluster.kubernetes.app.k8s import BOARD, WORKLOADS
from voxlane.cluster.kubernetes.credentials import Credentials, matching
from voxlane.cluster.kubernetes.names import DATA_PATH
from voxlane.errors import ConfigError
from voxlane.redaction import holds_known_secret, holds_secret, is_secret_field, looks_secret
from voxlane.settings import record
from voxlane.sizes import parse_bytes, parse_duration

FILE = "app.yaml"
SpaceCheck = Callable[[Mapping[str, Any], str], object]
"""Checks the values of a search space; the second argument is the path to name in errors."""
Template = Literal["jobset", "rayjob", "trainjob", "tensorboard"]
REPLICATED_JOB = "node"
"""Name of an app's only replicated job, as in Trainer's own runtimes; part of every pod's name."""
_MAX_LABEL_LENGTH = 63
_MAX_RAYJOB_LENGTH = 47
"""Longest name of a RayJob that KubeRay's webhook accepts."""

_SHORT_NAME = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
_CORES = re.compile(r"^(?![0.]+m?$)(\d+(\.\d+)?|\d+m)$")
_LABEL_KEY = re.compile(r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?$")
_LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?$")
_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_IMAGE = re.compile(
    r"^(?P<name>(?:[A-Za-z0-9][-A-Za-z0-9.]*(?::\d+)?/)?[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
    r"(?:/[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*)*)(?P<tag>:\w[\w.-]{0,127})?(?P<digest>@sha256:[0-9a-f]{64})?$"
)
_BUCKETS = ("gs://", "s3://", "az://")
_RESERVED_PREFIXES = ("app.kubernetes.io/", "voxlane.dev/", "staged.voxlane.dev/")
_USE_SECRET = "put it into a Secret and name the Secret as credentials.secret"


def parse_cores(text: str) -> float:
    """Return the number of CPU cores of a quantity such as 4 or 500m."""
    return float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)


def _check_amount(parse: Callable[[Any], float], types: tuple[type, ...], expected: str) -> pydantic.BeforeValidator:
    """Return a validator of amounts above zero that `parse` accepts; it returns values of these types as text."""

    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, types):
            return value
        try:
            amount = parse(value)
        except ConfigError:
            raise ValueError(f"{value!r} is not {expected}") from None
        if amount <= 0:
            raise ValueError(f"expected more than zero, got {value!r}")
        return str(value)

    return pydantic.BeforeValidator(check)


def _to_text(value: Any) -> Any:
    """Convert the numbers and booleans that YAML reads to text, which Kubernetes expects."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, (int, float)) else value


_TO_TEXT = pydantic.BeforeValidator(_to_text)


def _check_no_secret(value: Any) -> Any:
    if isinstance(value, str) and holds_secret(value):
        raise ValueError("it contains a secret, which manifests must not; put it into a Secret and name that")
    return value


def _check_bucket(value: Any) -> Any:
    if isinstance(value, str) and not value.startswith(_BUCKETS):
        raise ValueError(f"{value!r} is not in a bucket, which all pods can reach; give it as gs://, s3:// or az://")
    return _check_no_secret(value)


Size = Annotated[str, _check_amount(parse_bytes, (int, str), "a size; give one such as 100Gi")]
Duration = Annotated[str, _check_amount(parse_duration, (str,), "a duration; give one such as 2h or 30m")]
Text = Annotated[str, pydantic.BeforeValidator(_check_no_secret), _TO_TEXT]
Cores = Annotated[str, matching(_CORES, "a number of cores; give it as 4 or 500m"), _TO_TEXT]
Key = Annotated[str, matching(_LABEL_KEY, "the key of a label; give one such as cloud.google.com/gke-nodepool")]
_LABEL_ERROR = "the value of a label: at most 63 letters, digits, -, _ and ."
Label = Annotated[str, matching(_LABEL_VALUE, _LABEL_ERROR), _TO_TEXT]
_OBJECT_ERROR = "the name of an object: lowercase letters, digits, - and ."
ObjectName = Annotated[str, pydantic.Field(max_length=253), matching(_SUBDOMAIN, _OBJECT_ERROR)]
_NAME_ERROR = "a valid name: use lowercase letters, digits and -, starting with a letter"
ShortName = Annotated[str, pydantic.Field(max_length=_MAX_LABEL_LENGTH), matching(_SHORT_NAME, _NAME_ERROR)]
Bucket = Annotated[str, pydantic.BeforeValidator(_check_bucket)]


@record
class Train:
    """Run `voxlane train` on every device of every node."""

    data: Text
    """Prepared dataset: a gs://, s3:// or az:// URI, or the path of staged data, such as /data/NAME."""
    run: Bucket
    """Bucket URI of the run, which continues there after a restart."""
    config: str | None = None
    """Name of a config file in the app's folder, as for `voxlane train --config`."""
    set: dict[str, Any] = pydantic.Field(default_factory=dict)
    """Config fields that override those of the file, such as epochs: 100 or optimizer.lr: 0.001."""


@record
class Tune:
    """Run `voxlane tune` on a Ray cluster of the app's own."""

    space: str = "space.yaml"
    """Name of a file in the app's folder with the search space: fields and distributions."""
    data: Text
    """Prepared dataset: a gs://, s3:// or az:// URI, or the path of staged data, such as /data/NAME."""
    run: Bucket
    """Bucket URI of the search, which continues there after a restart."""
    set: dict[str, Any] = pydantic.Field(default_factory=dict)
    """Fields that override those of the space, such as tune.trials: 40."""


@record
class Resources:
    """Resources that a pod requests."""

    cpu: Cores | None = None
    """Number of cores, such as 8 or 500m; a pod may use more if the node has more."""
    memory: Size | None = None
    """Memory, such as 32Gi, including shared_memory; a pod that uses more is killed."""
    disk: Size | None = None
    """Space that the pod may use on the node's disk, such as 50Gi, without staged data."""


@record
class Toleration:
    """A taint of nodes that the app's pods tolerate."""

    key: str | None = None
    operator: Literal["Exists", "Equal"] = "Exists"
    value: Label | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


@record
class Topology:
    """Place the app's pods near one another."""

    required: Key | None = None
    """Node label that must have the same value for all pods, such as cloud.google.com/gce-topology-block."""
    preferred: Key | None = None
    """Node label that should have the same value for all pods, if possible."""

    @pydantic.model_validator(mode="after")
    def _check_exclusive(self) -> Topology:
        if self.required and self.preferred:
            raise ValueError("required and preferred are both given; give one of them")
        return self


@record
class Stage:
    """Data that is copied to the nodes' own disks before the app starts. With `name` alone, an existing
    StagedDataset."""

    name: ShortName
    """Name of the StagedDataset."""
    source: Text | None = None
    """Source of the data: a gs://, s3:// or az:// prefix, or nfs://SERVER/PATH."""
    capacity: Size | None = None
    """Maximum size of the source; a larger source is rejected."""
    replicas: int | None = pydantic.Field(default=None, ge=1)
    """Number of nodes that get a copy; null: as many as the app has, or, with node_selector, all that it selects."""
    node_selector: dict[Key, Label] | None = None
    """Labels of the nodes that get a copy; null: those of the app."""
    path: str | None = None
    """Path of the data in pods; null: /data/NAME."""
    data_path: str = DATA_PATH
    """Folder for the data on the nodes' disks: one of those that the operator allows."""
    timeout: Duration | None = None
    """Maximum time for a node's copy, such as 30m or 2h."""
    keep: bool = False
    """Keep the data when the app is undeployed, and never evict it."""

    @pydantic.field_validator("source")
    @classmethod
    def _check_source(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith((*_BUCKETS, "nfs://")):
            raise ValueError(f"{value!r} cannot be staged; give gs://, s3://, az:// or nfs://SERVER/PATH")
        if value is not None and value.startswith("nfs://") and not re.match(r"^nfs://[^/]+/.", value):
            raise ValueError(f"{value!r} does not name a folder of a server; give nfs://SERVER/PATH")
        return value

    @pydantic.field_validator("path", "data_path")
    @classmethod
    def _check_path(cls, value: str | None) -> str | None:
        if value is not None and (not value.startswith("/") or ".." in value.split("/") or value.strip("/") == ""):
            raise ValueError(f"{value!r} is not the absolute path of a folder")
        return value

    @pydantic.model_validator(mode="after")
    def _check_consistency(self) -> Stage:
        for name in ("capacity", "replicas", "node_selector", "timeout"):
            if self.source is None and getattr(self, name) is not None:
                raise ValueError(f"{name} is for data that the app stages itself; give its source, or the name alone")
        return self

    @property
    def mount(self) -> str:
        """Path of the data in pods."""
        return (self.path or f"/data/{self.name}").rstrip("/")


@record
class App:
    """A training app: what it runs, on which nodes and with which data."""

    name: ShortName
    """Name of the app, and of everything that it creates in the cluster."""
    template: Template = "jobset"
    """jobset: train or a command, on JobSet. rayjob: tune, or a command such as voxlane bench loading, on KubeRay.
    trainjob: train or a command, on Kubeflow Trainer. tensorboard: TensorBoard of `run`."""
    namespace: ObjectName | None = None
    """Namespace in the cluster; null: that of the current kubectl context."""
    image: Annotated[str, matching(_IMAGE, "the name of an image; give it as registry.example/team/name")]
    """Container image. Without a tag, it is built from the folder's Dockerfile and tagged by its content. With a tag,
    it is used as it is."""
    pull_secret: ObjectName | None = None
    """Name of the Secret with which nodes pull the image; null: no Secret is needed."""
    train: Train | None = None
    """Train a model. Give exactly one of train, tune and command."""
    tune: Tune | None = None
    """Search for the config with the best score."""
    command: tuple[Text, ...] | None = pydantic.Field(default=None, min_length=1)
    """Any other program and its arguments. `torchrun train.py` needs no further options: its ranks find each other.
    voxlane's own commands, such as [voxlane, bench, loading, gs://bucket/data], need no torchrun."""
    run: Bucket | None = None
    """Bucket URI below which the image's own voxlane stores logs and a benchmark's result (for apps with `command`), or
    the run, search or folder of runs to show (template tensorboard)."""
    nodes: int = pydantic.Field(default=1, ge=1, le=1000)
    """Number of machines; with rayjob, Ray's workers, in addition to its head."""
    devices_per_node: int = pydantic.Field(default=1, ge=1, le=64)
    """Number of GPUs, or of processes on the CPU, on each node."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Device to compute on."""
    gpu_resource: Key = "nvidia.com/gpu"
    """Resource name of the nodes' GPUs."""
    resources: Resources = Resources()
    """Resources of each node's pod."""
    head: Resources = Resources(cpu="2", memory="8Gi")
    """Resources of Ray's head (rayjob), which coordinates the workers and does not train."""
    shared_memory: Size | None = "2Gi"
    """Size of /dev/shm, through which the loader's processes pass patches; null: the container engine's 64 MiB."""
    node_selector: dict[Key, Label] = pydantic.Field(default_factory=dict)
    """Labels of the nodes to run on."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes that pods, and the pods that stage their data, tolerate."""
    user: int | None = pydantic.Field(default=1000, ge=0)
    """User and group id that pods run as; null: the user of the image, which must be a number. Namespaces that enforce
    the Pod Security level restricted refuse 0 (root)."""
    queue: ObjectName | None = None
    """Name of Kueue's LocalQueue; null: the app starts at once."""
    priority_class: ObjectName | None = None
    """Priority class of the pods."""
    topology: Topology = Topology()
    """Placement of the pods near one another."""
    restarts: int = pydantic.Field(default=3, ge=0)
    """Number of restarts after a failure; preemptions and lost nodes do not count. With trainjob, the runtime
    decides."""
    grace_s: int = pydantic.Field(default=120, ge=10, le=3600)
    """Seconds that a pod has to save its state when it must stop."""
    ttl_s: int | None = pydantic.Field(default=None, ge=0)
    """Seconds after which a finished app is removed; null: it stays until undeploy."""
    runtime: ObjectName = "torch-distributed"
    """Name of the ClusterTrainingRuntime (trainjob)."""
    credentials: Credentials = Credentials()
    """How pods get access to buckets."""
    env: dict[str, Text] = pydantic.Field(default_factory=dict)
    """Environment variables of the container; their values must not be secret."""
    stage: tuple[Stage, ...] = ()
    """Data to copy to the nodes' own disks."""
    files: dict[str, str] = pydantic.Field(default_factory=dict)
    """Text of the folder's files that pods read; filled by `load`."""

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str] = ".", *, deep: bool = True, check_space: SpaceCheck | None = None
    ) -> App:
        """Load and check the app of a folder. With `deep`, also read and check the files that it names, which takes
        the seconds that torch needs to load; an app loaded without `deep` cannot be rendered. `check_space` gets the
        values of a search space and the path to name in errors; with None, a search space is read but not checked."""
        path = os.path.join(os.fspath(folder), FILE)
        if not os.path.isfile(path):
            fix = "Create one with `voxlane app init NAME`, or name its folder"
            raise ConfigError("there is no app here", uri=path, fix=fix)
        with open(path, encoding="utf-8", errors="replace") as file:
            if any(line.startswith("<<<<<<< ") for line in file):
                raise ConfigError("it has an unresolved conflict of an update", uri=path, fix="Look for <<<<<<< in it")
        values = settings.read_file(path)
        if "files" in values:
            raise ConfigError("files: no such field", uri=path)
        app = settings.build(cls, values, origin=path)
        return dataclasses.replace(app, files=_load_files(app, os.fspath(folder), path, check_space)) if deep else app

    @pydantic.field_validator("env")
    @classmethod
    def _check_env(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not _VARIABLE.match(name):
                raise ValueError(f"{name!r} is not the name of a variable")
            if looks_secret(name):
                message = f"variable {name} looks like a secret, which manifests must not contain"
                raise ValueError(f"{message}; {_USE_SECRET}")
        return value

    @pydantic.model_validator(mode="after")
    def _check_consistency(self) -> App:
        for check in (_check_work, _check_name_and_resources, _check_stage, _check_data):
            check(self)
        return self

    @property
    def work(self) -> Train | Tune | None:
        """The training or search; None if the app runs another command or TensorBoard."""
        return self.train or self.tune

    @property
    def run_uri(self) -> str | None:
        """URI of the run, without a slash at the end."""
        uri = self.work.run if self.work else self.run
        return uri.rstrip("/") if uri else None

    @property
    def parallel(self) -> commands.ParallelCommand | None:
        """The command of voxlane that the app runs on all its nodes; None if it runs another program, or none."""
        if self.command is not None:
            return commands.find_command(self.command[1:]) if self.command[0] == "voxlane" else None
        return commands.find_command(["train"] if self.train else ["tune"] if self.tune else [])

    @property
    def file_names(self) -> list[str]:
        """Names of the folder's files that pods read."""
        names = [self.train.config if self.train else None, self.tune.space if self.tune else None]
        return [name for name in names if name is not None]

    @property
    def is_built(self) -> bool:
        """Whether the image is built from the folder, because it has neither a tag nor a digest."""
        match = _IMAGE.match(self.image)
        return match is not None and not match["tag"] and not match["digest"]

    @property
    def workload(self) -> tuple[str, str]:
        """Return the apiVersion and the kind of the object that runs the app."""
        kind = _WORKLOAD_KINDS[self.template]
        return WORKLOADS.get(kind, "apps/v1"), kind


_WORKLOAD_KINDS = {"jobset": "JobSet", "rayjob": "RayJob", "trainjob": "TrainJob", "tensorboard": "Deployment"}


def get_name_limit(template: str, nodes: int) -> int:
    """Return the maximum length of an app's name, because the names of its pods, hosts and services are labels."""
    if template == "rayjob":
        return _MAX_RAYJOB_LENGTH
    if template == "tensorboard":
        return _MAX_LABEL_LENGTH - len(f"-{BOARD}")
    return _MAX_LABEL_LENGTH - len(f"-{REPLICATED_JOB}-0-{nodes - 1}-xxxxx")


def _check_work(app: App) -> None:
    work_fields = [name for name in ("train", "tune", "command") if getattr(app, name) is not None]
    if app.template == "tensorboard":
        if work_fields:
            raise ValueError(f"{work_fields[0]}: template tensorboard shows a run and does not train; give `run` alone")
        if app.run is None:
            raise ValueError("run: missing; template tensorboard shows it")
        return
    if len(work_fields) != 1:
        raise ValueError(f"expected exactly one of train, tune and command, got {' and '.join(work_fields) or 'none'}")
    if app.command is None and app.run is not None:
        raise ValueError(f"run: give it as {work_fields[0]}.run")
    if app.template not in (templates := _list_templates(app)):
        raise ValueError(f"{work_fields[0]}: it runs on template {' or '.join(templates)}, not {app.template}")
    _check_result(app)
    for field in ("priority_class", "ttl_s"):
        if app.template == "trainjob" and getattr(app, field) is not None:
            raise ValueError(f"{field}: a TrainJob does not have it; set it in the runtime, or use template jobset")
    if app.template != "trainjob" and app.runtime != "torch-distributed":
        raise ValueError("runtime: it is for template trainjob only")


def _list_templates(app: App) -> list[str]:
    """Return the templates that can run the app's work."""
    parallel = app.parallel
    if app.tune is not None:
        return ["rayjob"]
    on_ray = app.command is not None and parallel is not None and parallel.ray_options is not None
    # Any program can run as one process; several of a command that only supports Ray would each do all of its work.
    as_ranks = parallel is None or parallel.supports_torchrun or app.nodes * app.devices_per_node == 1
    return [*(["jobset", "trainjob"] if as_ranks else []), *(["rayjob"] if on_ray else [])]


def _check_result(app: App) -> None:
    """Check that a benchmark's result is stored where it outlives the pod."""
    if app.command is None or app.parallel is None or not app.parallel.result_file:
        return
    out = commands.parse_options(app.command).get("--out")
    if out is None and app.run is None:
        lost = f"the result of `voxlane {app.parallel.name}` is lost with its pod"
        raise ValueError(f"run: missing; without a bucket, {lost}")
    if out is not None and not out.startswith(_BUCKETS):
        fix = "give it as gs://, s3:// or az://, or give `run` instead"
        raise ValueError(f"command: --out {out} is lost with the pod; {fix}")


def _check_name_and_resources(app: App) -> None:
    limit = get_name_limit(app.template, app.nodes)
    if len(app.name) > limit:
        fix = f"use at most {limit}, so that the pods of a {app.workload[1]} can be named"
        raise ValueError(f"name: {app.name!r} has {len(app.name)} characters; {fix}")
    memory, shared = app.resources.memory, app.shared_memory
    if memory and shared and parse_bytes(shared) >= parse_bytes(memory):
        raise ValueError(f"shared_memory: {shared} must be less than resources.memory, {memory}, of which it is a part")
    for key in app.node_selector:
        if key.startswith(_RESERVED_PREFIXES):
            raise ValueError(f"node_selector: voxlane itself sets {key}; use `stage` for data")
    if app.device == "gpu" and "/" not in app.gpu_resource:
        raise ValueError(f"gpu_resource: {app.gpu_resource!r}; give it as nvidia.com/gpu or amd.com/gpu")


def _check_stage(app: App) -> None:
    if app.stage and app.template == "tensorboard":
        raise ValueError("stage: TensorBoard reads the bucket and needs no staged data")
    names, mounts = [stage.name for stage in app.stage], [stage.mount for stage in app.stage]
    for field, values in (("name", names), ("path", mounts)):
        if duplicates := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"stage: two of them have the {field} {duplicates[0]}")
    if any(stage.source for stage in app.stage) and not all(toleration.key for toleration in app.tolerations):
        raise ValueError("tolerations: with staged data, each must have the key of a taint")
    for stage in app.stage:
        if stage.replicas is not None and stage.replicas < app.nodes:
            nodes = f"{stage.replicas} nodes, but the app runs on {app.nodes}"
            raise ValueError(f"stage: {stage.name} is on {nodes}; raise replicas")
        if stage.source and app.device == "gpu" and not (app.node_selector or stage.node_selector):
            fix = 'give node_selector, such as {nvidia.com/gpu.present: "true"}'
            raise ValueError(f"stage: {stage.name} could be copied to nodes without GPUs; {fix}")


def _check_data(app: App) -> None:
    """Check that the dataset is in a bucket or staged."""
    if app.work is None or app.work.data.startswith(_BUCKETS):
        return
    data, mounts = app.work.data, [stage.mount for stage in app.stage]
    if not any(data == mount or data.startswith(f"{mount}/") for mount in mounts):
        field = "train" if app.train else "tune"
        staged = f", or the path of staged data: {', '.join(mounts)}" if mounts else ""
        raise ValueError(f"{field}.data: {data!r} is not in a bucket; give it as gs://, s3:// or az://{staged}")


def find_staged_copy(app: App) -> Stage | None:
    """Return the staged copy of the data to train on: the one with that source, or the only existing StagedDataset."""
    if app.work is None or not app.work.data.startswith(_BUCKETS):
        return None
    uri = app.work.data.rstrip("/")
    same_source = [stage for stage in app.stage if stage.source and stage.source.rstrip("/") == uri]
    existing = [stage for stage in app.stage if stage.source is None]
    return same_source[0] if same_source else existing[0] if len(existing) == 1 else None


def format_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return config fields as `field=value` arguments for the command line."""

    def is_plain(value: Any) -> bool:
        return isinstance(value, str) and yaml.safe_load(value) == value

    return [f"{name}={value if is_plain(value) else json.dumps(value)}" for name, value in values.items()]


def _load_files(app: App, folder: str, origin: str, check_space: SpaceCheck | None) -> dict[str, str]:
    """Return the file that pods read, by its name; check it as the command that reads it will."""
    if app.work is None or not (app.file_names or app.work.set):
        return {}
    field = "train.config" if app.train is not None else "tune.space"
    files = {name: _read_file(folder, name, field, origin) for name in app.file_names}
    path = os.path.join(folder, *files) if files else origin
    values = settings.read_file(path) if files else {}
    for override in format_overrides(app.work.set):
        settings.set_dotted(values, override)
    _reject_secrets(values, "", path)
    _check_source(values.get("init_from"), path)
    if app.train is not None:
        from voxlane.store import StoreConfig
        from voxlane.train.config import build_config

        store = values.pop("store", None) or {}
        if not isinstance(store, dict):
            raise ConfigError(f"store: expected fields, got {store!r}", uri=path)
        StoreConfig.from_dict({str(name): value for name, value in store.items()})
        build_config(values, origin=path)
    elif check_space is not None:
        check_space(values, path)
    return files


def _check_source(init_from: Any, origin: str) -> None:
    """Check that pods can find the weights that training starts from, or each choice of a search."""
    if isinstance(init_from, Mapping | list):
        for item in init_from.values() if isinstance(init_from, Mapping) else init_from:
            _check_source(item, origin)
    elif isinstance(init_from, str) and not init_from.startswith((*_BUCKETS, "/")):
        fix = "Give it as gs://, s3:// or az://, or as an absolute path in the image"
        raise ConfigError(f"init_from: pods do not have the path {init_from!r}", uri=origin, fix=fix)


def _read_file(folder: str, name: str, field: str, origin: str) -> str:
    if os.path.basename(name) != name or not re.match(r"^[-\w.]+$", name):
        raise ConfigError(f"{field}: {name!r} is not a file of the app's folder", uri=origin, fix="Give its name alone")
    path = os.path.join(folder, name)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError(f"{field}: cannot read {name}: {reason}", uri=origin) from None
    if holds_known_secret(text):
        message = "it contains a secret, but pods read it from a ConfigMap"
        raise ConfigError(message, uri=path, fix="Use credentials.secret")
    return text


def _reject_secrets(values: Mapping[str, Any], prefix: str, origin: str) -> None:
    """Raise ConfigError for a secret: every reader of the app can see its arguments and its ConfigMap."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            _reject_secrets(value, f"{prefix}{name}.", origin)
        elif value is not None and (is_secret_field(str(name)) or holds_secret(str(value))):
            message = f"{prefix}{name}: it is a secret, which would become part of a manifest"
            raise ConfigError(message, uri=origin, fix=f"{_USE_SECRET[0].upper()}{_USE_SECRET[1:]}")
