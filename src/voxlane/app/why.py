"""One sentence on where an app stands and why it is not running. Pure: over objects that were fetched before."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from voxlane.app.objects import (
    Object,
    Seen,
    asked_pods,
    condition,
    deleting,
    holds,
    name_of,
    restarts_of,
    shorts,
    since,
    span,
    spec,
    status,
    uid_of,
    when,
)
from voxlane.app.trouble import ORDER, Trouble, data_words, ready, restarts, trouble

_RELEASE = '{"spec":{"suspend":false}}'
_TAIL = 10
"""Log lines that are shown of a crash."""


@dataclass(frozen=True)
class Verdict:
    """Where an app stands."""

    state: str
    """absent, staging, queued, suspended, waiting, starting, running, restarting, stopping, finished or failed."""
    why: str
    """One sentence without its stop."""
    fix: str = ""
    lines: tuple[str, ...] = ()
    """Last log lines of the pod that crashed."""

    @property
    def ended(self) -> bool:
        """Whether it will do nothing more by itself."""
        return self.state in ("finished", "failed", "absent")

    @property
    def text(self) -> str:
        """State, reason and what to do, in one line."""
        said = f"{self.state}: {self.why}" if self.why else self.state
        return f"{said}. {self.fix}" if self.fix else said


def verdict(seen: Seen, now: datetime) -> Verdict:
    """Where an app stands at `now`."""
    workload = seen.workload
    if workload is None:
        return _without_workload(seen, now)
    if deleting(workload):
        left = f"{len(seen.pods)} pod{'s' * (len(seen.pods) != 1)} not gone yet" if seen.pods else "its pods are gone"
        return Verdict("stopping", f"it is being removed; {left}")
    done, at, said = ending(workload)
    if done == "finished":
        return Verdict("finished", _finished(workload, at, now))
    if done == "failed":
        return _failed(seen, at, said, now)
    if suspended(workload):
        return _suspended(seen, now)
    return _active(seen, now)


def _without_workload(seen: Seen, now: datetime) -> Verdict:
    if seen.pods or (seen.data and all(deleting(one) for one in seen.data)):
        return Verdict("stopping", "what is left of it is being removed")
    if lacking := data_words(seen, [name_of(one) for one in seen.data]):
        return Verdict("staging", f"the training {lacking}")
    if seen.boards:
        return _board_alone(seen, now)
    if seen.data:
        return Verdict("staging", "its data is there; the training is not deployed yet")
    return Verdict("absent", "not deployed", "Run: voxlane app deploy")


def _board_alone(seen: Seen, now: datetime) -> Verdict:
    if any(ready(pod) for pod in seen.board_pods):
        return Verdict("running", "its TensorBoard alone; no training is deployed")
    found = next((one for pod in seen.board_pods if (one := trouble(pod, seen, now))), None)
    if found is not None:
        return Verdict("waiting", f"its TensorBoard's pod {found.said}", found.fix)
    return Verdict("starting", "its TensorBoard alone; no training is deployed")


# -- ended -------------------------------------------------------------------------------------------------------------


def ending(workload: Mapping[str, Any]) -> tuple[str, str, str]:
    """("finished" or "failed" or "", when, what the controller said) of a workload."""
    if workload["kind"] == "RayJob":
        now = status(workload)
        at, deployed = str(now.get("endTime") or ""), now.get("jobDeploymentStatus")
        said = str(now.get("message") or now.get("reason") or "")
        if now.get("jobStatus") in ("FAILED", "STOPPED") and deployed in ("Complete", "Failed"):
            return "failed", at, said
        if deployed in ("Complete", "Failed", "ValidationFailed"):
            return ("finished" if deployed == "Complete" else "failed"), at, said
        return "", "", ""
    for kind, state in (("Completed", "finished"), ("Complete", "finished"), ("Failed", "failed")):
        if holds(workload, kind):
            found = condition(workload, kind)
            return state, str(found.get("lastTransitionTime") or ""), str(found.get("message") or "")
    return "", "", ""


def _finished(workload: Mapping[str, Any], at: str, now: datetime) -> str:
    begun, ended = when(workload["metadata"].get("creationTimestamp")), when(at)
    took = f", {span((ended - begun).total_seconds())} after it was deployed" if begun and ended else ""
    clock = ended.strftime("%Y-%m-%d %H:%M UTC") if ended else "at an unknown time"
    return f"it finished {since(at, now) or 'some time'} ago ({clock}){took}" if ended else f"it finished {clock}"


def _failed(seen: Seen, at: str, said: str, now: datetime) -> Verdict:
    ago = f", {since(at, now)} ago" if at else ""
    first = told(seen, now)
    used = _restarts(seen)
    if any(condition(job, "Failed").get("reason") == "DeadlineExceeded" for job in seen.jobs):
        return Verdict("failed", f"it ran past its time limit{ago}{used}", "Raise it and deploy again: the run goes on")
    if first is not None:
        return Verdict(
            "failed",
            f"{_who(first, seen)} {first.said}{ago}{used}",
            first.fix,
            tuple(seen.tails.get(first.pod, ())[-_TAIL:]),
        )
    words = " ".join(said.split()).rstrip(".") or "the cluster gives no reason"
    gone = "" if seen.pods else "Its pods are gone; what they wrote is kept: voxlane app logs"
    return Verdict("failed", f"it failed{ago}: {words}{used}", gone)


def _restarts(seen: Seen) -> str:
    """How often the whole set was started again, of how often it may be."""
    assert seen.workload is not None
    used, counted = restarts_of(seen.workload)
    limit = (spec(seen.workload).get("failurePolicy") or {}).get("maxRestarts")
    if not used:
        return ""
    if limit is None:
        return f" (restarted {used} times)"
    free = f", and {used - counted} for preemptions" if used > counted else ""
    return f" ({counted} of {limit} restarts used{free})"


# -- held --------------------------------------------------------------------------------------------------------------


def suspended(workload: Mapping[str, Any]) -> bool:
    """Whether it is told not to run for now, as Kueue tells what waits in a queue."""
    return bool(spec(workload).get("suspend"))


def _suspended(seen: Seen, now: datetime) -> Verdict:
    assert seen.workload is not None
    queue = seen.queue_name
    if not queue:
        kind = seen.workload["kind"].lower()
        return Verdict(
            "suspended",
            "somebody suspended it, and no queue will let it go",
            f"Run: kubectl -n {seen.namespace} patch {kind} {seen.name} --type merge -p '{_RELEASE}'",
        )
    if seen.queue is None and "LocalQueue" not in seen.unread:
        return Verdict(
            "queued",
            f"queue {queue} does not exist in namespace {seen.namespace}",
            "Set `queue` in app.yaml to one that does (kubectl get localqueues) and deploy again",
        )
    active = condition(seen.queue, "Active") if seen.queue else {}
    if active.get("status") == "False":
        return Verdict(
            "queued", f"queue {queue} is not active: {_plain(active.get('message'))}", "Ask who runs Kueue here"
        )
    if not seen.admissions:
        return Verdict("queued", f"it waits in queue {queue}, and Kueue has not looked at it", _unseen(seen, now))
    return _queued(seen.admissions[-1], queue, now)


def _unseen(seen: Seen, now: datetime) -> str:
    assert seen.workload is not None
    begun = when(seen.workload["metadata"].get("creationTimestamp"))
    late = begun is not None and (now - begun).total_seconds() > 30
    return (
        f"Check that Kueue runs and manages {seen.workload['kind']}s (kubectl get pods -n kueue-system)" if late else ""
    )


def _queued(admission: Object, queue: str, now: datetime) -> Verdict:
    """Why Kueue does not let it go."""
    evicted, reserved = condition(admission, "Evicted"), condition(admission, "QuotaReserved")
    if spec(admission).get("active") is False:
        reason = _plain(evicted.get("message")) or "its Workload is not active"
        return Verdict("queued", f"Kueue has put it out of queue {queue}: {reason}", "Deploy again with --replace")
    waits = [one for one in status(admission).get("admissionChecks") or () if one.get("state") != "Ready"]
    if holds(admission, "QuotaReserved") and waits:
        check = waits[0]
        told_so = f": {_plain(check.get('message'))}" if check.get("message") else ""
        return Verdict("queued", f"it has quota in queue {queue} and waits for the check {check.get('name')}{told_so}")
    before = f" It was put back {since(evicted.get('lastTransitionTime'), now)} ago: {_plain(evicted.get('message'))}"
    again = before if evicted.get("status") == "True" and evicted.get("message") else ""
    if reserved.get("status") == "False" and reserved.get("message"):
        return Verdict(
            "queued", f"it waits for quota in queue {queue}: {quota(str(reserved['message']))}{again and '.'}{again}"
        )
    if holds(admission, "Admitted"):
        return Verdict("starting", f"queue {queue} has let it go; it is about to start")
    if again:
        return Verdict("queued", f"it waits in queue {queue}.{again}")
    return Verdict("queued", f"it waits in queue {queue}")


def quota(message: str) -> str:
    """Kueue's words about quota without its own names for things."""
    text = re.sub(r"couldn't assign flavors to pod set \S+: ", "", _plain(message))
    for pattern, words in _QUOTAS:
        text = re.sub(pattern, words, text)
    return text


