"""What keeps one pod from running, read from its status, the scheduler's words, the nodes and the warnings about it.

Pure: everything was fetched before. The sentences name the thing and, where one helps, the field of app.yaml to change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from voxlane.app.objects import (
    Object,
    Seen,
    condition,
    holds,
    name_of,
    spec,
    status,
    uid_of,
    used_data,
    when,
)


@dataclass(frozen=True)
class Trouble:
    """Why a pod is not running. `said` follows the pods' names in a sentence: "finds no node: ..."."""

    kind: str
    """crash, memory, image, config, mount, start, lost, evicted, deadline, data, node or wait: what decides which of
    several is told, in `ORDER`."""
    said: str
    fix: str = ""
    pod: str = ""
    at: str = ""
    """When it happened (RFC 3339), if that is known."""


ORDER = ("memory", "crash", "deadline", "image", "config", "start", "mount", "evicted", "lost", "data", "node", "wait")
"""What explains the others comes first: peers of a pod that crashed crash too, and peers of one without a node wait."""


def trouble(pod: Mapping[str, Any], seen: Seen, now: datetime) -> Trouble | None:
    """What is wrong with a pod; None: it runs, has ended well, or is only just starting."""
    found = _disrupted(pod, seen) or _containers(pod, seen, now) or _unplaced(pod, seen, now)
    return found and Trouble(found.kind, found.said, found.fix, name_of(pod), found.at)


# -- taken away --------------------------------------------------------------------------------------------------------

_DISRUPTIONS = {
    "PreemptionByScheduler": ("evicted", "was preempted for pods of higher priority"),
    "DeletionByTaintManager": ("lost", "was taken off node {node}, which does not answer or was tainted"),
    "DeletionByPodGC": ("lost", "is gone with its node {node}"),
    "EvictionByEvictionAPI": ("evicted", "was evicted from node {node}, as a drain does"),
    "TerminationByKubelet": ("evicted", "was ended by its node {node}: {message}"),
}
_REASONS = {
    "Evicted": ("evicted", "was evicted from node {node}: {message}"),
    "NodeLost": ("lost", "is on node {node}, which is lost"),
    "NodeShutdown": ("lost", "ended because node {node} was shut down"),
    "Terminated": ("lost", "ended because node {node} was shut down"),
    "Shutdown": ("lost", "ended because node {node} was shut down"),
    "Preempting": ("evicted", "was preempted for pods of higher priority"),
    "DeadlineExceeded": ("deadline", "ran past its time limit"),
    "UnexpectedAdmissionError": ("start", "was refused by node {node}: {message}"),
    "NodeAffinity": ("start", "was refused by node {node}, whose labels changed"),
}


def _disrupted(pod: Mapping[str, Any], seen: Seen) -> Trouble | None:
    node = spec(pod).get("nodeName", "?")
    target, reason = condition(pod, "DisruptionTarget"), str(status(pod).get("reason") or "")
    words = {"node": node, "message": _sentence(str(target.get("message") or status(pod).get("message") or ""))}
    found = _DISRUPTIONS.get(str(target.get("reason"))) if target.get("status") == "True" else None
    if found is None and reason.startswith("OutOf"):
        found = ("start", f"was refused by node {node}: too little {reason.removeprefix('OutOf')} was left")
    found = found or _REASONS.get(reason)
    if found is not None:
        return Trouble(found[0], found[1].format(**words).rstrip(": "), at=str(target.get("lastTransitionTime") or ""))
    if status(pod).get("phase") in ("Succeeded", "Failed") or seen.nodes is None or "nodeName" not in spec(pod):
        return None
    own = next((one for one in seen.nodes if name_of(one) == node), None)
    if own is None:
        return Trouble("lost", f"is on node {node}, which is gone from the cluster")
    ready = condition(own, "Ready")
    if ready and ready.get("status") != "True":
        return Trouble("lost", f"is on node {node}, which does not answer", at=str(ready.get("lastTransitionTime")))
    return None


