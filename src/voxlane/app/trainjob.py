"""A TrainJob of Kubeflow Trainer: its runtime makes the JobSet, and says how often it starts again. Pure."""

from __future__ import annotations

from typing import Any

from voxlane.app import pod
from voxlane.app.config import REPLICATED, App
from voxlane.app.pod import Manifest, Target

_MANAGER = "voxlane.dev/app"


def render(target: Target) -> Manifest:
    """The TrainJob."""
    app = target.app
    asked = pod.requests(app, app.resources)
    return {
        "apiVersion": app.workload[0],
        "kind": app.workload[1],
        "metadata": pod.metadata(target, app.name, pod.job_labels(app) | pod.queue_labels(app)),
        "spec": {
            **({"suspend": True} if app.queue else {}),  # Kueue lets it go
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": app.runtime,
            },
            "trainer": {
                "image": target.image,
                **_words(app),
                "env": [*pod.environment(app), *_secrets(app)],
                "numNodes": app.nodes,
                "numProcPerNode": app.devices_per_node,
                **({"resourcesPerNode": asked} if asked else {}),
            },
            "runtimePatches": [{"manager": _MANAGER, "trainingRuntimeSpec": {"template": _patch(target)}}],
        },
    }


def _words(app: App) -> dict[str, list[str]]:
    # The runtime sets torchrun's own variables: which node of how many, and where rank 0 is.
    words = [*pod.torchrun_words(app, []), *pod.work_words(app)]
    entry = pod.entry_words(app)
    return {"command": entry, "args": words} if entry else {"command": words}


def _secrets(app: App) -> list[dict[str, Any]]:
    """A Secret's keys one by one, because a TrainJob has no envFrom."""
    secret = app.credentials.secret
    if not secret or app.credentials.file:
        return []
    keys = app.credentials.variables(*pod.schemes(app))
    return [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": True}}} for key in keys
    ]


def _patch(target: Target) -> dict[str, Any]:
    """What a TrainJob may change of its runtime's JobSet."""
    app = target.app
    made, mounts = pod.volumes(target)
    notes = pod.topology_notes(app)
    spec = {
        "terminationGracePeriodSeconds": app.grace_s,
        **pod.placement(target, pod.own(app, "job")),
        **({"containers": [{"name": REPLICATED, "volumeMounts": mounts}]} if mounts else {}),
        **({"volumes": made} if made else {}),
    }
    template = {
        "metadata": {
            "labels": pod.job_labels(app) | pod.identity_labels(app),
            **({"annotations": notes} if notes else {}),
        },
        "spec": spec,
    }
    return {
        "metadata": {"labels": pod.job_labels(app)},
        "spec": {"replicatedJobs": [{"name": REPLICATED, "template": {"spec": {"template": template}}}]},
    }
