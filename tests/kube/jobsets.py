"""Plays the JobSet controller where none runs: pods of each replicated job, restarts, the end."""

from __future__ import annotations

import copy
import secrets
import threading
from typing import Any

from tests.kube.kubelet import now
from voxlane.errors import ClusterError, MissingObjectError
from voxlane.kube.client import Cluster, Object, path_of, path_of_object

_VERSION = "jobset.x-k8s.io/v1alpha2"
_POLL_S = 0.15
_PREFIX = "jobset.sigs.k8s.io"


class JobSets:
    """Use as a context manager."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stop = threading.Event()
        self._made: set[tuple[str, int]] = set()
        self.failure: BaseException | None = None

    def __enter__(self) -> JobSets:
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(20)
        if self.failure is not None:
            raise self.failure

    def _play(self) -> None:
        while not self._stop.wait(_POLL_S):
            for jobset in self._cluster.list(path_of(_VERSION, "JobSet")):
                try:
                    self._step(jobset)
                except MissingObjectError:
                    continue
                except ClusterError as error:
                    if not self._stop.is_set() and "terminat" not in str(error):  # of a namespace that is going
                        self.failure = error
                        return

    def _step(self, jobset: Object) -> None:
        meta, spec, status = jobset["metadata"], jobset["spec"], jobset.get("status", {})
        if "deletionTimestamp" in meta or status.get("terminalState"):
            return
        if spec.get("suspend"):
            self._say(jobset, {"conditions": [_condition("Suspended", "SuspendedJobs", "jobset is suspended")]})
            return
        restarts = status.get("restarts", 0)
        own = f"{_PREFIX}/jobset-uid={meta['uid']}"
        pods = self._cluster.list(path_of("v1", "Pod", meta["namespace"]), labels=own)
        if (meta["uid"], restarts) not in self._made:
            if pods:  # of the attempt before
                for pod in pods:
                    self._cluster.delete(path_of_object(pod))
                return
            for job in spec["replicatedJobs"]:
                for number in range(job.get("replicas", 1)):
                    for index in range(job["template"]["spec"].get("completions", 1)):
                        self._cluster.create(_pod(jobset, job, number, index, restarts))
            self._made.add((meta["uid"], restarts))
            return
        phases = [pod["status"].get("phase") for pod in pods]
        wanted = sum(j.get("replicas", 1) * j["template"]["spec"].get("completions", 1) for j in spec["replicatedJobs"])
        failed = [pod for pod in pods if pod["status"].get("phase") == "Failed"]
        gone = len(pods) < wanted or any("deletionTimestamp" in pod["metadata"] for pod in pods)
        if failed or gone:
            self._failed(jobset, restarts, failed, gone)
        elif phases and all(phase == "Succeeded" for phase in phases):
            done = _condition("Completed", "AllJobsCompleted", "jobset completed successfully")
            self._say(jobset, {"terminalState": "Completed", "conditions": [done]})
        else:
            jobs = [
                {"name": j["name"], "active": phases.count("Running"), "ready": phases.count("Running")}
                | {"failed": 0, "succeeded": phases.count("Succeeded"), "suspended": 0}
                for j in spec["replicatedJobs"]
            ]
            self._say(jobset, {"restarts": restarts, "replicatedJobsStatus": jobs})

    def _failed(self, jobset: Object, restarts: int, failed: list[Object], gone: bool) -> None:
        policy = jobset["spec"].get("failurePolicy", {})
        disrupted = gone or any(
            condition["type"] == "DisruptionTarget"
            for pod in failed
            for condition in pod["status"].get("conditions", [])
        )
        free = disrupted and any(
            rule["action"] == "RestartJobSetAndIgnoreMaxRestarts" for rule in policy.get("rules", [])
        )
        counted = jobset.get("status", {}).get("restartsCountTowardsMax", 0)
        if free or counted < policy.get("maxRestarts", 0):
            self._say(jobset, {"restarts": restarts + 1, "restartsCountTowardsMax": counted + (not free)})
            return
        words = "jobset failed due to reaching max number of restarts"
        failure = _condition(
            "Failed",
            "ReachedMaxRestarts" if counted else "FailedJobs",
            words if counted else "jobset failed due to one or more job failures",
        )
        self._say(jobset, {"terminalState": "Failed", "conditions": [failure]})

    def _say(self, jobset: Object, changes: dict[str, Any]) -> None:
        status = jobset.get("status", {})
        old = [{k: c[k] for k in ("type", "reason")} for c in status.get("conditions", [])]
        new = [{k: c[k] for k in ("type", "reason")} for c in changes.get("conditions", [])]
        same = {k: v for k, v in changes.items() if k != "conditions"}
        if all(status.get(k) == v for k, v in same.items()) and ("conditions" not in changes or old == new):
            return
        self._cluster.patch(path_of_object(jobset), {"status": changes}, subresource="status")


def _condition(kind: str, reason: str, message: str) -> Object:
    return {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now()}


def _pod(jobset: Object, job: Object, number: int, index: int, restarts: int) -> Object:
    """A pod as Job and JobSet make it."""
    meta, template = jobset["metadata"], copy.deepcopy(job["template"]["spec"]["template"])
    job_name = f"{meta['name']}-{job['name']}-{number}"
    marks = {
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
            "labels": {**own.get("labels", {}), **marks},
            "annotations": {**own.get("annotations", {}), **marks},
            "ownerReferences": [
                {"apiVersion": _VERSION, "kind": "JobSet", "name": meta["name"], "uid": meta["uid"], "controller": True}
            ],
        },
        "spec": spec,
    }