# -- containers --------------------------------------------------------------------------------------------------------

_PULLS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
    | {"RegistryUnavailable"}
)
_SIGNALS = {134: "SIGABRT", 135: "SIGBUS", 136: "SIGFPE", 137: "SIGKILL", 139: "SIGSEGV", 143: "SIGTERM"}


def container_states(pod: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The status of every container, those that run first included."""
    yield from status(pod).get("initContainerStatuses") or ()
    yield from status(pod).get("containerStatuses") or ()


def _containers(pod: Mapping[str, Any], seen: Seen, now: datetime) -> Trouble | None:
    for one in container_states(pod):
        state = one.get("state") or {}
        if found := _ended(one, pod, state.get("terminated") or {}):
            return found
        waits = state.get("waiting") or {}
        reason, message = str(waits.get("reason") or ""), str(waits.get("message") or "")
        if reason in _PULLS:
            return _pull(str(one.get("image") or _image(pod, one)), reason, message, pod, seen)
        if reason == "CreateContainerConfigError":
            return _config(message)
        if reason == "CrashLoopBackOff":
            last = (one.get("lastState") or {}).get("terminated") or {}
            again = f" (restarted {one.get('restartCount', 0)} times)"
            found = _ended(one, pod, last)
            return found and Trouble(found.kind, found.said + again, found.fix, at=found.at)
        if reason in ("CreateContainerError", "RunContainerError", "ContainerCannotRun", "StartError"):
            return Trouble("start", f"cannot be started: {_sentence(message) or reason}")
        if reason in ("ContainerCreating", "PodInitializing") and (found := _mount(pod, seen)):
            return found
    if status(pod).get("phase") == "Pending" and "nodeName" in spec(pod):
        if found := _mount(pod, seen):
            return found
        begun = when(condition(pod, "PodScheduled").get("lastTransitionTime"))
        if begun and (now - begun).total_seconds() > 60 and not list(container_states(pod)):
            return Trouble("start", f"was given to node {spec(pod)['nodeName']}, which does nothing with it")
    if status(pod).get("phase") == "Failed":
        message = _sentence(str(status(pod).get("message") or status(pod).get("reason") or ""))
        return Trouble("crash", f"failed: {message}" if message else "failed")
    return None


def _ended(one: Mapping[str, Any], pod: Mapping[str, Any], end: Mapping[str, Any]) -> Trouble | None:
    """A container's end, unless it ended well."""
    code, reason, at = end.get("exitCode", 0), end.get("reason", ""), str(end.get("finishedAt") or "")
    if reason == "OOMKilled":
        limit = _limit(pod, one, "memory")
        has = f": its limit is {limit}" if limit else ""
        return Trouble("memory", f"ran out of memory{has}", "Raise resources.memory in app.yaml", at=at)
    if reason == "StartError" or reason == "ContainerCannotRun":
        return Trouble("start", f"cannot be started: {_sentence(str(end.get('message') or ''))}", at=at)
    if not code:
        return None
    signal = f" ({_SIGNALS[code]})" if code in _SIGNALS else ""
    fix = ""
    if code == 137:
        fix = "SIGKILL is what a node sends for memory, or when the grace period is over"
    if code in (126, 127):
        fix = "The image has no such command: check `command` in app.yaml and the Dockerfile"
    return Trouble("crash", f"crashed with exit code {code}{signal}", fix, at=at)


def _pull(image: str, reason: str, message: str, pod: Mapping[str, Any], seen: Seen) -> Trouble:
    # While it backs off, the kubelet's status says no more than that; the warning before has the registry's words.
    said = message
    if reason == "ImagePullBackOff" or not said:
        earlier = [one.get("message", "") for one in _warnings(pod, seen) if "ull" in one.get("message", "")]
        said = next((one for one in reversed(earlier) if "Back-off" not in one and len(one) > len("Error: ")), message)
    lower = said.lower()
    if reason == "InvalidImageName":
        return Trouble("image", f"has an image whose name is not valid: {image}", "Correct `image` in app.yaml")
    if reason == "ErrImageNeverPull":
        return Trouble("image", f"wants image {image}, which its node does not have and may not pull")
    for pattern, words, fix in (
        (
            "unauthorized|authentication required|denied|forbidden|401|403",
            "the registry does not let the cluster read it",
            "Give the pods' service account an imagePullSecret, or make the image readable",
        ),
        ("not found|manifest unknown|404", "the registry has no such image", "Push it: voxlane app build"),
        (
            "no such host|timeout|connection refused|i/o|network|unreachable|tls|x509",
            f"the registry cannot be reached from the node ({_sentence(_last(said))})",
            "Check the registry's name in app.yaml",
        ),
    ):
        if re.search(pattern, lower):
            return Trouble("image", f"cannot pull image {image}: {words}", fix)
    return Trouble("image", f"cannot pull image {image}: {_sentence(_last(said)) or reason}")


def _config(message: str) -> Trouble:
    if found := re.search(r"couldn't find key (\S+) in (Secret|ConfigMap) (?:\S+/)?(\S+)", message):
        return Trouble("config", f"needs key {found[1]} of {found[2]} {found[3]}, which has no such key")
    if found := re.search(r'(secret|configmap) "([^"]+)" not found', message):
        kind = "Secret" if found[1] == "secret" else "ConfigMap"
        fix = f"Create it: kubectl create secret generic {found[2]} ..." if kind == "Secret" else "Deploy again"
        return Trouble("config", f"needs {kind} {found[2]}, which does not exist", fix)
    return Trouble("config", f"cannot be set up: {_sentence(message)}")


def _mount(pod: Mapping[str, Any], seen: Seen) -> Trouble | None:
    for event in reversed(_warnings(pod, seen)):
        message = str(event.get("message") or "")
        if event.get("reason") in ("FailedMount", "FailedAttachVolume"):
            if found := re.search(r'(secret|configmap) "([^"]+)" not found', message):
                return _config(message)
            if found := re.search(r"hostPath type check failed: (\S+) is not a directory", message):
                return Trouble("mount", f"finds no folder {found[1]} on node {spec(pod).get('nodeName')}")
            named = re.search(r'MountVolume\.\S+ failed for volume "([^"]+)"', message)
            volume = f" {named[1]}" if named else ""
            return Trouble("mount", f"cannot mount volume{volume}: {_sentence(_last(message))}")
        if event.get("reason") == "FailedCreatePodSandBox":
            return Trouble("start", f"cannot be started on node {spec(pod).get('nodeName')}: {_sentence(message)}")
    return None


def _warnings(pod: Mapping[str, Any], seen: Seen) -> list[Object]:
    return [one for one in seen.warnings if (one.get("involvedObject") or {}).get("uid") == uid_of(pod)]


def _image(pod: Mapping[str, Any], one: Mapping[str, Any]) -> str:
    return str(next((c.get("image") for c in _all_containers(pod) if c.get("name") == one.get("name")), "?"))


def _limit(pod: Mapping[str, Any], one: Mapping[str, Any], resource: str) -> str:
    own: Mapping[str, Any] = next((c for c in _all_containers(pod) if c.get("name") == one.get("name")), {})
    return str(((own.get("resources") or {}).get("limits") or {}).get(resource, ""))


def _all_containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*(spec(pod).get("initContainers") or ()), *(spec(pod).get("containers") or ())]


