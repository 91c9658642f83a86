"""Diagnose in one sentence what state an app is in and why it is not running. Pure: it reads a snapshot."""

from __future__ import annotations

import re
from dataclasses import dataclass

from voxlane.cluster.kubernetes.app import k8s
from voxlane.cluster.kubernetes.app.k8s import AppSnapshot, Object
from voxlane.cluster.kubernetes.app.pod_diagnosis import SEVERITY_ORDER, PodProblem, describe_missing_data, diagnose_pod

_RESUME_PATCH = '{"spec":{"suspend":false}}'
_PLURALS = {"needs": "need", "has": "have", "is": "are", "was": "were"}


@dataclass(frozen=True)
class AppDiagnosis:
    """The state of an app and the reason for it."""

    state: str
    """absent, staging, queued, suspended, waiting, starting, running, restarting, stopping, finished or failed."""
    reason: str
    """One sentence without its final full stop."""
    fix: str = ""
    log_lines: tuple[str, ...] = ()
    """Last log lines of the pod that crashed."""

    @property
    def has_ended(self) -> bool:
        """Whether the app will do nothing more by itself."""
        return self.state in ("finished", "failed", "absent")

    @property
    def text(self) -> str:
        """State, reason and fix in one line."""
        text = f"{self.state}: {self.reason}" if self.reason else self.state
        return f"{text}. {self.fix}" if self.fix else text

    @property
    def sentence(self) -> str:
        """The text with a capital letter."""
        return f"{self.text[0].upper()}{self.text[1:]}"


def diagnose_app(snapshot: AppSnapshot) -> AppDiagnosis:
    """Return the state of an app when the snapshot was taken."""
    workload = snapshot.workload
    if workload is None:
        return _diagnose_without_workload(snapshot)
    if k8s.is_deleting(workload):
        rest = f"{k8s.count_noun(len(snapshot.pods), 'pod')} left" if snapshot.pods else "its pods are gone"
        return AppDiagnosis("stopping", f"it is being removed; {rest}")
    outcome, time, message = get_outcome(workload)
    if outcome == "finished":
        started, ended = k8s.parse_time(k8s.created_at(workload)), k8s.parse_time(time)
        if ended is None:
            return AppDiagnosis("finished", "it finished at an unknown time")
        took = f", {k8s.format_duration((ended - started).total_seconds())} after it was deployed" if started else ""
        at = f"{snapshot.format_age(time)} ago ({ended:%Y-%m-%d %H:%M} UTC)"
        return AppDiagnosis("finished", f"it finished {at}{took}")
    if outcome == "failed":
        return _diagnose_failure(snapshot, workload, time, message)
    if k8s.spec(workload).get("suspend"):
        return _diagnose_suspension(snapshot, workload)
    return _diagnose_active(snapshot, workload)


def _diagnose_without_workload(snapshot: AppSnapshot) -> AppDiagnosis:
    if snapshot.pods or (snapshot.data and all(map(k8s.is_deleting, snapshot.data))):
        return AppDiagnosis("stopping", "the rest of it is being removed")
    if missing_data := describe_missing_data(snapshot, map(k8s.name_of, snapshot.data)):
        return AppDiagnosis("staging", f"the training {missing_data}")
    if snapshot.boards:
        only_board = "only its TensorBoard is deployed, no training"
        if any(map(k8s.is_ready, snapshot.board_pods)):
            return AppDiagnosis("running", only_board)
        for problem in diagnose_pods(snapshot.board_pods, snapshot):
            return AppDiagnosis("waiting", f"the pod of its TensorBoard {problem.message}", problem.fix)
        return AppDiagnosis("starting", only_board)
    if snapshot.data:
        return AppDiagnosis("staging", "its data is ready; the training is not deployed yet")
    return AppDiagnosis("absent", "not deployed", "Run: voxlane app deploy")


# -- ended -------------------------------------------------------------------------------------------------------------


