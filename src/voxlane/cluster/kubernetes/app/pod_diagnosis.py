"""Diagnose why one pod is not running, from its status, the scheduler's message, the nodes and its warning events.

Pure: everything was fetched before. Messages name the object and, where it helps, the field of app.yaml to change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from voxlane.cluster.kubernetes.app import k8s
from voxlane.cluster.kubernetes.app.k8s import AppSnapshot, Object


@dataclass(frozen=True)
class PodProblem:
    """Why a pod is not running."""

    kind: str
    """One of SEVERITY_ORDER."""
    message: str
    """Continues a sentence that begins with the pod's name: "cannot be scheduled: ..."."""
    fix: str = ""
    pod: str = ""
    time: str = ""
    """When it happened (RFC 3339); empty if unknown."""


SEVERITY_ORDER = (
    *("memory", "crash", "deadline", "image", "config", "start"),
    *("mount", "evicted", "lost", "data", "node", "wait"),
)
"""Kinds of problems. Those that explain others come first: the peers of a pod that crashed crash too, and the peers of
a pod that cannot be scheduled wait."""


def diagnose_pod(pod: Object, snapshot: AppSnapshot) -> PodProblem | None:
    """Return what is wrong with a pod; None if it runs, has finished or is just starting."""
    problem = (
        _diagnose_disruption(pod, snapshot)
        or _diagnose_containers(pod, snapshot)
        or _diagnose_start(pod, snapshot)
        or _diagnose_scheduling(pod, snapshot)
    )
    return problem and replace(problem, pod=k8s.name_of(pod))


# -- disrupted ---------------------------------------------------------------------------------------------------------

_DISRUPTIONS = {
    "PreemptionByScheduler": ("evicted", "was preempted by pods of higher priority"),
    "DeletionByTaintManager": ("lost", "was removed from node {node}, which does not answer or was tainted"),
    "DeletionByPodGC": ("lost", "was lost with its node {node}"),
    "EvictionByEvictionAPI": ("evicted", "was evicted from node {node}, for example by a drain"),
    "TerminationByKubelet": ("evicted", "was terminated by its node {node}: {message}"),
    "Evicted": ("evicted", "was evicted from node {node}: {message}"),
    "NodeLost": ("lost", "is on node {node}, which is lost"),
    **dict.fromkeys(("NodeShutdown", "Terminated", "Shutdown"), ("lost", "ended because node {node} was shut down")),
    "Preempting": ("evicted", "was preempted by pods of higher priority"),
    "DeadlineExceeded": ("deadline", "exceeded its time limit"),
    "UnexpectedAdmissionError": ("start", "was rejected by node {node}: {message}"),
    "NodeAffinity": ("start", "was rejected by node {node}, whose labels have changed"),
}
"""Kind of problem and message, by the reason of the condition DisruptionTarget or of the pod's status."""


def _diagnose_disruption(pod: Object, snapshot: AppSnapshot) -> PodProblem | None:
    node_name, current = k8s.spec(pod).get("nodeName", "?"), k8s.status(pod)
    target, reason = k8s.condition(pod, "DisruptionTarget"), str(current.get("reason") or "")
    template = _DISRUPTIONS.get(str(target.get("reason"))) if target.get("status") == "True" else None
    if template is None and reason.startswith("OutOf"):
        template = ("start", f"was rejected by node {{node}}, which has too little {reason.removeprefix('OutOf')}")
    if template := template or _DISRUPTIONS.get(reason):
        cluster_message = _shorten(target.get("message") or current.get("message"))
        message = template[1].format(node=node_name, message=cluster_message).rstrip(": ")
        return PodProblem(template[0], message, time=str(target.get("lastTransitionTime") or ""))
    if k8s.has_ended(pod) or snapshot.nodes is None or node_name == "?":
        return None
    node = next((node for node in snapshot.nodes if k8s.name_of(node) == node_name), None)
    if node is None:
        return PodProblem("lost", f"is on node {node_name}, which is gone from the cluster")
    if k8s.condition(node, "Ready").get("status", "True") != "True":
        time = str(k8s.condition(node, "Ready").get("lastTransitionTime"))
        return PodProblem("lost", f"is on node {node_name}, which does not answer", time=time)
    return None