# -- no node -----------------------------------------------------------------------------------------------------------


def _unplaced(pod: Mapping[str, Any], seen: Seen, now: datetime) -> Trouble | None:
    if "nodeName" in spec(pod) or status(pod).get("phase", "Pending") != "Pending":
        return None
    placed = condition(pod, "PodScheduled")
    if placed.get("reason") == "SchedulingGated":
        return Trouble("wait", "is held by a scheduling gate until its queue lets it go")
    message = str(placed.get("message") or "")
    if placed.get("status") != "False":
        begun = when(pod["metadata"].get("creationTimestamp"))
        late = begun and (now - begun).total_seconds() > 30
        return Trouble("wait", "waits: the scheduler has not looked at it" + (" for half a minute" if late else " yet"))
    return unschedulable(message, pod, seen)


def reasons(message: str) -> list[tuple[int, str]]:
    """(nodes, why) of the scheduler's words: "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had taint ..."."""
    _, _, rest = message.partition("nodes are available:")
    rest = re.split(r"\.?\s*preemption:|\. no new claims", rest)[0].strip().rstrip(".")
    return [(int(count), why) for count, why in re.findall(r"(?:^|, )(\d+) (.+?)(?=, \d+ |$)", rest)]


def unschedulable(message: str, pod: Mapping[str, Any], seen: Seen) -> Trouble:
    """The scheduler's words as ours: which resource, compared with what the nodes have."""
    parts = reasons(message)
    if not parts:
        none = "no nodes available" in message
        return Trouble("node", "finds no node: " + ("the cluster has none" if none else _sentence(message)))
    short_of = any(why.startswith("Insufficient") for _, why in parts)
    lacking = data_words(seen, used_data(pod)) if any(_LABELS.search(why) for _, why in parts) else ""
    if lacking and not short_of:
        return Trouble("data", lacking)
    told = [_reason(*part, pod, seen) for part in sorted(parts, key=lambda part: not part[1].startswith("Insuff"))]
    said = "; ".join(dict.fromkeys(words for words, _ in told))
    return Trouble("node", f"finds no node: {said}", next((fix for _, fix in told if fix), ""))