_FLAVOR = r"insufficient (?:unused )?quota (?:in cohort )?for (\S+) in flavor ([^,\s]+), "
_QUOTAS = (
    (_FLAVOR + r"(\S+) more needed", r"\3 more \1 needed in flavor \2"),
    (
        _FLAVOR + r"request > maximum capacity \((\S+) > (\S+)\)",
        r"it asks for \3 \1, and flavor \2 has a quota of \4 in all",
    ),
    (
        _FLAVOR + r"previously considered podsets requests \(\S+\) \+ current podset request \((\S+)\) > "
        r"maximum capacity \((\S+)\)",
        r"it asks for \3 \1, and flavor \2 has a quota of \4 in all",
    ),
)


# -- active ------------------------------------------------------------------------------------------------------------


def _active(seen: Seen, now: datetime) -> Verdict:
    assert seen.workload is not None
    asked = asked_pods(seen.workload)
    alive = [pod for pod in seen.pods if status(pod).get("phase") not in ("Succeeded", "Failed")]
    hurt = {one.pod for one in _all(seen, now)}
    up = [pod for pod in alive if ready(pod) and not deleting(pod) and name_of(pod) not in hurt]
    total = max(asked, len(alive))
    used = _restarts(seen)
    if not seen.pods:
        return _no_pods(seen, now, used)
    first = told(seen, now)
    if first is not None:
        return _troubled(seen, first, len(up), total, used, now)
    if len(up) >= total:
        nodes = len({spec(pod).get("nodeName") for pod in up})
        begun = min((str(status(pod).get("startTime") or "") for pod in up), default="")
        count = f"{len(up)} pod{'s' * (len(up) != 1)} on {nodes} node{'s' * (nodes != 1)}"
        again = sum(restarts(pod) for pod in up)
        kicked = f"; containers were restarted {again} times" if again else ""
        return Verdict("running", f"{count} for {since(begun, now) or 'some time'}{used}{kicked}")
    if any(deleting(pod) for pod in seen.pods):
        return Verdict("restarting", f"its pods are being replaced, {len(up)} of {total} run{used}")
    done = sum(status(pod).get("phase") == "Succeeded" for pod in seen.pods)
    if done:
        return Verdict("running", f"{done} of {total} pods are done{used}")
    return Verdict("starting", f"{len(up)} of {total} pods run{used}")