# -- containers --------------------------------------------------------------------------------------------------------

_PULL_REASONS = (
    *("ErrImagePull", "ImagePullBackOff", "InvalidImageName"),
    *("ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable"),
)
_NO_COMMAND = "The image has no such command: check `command` in app.yaml and the Dockerfile"
_EXIT_CODE_FIXES = {
    126: _NO_COMMAND,
    127: _NO_COMMAND,
    137: "A node sends SIGKILL for lack of memory, or when the grace period is over",
}
_SIGNALS = {134: "SIGABRT", 135: "SIGBUS", 136: "SIGFPE", 137: "SIGKILL", 139: "SIGSEGV", 143: "SIGTERM"}


def _diagnose_containers(pod: Object, snapshot: AppSnapshot) -> PodProblem | None:
    specs = {item["name"]: item for part in ("initContainers", "containers") for item in k8s.spec(pod).get(part) or ()}
    for container in k8s.list_container_statuses(pod):
        spec = specs.get(container["name"], {})
        problem = _diagnose_end(spec, (container.get("state") or {}).get("terminated") or {})
        if problem := problem or _diagnose_waiting(container, spec, pod, snapshot):
            return problem
    return None


def _diagnose_waiting(container: Object, spec: Object, pod: Object, snapshot: AppSnapshot) -> PodProblem | None:
    """Diagnose a container that waits to be started, from its status and its spec."""
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason in _PULL_REASONS:
        return _diagnose_pull(str(container.get("image") or spec.get("image") or "?"), reason, message, pod, snapshot)
    if reason == "CreateContainerConfigError":
        return _diagnose_config(message)
    if reason == "CrashLoopBackOff":
        problem = _diagnose_end(spec, (container.get("lastState") or {}).get("terminated") or {})
        restarted = f" (restarted {container.get('restartCount', 0)} times)"
        return problem and replace(problem, message=problem.message + restarted)
    if reason in ("CreateContainerError", "RunContainerError", "ContainerCannotRun", "StartError"):
        return PodProblem("start", f"cannot be started: {_shorten(message) or reason}")
    return _diagnose_mount(pod, snapshot) if reason in ("ContainerCreating", "PodInitializing") else None


def _diagnose_start(pod: Object, snapshot: AppSnapshot) -> PodProblem | None:
    """Diagnose a pod that its node has not started, or that failed without a failed container."""
    phase = k8s.status(pod).get("phase")
    if phase == "Pending" and "nodeName" in k8s.spec(pod):
        if problem := _diagnose_mount(pod, snapshot):
            return problem
        scheduled_at = k8s.condition(pod, "PodScheduled").get("lastTransitionTime")
        if snapshot.is_older_than(scheduled_at, 60) and not list(k8s.list_container_statuses(pod)):
            return PodProblem("start", f"was assigned to node {k8s.spec(pod)['nodeName']}, which has not started it")
    if phase == "Failed":
        message = _shorten(k8s.status(pod).get("message") or k8s.status(pod).get("reason"))
        return PodProblem("crash", f"failed: {message}" if message else "failed")
    return None


def _diagnose_end(spec: Object, terminated: Object) -> PodProblem | None:
    """Diagnose how a container ended; None if it succeeded or has not ended."""
    code, reason = terminated.get("exitCode", 0), terminated.get("reason", "")
    time = str(terminated.get("finishedAt") or "")
    if reason == "OOMKilled":
        limits = (spec.get("resources") or {}).get("limits") or {}
        limit = f": its limit is {limits['memory']}" if limits.get("memory") else ""
        return PodProblem("memory", f"ran out of memory{limit}", "Raise resources.memory in app.yaml", time=time)
    if reason in ("StartError", "ContainerCannotRun"):
        return PodProblem("start", f"cannot be started: {_shorten(terminated.get('message'))}", time=time)
    signal = f" ({_SIGNALS[code]})" if code in _SIGNALS else ""
    fix = _EXIT_CODE_FIXES.get(code, "")
    return PodProblem("crash", f"crashed with exit code {code}{signal}", fix, time=time) if code else None