_LABELS = re.compile("node affinity|node selector|NodeAffinity")


def _reason(count: int, why: str, pod: Mapping[str, Any], seen: Seen) -> tuple[str, str]:
    """Words for one of the scheduler's reasons, and what to do."""
    nodes = f"{count} node{'s' * (count != 1)}"
    if found := re.match(r"Insufficient (\S+)", why):
        return _insufficient(found[1], nodes, pod, seen)
    if _LABELS.search(why):
        if used_data(pod):
            return f"{nodes} without its data", ""
        chosen = spec(pod).get("nodeSelector") or {}
        pairs = ", ".join(f"{key}={value}" for key, value in chosen.items())
        return f"{nodes} without {pairs or 'the labels it asks for'}", "See node_selector in app.yaml" if pairs else ""
    if "anti-affinity" in why or "pod affinity" in why:
        return f"{nodes} already with a pod of this app", "Ask for fewer nodes, or wait for nodes"
    if taint := re.search(r"taint(?:\(s\))? \{([^}]*)\}", why):
        key, _, value = taint[1].partition(":")
        pair = f"{key.strip()}={value.strip()}" if value.strip() else key.strip()
        if key.strip() in ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"):
            return f"{nodes} not ready", ""
        if key.strip() == "node.kubernetes.io/unschedulable":
            return f"{nodes} cordoned", ""
        return f"{nodes} with the taint {pair}", "Add it to tolerations in app.yaml if the pods may run there"
    if "unschedulable" in why:
        return f"{nodes} cordoned", ""
    if "Too many pods" in why:
        return f"{nodes} with as many pods as fit", ""
    return f"{nodes}: {why.replace('node(s) ', '')}", ""


def _insufficient(resource: str, nodes: str, pod: Mapping[str, Any], seen: Seen) -> tuple[str, str]:
    asked = asked_of(pod).get(resource)
    what = "GPUs" if resource.endswith("/gpu") else resource
    field = "devices_per_node" if what == "GPUs" else f"resources.{resource}"
    largest = max(
        (quantity(status(n).get("allocatable", {}).get(resource, "0")) for n in seen.nodes or ()), default=None
    )
    if asked is None:
        return f"{nodes} with too little {what} free", ""
    if largest is not None and asked > largest:
        has = "none has any" if not largest else f"no node has more than {shown(largest, resource)}"
        return f"each pod asks for {shown(asked, resource)} {what} and {has}", f"Lower {field} in app.yaml"
    return f"{nodes} with less than {shown(asked, resource)} {what} free", ""


