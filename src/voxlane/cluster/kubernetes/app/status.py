"""Format an app's state and events as tables for people, and its state as plain data for programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from voxlane.cluster.kubernetes.app import k8s
from voxlane.cluster.kubernetes.app.diagnosis import AppDiagnosis, get_outcome
from voxlane.cluster.kubernetes.app.k8s import AppSnapshot, Object
from voxlane.cluster.kubernetes.app.pod_diagnosis import diagnose_pod

MAX_PODS = 20
"""With more pods than this, pods are counted by state, and only those with a problem are named."""
_MAX_NAMED = 10
_HEADER = ("", "NAME", "STATE", "NODE", "RESTARTS", "AGE")


@dataclass(frozen=True)
class StatusRow:
    """One row of the table."""

    kind: str
    name: str
    state: str
    node: str = ""
    restarts: str = ""
    age: str = ""


def build_rows(snapshot: AppSnapshot) -> list[StatusRow]:
    """Return the rows of an app, from its queue down to its pods, then its data and TensorBoard."""
    workload, rows = snapshot.workload, []

    def build_row(kind: str, item: Object, state: str, **more: str) -> StatusRow:
        return StatusRow(kind, k8s.name_of(item), state, age=snapshot.format_age(k8s.created_at(item)), **more)

    if snapshot.queue_name:
        rows.append(StatusRow("queue", snapshot.queue_name, _describe_queue(snapshot)))
    if workload is not None:
        total, counted, limit = k8s.count_restarts(workload)
        uncounted = f", {total - counted} uncounted" if total > counted else ""
        restarts = f"{counted} of {limit}{uncounted}" if limit is not None else ""
        rows.append(build_row(workload["kind"], workload, _describe_workload(snapshot, workload), restarts=restarts))
    rows += [build_row("job", job, _describe_job(job, snapshot)) for job in snapshot.jobs]
    rows += _build_pod_rows(snapshot)
    rows += [build_row("data", dataset, _describe_data(dataset)) for dataset in snapshot.data]
    rows += [StatusRow("data", name, "does not exist") for name in snapshot.missing_data]
    for board in snapshot.boards:
        pod = next((pod for pod in snapshot.board_pods if not k8s.is_deleting(pod)), None)
        not_ready = f"not ready ({_describe_pod(pod)})" if pod else "not ready"
        state = "running" if k8s.status(board).get("readyReplicas") else not_ready
        rows.append(build_row("board", board, state, node=k8s.spec(pod).get("nodeName", "") if pod else ""))
    return rows


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align cells in columns; leave out columns that are empty below the header."""
    header, *body = rows
    columns = [i for i in range(len(header)) if i == 0 or any(row[i] for row in body)]
    widths = [max(len(row[i]) for row in rows) for i in columns]
    return ["  ".join(row[i].ljust(width) for i, width in zip(columns, widths, strict=True)).rstrip() for row in rows]


def format_status(snapshot: AppSnapshot, diagnosis: AppDiagnosis) -> list[str]:
    """Return the lines that `voxlane app status` prints about one app."""
    lines = [f"{snapshot.name}: {diagnosis.text}"]
    lines += [f"    | {line}" for line in diagnosis.log_lines]
    if snapshot.workload is not None:
        facts = {"namespace": snapshot.namespace, "run": snapshot.run_uri, "image": snapshot.image}
        lines.append("  ".join(f"{name} {value}" for name, value in facts.items() if value))
    if rows := build_rows(snapshot):
        lines += ["", *format_table([_HEADER, *(tuple(asdict(row).values()) for row in rows)])]
    if snapshot.unreadable:
        lines += ["", f"(not shown, because you may not read them: {', '.join(snapshot.unreadable)})"]
    return lines


def format_overview(apps: Sequence[tuple[AppSnapshot, AppDiagnosis]]) -> list[str]:
    """Return a table with one row for each app."""
    rows = [("APP", "KIND", "STATE", "AGE", "WHY")]
    for snapshot, diagnosis in apps:
        workload = snapshot.workload
        age = snapshot.format_age(k8s.created_at(workload)) if workload else ""
        kind = workload["kind"] if workload else "TensorBoard" if snapshot.boards else ""
        rows.append((snapshot.name, kind, diagnosis.state, age, diagnosis.reason))
    return format_table(rows)


def format_events(events: Sequence[Object], app: str, now: datetime) -> list[str]:
    """Return events as a table, in the order given."""
    rows = []
    for event in events:
        subject = event.get("involvedObject") or {}
        count = (event.get("series") or {}).get("count") or event.get("count") or 1
        message = " ".join(str(event.get("message") or "").split()) + (f" (x{count})" if count > 1 else "")
        name = str(subject.get("name")).removeprefix(f"{app}-")
        kind = "" if event.get("type") == "Normal" else str(event.get("type") or "")
        title = f"{str(subject.get('kind')).lower()} {name}"
        age = k8s.format_age(k8s.get_event_time(event), now)
        rows.append((age, kind, str(event.get("reason") or ""), title, message))
    return format_table([("AGO", "TYPE", "REASON", "OBJECT", "MESSAGE"), *rows])


