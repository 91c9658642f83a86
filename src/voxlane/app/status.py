"""An app's state as a table for people and as plain data for programs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from voxlane.app.objects import (
    IMAGE,
    RUN,
    Seen,
    annotation,
    asked_pods,
    condition,
    deleting,
    holds,
    name_of,
    owned_by,
    restarts_of,
    shorts,
    since,
    spec,
    status,
    uid_of,
)
from voxlane.app.trouble import container_states, ready, restarts, trouble
from voxlane.app.why import Verdict, ending, suspended

MOST_PODS = 20
"""More pods than these are counted, and only those with trouble are named."""
_NAMED = 10
_HEAD = ("", "NAME", "STATE", "NODE", "RESTARTS", "AGE")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    kind: str
    name: str
    state: str
    node: str = ""
    restarts: str = ""
    age: str = ""


def rows(seen: Seen, now: datetime) -> list[Row]:
    """The app from its queue down to its pods, then data and board."""
    made = []
    if seen.queue_name:
        made.append(Row("queue", seen.queue_name, _queue(seen)))
    if seen.workload is not None:
        limit = (spec(seen.workload).get("failurePolicy") or {}).get("maxRestarts")
        used, counted = restarts_of(seen.workload)
        free = f", {used - counted} uncounted" if used > counted else ""
        again = f"{counted} of {limit}{free}" if limit is not None else ""
        age = since(seen.workload["metadata"].get("creationTimestamp"), now)
        made.append(Row(seen.workload["kind"], name_of(seen.workload), _workload(seen), "", again, age))
    made += [_job(job, seen, now) for job in seen.jobs]
    made += _pods(seen, now)
    made += [_data(one, now) for one in seen.data]
    made += [Row("data", name, "does not exist") for name in seen.lacking_data]
    made += [_board(one, seen, now) for one in seen.boards]
    return made


def table(lines: Sequence[Sequence[str]]) -> list[str]:
    """Cells in columns; columns without content below the head are left out."""
    head, *body = lines
    kept = [i for i in range(len(head)) if i == 0 or any(line[i] for line in body)]
    widths = [max(len(line[i]) for line in lines) for i in kept]
    return ["  ".join(line[i].ljust(width) for i, width in zip(kept, widths, strict=True)).rstrip() for line in lines]


def text(seen: Seen, found: Verdict, now: datetime) -> list[str]:
    """What `voxlane app status` prints of one app."""
    lines = [f"{seen.name}: {found.text}"]
    lines += [f"    | {line}" for line in found.lines]
    about = _about(seen)
    lines += [about] if about else []
    body = rows(seen, now)
    if body:
        lines += ["", *table([_HEAD, *(tuple(asdict(row).values()) for row in body)])]
    if seen.unread:
        lines += ["", f"(not shown, because you may not read them: {', '.join(seen.unread)})"]
    return lines


def overview(apps: Sequence[tuple[Seen, Verdict]], now: datetime) -> list[str]:
    """A line an app."""
    body = []
    for seen, found in apps:
        age = since(seen.workload["metadata"].get("creationTimestamp"), now) if seen.workload else ""
        kind = seen.workload["kind"] if seen.workload else "TensorBoard" if seen.boards else ""
        body.append((seen.name, kind, found.state, age, found.why))
    return table([("APP", "KIND", "STATE", "AGE", "WHY"), *body])


def plain(seen: Seen, found: Verdict, now: datetime) -> dict[str, Any]:
    """The same as data, for --json."""
    return {
        "app": seen.name,
        "namespace": seen.namespace,
        "state": found.state,
        "why": found.why,
        "fix": found.fix,
        "lines": list(found.lines),
        "run": annotation(seen.workload, RUN) if seen.workload else "",
        "image": annotation(seen.workload, IMAGE) if seen.workload else "",
        "rows": [asdict(row) for row in rows(seen, now)],
    }


def _about(seen: Seen) -> str:
    if seen.workload is None:
        return ""
    parts = [f"{key} {value}" for key, value in (("run", annotation(seen.workload, RUN)),) if value]
    parts += [f"image {annotation(seen.workload, IMAGE)}"] if annotation(seen.workload, IMAGE) else []
    return "  ".join([f"namespace {seen.namespace}", *parts])


def _queue(seen: Seen) -> str:
    if seen.queue is None:
        return "not readable" if "LocalQueue" in seen.unread else "does not exist"
    if condition(seen.queue, "Active").get("status") == "False":
        return "not active"
    if not seen.admissions:
        return "has not seen the app"
    last = seen.admissions[-1]
    given = (status(last).get("admission") or {}).get("clusterQueue")
    if holds(last, "Finished"):
        return "app finished"
    if holds(last, "Admitted"):
        return f"app admitted by {given}" if given else "app admitted"
    waiting = status(seen.queue).get("pendingWorkloads")
    many = f", {waiting} waiting in it" if waiting else ""
    return ("has quota, waits for checks" if holds(last, "QuotaReserved") else "app waits for quota") + many


def _workload(seen: Seen) -> str:
    assert seen.workload is not None
    if deleting(seen.workload):
        return "stopping"
    done, _, _ = ending(seen.workload)
    if done:
        return done
    if suspended(seen.workload):
        return "suspended"
    up = sum(ready(pod) for pod in seen.pods)
    return f"{up} of {max(asked_pods(seen.workload), len(_alive(seen)))} pods run"


def _alive(seen: Seen) -> list[dict[str, Any]]:
    return [pod for pod in seen.pods if status(pod).get("phase") not in ("Succeeded", "Failed")]


def _job(job: Mapping[str, Any], seen: Seen, now: datetime) -> Row:
    now_, asked = status(job), spec(job).get("parallelism", 1)
    if holds(job, "Complete"):
        state = "finished"
    elif holds(job, "Failed"):
        reason = condition(job, "Failed").get("reason")
        state = f"failed ({reason})" if reason else "failed"
    elif suspended(job):
        state = "suspended"
    else:
        own = [pod for pod in seen.pods if owned_by(pod, uid_of(job))]
        up = sum(ready(pod) for pod in own) if own else now_.get("active", 0)
        state = f"{up} of {asked} pods run"
    return Row("job", name_of(job), state, age=since(job["metadata"].get("creationTimestamp"), now))


def _pods(seen: Seen, now: datetime) -> list[Row]:
    names = shorts(seen.pods, seen.name)
    if len(seen.pods) <= MOST_PODS:
        return [_pod(pod, names, now) for pod in seen.pods]
    states = Counter(_pod_state(pod) for pod in seen.pods)
    nodes: dict[str, set[str]] = {}
    for pod in seen.pods:
        nodes.setdefault(_pod_state(pod), set()).add(spec(pod).get("nodeName", ""))
    made = []
    for state, count in states.most_common():
        on = len(nodes[state] - {""})
        made.append(Row("pods", f"{count} of {len(seen.pods)}", state, f"{on} node{'s' * (on != 1)}" if on else ""))
    bad = [pod for pod in seen.pods if (found := trouble(pod, seen, now)) and found.kind != "wait"]
    made += [_pod(pod, names, now) for pod in bad[:_NAMED]]
    if len(bad) > _NAMED:
        made.append(Row("pods", f"and {len(bad) - _NAMED} more", "not well"))
    return made


def _pod(pod: Mapping[str, Any], names: Mapping[str, str], now: datetime) -> Row:
    return Row(
        "pod",
        names[name_of(pod)],
        _pod_state(pod),
        spec(pod).get("nodeName", ""),
        str(restarts(pod) or ""),
        since(pod["metadata"].get("creationTimestamp"), now),
    )


def _pod_state(pod: Mapping[str, Any]) -> str:
    """As kubectl says it: a container's reason where there is one, else the phase."""
    if deleting(pod):
        return "Terminating"
    if status(pod).get("reason"):
        return str(status(pod)["reason"])
    for one in container_states(pod):
        state = one.get("state") or {}
        if reason := (state.get("waiting") or {}).get("reason"):
            return str(reason)
        end = state.get("terminated") or {}
        if end.get("exitCode"):
            reason = end.get("reason") or "Error"
            return f"{reason} (exit code {end['exitCode']})" if reason == "Error" else str(reason)
    if condition(pod, "PodScheduled").get("reason") in ("Unschedulable", "SchedulingGated"):
        return str(condition(pod, "PodScheduled")["reason"])
    return str(status(pod).get("phase") or "Pending")


def _data(one: Mapping[str, Any], now: datetime) -> Row:
    said = status(one)
    state = str(said.get("phase") or "not seen by the operator")
    if said.get("phase") == "Staging" and said.get("progress"):
        state += f" {said['progress']}"
    state += f" on {said['ready']} nodes" if said.get("ready") else ""
    state += f", {said['size']}" if said.get("size") else ""
    return Row("data", name_of(one), state, age=since(one["metadata"].get("creationTimestamp"), now))


def _board(one: Mapping[str, Any], seen: Seen, now: datetime) -> Row:
    up = status(one).get("readyReplicas") or 0
    first = next((pod for pod in seen.board_pods if not deleting(pod)), None)
    state = "running" if up else f"not ready ({_pod_state(first)})" if first else "not ready"
    node = spec(first).get("nodeName", "") if first else ""
    return Row("board", name_of(one), state, node, age=since(one["metadata"].get("creationTimestamp"), now))
