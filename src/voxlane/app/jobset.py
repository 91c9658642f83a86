"""A JobSet: one pod a node, whose ranks find each other by name, started again as one when any is lost. Pure."""

from __future__ import annotations

from typing import Any

from voxlane.app import pod
from voxlane.app.config import REPLICATED, App
from voxlane.app.pod import Manifest, Target
from voxlane.launch.status import STOPPED

_STOPPED = {"containerName": REPLICATED, "operator": "In", "values": [STOPPED]}


def host(app: App) -> str:
    """Of rank 0, as the other pods know it."""
    return f"{app.name}-{REPLICATED}-0-0.{app.name}"


def render(target: Target) -> Manifest:
    """The JobSet."""
    app = target.app
    meta = pod.metadata(target, app.name, pod.job_labels(app) | pod.queue_labels(app))
    return {
        "apiVersion": app.workload[0],
        "kind": app.workload[1],
        "metadata": meta,
        "spec": {
            **({"suspend": True} if app.queue else {}),  # Kueue lets it go
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [REPLICATED]},
            "failurePolicy": {
                "maxRestarts": app.restarts,
                # Preemption, eviction and a lost node are nobody's fault: they do not count.
                "rules": [
                    {
                        "name": "disrupted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            **({"ttlSecondsAfterFinished": app.ttl_s} if app.ttl_s is not None else {}),
            "replicatedJobs": [{"name": REPLICATED, "replicas": 1, "template": _job(target)}],
        },
    }


def _job(target: Target) -> dict[str, Any]:
    app = target.app
    return {
        "metadata": {"labels": pod.job_labels(app)},
        "spec": {
            "parallelism": app.nodes,
            "completions": app.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    # Ranks on other nodes, which saved and stopped because one was told to. Of this container alone: a
                    # sidecar that a cluster adds is stopped so after every crash, which must count.
                    {"action": "FailJob", "onExitCodes": _STOPPED},
                ]
            },
            "template": _pod(target),
        },
    }


def _pod(target: Target) -> dict[str, Any]:
    app = target.app
    made, mounts = pod.volumes(target)
    notes = pod.topology_notes(app)
    asked = pod.requests(app, app.resources)
    one = {
        **pod.container(target, REPLICATED, env=_ranks(app)),
        **_words(app),
        **({"resources": asked} if asked else {}),
        **({"volumeMounts": mounts} if mounts else {}),
    }
    return {
        "metadata": {
            "labels": pod.job_labels(app) | pod.identity_labels(app),
            **({"annotations": notes} if notes else {}),
        },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": app.grace_s,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **pod.placement(target, pod.own(app, "job")),
            "containers": [one],
            **({"volumes": made} if made else {}),
        },
    }


def _words(app: App) -> dict[str, list[str]]:
    where = [
        f"--nnodes={app.nodes}",
        f"--nproc-per-node={app.devices_per_node}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        f"--master-addr={host(app)}",
        f"--master-port={pod.PORT}",
    ]
    words = [*pod.torchrun_words(app, where), *pod.work_words(app)]
    entry = pod.entry_words(app)
    return {"command": entry, "args": words} if entry else {"command": words}


def _ranks(app: App) -> list[dict[str, Any]]:
    """torchrun's own variables, so that a command of it finds the other ranks; voxlane's have them as options."""
    if app.command is None or app.parallel is not None:
        return []
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    plain = {
        "PET_NNODES": str(app.nodes),
        "PET_NPROC_PER_NODE": str(app.devices_per_node),
        "PET_MASTER_ADDR": host(app),
        "PET_MASTER_PORT": str(pod.PORT),
    }
    found: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in plain.items()]
    return [*found, {"name": "PET_NODE_RANK", "valueFrom": index}]