_PULL_ERRORS = (
    (
        "unauthorized|authentication required|denied|forbidden|401|403",
        "the registry does not let the cluster read it",
        "Give the pods' service account an imagePullSecret, or make the image readable",
    ),
    ("not found|manifest unknown|404", "the registry has no such image", "Push it: voxlane app build"),
    (
        "no such host|timeout|connection refused|i/o|network|unreachable|tls|x509",
        "the node cannot reach the registry ({error})",
        "Check the registry's name in app.yaml",
    ),
)
"""Pattern in the registry's message, explanation and fix."""


def _diagnose_pull(image: str, reason: str, message: str, pod: Object, snapshot: AppSnapshot) -> PodProblem:
    # While the kubelet backs off, the status says no more than that; the registry's message is in an earlier warning.
    if reason == "ImagePullBackOff" or not message:
        earlier = [event.get("message", "") for event in _list_warnings(pod, snapshot)]
        earlier = [text for text in earlier if "ull" in text and "Back-off" not in text and len(text) > len("Error: ")]
        message = earlier[-1] if earlier else message
    if reason == "InvalidImageName":
        return PodProblem("image", f"has an invalid image name: {image}", "Correct `image` in app.yaml")
    if reason == "ErrImageNeverPull":
        return PodProblem("image", f"needs image {image}, which its node does not have and may not pull")
    error = _shorten(_innermost_error(message))
    matching = ((text, fix) for pattern, text, fix in _PULL_ERRORS if re.search(pattern, message.lower()))
    explanation, fix = next(matching, ("{error}", ""))
    return PodProblem("image", f"cannot pull image {image}: {explanation.format(error=error or reason)}", fix)


_MISSING_OBJECT = re.compile(r'(secret|configmap) "([^"]+)" not found')


def _diagnose_config(message: str) -> PodProblem:
    """Diagnose a container whose Secret or ConfigMap is missing or incomplete."""
    if match := re.search(r"couldn't find key (\S+) in (Secret|ConfigMap) (?:\S+/)?(\S+)", message):
        return PodProblem("config", f"needs key {match[1]} of {match[2]} {match[3]}, which has no such key")
    if match := _MISSING_OBJECT.search(message):
        kind = "Secret" if match[1] == "secret" else "ConfigMap"
        fix = f"Create it: kubectl create secret generic {match[2]} ..." if kind == "Secret" else "Deploy again"
        return PodProblem("config", f"needs {kind} {match[2]}, which does not exist", fix)
    return PodProblem("config", f"cannot be configured: {_shorten(message)}")


def _diagnose_mount(pod: Object, snapshot: AppSnapshot) -> PodProblem | None:
    """Diagnose a pod whose volumes cannot be mounted or whose sandbox cannot be created."""
    node = k8s.spec(pod).get("nodeName")
    for event in reversed(_list_warnings(pod, snapshot)):
        message = str(event.get("message") or "")
        if event.get("reason") in ("FailedMount", "FailedAttachVolume"):
            if _MISSING_OBJECT.search(message):
                return _diagnose_config(message)
            if match := re.search(r"hostPath type check failed: (\S+) is not a directory", message):
                return PodProblem("mount", f"cannot find folder {match[1]} on node {node}")
            volume = re.search(r'MountVolume\.\S+ failed for volume "([^"]+)"', message)
            name = f" {volume[1]}" if volume else ""
            return PodProblem("mount", f"cannot mount volume{name}: {_shorten(_innermost_error(message))}")
        if event.get("reason") == "FailedCreatePodSandBox":
            return PodProblem("start", f"cannot be started on node {node}: {_shorten(message)}")
    return None


def _list_warnings(pod: Object, snapshot: AppSnapshot) -> list[Object]:
    return [event for event in snapshot.warnings if k8s.is_about(event, [k8s.uid_of(pod)])]


# -- scheduling --------------------------------------------------------------------------------------------------------