def get_outcome(workload: Object) -> tuple[str, str, str]:
    """Return how a workload ended ("finished", "failed" or "" if it has not), when, and the controller's message."""
    if workload["kind"] == "RayJob":
        current = k8s.status(workload)
        deployment = current.get("jobDeploymentStatus")
        if deployment not in ("Complete", "Failed", "ValidationFailed"):
            return "", "", ""
        succeeded = deployment == "Complete" and current.get("jobStatus") not in ("FAILED", "STOPPED")
        message = str(current.get("message") or current.get("reason") or "")
        return "finished" if succeeded else "failed", str(current.get("endTime") or ""), message
    for kind, outcome in (("Completed", "finished"), ("Complete", "finished"), ("Failed", "failed")):
        if k8s.is_true(workload, kind):
            entry = k8s.condition(workload, kind)
            return outcome, str(entry.get("lastTransitionTime") or ""), str(entry.get("message") or "")
    return "", "", ""


def _diagnose_failure(snapshot: AppSnapshot, workload: Object, time: str, message: str) -> AppDiagnosis:
    ago, restarts = snapshot.format_ago(time), _describe_restarts(workload)
    if any(k8s.condition(job, "Failed").get("reason") == "DeadlineExceeded" for job in snapshot.jobs):
        fix = "Raise the limit and deploy again: the run continues"
        return AppDiagnosis("failed", f"it exceeded its time limit{ago}{restarts}", fix)
    if problems := diagnose_pods(snapshot.pods, snapshot):
        cause = problems[0]
        reason = f"{_name_pod(cause, snapshot)} {cause.message}{ago}{restarts}"
        return AppDiagnosis("failed", reason, cause.fix, tuple(snapshot.log_tails.get(cause.pod, ())))
    reason = k8s.collapse_message(message) or "the cluster gives no reason"
    fix = "" if snapshot.pods else "Its pods are gone; their logs are archived: voxlane app logs"
    return AppDiagnosis("failed", f"it failed{ago}: {reason}{restarts}", fix)


def _describe_restarts(workload: Object) -> str:
    """Describe how often the workload was restarted, and how often it may be; empty if never."""
    restarts, counted, limit = k8s.count_restarts(workload)
    if not restarts:
        return ""
    if limit is None:
        return f" (restarted {restarts} times)"
    uncounted = f", and {restarts - counted} for preemptions" if restarts > counted else ""
    return f" ({counted} of {limit} restarts used{uncounted})"


# -- suspended ---------------------------------------------------------------------------------------------------------


def _diagnose_suspension(snapshot: AppSnapshot, workload: Object) -> AppDiagnosis:
    queue, kind, namespace = snapshot.queue_name, workload["kind"], snapshot.namespace
    if not queue:
        fix = f"Run: kubectl -n {namespace} patch {kind.lower()} {snapshot.name} --type merge -p '{_RESUME_PATCH}'"
        return AppDiagnosis("suspended", "it is suspended, and no queue will resume it", fix)
    if snapshot.queue is None and "LocalQueue" not in snapshot.unreadable:
        fix = "Set `queue` in app.yaml to one that does (kubectl get localqueues) and deploy again"
        return AppDiagnosis("queued", f"queue {queue} does not exist in namespace {namespace}", fix)
    active = k8s.condition(snapshot.queue, "Active") if snapshot.queue else {}
    if active.get("status") == "False":
        reason = f"queue {queue} is not active: {k8s.collapse_message(active.get('message'))}"
        return AppDiagnosis("queued", reason, "Ask the administrator of Kueue")
    if not snapshot.admissions:
        fix = f"Check that Kueue runs and manages {kind}s (kubectl get pods -n kueue-system)"
        late = snapshot.is_older_than(k8s.created_at(workload), 30)
        reason = f"it is waiting in queue {queue}, and Kueue has not picked it up"
        return AppDiagnosis("queued", reason, fix if late else "")
    return _diagnose_admission(snapshot.admissions[-1], queue, snapshot)


