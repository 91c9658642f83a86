"""The pods of an app, whatever makes them: labels, words of the container, volumes, where they are placed. Pure."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from voxlane.app.config import App, Resources, Stage, cores, overrides, staged_data
from voxlane.kube.names import node_key, node_label, use_label
from voxlane.launch import parallel

Manifest = dict[str, Any]
CONFIG = "/voxlane/config"
"""Where pods find the app's files."""
PORT = 29500
"""Of rank 0, at which the ranks find each other."""
_SAVING_S = 10
"""Of the grace: for keeping the end of the log once the ranks have ended."""


@dataclasses.dataclass(frozen=True)
class Target:
    """What an app is rendered for."""

    app: App
    image: str
    """With tag or digest."""
    namespace: str


def labels(app: App, part: str) -> dict[str, str]:
    """Of everything that an app makes; `part`: job, board, data or config."""
    return {"app.kubernetes.io/managed-by": "voxlane", "app.kubernetes.io/name": app.name, **own(app, part)}


def own(app: App, part: str) -> dict[str, str]:
    """Labels by which an app's pods are told from all others."""
    return {"voxlane.dev/app": app.name, "voxlane.dev/part": part}


def job_labels(app: App) -> dict[str, str]:
    """Of what runs, and of its pods: also which data they use."""
    return labels(app, "job") | {use_label(one.name): "true" for one in app.stage}


def queue_labels(app: App) -> dict[str, str]:
    """Of a workload that Kueue admits."""
    return {"kueue.x-k8s.io/queue-name": app.queue} if app.queue else {}


def metadata(target: Target, name: str, of: Mapping[str, str]) -> dict[str, Any]:
    """Name, namespace, labels and annotations of an object."""
    app = target.app
    notes: dict[str, str] = {"voxlane.dev/template": app.template}
    if of["voxlane.dev/part"] in ("job", "board"):
        notes["voxlane.dev/image"] = target.image
    if app.run_uri:
        notes["voxlane.dev/run"] = app.run_uri
    return {"name": name, "namespace": target.namespace, "labels": dict(of), "annotations": notes}


def config_name(app: App) -> str:
    """Of the ConfigMap with the app's files."""
    return f"{app.name}-config"


# -- what runs ---------------------------------------------------------------------------------------------------------


def work_words(app: App) -> list[str]:
    """The app's own command, without what starts ranks and keeps logs."""
    if app.command is not None:
        return [*app.command, *_result_words(app), *_ray_words(app, app.command[1:])]
    copy = staged_data(app)
    staged = [f"loader.staged={copy.mount}"] if copy is not None else []
    if app.train is not None:
        said = [*overrides(app.train.set), *staged]
        config = ["--config", f"{CONFIG}/{app.train.config}"] if app.train.config else []
        return ["voxlane", "train", app.train.data, *said, "--run", app.train.run, "--auto-resume", *config]
    assert app.tune is not None
    said = [*overrides(app.tune.set), *staged]
    where = ["--run", app.tune.run, *_ray_words(app, ["tune"]), "--auto-resume"]
    return ["voxlane", "tune", f"{CONFIG}/{app.tune.space}", app.tune.data, *said, *where]


def _result_words(app: App) -> list[str]:
    """Where a benchmark's result goes, unless its user said it: beside the logs."""
    if app.command is None or app.parallel is None or not app.parallel.result:
        return []
    return [] if "--out" in parallel.options(app.command) else ["--out", f"{app.run_uri}/{app.parallel.result}"]