def asked_of(pod: Mapping[str, Any]) -> dict[str, float]:
    """What a pod requests: the sum of its containers, or its largest first container where that is more."""
    total: dict[str, float] = {}
    for one in spec(pod).get("containers") or ():
        for resource, amount in _requests(one).items():
            total[resource] = total.get(resource, 0.0) + amount
    for one in spec(pod).get("initContainers") or ():
        for resource, amount in _requests(one).items():
            total[resource] = max(total.get(resource, 0.0), amount)
    return total


def _requests(container: Mapping[str, Any]) -> dict[str, float]:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {resource: quantity(amount) for resource, amount in asked.items()}


_UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "n": 1e-9, "u": 1e-6} | {
    f"{letter}i": 1024.0 ** (i + 1) for i, letter in enumerate("KMGTPE")
}


def quantity(amount: Any) -> float:
    """A Kubernetes quantity (100Gi, 500m, 2) as a number; 0 for what is none."""
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]{0,2})", str(amount).strip())
    if not found or (found[2] and found[2] not in _UNITS):
        return 0.0
    return float(found[1]) * _UNITS.get(found[2], 1.0)


def shown(amount: float, resource: str) -> str:
    """A quantity as people read it."""
    if resource in ("memory", "ephemeral-storage"):
        for unit in ("Ti", "Gi", "Mi"):
            if amount >= _UNITS[unit]:
                return f"{amount / _UNITS[unit]:.4g} {unit}B"
    return f"{amount:.4g}"


# -- data --------------------------------------------------------------------------------------------------------------


def data_words(seen: Seen, names: Iterable[str] | None = None) -> str:
    """What is said of staged data that is not ready everywhere it should be; empty: all is there."""
    wanted = None if names is None else set(names)
    for name in seen.lacking_data:
        if wanted is None or name in wanted:
            return f"waits for data {name}, and there is no StagedDataset of that name"
    said = ""
    for one in seen.data:
        if (wanted is not None and name_of(one) not in wanted) or status(one).get("phase") in ("Ready", "Degraded"):
            continue
        said = said or _staging(one)
    return said


def _staging(one: Mapping[str, Any]) -> str:
    now, name = status(one), name_of(one)
    phase, message = str(now.get("phase") or ""), _sentence(str(now.get("message") or ""))
    if not phase:
        return f"waits for data {name}, which the operator has not begun to copy"
    if phase == "Failed":
        return f"waits for data {name}, which cannot be copied: {message}"
    if phase == "Staging":
        size = f" of {now['size']}" if now.get("size") else ""
        ready = f", ready on {now['ready']} nodes" if now.get("ready") else ""
        return f"waits for data {name}: staging at {now.get('progress') or '0%'}{size}{ready}"
    told = f": {message}" if message else ""
    return f"waits for data {name}, which is {phase.lower()}{told}"


# -- words -------------------------------------------------------------------------------------------------------------


def _sentence(text: str) -> str:
    """One line, without a final stop, not too long."""
    line = " ".join(text.split()).rstrip(". ")
    return line if len(line) <= 240 else f"{line[:237]}..."


def _last(text: str) -> str:
    """The innermost of the errors that Go programs join by colons, with the one around it."""
    parts = [part for part in re.split(r": (?!//)", " ".join(text.split())) if part]
    return ": ".join(parts[-2:]) if len(parts) > 2 else text


def ready(pod: Mapping[str, Any]) -> bool:
    """Whether a pod runs and says that it is ready."""
    return status(pod).get("phase") == "Running" and (holds(pod, "Ready") or not condition(pod, "Ready"))


def restarts(pod: Mapping[str, Any]) -> int:
    """How often containers of a pod were started again."""
    return sum(one.get("restartCount", 0) for one in container_states(pod))
