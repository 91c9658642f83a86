"""A RayJob: a Ray cluster for one search or benchmark, which goes when that has ended. Pure."""

from __future__ import annotations

from typing import Any

from voxlane.app import pod
from voxlane.app.config import Resources
from voxlane.app.pod import Manifest, Target

RAY_VERSION = "2.60.0"
"""That the image has: KubeRay starts Ray with that version's options."""
_OBJECT_STORE_BYTES = 200_000_000
"""Nothing large passes through it, because data comes from the bucket and gradients by gloo or NCCL."""
_LINGER_S = 300
"""Of an ended job's pods, whose logs are in the bucket."""
_SUBMITTER = Resources(cpu="500m", memory="512Mi")


def render(target: Target) -> Manifest:
    """The RayJob."""
    app = target.app
    words = [*pod.entry_words(app), *pod.work_words(app)]
    return {
        "apiVersion": app.workload[0],
        "kind": app.workload[1],
        "metadata": pod.metadata(target, app.name, pod.job_labels(app) | pod.queue_labels(app)),
        "spec": {
            **({"suspend": True} if app.queue else {}),  # Kueue lets it go
            "entrypoint": pod.shell(words),
            "backoffLimit": app.restarts,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": _LINGER_S if app.ttl_s is None else app.ttl_s,
            "submitterPodTemplate": _submitter(target),
            "rayClusterSpec": {
                "rayVersion": RAY_VERSION,
                # Whoever reaches a Ray without a token may run anything with the app's credentials.
                "authOptions": {"mode": "token"},
                "headGroupSpec": _head(target),
                "workerGroupSpecs": [_workers(target)],
            },
        },
    }


def _start(**options: str) -> dict[str, str]:
    return {"object-store-memory": str(_OBJECT_STORE_BYTES), **{k.replace("_", "-"): v for k, v in options.items()}}


def _ray(target: Target, name: str, asked: Resources, *, devices: bool) -> tuple[dict[str, Any], list[Any]]:
    """A container that runs a node of Ray, and the volumes of its pod."""
    made, mounts = pod.volumes(target, data=devices)  # the head trains nothing, and may be on a node without the data
    quiet = [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}]
    one = {
        **pod.container(target, name, env=quiet),
        "resources": pod.requests(target.app, asked, devices=devices),
        **({"volumeMounts": mounts} if mounts else {}),
    }
    return one, made


def _head(target: Target) -> dict[str, Any]:
    app = target.app
    one, made = _ray(target, "ray-head", app.head, devices=False)
    one["ports"] = [
        {"name": "gcs-server", "containerPort": 6379},
        {"name": "dashboard", "containerPort": 8265},
        {"name": "client", "containerPort": 10001},
    ]
    return {
        "rayStartParams": _start(dashboard_host="0.0.0.0", num_cpus="0", num_gpus="0"),
        "template": {
            "metadata": {"labels": pod.labels(app, "job") | pod.identity_labels(app)},
            "spec": {
                "terminationGracePeriodSeconds": app.grace_s,
                **pod.identity(app),
                **({"priorityClassName": app.priority_class} if app.priority_class else {}),
                "containers": [one],
                **({"volumes": made} if made else {}),
            },
        },
    }


def _workers(target: Target) -> dict[str, Any]:
    app = target.app
    one, made = _ray(target, "ray-worker", app.resources, devices=True)
    worker = {"voxlane.dev/ray": "worker"}
    gpus = app.devices_per_node if app.device == "gpu" else 0
    notes = pod.topology_notes(app)
    return {
        "groupName": "workers",
        "replicas": app.nodes,
        "minReplicas": app.nodes,
        "maxReplicas": app.nodes,
        "rayStartParams": _start(num_cpus=str(pod.ray_cpus(app)), num_gpus=str(gpus)),
        "template": {
            "metadata": {
                "labels": pod.job_labels(app) | pod.identity_labels(app) | worker,
                **({"annotations": notes} if notes else {}),
            },
            "spec": {
                "terminationGracePeriodSeconds": app.grace_s,
                **pod.placement(target, pod.own(app, "job") | worker),
                "containers": [one],
                **({"volumes": made} if made else {}),
            },
        },
    }


def _submitter(target: Target) -> dict[str, Any]:
    """The pod that gives Ray the command and prints what it says; KubeRay fills in its words."""
    app = target.app
    return {
        "metadata": {"labels": pod.labels(app, "job")},
        "spec": {
            "restartPolicy": "Never",
            **pod.identity(app),
            "containers": [
                {
                    "name": "ray-job-submitter",
                    "image": target.image,
                    "imagePullPolicy": "IfNotPresent",
                    "resources": pod.requests(app, _SUBMITTER, devices=False),
                    "securityContext": {"allowPrivilegeEscalation": False},
                }
            ],
        },
    }