def _troubled(seen: Seen, first: Trouble, up: int, total: int, used: str, now: datetime) -> Verdict:
    same = sum(1 for one in _all(seen, now) if one.kind == first.kind and one.said == first.said)
    who = _who(first, seen) if same == 1 else f"{same} of {max(total, len(seen.pods))} pods"
    said = _many(first.said) if same > 1 else first.said
    tail = tuple(seen.tails.get(first.pod, ())[-_TAIL:])
    if first.kind in ("crash", "memory", "evicted", "lost", "deadline"):
        ago = f", {since(first.at, now)} ago" if first.at else ""
        rest = "" if up == 0 else f"; {up} of {total} still run"
        return Verdict("restarting", f"{who} {said}{ago}{rest}{used}", first.fix, tail)
    state = {"data": "staging", "wait": "starting"}.get(first.kind, "waiting")
    rest = f"; {up} of {total} run" if up else ""
    return Verdict(state, f"{who} {said}{rest}{used}", first.fix, tail)


def _no_pods(seen: Seen, now: datetime, used: str) -> Verdict:
    assert seen.workload is not None
    kind, made = seen.workload["kind"], seen.workload["metadata"].get("creationTimestamp")
    own = {uid_of(seen.workload)} | {uid_of(job) for job in seen.jobs}
    for event in reversed(seen.warnings):
        if (event.get("involvedObject") or {}).get("uid") in own and event.get("reason") != "FailedScheduling":
            return Verdict("waiting", f"no pods can be made: {refused(str(event.get('message') or ''))}{used}")
    lacking = data_words(seen, [name_of(one) for one in seen.data] + seen.lacking_data)
    begun = when(made)
    if begun is not None and (now - begun).total_seconds() > 30 and not used:
        fix = f"Check that the controller of {kind}s runs"
        return Verdict("waiting", f"{kind} {seen.name} was made {since(made, now)} ago and nothing has come of it", fix)
    if lacking:
        return Verdict("staging", f"it {lacking}")
    return Verdict("restarting" if used else "starting", f"no pods yet{used}")