def _ray_words(app: App, words: Sequence[str]) -> list[str]:
    """What a voxlane command, given as `words`, is told about the app's Ray cluster; nothing where it has none."""
    if app.template != "rayjob":
        return []
    gpus = 1.0 if app.device == "gpu" else 0.0
    each = max(1, ray_cpus(app) // app.devices_per_node)
    place = parallel.Place(nodes=app.nodes, per_node=app.devices_per_node, cpus=str(each), gpus=gpus)
    return parallel.ray_words(words, place)


def ray_cpus(app: App) -> int:
    """Cores that a node of the app's Ray cluster has to give."""
    return max(1, math.floor(cores(app.resources.cpu))) if app.resources.cpu else app.devices_per_node


def entry_words(app: App) -> list[str]:
    """What keeps the logs of the words after it; nothing where there is no bucket to keep them in."""
    return ["voxlane", "app", "entry", "--logs", f"{app.run_uri}/logs", "--"] if app.run_uri else []


def torchrun_words(app: App, where: Sequence[str]) -> list[str]:
    """What starts voxlane's command as one process a device; nothing where one process is all, or where the command is
    not voxlane's. `where`: options that say which node of how many this is."""
    if app.parallel is None or app.nodes * app.devices_per_node == 1:
        return []
    # A rank that is lost ends its pod, and with it all pods: the cluster starts them again, not torchrun.
    stop = f"--shutdown-timeout={max(5, app.grace_s - _SAVING_S)}"
    return ["torchrun", *where, "--max-restarts=0", stop, "-m", "--"]


def shell(words: Sequence[str]) -> str:
    """Words as one line for a shell."""
    return shlex.join(words)


# -- container ---------------------------------------------------------------------------------------------------------


def schemes(app: App) -> list[str]:
    """Schemes of the buckets that the app reads and writes; [] where it does not say."""
    work = app.train or app.tune
    uris = [work.data if work else None, app.run_uri, *(one.source for one in app.stage)]
    if app.parallel is not None:
        uris += [word.rpartition("=")[2] for word in app.command or ()]
    found = {uri.split("://")[0] for uri in uris if uri and "://" in uri}
    return sorted(found & {"gs", "s3", "az"})


def environment(app: App) -> list[dict[str, Any]]:
    """Variables of a container, with those of its credentials."""
    plain = {"PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCH_CPP_LOG_LEVEL": "ERROR", **app.env}
    pod = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    found = app.credentials.pod_parts(*schemes(app))["env"]
    return [pod, *({"name": name, "value": value} for name, value in plain.items()), *found]


def requests(app: App, asked: Resources, *, devices: bool = True) -> dict[str, dict[str, str]]:
    """A container's resources. Memory and disk are limits too, so that a pod that leaks ends itself and no other."""
    hard = {"memory": asked.memory, "ephemeral-storage": asked.disk}
    limits = {name: value for name, value in hard.items() if value}
    soft = {"cpu": asked.cpu} if asked.cpu else {}
    if devices and app.device == "gpu":
        limits[app.gpu_resource] = str(app.devices_per_node)
    found = {"requests": {**soft, **limits}, "limits": limits}
    return {name: values for name, values in found.items() if values}


def volumes(
    target: Target, *, data: bool = True, files: bool = True
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes of a pod, and where its container mounts them. `data`: with /dev/shm and what is staged, for pods that
    train. `files`: with the app's files."""
    app = target.app
    parts = app.credentials.pod_parts(*schemes(app))
    made, mounts = list(parts["volumes"]), list(parts["volumeMounts"])
    if app.file_names and files:
        made.append({"name": "config", "configMap": {"name": config_name(app)}})
        mounts.append({"name": "config", "mountPath": CONFIG, "readOnly": True})
    if not data:
        return made, mounts
    if app.shared_memory:
        made.append({"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": app.shared_memory}})
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    for number, one in enumerate(app.stage):
        path = host_path(target.namespace, one)
        # Directory: where the data is not there, the pod waits and says so, instead of reading an empty folder.
        made.append({"name": f"data-{number}", "hostPath": {"path": path, "type": "Directory"}})
        mounts.append({"name": f"data-{number}", "mountPath": one.mount, "readOnly": True})
    return made, mounts


def host_path(namespace: str, stage: Stage) -> str:
    """The dataset's folder on a node's disk."""
    return f"{stage.data_path.rstrip('/')}/datasets/{node_key(namespace, stage.name)}"


def container(target: Target, name: str, *, env: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A container of the app's image, without its words, resources and volumes."""
    app = target.app
    source = app.credentials.pod_parts(*schemes(app))["envFrom"]
    return {
        "name": name,
        "image": target.image,
        "imagePullPolicy": "IfNotPresent",
        "env": [*environment(app), *map(dict, env)],
        **({"envFrom": source} if source else {}),
        # The last lines of a crash are then part of the pod's status, and there after its log is gone.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False},
    }


# -- placement ---------------------------------------------------------------------------------------------------------


def affinity(target: Target, among: Mapping[str, str]) -> dict[str, Any]:
    """Where pods go: to nodes that hold the data, one a node, near one another where asked. `among`: the labels that
    the app's own pods have. {} where all nodes do."""
    app = target.app
    found: dict[str, Any] = {}
    if app.stage:
        wanted = [
            {"key": node_label(target.namespace, one.name), "operator": "In", "values": ["ready"]} for one in app.stage
        ]
        terms = {"nodeSelectorTerms": [{"matchExpressions": wanted}]}
        found["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    selector = {"matchLabels": dict(among)}
    near = app.topology.required or app.topology.preferred
    if near and app.nodes > 1 and not app.queue:  # with a queue, Kueue places them
        term = {"labelSelector": selector, "topologyKey": near}
        found["podAffinity"] = (
            {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
            if app.topology.required
            else {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
        )
    if app.nodes > 1:
        apart = {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}
        found["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    return found


def topology_notes(app: App) -> dict[str, str]:
    """Annotations of a pod template by which Kueue places pods near one another."""
    if not app.queue:
        return {}
    asked = {"required": app.topology.required, "preferred": app.topology.preferred}
    return {f"kueue.x-k8s.io/podset-{how}-topology": key for how, key in asked.items() if key}


def placement(target: Target, among: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a pod's spec that say where it runs and as whom."""
    app = target.app
    near = affinity(target, among)
    tolerations = [_without_none(dataclasses.asdict(one)) for one in app.tolerations]
    return {
        **({"nodeSelector": dict(app.node_selector)} if app.node_selector else {}),
        **({"tolerations": tolerations} if tolerations else {}),
        **({"affinity": near} if near else {}),
        **({"priorityClassName": app.priority_class} if app.priority_class else {}),
        **identity(app),
    }


def identity(app: App) -> dict[str, Any]:
    """Fields of a pod's spec: its service account, and the Secret to pull with."""
    account = app.credentials.service_account
    return {
        **({"serviceAccountName": account} if account else {}),
        **({"imagePullSecrets": [{"name": app.pull_secret}]} if app.pull_secret else {}),
    }


def identity_labels(app: App) -> dict[str, str]:
    """Of pods whose service account stands for an Azure identity."""
    azure = app.credentials.service_account and "az" in schemes(app)
    return {"azure.workload.identity/use": "true"} if azure else {}


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
