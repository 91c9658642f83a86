"""The parts of an app's pods that all workloads share: labels, command, environment, volumes and placement. Pure.

The app has the image and the namespace that it is rendered for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from voxlane.cluster import commands
from voxlane.cluster.kubernetes.app import k8s
from voxlane.cluster.kubernetes.app.config import App, Resources, find_staged_copy, format_overrides, parse_cores
from voxlane.cluster.kubernetes.names import claim_name, copy_path, node_label, use_label
from voxlane.cluster.kubernetes.pod_security import CONTAINER_SECURITY, SECCOMP

Manifest = dict[str, Any]
CONFIG_FOLDER = "/voxlane/config"
"""Folder of the app's files in pods."""
RANK_ZERO_PORT = 29500
"""Port of rank 0 at which the ranks find each other."""
_ARCHIVE_S = 10
"""Part of the grace period that is left for archiving the end of the log after the ranks have ended."""


def build_labels(app: App, part: str) -> dict[str, str]:
    """Return the labels of every object of an app; `part` is job, board, data or config."""
    return {k8s.MANAGED_BY_LABEL: k8s.MANAGED_BY, "app.kubernetes.io/name": app.name, **build_selector(app, part)}


def build_selector(app: App, part: str) -> dict[str, str]:
    """Return the labels that distinguish an app's pods from all others."""
    return {k8s.APP_LABEL: app.name, k8s.PART_LABEL: part}


def build_job_labels(app: App) -> dict[str, str]:
    """Return the labels of the workload and its pods, including those of the data that they use."""
    return build_labels(app, "job") | {use_label(stage.name): "true" for stage in app.stage}