def refused(message: str) -> str:
    """Why the server would not make a pod."""
    text = _plain(message)
    if found := re.search(r"exceeded quota: (\S+), requested: (\S+), used: (\S+), limited: (\S+)", text):
        return f"the namespace's quota {found[1]} is used up (asked {found[2]}, used {found[3]}, limit {found[4]})"
    if found := re.search(r'service account \S*?/?([^/\s"]+): .*not found|serviceaccount "([^"]+)" not found', text):
        return f"service account {found[1] or found[2]} does not exist"
    if found := re.search(r"no PriorityClass with name (\S+) was found", text):
        return f"priority class {found[1]} does not exist"
    return text


def told(seen: Seen, now: datetime) -> Trouble | None:
    """The trouble that explains the others: the most serious, and of those the first."""
    found = _all(seen, now)
    return min(found, key=lambda one: (ORDER.index(one.kind), one.at or "9", one.pod), default=None)


def _all(seen: Seen, now: datetime) -> list[Trouble]:
    return [found for pod in seen.pods if (found := trouble(pod, seen, now)) is not None]


def suspects(seen: Seen, now: datetime) -> Sequence[str]:
    """Names of the pods whose last lines the verdict would show; at most one."""
    first = told(seen, now)
    return [first.pod] if first is not None and first.kind in ("crash", "memory") else []


def _who(first: Trouble, seen: Seen) -> str:
    return f"pod {shorts(seen.pods, seen.name).get(first.pod, first.pod)}"


_PLURAL = {
    "finds": "find",
    "waits": "wait",
    "needs": "need",
    "wants": "want",
    "has": "have",
    "is": "are",
    "was": "were",
}


def _many(said: str) -> str:
    """What is said of one pod, said of several."""
    word, space, rest = said.partition(" ")
    return f"{_PLURAL.get(word, word)}{space}{rest}"


def _plain(text: Any) -> str:
    return " ".join(str(text or "").split()).rstrip(". ")
