"""Simulate the JobSet controller: create pods of replicated jobs, restart them, and report the end."""

from __future__ import annotations

import contextlib
import copy
import secrets
import threading
import time
from typing import Any

from tests.cluster.kubernetes.control_plane import now
from voxlane.cluster.kubernetes.client import Cluster, Object, path_of, path_of_object
from voxlane.errors import ClusterError, ForbiddenError, MissingObjectError

_VERSION = "jobset.x-k8s.io/v1alpha2"
_POLL_S = 0.15
_PREFIX = "jobset.sigs.k8s.io"
_MAX_FAILING_S = 120.0
"""How long requests to the API server may fail, for example because the machine is busy."""


class JobSets:
    """JobSet controller, as a context manager."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stop = threading.Event()
        self._created: set[tuple[str, int]] = set()
        self.failure: BaseException | None = None

    def __enter__(self) -> JobSets:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(120)
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        last_success = time.monotonic()
        while not self._stop.wait(_POLL_S):
            try:
                for jobset in self._cluster.list(path_of(_VERSION, "JobSet")):
                    # Objects may be is_incomplete, and a terminating namespace forbids new ones.
                    with contextlib.suppress(MissingObjectError, ForbiddenError):
                        self._step(jobset)
                last_success = time.monotonic()
            except ClusterError as error:
                if time.monotonic() - last_success > _MAX_FAILING_S:
                    self.failure = error
                    return

    def _step(self, jobset: Object) -> None:
        meta, spec, status = jobset["metadata"], jobset["spec"], jobset.get("status", {})
        if "deletionTimestamp" in meta or status.get("terminalState"):
            return
        if spec.get("suspend"):
            self._update_status(
                jobset, {"conditions": [_build_condition("Suspended", "SuspendedJobs", "jobset is suspended")]}
            )
            return
        restarts = status.get("restarts", 0)
        own = f"{_PREFIX}/jobset-uid={meta['uid']}"
        pods = self._cluster.list(path_of("v1", "Pod", meta["namespace"]), labels=own)
        if (meta["uid"], restarts) not in self._created:
            if pods:  # of the previous attempt
                for pod in pods:
                    self._cluster.delete(path_of_object(pod))
                return
            for job in spec["replicatedJobs"]:
                for number in range(job.get("replicas", 1)):
                    for index in range(job["template"]["spec"].get("completions", 1)):
                        self._cluster.create(_build_pod(jobset, job, number, index, restarts))
            self._created.add((meta["uid"], restarts))
            return
        phases = [pod["status"].get("phase") for pod in pods]
        expected = sum(
            j.get("replicas", 1) * j["template"]["spec"].get("completions", 1) for j in spec["replicatedJobs"]
        )
        failed = [pod for pod in pods if pod["status"].get("phase") == "Failed"]
        is_incomplete = len(pods) < expected or any("deletionTimestamp" in pod["metadata"] for pod in pods)
        if failed or is_incomplete:
            self._handle_failure(jobset, restarts, failed, is_incomplete)
        elif phases and all(phase == "Succeeded" for phase in phases):
            done = _build_condition("Completed", "AllJobsCompleted", "jobset completed successfully")
            self._update_status(jobset, {"terminalState": "Completed", "conditions": [done]})
        else:
            jobs = [
                {"name": j["name"], "active": phases.count("Running"), "ready": phases.count("Running")}
                | {"failed": 0, "succeeded": phases.count("Succeeded"), "suspended": 0}
                for j in spec["replicatedJobs"]
            ]
            self._update_status(jobset, {"restarts": restarts, "replicatedJobsStatus": jobs})

    def _handle_failure(self, jobset: Object, restarts: int, failed: list[Object], is_incomplete: bool) -> None:
        policy = jobset["spec"].get("failurePolicy", {})
        disrupted = is_incomplete or any(
            condition["type"] == "DisruptionTarget"
            for pod in failed
            for condition in pod["status"].get("conditions", [])
        )
        is_free = disrupted and any(
            rule["action"] == "RestartJobSetAndIgnoreMaxRestarts" for rule in policy.get("rules", [])
        )
        counted = jobset.get("status", {}).get("restartsCountTowardsMax", 0)
        if is_free or counted < policy.get("maxRestarts", 0):
            self._update_status(jobset, {"restarts": restarts + 1, "restartsCountTowardsMax": counted + (not is_free)})
            return
        message = "jobset failed due to reaching max number of restarts"
        failure = _build_condition(
            "Failed",
            "ReachedMaxRestarts" if counted else "FailedJobs",
            message if counted else "jobset failed due to one or more job failures",
        )
        self._update_status(jobset, {"terminalState": "Failed", "conditions": [failure]})

    def _update_status(self, jobset: Object, changes: dict[str, Any]) -> None:
        status = jobset.get("status", {})
        old = [{k: c[k] for k in ("type", "reason")} for c in status.get("conditions", [])]
        new = [{k: c[k] for k in ("type", "reason")} for c in changes.get("conditions", [])]
        same = {k: v for k, v in changes.items() if k != "conditions"}
        if all(status.get(k) == v for k, v in same.items()) and ("conditions" not in changes or old == new):
            return
        self._cluster.patch(path_of_object(jobset), {"status": changes}, subresource="status")


def _build_condition(kind: str, reason: str, message: str) -> Object:
    return {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now()}


def _build_pod(jobset: Object, job: Object, number: int, index: int, restarts: int) -> Object:
    """Return a pod as the controllers of Job and JobSet create it."""
    meta, template = jobset["metadata"], copy.deepcopy(job["template"]["spec"]["template"])
    job_name = f"{meta['name']}-{job['name']}-{number}"
    labels = {
        f"{_PREFIX}/jobset-name": meta["name"],
        f"{_PREFIX}/replicatedjob-name": job["name"],
        f"{_PREFIX}/replicatedjob-replicas": str(job.get("replicas", 1)),
        f"{_PREFIX}/job-index": str(number),
        f"{_PREFIX}/restart-attempt": str(restarts),
        f"{_PREFIX}/jobset-uid": meta["uid"],
        "batch.kubernetes.io/job-name": job_name,
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    own = template.get("metadata", {})
    spec = template["spec"]
    spec["hostname"] = f"{job_name}-{index}"
    spec["subdomain"] = jobset["spec"].get("network", {}).get("subdomain") or meta["name"]
    for container in spec["containers"]:
        container.setdefault("env", []).insert(0, {"name": "JOB_COMPLETION_INDEX", "value": str(index)})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{job_name}-{index}-{secrets.token_hex(3)[:5]}",
            "namespace": meta["namespace"],
            "labels": {**own.get("labels", {}), **labels},
            "annotations": {**own.get("annotations", {}), **labels},
            "ownerReferences": [
                {"apiVersion": _VERSION, "kind": "JobSet", "name": meta["name"], "uid": meta["uid"], "controller": True}
            ],
        },
        "spec": spec,
    }