def _diagnose_scheduling(pod: Object, snapshot: AppSnapshot) -> PodProblem | None:
    if "nodeName" in k8s.spec(pod) or k8s.status(pod).get("phase", "Pending") != "Pending":
        return None
    scheduled = k8s.condition(pod, "PodScheduled")
    if scheduled.get("reason") == "SchedulingGated":
        return PodProblem("wait", "is held by a scheduling gate until its queue admits it")
    if scheduled.get("status") != "False":
        if snapshot.is_older_than(k8s.created_at(pod), 30):
            return PodProblem("wait", "has been waiting for the scheduler for more than 30 s")
        return PodProblem("wait", "is waiting for the scheduler")
    return explain_unschedulable(str(scheduled.get("message") or ""), pod, snapshot)


def parse_scheduler_message(message: str) -> list[tuple[int, str]]:
    """Return (number of nodes, reason) pairs of a message such as "0/3 nodes are available: 3 Insufficient cpu"."""
    _, _, reasons = message.partition("nodes are available:")
    reasons = re.split(r"\.?\s*preemption:|\. no new claims", reasons)[0].strip().rstrip(".")
    return [(int(count), reason) for count, reason in re.findall(r"(?:^|, )(\d+) (.+?)(?=, \d+ |$)", reasons)]


_NODE_LABELS = re.compile("node affinity|node selector|NodeAffinity")


def explain_unschedulable(message: str, pod: Object, snapshot: AppSnapshot) -> PodProblem:
    """Explain the scheduler's message: which resource is missing, compared with what the nodes have."""
    reasons, missing_data = (
        parse_scheduler_message(message),
        describe_missing_data(snapshot, k8s.list_used_datasets(pod)),
    )
    if missing_data and "persistentvolumeclaim" in message.lower():  # the operator makes it with the first copy
        return PodProblem("data", missing_data)
    if not reasons:
        explanation = "the cluster has no nodes" if "no nodes available" in message else _shorten(message)
        return PodProblem("node", f"cannot be scheduled: {explanation}")
    insufficient = any(reason.startswith("Insufficient") for _, reason in reasons)
    no_match = any(_NODE_LABELS.search(reason) for _, reason in reasons)
    if no_match and missing_data and not insufficient:
        return PodProblem("data", missing_data)
    reasons.sort(key=lambda item: not item[1].startswith("Insufficient"))
    explained = [_explain_reason(count, reason, pod, snapshot) for count, reason in reasons]
    explanation = "; ".join(dict.fromkeys(text for text, _ in explained))
    return PodProblem("node", f"cannot be scheduled: {explanation}", next((fix for _, fix in explained if fix), ""))


def _explain_reason(count: int, reason: str, pod: Object, snapshot: AppSnapshot) -> tuple[str, str]:
    """Return the explanation of one of the scheduler's reasons, and the fix."""
    nodes = k8s.count_noun(count, "node")
    if match := re.match(r"Insufficient (\S+)", reason):
        return _explain_insufficient(match[1], nodes, pod, snapshot)
    if _NODE_LABELS.search(reason):
        if k8s.list_used_datasets(pod):
            return f"{nodes} without its data", ""
        selector = ", ".join(f"{key}={value}" for key, value in (k8s.spec(pod).get("nodeSelector") or {}).items())
        fix = "See node_selector in app.yaml" if selector else ""
        return f"{nodes} without {selector or 'the labels that it requires'}", fix
    if "anti-affinity" in reason or "pod affinity" in reason:
        return f"{nodes} already with a pod of this app", "Request fewer nodes, or wait for nodes"
    taint = re.search(r"taint(?:\(s\))? \{([^}:]*):?([^}]*)\}", reason)
    key, value = (taint[1].strip(), taint[2].strip()) if taint else ("", "")
    if key in ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"):
        return f"{nodes} not ready", ""
    if key == "node.kubernetes.io/unschedulable" or (not taint and "unschedulable" in reason):
        return f"{nodes} cordoned", ""
    if taint:
        pair = f"{key}={value}" if value else key
        return f"{nodes} with the taint {pair}", "Add it to tolerations in app.yaml if the pods may run there"
    if "Too many pods" in reason:
        return f"{nodes} with the maximum number of pods", ""
    return f"{nodes}: {reason.replace('node(s) ', '')}", ""