def build_metadata(app: App, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the name, namespace, labels and annotations of an object."""
    annotations: dict[str, str] = {"voxlane.dev/template": app.template}
    if labels[k8s.PART_LABEL] in ("job", k8s.BOARD):
        annotations[k8s.IMAGE_ANNOTATION] = app.image
    if app.run_uri:
        annotations[k8s.RUN_ANNOTATION] = app.run_uri
    return {"name": name, "namespace": app.namespace, "labels": dict(labels), "annotations": annotations}


def build_workload(app: App, spec: Mapping[str, Any]) -> Manifest:
    """Return the manifest of the app's workload; in a queue, it starts suspended, and Kueue resumes it."""
    queue_labels = {k8s.QUEUE_LABEL: app.queue} if app.queue else {}
    return {
        "apiVersion": app.workload[0],
        "kind": app.workload[1],
        "metadata": build_metadata(app, app.name, build_job_labels(app) | queue_labels),
        "spec": {**({"suspend": True} if app.queue else {}), **spec},
    }


# -- command -----------------------------------------------------------------------------------------------------------


def build_work_command(app: App) -> list[str]:
    """Return the app's own command, without what starts ranks and archives logs."""
    if app.command is not None:
        # A benchmark's result is stored beside the logs, unless the user gave --out.
        file = app.parallel.result_file if app.parallel and "--out" not in commands.parse_options(app.command) else ""
        out = ["--out", f"{app.run_uri}/{file}"] if file else []
        return [*app.command, *out, *_build_ray_options(app, app.command[1:])]
    assert app.work is not None
    copy = find_staged_copy(app)
    overrides = [*format_overrides(app.work.set), *([f"loader.staged={copy.mount}"] if copy else [])]
    work = [app.work.data, *overrides, "--run", app.work.run]
    if app.tune is not None:
        space = f"{CONFIG_FOLDER}/{app.tune.space}"
        return ["voxlane", "tune", space, *work, *_build_ray_options(app, ["tune"]), "--auto-resume"]
    config = ["--config", f"{CONFIG_FOLDER}/{app.file_names[0]}"] if app.file_names else []
    return ["voxlane", "train", *work, "--auto-resume", *config]


def _build_ray_options(app: App, arguments: Sequence[str]) -> list[str]:
    """Return the options that tell a voxlane command about the app's Ray cluster; [] if it has none."""
    if app.template != "rayjob":
        return []
    placement = commands.RayPlacement(
        nodes=app.nodes,
        per_node=app.devices_per_node,
        cpus=str(max(1, count_ray_cpus(app) // app.devices_per_node)),
        gpus=1.0 if app.device == "gpu" else 0.0,
    )
    return commands.ray_arguments(arguments, placement)


def count_ray_cpus(app: App) -> int:
    """Return the number of cores that a node of the app's Ray cluster offers."""
    return max(1, math.floor(parse_cores(app.resources.cpu))) if app.resources.cpu else app.devices_per_node


def build_entry_command(app: App) -> list[str]:
    """Return the command that archives the logs of the command after it; [] if there is no bucket for them."""
    return ["voxlane", "app", "entry", "--logs", f"{app.run_uri}/logs", "--"] if app.run_uri else []


def build_ranks_command(app: App, node_options: Sequence[str] = ()) -> dict[str, Any]:
    """Return `command` and `args` of a container that runs the app's command as ranks, with these torchrun options."""
    arguments = build_work_command(app)
    if app.parallel is not None and app.nodes * app.devices_per_node > 1:
        # A lost rank ends its pod, and with it all pods: the cluster restarts them, not torchrun.
        timeout = f"--shutdown-timeout={max(5, app.grace_s - _ARCHIVE_S)}"
        arguments = ["torchrun", *node_options, "--max-restarts=0", timeout, "-m", "--", *arguments]
    entry = build_entry_command(app)
    return {"command": entry, "args": arguments} if entry else {"command": arguments}


# -- container ---------------------------------------------------------------------------------------------------------


def list_bucket_schemes(app: App) -> list[str]:
    """Return the schemes of the buckets that the app reads and writes; [] if they are unknown."""
    uris = [app.work.data if app.work else None, app.run_uri, *(stage.source for stage in app.stage)]
    if app.parallel is not None:
        uris += [word.rpartition("=")[2] for word in app.command or ()]
    schemes = {uri.split("://")[0] for uri in uris if uri and "://" in uri}
    return sorted(schemes & {"gs", "s3", "az"})


def build_environment(app: App) -> list[dict[str, Any]]:
    """Return the environment variables of a container, including those of its credentials."""
    variables = {"PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCH_CPP_LOG_LEVEL": "ERROR", **app.env}
    pod_name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    credentials = app.credentials.pod_parts(*list_bucket_schemes(app))["env"]
    return [pod_name, *({"name": name, "value": value} for name, value in variables.items()), *credentials]


def build_resources(app: App, resources: Resources, *, devices: bool = True) -> dict[str, dict[str, str]]:
    """Return a container's requests and limits. Memory and disk are limits too, so that a pod that leaks ends itself
    and no other."""
    amounts = {"memory": resources.memory, "ephemeral-storage": resources.disk}
    limits = {name: amount for name, amount in amounts.items() if amount}
    if devices and app.device == "gpu":
        limits[app.gpu_resource] = str(app.devices_per_node)
    requests = {**({"cpu": resources.cpu} if resources.cpu else {}), **limits}
    return drop_empty({"requests": requests, "limits": limits})


def build_volumes(
    app: App, *, data: bool = True, files: bool = True
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes of a pod and the volume mounts of its container. `data` includes /dev/shm and staged data, for
    pods that train; `files` includes the app's files."""
    parts = app.credentials.pod_parts(*list_bucket_schemes(app))
    volumes, mounts = list(parts["volumes"]), list(parts["volumeMounts"])
    if app.file_names and files:
        volumes.append({"name": "config", "configMap": {"name": f"{app.name}-config"}})
        mounts.append({"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True})
    if not data:
        return volumes, mounts
    if app.shared_memory:
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": app.shared_memory}})
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    names: dict[str, str] = {}  # of volumes, by their claims
    for number, stage in enumerate(app.stage):
        # The claim of the namespace: a volume of the type hostPath could be any folder of the node.
        claim = claim_name(stage.data_path.rstrip("/"))
        names[claim] = names.get(claim) or f"data-{number}"
        mount = {"name": names[claim], "mountPath": stage.mount, "readOnly": True}
        mounts.append(mount | {"subPath": copy_path(app.namespace or "default", stage.name)})
    claims = {name: {"claimName": claim, "readOnly": True} for claim, name in names.items()}
    return [*volumes, *({"name": name, "persistentVolumeClaim": claim} for name, claim in claims.items())], mounts


def build_pod_spec(
    app: App,
    name: str,
    resources: Mapping[str, Any],
    fields: Mapping[str, Any],
    *,
    env: Sequence[Mapping[str, Any]] = (),
    data: bool = True,
    files: bool = True,
    **container_fields: Any,
) -> dict[str, Any]:
    """Return the spec of a pod: `fields`, the volumes (see `build_volumes`), and one container of the app's image with
    these resources, more environment variables and other fields."""
    volumes, mounts = build_volumes(app, data=data, files=files)
    container = {
        "name": name,
        "image": app.image,
        "imagePullPolicy": "IfNotPresent",
        "env": [*build_environment(app), *map(dict, env)],
        **drop_empty({"envFrom": app.credentials.pod_parts(*list_bucket_schemes(app))["envFrom"]}),
        # The last lines of a crash then become part of the pod's status, and outlive its log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY,
        **container_fields,
        **drop_empty({"resources": resources, "volumeMounts": mounts}),
    }
    return {
        **fields,
        "securityContext": build_security(app),
        "containers": [container],
        **drop_empty({"volumes": volumes}),
    }


def build_security(app: App) -> dict[str, Any]:
    """Return the security context of a pod."""
    is_root = app.user == 0
    users = {} if app.user is None else {"runAsUser": app.user, "runAsGroup": app.user}
    return {**({} if is_root else {"runAsNonRoot": True}), **users, "seccompProfile": SECCOMP}


# -- placement ---------------------------------------------------------------------------------------------------------


def _build_affinity(app: App, selector: Mapping[str, str]) -> dict[str, Any]:
    """Return the affinity of pods: to nodes that hold the data, one pod on each node, near one another if requested; {}
    if any node will do. `selector` selects the app's own pods."""
    affinity: dict[str, Any] = {}
    if app.stage:
        labels = (node_label(app.namespace or "default", stage.name) for stage in app.stage)
        has_data = [{"key": label, "operator": "In", "values": ["ready"]} for label in labels]
        terms = {"nodeSelectorTerms": [{"matchExpressions": has_data}]}
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    own_pods = {"matchLabels": dict(selector)}
    topology_key = app.topology.required or app.topology.preferred
    if topology_key and app.nodes > 1 and not app.queue:  # in a queue, Kueue places them
        term = {"labelSelector": own_pods, "topologyKey": topology_key}
        affinity["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        if not app.topology.required:
            weighted = {"weight": 100, "podAffinityTerm": term}
            affinity["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}
    if app.nodes > 1:
        other_host = {"labelSelector": own_pods, "topologyKey": "kubernetes.io/hostname"}
        affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [other_host]}
    return affinity


def build_pod_metadata(app: App, extra_labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the metadata of the pods that train, with the annotations by which Kueue places them near one another."""
    topology = {"required": app.topology.required, "preferred": app.topology.preferred} if app.queue else {}
    annotations = {f"kueue.x-k8s.io/podset-{kind}-topology": key for kind, key in topology.items() if key}
    labels = build_job_labels(app) | build_identity_labels(app) | dict(extra_labels or {})
    return {"labels": labels, **drop_empty({"annotations": annotations})}


def build_placement(app: App, selector: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a pod's spec that say where it runs and with which identity."""
    placement = {
        "nodeSelector": dict(app.node_selector),
        "tolerations": [drop_empty(dataclasses.asdict(toleration)) for toleration in app.tolerations],
        "affinity": _build_affinity(app, selector),
        "priorityClassName": app.priority_class,
    }
    return {**drop_empty(placement), **build_identity(app)}


def build_identity(app: App) -> dict[str, Any]:
    """Return the fields of a pod's spec for its service account and for the Secret to pull its image with."""
    secrets = [{"name": app.pull_secret}] if app.pull_secret else []
    return drop_empty({"serviceAccountName": app.credentials.service_account, "imagePullSecrets": secrets})


def build_identity_labels(app: App) -> dict[str, str]:
    """Return the labels of pods whose service account has an Azure identity."""
    has_azure_identity = app.credentials.service_account and "az" in list_bucket_schemes(app)
    return {"azure.workload.identity/use": "true"} if has_azure_identity else {}


def drop_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not empty."""
    return {name: value for name, value in values.items() if value}