def _diagnose_admission(admission: Object, queue: str, snapshot: AppSnapshot) -> AppDiagnosis:
    evicted, reserved = k8s.condition(admission, "Evicted"), k8s.condition(admission, "QuotaReserved")
    evicted_message = k8s.collapse_message(evicted.get("message"))
    if k8s.spec(admission).get("active") is False:
        reason = f"Kueue has removed it from queue {queue}: {evicted_message or 'its Workload is not active'}"
        return AppDiagnosis("queued", reason, "Deploy again with --replace")
    pending = [check for check in k8s.status(admission).get("admissionChecks") or () if check.get("state") != "Ready"]
    if k8s.is_true(admission, "QuotaReserved") and pending:
        message = f": {k8s.collapse_message(pending[0]['message'])}" if pending[0].get("message") else ""
        check = f"{pending[0].get('name')}{message}"
        return AppDiagnosis("queued", f"it has quota in queue {queue} and is waiting for the check {check}")
    eviction = ""
    if k8s.is_true(admission, "Evicted") and evicted_message:
        eviction = f". It was evicted {snapshot.format_age(evicted.get('lastTransitionTime'))} ago: {evicted_message}"
    if reserved.get("status") == "False" and reserved.get("message"):
        reason = f"it is waiting for quota in queue {queue}: {explain_quota(str(reserved['message']))}{eviction}"
        return AppDiagnosis("queued", reason)
    if k8s.is_true(admission, "Admitted"):
        return AppDiagnosis("starting", f"queue {queue} has admitted it; it is about to start")
    return AppDiagnosis("queued", f"it is waiting in queue {queue}{eviction}")


def explain_quota(message: str) -> str:
    """Rephrase Kueue's message about quota without its internal terms."""
    text = re.sub(r"couldn't assign flavors to pod set \S+: ", "", k8s.collapse_message(message))
    for pattern, replacement in _QUOTA_MESSAGES:
        text = re.sub(pattern, replacement, text)
    return text


_FLAVOR = r"insufficient (?:unused )?quota (?:in cohort )?for (\S+) in flavor ([^,\s]+), "
_ABOVE_QUOTA = r"it requests \3 \1, but flavor \2 has a total quota of \4"
_QUOTA_MESSAGES = (
    (_FLAVOR + r"(\S+) more needed", r"\3 more \1 needed in flavor \2"),
    (_FLAVOR + r"request > maximum capacity \((\S+) > (\S+)\)", _ABOVE_QUOTA),
    (
        _FLAVOR + r"previously considered podsets requests \(\S+\) \+ current podset request \((\S+)\) > "
        r"maximum capacity \((\S+)\)",
        _ABOVE_QUOTA,
    ),
)


# -- active ------------------------------------------------------------------------------------------------------------


def _diagnose_active(snapshot: AppSnapshot, workload: Object) -> AppDiagnosis:
    restarts = _describe_restarts(workload)
    if not snapshot.pods:
        return _diagnose_no_pods(snapshot, workload, restarts)
    problems = diagnose_pods(snapshot.pods, snapshot)
    with_problems = {problem.pod for problem in problems}
    running = [pod for pod in snapshot.alive_pods if k8s.is_available(pod) and k8s.name_of(pod) not in with_problems]
    total = max(k8s.count_requested_pods(workload), len(snapshot.alive_pods))
    if problems:
        return _diagnose_problems(snapshot, problems, len(running), total, restarts)
    if len(running) >= total:
        nodes = len({k8s.spec(pod).get("nodeName") for pod in running})
        started = min((str(k8s.status(pod).get("startTime") or "") for pod in running), default="")
        container_restarts = sum(map(k8s.count_container_restarts, running))
        more = f"; containers were restarted {container_restarts} times" if container_restarts else ""
        counts = f"{k8s.count_noun(len(running), 'pod')} on {k8s.count_noun(nodes, 'node')}"
        age = snapshot.format_age(started) or "an unknown time"
        return AppDiagnosis("running", f"{counts} for {age}{restarts}{more}")
    if any(map(k8s.is_deleting, snapshot.pods)):
        return AppDiagnosis("restarting", f"its pods are being replaced, {len(running)} of {total} run{restarts}")
    if finished := sum(k8s.status(pod).get("phase") == "Succeeded" for pod in snapshot.pods):
        return AppDiagnosis("running", f"{finished} of {total} pods have finished{restarts}")
    return AppDiagnosis("starting", f"{len(running)} of {total} pods run{restarts}")


