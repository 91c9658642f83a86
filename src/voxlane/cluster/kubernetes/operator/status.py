"""Summarize the copies of a StagedDataset in its `status`. The functions here are pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from voxlane.cluster.kubernetes.names import claim_name, copy_path
from voxlane.cluster.kubernetes.operator.resource import (
    STALE,
    ClusterNode,
    DatasetSpec,
    NodeCopy,
    StagedDataset,
    format_time,
    parse_time,
)
from voxlane.sizes import format_bytes

_LAST_USED_RESOLUTION_S = 60.0
_EVICTING = "Evicting"


def summarize(
    dataset: StagedDataset,
    spec: DatasetSpec,
    nodes: Mapping[str, ClusterNode],
    copies: Mapping[str, NodeCopy],
    chosen: Sequence[str],
    count: int,
) -> tuple[str, str]:
    """Return the phase and the message of a dataset whose copies belong on the `chosen` nodes, ideally `count`."""
    ready, evicted, lost = _list_nodes(copies, "Ready"), _list_nodes(copies, "Evicted"), _list_nodes(copies, "Lost")
    failed = _list_nodes(copies, "Failed", "NoRoom")
    staging = _list_nodes(copies, "Waiting", "Copying")
    staging += [node for node in _list_nodes(copies, _EVICTING) if node in chosen]
    if ready and len(ready) >= count:
        return "Ready", f"ready on {join_names(ready)}"
    if evicted and not (staging or failed) and len(ready) + len(evicted) >= count:
        return _summarize_evicted(evicted, ready)
    too_few = explain_too_few_nodes(spec, nodes, len(chosen), count)
    message = _describe_problems(copies, failed, lost, staging, too_few)
    if ready:
        is_on_track = staging and not (failed or lost) and len(chosen) >= count
        message = message or f"ready on {join_names(ready)}, staging onto {join_names(staging)}"
        return ("Staging" if is_on_track else "Degraded"), message
    if not staging:
        return ("Failed" if failed else "Pending"), message
    if _is_retry_without_progress(dataset, copies, staging):
        return "Failed", str(dataset.status.get("message"))
    return "Staging", message or f"staging onto {join_names(staging)}"


def _list_nodes(copies: Mapping[str, NodeCopy], *phases: str) -> list[str]:
    """Return the names of the nodes whose copies are in these phases; a copy that waits for evictions is in none but
    _EVICTING."""
    phase_of = {node: _EVICTING if copy.reason == _EVICTING else copy.phase for node, copy in copies.items()}
    return sorted(node for node, phase in phase_of.items() if phase in phases)


def _summarize_evicted(evicted: Sequence[str], ready: Sequence[str]) -> tuple[str, str]:
    remaining = f"; ready on {join_names(ready)}" if ready else ""
    message = f"evicted from {join_names(evicted)} to make room{remaining}"
    return "Degraded" if ready else "Evicted", f"{message}; it will be staged again when something uses it"


def _describe_problems(
    copies: Mapping[str, NodeCopy], failed: Sequence[str], lost: Sequence[str], staging: Sequence[str], too_few: str
) -> str:
    problems = [f"{node}: {copies[node].message}" for node in failed[:1]]
    problems += [f"{join_names(lost)} does not respond"] if lost else []
    problems += [too_few] if too_few else []
    problems += [f"{node}: {copies[node].message}" for node in staging if copies[node].message][:1]
    return "; ".join(problems)


def _is_retry_without_progress(dataset: StagedDataset, copies: Mapping[str, NodeCopy], staging: Sequence[str]) -> bool:
    """Return whether a failed dataset is only being retried, which is no news until data arrives."""
    status = dataset.status
    has_failed = status.get("phase") == "Failed" and status.get("observedGeneration") == dataset.generation
    return has_failed and all(copies[node].attempts and not copies[node].bytes for node in staging)


def explain_too_few_nodes(spec: DatasetSpec, nodes: Mapping[str, ClusterNode], chosen: int, count: int) -> str:
    """Return why fewer than `count` nodes could be chosen; empty if enough were."""
    if chosen >= max(count, 1):
        return ""
    selector = ",".join(f"{key}={value}" for key, value in sorted(spec.node_selector.items()))
    matching = [node for node in nodes.values() if matches_selector(node, spec)]
    if not matching:
        return _explain_no_match([node for node in nodes.values() if has_labels(node, spec)], selector)
    is_single = len(matching) == 1
    nodes_text = f"{len(matching)} node{'' if is_single else 's'}"
    if selector:
        nodes_text += f" that match{'es' if is_single else ''} nodeSelector {selector}"
    if len(matching) < count:
        return f"{count} nodes were requested, but there {'is' if is_single else 'are'} only {nodes_text}"
    available = sum(node.ready and node.schedulable for node in matching)
    if available < count:
        return f"{count} of {nodes_text} {'is' if count == 1 else 'are'} needed, but {available} can take a copy now"
    return f"{count - chosen} more of {nodes_text} needed"


def _explain_no_match(selected: Sequence[ClusterNode], selector: str) -> str:
    """Return why no node matches a dataset; `selected` have the labels that it requires."""
    if selector and not selected:
        return f"no node matches nodeSelector {selector}"
    taints = sorted({taint.key for node in selected for taint in node.taints})
    hint = f"; there are nodes with the taint {taints[0]}, which tolerations must name" if taints else ""
    return f"no node can take a copy{hint}"


def build_status(
    dataset: StagedDataset,
    copies: Mapping[str, NodeCopy],
    phase: str,
    message: str,
    *,
    count: int,
    in_use: bool,
    now: float,
) -> dict[str, Any]:
    """Return the new `status` of a dataset of which `count` nodes should hold copies."""
    ready = [copy for copy in copies.values() if copy.phase == "Ready"]
    unfinished = [copy for copy in copies.values() if copy.phase in ("Copying", "Waiting", "NoRoom", "Failed")]
    active = [*ready, *unfinished][: max(count, 1)]
    relevant = [*ready, *active]
    total = max((copy.total_bytes for copy in relevant), default=0)
    objects = max((copy.total_objects for copy in relevant), default=0)
    conditions = dataset.status.get("conditions") or ()
    old: Mapping[str, Any] = next((condition for condition in conditions if condition["type"] == "Ready"), {})
    is_ready = "True" if phase == "Ready" else "False"
    since = old.get("lastTransitionTime") if old.get("status") == is_ready else format_time(now)
    ready_condition = {"type": "Ready", "status": is_ready, "reason": phase, "message": message}
    status = dict(dataset.status) | {
        "phase": phase,
        "message": message,
        "ready": f"{len(ready)}/{count}",
        "observedGeneration": dataset.generation,
        "progress": f"{int(min(_compute_progress(active, len(ready), total, count), 1) * 100)}%",
        "nodes": {node: copy.to_json() for node, copy in copies.items()},
        "conditions": [ready_condition | {"lastTransitionTime": since}],
    }
    if total or objects:
        status |= {"bytes": total, "objects": objects, "size": format_bytes(total)}
    if dataset.root and dataset.spec:
        term = {"matchExpressions": [{"key": dataset.label, "operator": "In", "values": ["ready"]}]}
        affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        claim = {"claimName": claim_name(dataset.data_path), "readOnly": True}
        volume = {"persistentVolumeClaim": claim}
        path = copy_path(dataset.namespace, dataset.name)
        status |= {"hostPath": dataset.host_path, "nodeAffinity": affinity, "volume": volume, "subPath": path}
    if in_use and now - parse_time(dataset.status.get("lastUsed")) >= _LAST_USED_RESOLUTION_S:
        status["lastUsed"] = format_time(now)
    return status


def _compute_progress(active: Sequence[NodeCopy], ready: int, total: int, count: int) -> float:
    """Return the fraction of the data that has been copied, over all nodes."""
    if not total:
        return float(ready > 0 and ready >= count)
    current = [copy for copy in active if copy.reason != STALE]
    present = sum(total if copy.phase == "Ready" else min(copy.bytes, total) for copy in current)
    return present / (total * max(count, len(active)))


def build_merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch (RFC 7386) that turns `old` into `new`."""
    changes: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        current = old.get(key)
        if isinstance(value, Mapping) and isinstance(current, Mapping):
            if nested := build_merge_patch(current, value):
                changes[key] = nested
        elif key not in old or current != value:
            changes[key] = value
    return changes


def matches_selector(node: ClusterNode, spec: DatasetSpec) -> bool:
    """Return whether a node may hold a copy. A tainted node may only if the dataset names each of its taints."""
    if not all(any(toleration.matches(taint) for toleration in spec.tolerations) for taint in node.taints):
        return False
    return has_labels(node, spec)


def has_labels(node: ClusterNode, spec: DatasetSpec) -> bool:
    """Return whether a node has the labels that a dataset requires."""
    return all(node.labels.get(key) == value for key, value in spec.node_selector.items())


def join_names(names: Sequence[str], limit: int = 3) -> str:
    """Return at most `limit` names as an enumeration for a sentence."""
    if len(names) > limit:
        return f"{', '.join(names[:limit])} and {len(names) - limit} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