def _explain_insufficient(resource: str, nodes: str, pod: Object, snapshot: AppSnapshot) -> tuple[str, str]:
    requested = _sum_requests(pod, resource)
    noun = "GPUs" if resource.endswith("/gpu") else resource
    if not requested:
        return f"{nodes} with too little {noun} free", ""
    largest = max((get_allocatable(node, resource) for node in snapshot.nodes or ()), default=None)
    if largest is not None and requested > largest:
        limit = f"no node has more than {format_quantity(largest, resource)}" if largest else "no node has any"
        fix = f"Lower {'devices_per_node' if noun == 'GPUs' else f'resources.{resource}'} in app.yaml"
        return f"each pod requests {format_quantity(requested, resource)} {noun}, but {limit}", fix
    return f"{nodes} with less than {format_quantity(requested, resource)} {noun} free", ""


def get_allocatable(node: Object, resource: str) -> float:
    """Return how much of a resource a node has for pods; 0 if none."""
    return parse_quantity(k8s.status(node).get("allocatable", {}).get(resource, 0))


def _sum_requests(pod: Object, resource: str) -> float:
    """Return how much of a resource a pod requests: the sum of its containers, or more for its largest init
    container; 0 if nothing."""

    def list_amounts(part: str) -> list[float]:
        resources = [container.get("resources") or {} for container in k8s.spec(pod).get(part) or ()]
        requests = [{**(item.get("limits") or {}), **(item.get("requests") or {})} for item in resources]
        return [parse_quantity(amounts.get(resource, 0)) for amounts in requests]

    return max([sum(list_amounts("containers")), *list_amounts("initContainers")])


def parse_quantity(amount: Any) -> float:
    """Return a Kubernetes quantity (100Gi, 500m, 2) as a number."""
    from kubernetes.utils.quantity import parse_quantity as parse_decimal

    return float(parse_decimal(amount))


def format_quantity(amount: float, resource: str) -> str:
    """Format a quantity of a resource for people, such as 32 GiB of memory."""
    if resource in ("memory", "ephemeral-storage"):
        for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
            if amount >= size:
                return f"{amount / size:.4g} {unit}"
    return f"{amount:.4g}"


# -- data --------------------------------------------------------------------------------------------------------------


def describe_missing_data(snapshot: AppSnapshot, names: Iterable[str]) -> str:
    """Return a message about the first of these StagedDatasets that is not ready; empty if all are ready."""
    names = set(names)
    for name in snapshot.missing_data:
        if name in names:
            return f"is waiting for data {name}, but there is no StagedDataset of that name"
    for dataset in snapshot.data:
        if k8s.name_of(dataset) in names and k8s.status(dataset).get("phase") not in ("Ready", "Degraded"):
            return _describe_staging(dataset)
    return ""


def _describe_staging(dataset: Object) -> str:
    current, waiting = k8s.status(dataset), f"is waiting for data {k8s.name_of(dataset)}"
    phase, message = str(current.get("phase") or ""), _shorten(current.get("message"))
    if not phase:
        return f"{waiting}, which no operator has picked up"
    if phase == "Failed":
        return f"{waiting}, which cannot be copied: {message}"
    if phase == "Staging":
        size = f" of {current['size']}" if current.get("size") else ""
        nodes = f", ready on {current['ready']} nodes" if current.get("ready") else ""
        return f"{waiting}: staging at {current.get('progress') or '0%'}{size}{nodes}"
    return f"{waiting}, which is {phase.lower()}" + (f": {message}" if message else "")


# -- text --------------------------------------------------------------------------------------------------------------


def _shorten(text: Any) -> str:
    """Return one line without a final full stop, of at most 240 characters."""
    line = k8s.collapse_message(text)
    return line if len(line) <= 240 else f"{line[:237]}..."


def _innermost_error(text: str) -> str:
    """Return the two innermost of the errors that Go programs join with colons."""
    parts = [part for part in re.split(r": (?!//)", " ".join(text.split())) if part]
    return ": ".join(parts[-2:]) if len(parts) > 2 else text