def _diagnose_problems(
    snapshot: AppSnapshot, problems: list[PodProblem], running: int, total: int, restarts: str
) -> AppDiagnosis:
    cause = problems[0]
    same = sum((problem.kind, problem.message) == (cause.kind, cause.message) for problem in problems)
    subject, message = _name_pod(cause, snapshot), cause.message
    if same > 1:
        verb, space, rest = message.partition(" ")
        subject = f"{same} of {max(total, len(snapshot.pods))} pods"
        message = f"{_PLURALS.get(verb, verb)}{space}{rest}"
    state = {"data": "staging", "wait": "starting"}.get(cause.kind, "waiting")
    still = ""
    if cause.kind in ("crash", "memory", "evicted", "lost", "deadline"):
        state, still, message = "restarting", "still ", message + snapshot.format_ago(cause.time)
    rest = f"; {running} of {total} {still}run" if running else ""
    reason = f"{subject} {message}{rest}{restarts}"
    return AppDiagnosis(state, reason, cause.fix, tuple(snapshot.log_tails.get(cause.pod, ())))


def _diagnose_no_pods(snapshot: AppSnapshot, workload: Object, restarts: str) -> AppDiagnosis:
    uids = {k8s.uid_of(workload), *map(k8s.uid_of, snapshot.jobs)}
    for event in reversed(snapshot.warnings):
        if k8s.is_about(event, uids) and event.get("reason") != "FailedScheduling":
            reason = explain_refused_pod(str(event.get("message") or ""))
            return AppDiagnosis("waiting", f"no pods can be created: {reason}{restarts}")
    created = k8s.created_at(workload)
    if snapshot.is_older_than(created, 30) and not restarts:
        reason = f"{k8s.title_of(workload)} was created {snapshot.format_age(created)} ago, but has no pods"
        return AppDiagnosis("waiting", reason, f"Check that the controller of {workload['kind']}s runs")
    if missing_data := describe_missing_data(snapshot, [*map(k8s.name_of, snapshot.data), *snapshot.missing_data]):
        return AppDiagnosis("staging", f"it {missing_data}")
    return AppDiagnosis("restarting" if restarts else "starting", f"no pods yet{restarts}")


def explain_refused_pod(message: str) -> str:
    """Explain why the server refused to create a pod."""
    text = k8s.collapse_message(message)
    if match := re.search(r"exceeded quota: (\S+), requested: (\S+), used: (\S+), limited: (\S+)", text):
        amounts = f"requested {match[2]}, used {match[3]}, limit {match[4]}"
        return f"the namespace's quota {match[1]} is used up ({amounts})"
    if match := re.search(r'service account \S*?/?([^/\s"]+): .*not found|serviceaccount "([^"]+)" not found', text):
        return f"service account {match[1] or match[2]} does not exist"
    if match := re.search(r"no PriorityClass with name (\S+) was found", text):
        return f"priority class {match[1]} does not exist"
    return text


def diagnose_pods(pods: list[Object], snapshot: AppSnapshot) -> list[PodProblem]:
    """Return the problems of pods. The first explains the others: it is the most serious, and of these the earliest."""
    problems = [problem for pod in pods if (problem := diagnose_pod(pod, snapshot)) is not None]
    return sorted(problems, key=lambda item: (SEVERITY_ORDER.index(item.kind), item.time or "9", item.pod))


def _name_pod(cause: PodProblem, snapshot: AppSnapshot) -> str:
    return f"pod {k8s.shorten_pod_names(snapshot.pods, snapshot.name).get(cause.pod, cause.pod)}"