def to_dict(snapshot: AppSnapshot, diagnosis: AppDiagnosis) -> dict[str, Any]:
    """Return an app's state as data, for --json."""
    return {
        "app": snapshot.name,
        "namespace": snapshot.namespace,
        "state": diagnosis.state,
        "why": diagnosis.reason,
        "fix": diagnosis.fix,
        "lines": list(diagnosis.log_lines),
        "run": snapshot.run_uri,
        "image": snapshot.image,
        "rows": [asdict(row) for row in build_rows(snapshot)],
    }


def _describe_queue(snapshot: AppSnapshot) -> str:
    if snapshot.queue is None:
        return "not readable" if "LocalQueue" in snapshot.unreadable else "does not exist"
    if k8s.condition(snapshot.queue, "Active").get("status") == "False":
        return "not active"
    if not snapshot.admissions:
        return "has not picked up the app"
    admission = snapshot.admissions[-1]
    if k8s.is_true(admission, "Finished"):
        return "app finished"
    if k8s.is_true(admission, "Admitted"):
        cluster_queue = (k8s.status(admission).get("admission") or {}).get("clusterQueue")
        return f"app admitted by {cluster_queue}" if cluster_queue else "app admitted"
    pending = k8s.status(snapshot.queue).get("pendingWorkloads")
    count = f", {pending} waiting in it" if pending else ""
    return ("has quota, waits for checks" if k8s.is_true(admission, "QuotaReserved") else "app waits for quota") + count


def _describe_workload(snapshot: AppSnapshot, workload: Object) -> str:
    if k8s.is_deleting(workload):
        return "stopping"
    if outcome := get_outcome(workload)[0]:
        return outcome
    if k8s.spec(workload).get("suspend"):
        return "suspended"
    total = max(k8s.count_requested_pods(workload), len(snapshot.alive_pods))
    return f"{sum(map(k8s.is_ready, snapshot.pods))} of {total} pods run"


def _describe_job(job: Object, snapshot: AppSnapshot) -> str:
    if k8s.is_true(job, "Complete"):
        return "finished"
    if k8s.is_true(job, "Failed"):
        reason = k8s.condition(job, "Failed").get("reason")
        return f"failed ({reason})" if reason else "failed"
    if k8s.spec(job).get("suspend"):
        return "suspended"
    pods = [pod for pod in snapshot.pods if k8s.is_owned_by(pod, k8s.uid_of(job))]
    running = sum(map(k8s.is_ready, pods)) if pods else k8s.status(job).get("active", 0)
    return f"{running} of {k8s.spec(job).get('parallelism', 1)} pods run"


def _build_pod_rows(snapshot: AppSnapshot) -> list[StatusRow]:
    """Return a row for each pod or, if there are many, for each state and for the first pods with a problem."""
    names = k8s.shorten_pod_names(snapshot.pods, snapshot.name)
    rows, named_pods, unnamed = [], snapshot.pods, 0
    if len(snapshot.pods) > MAX_PODS:
        nodes_by_state: dict[str, list[str]] = {}
        for pod in snapshot.pods:
            nodes_by_state.setdefault(_describe_pod(pod), []).append(k8s.spec(pod).get("nodeName", ""))
        for state, nodes in sorted(nodes_by_state.items(), key=lambda item: -len(item[1])):
            on_nodes = k8s.count_noun(len({*nodes} - {""}), "node") if any(nodes) else ""
            rows.append(StatusRow("pods", f"{len(nodes)} of {len(snapshot.pods)}", state, on_nodes))
        problems = ((pod, diagnose_pod(pod, snapshot)) for pod in snapshot.pods)
        with_problems = [pod for pod, problem in problems if problem and problem.kind != "wait"]
        named_pods, unnamed = with_problems[:_MAX_NAMED], len(with_problems) - _MAX_NAMED
    for pod in named_pods:
        restarts, age = str(k8s.count_container_restarts(pod) or ""), snapshot.format_age(k8s.created_at(pod))
        node = k8s.spec(pod).get("nodeName", "")
        rows.append(StatusRow("pod", names[k8s.name_of(pod)], _describe_pod(pod), node, restarts, age))
    if unnamed > 0:
        rows.append(StatusRow("pods", f"and {unnamed} more", "with problems"))
    return rows


def _describe_pod(pod: Object) -> str:
    """Describe a pod's state as kubectl does: by the reason of a container if there is one, otherwise by its phase."""
    if k8s.is_deleting(pod):
        return "Terminating"
    if k8s.status(pod).get("reason"):
        return str(k8s.status(pod)["reason"])
    for container in k8s.list_container_statuses(pod):
        state = container.get("state") or {}
        if reason := (state.get("waiting") or {}).get("reason"):
            return str(reason)
        terminated = state.get("terminated") or {}
        if terminated.get("exitCode"):
            reason = terminated.get("reason") or "Error"
            return f"{reason} (exit code {terminated['exitCode']})" if reason == "Error" else str(reason)
    if k8s.condition(pod, "PodScheduled").get("reason") in ("Unschedulable", "SchedulingGated"):
        return str(k8s.condition(pod, "PodScheduled")["reason"])
    return str(k8s.status(pod).get("phase") or "Pending")


def _describe_data(dataset: Object) -> str:
    current = k8s.status(dataset)
    state = str(current.get("phase") or "not picked up by an operator")
    if current.get("phase") == "Staging" and current.get("progress"):
        state += f" {current['progress']}"
    state += f" on {current['ready']} nodes" if current.get("ready") else ""
    return state + (f", {current['size']}" if current.get("size") else "")
