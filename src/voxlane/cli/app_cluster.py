"""`voxlane app deploy`, `status`, `logs`, `events`, `exec`, `tensorboard` and `undeploy`: an app in a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any

import pydantic

from voxlane.cli import signals
from voxlane.cli.app import check_command, check_search_space
from voxlane.cli.config_options import StoreOptions
from voxlane.cluster.kubernetes.app import build, deploy, execute, logs, preflight, render, tensorboard, undeploy
from voxlane.cluster.kubernetes.app.config import FILE, App
from voxlane.cluster.kubernetes.app.diagnosis import AppDiagnosis, diagnose_app
from voxlane.cluster.kubernetes.app.k8s import AppSnapshot, Object, has_ended, is_ready, shorten_pod_names, title_of
from voxlane.cluster.kubernetes.app.logs import LogLine, LogQuery
from voxlane.cluster.kubernetes.app.snapshot import fetch_events, take_all_snapshots, take_snapshot
from voxlane.cluster.kubernetes.app.status import format_events, format_overview, format_status, to_dict
from voxlane.cluster.kubernetes.client import Cluster
from voxlane.cluster.kubernetes.validate import validate
from voxlane.errors import ConfigError, MissingObjectError
from voxlane.settings import ARGUMENT, REMAINDER, Flag, record
from voxlane.sizes import parse_duration

_WATCH_S = 2.0
_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94)
_PLANNED_ACTIONS = {"create": "would be created", "change": "would be changed", "replace": "would be replaced"}
print_line = partial(print, flush=True)


@record
class TargetOptions:
    """The app and the cluster of a command."""

    app: Annotated[str | None, ARGUMENT] = None
    """Folder or name of an app (default: this folder)."""
    context: Annotated[str | None, Flag(metavar="NAME")] = None
    """Cluster, by its context in kubeconfig (default: the current one)."""
    namespace: Annotated[str | None, Flag("-n", metavar="NAME")] = None
    """Namespace (default: app.yaml's, or the context's)."""

    @property
    def names_an_app(self) -> bool:
        """Whether an app is named, or this folder is one."""
        return self.app is not None or os.path.isfile(FILE)

    def connect(self, app: App | None = None) -> Cluster:
        """Connect to the cluster."""
        return Cluster.connect(context=self.context, namespace=self.namespace or (app.namespace if app else None))

    def resolve(self, *, deep: bool = False) -> AppTarget:
        """Return the app (named by its folder or name) and the cluster; with `deep`, its files are read and checked."""
        word = self.app or "."
        if word != "." and not os.path.isfile(os.path.join(word, FILE)) and os.sep not in word:
            return AppTarget(word, self.connect())
        app = App.load(word, deep=deep, check_space=check_search_space)
        return AppTarget(app.name, self.connect(app), app, word)


@dataclasses.dataclass(frozen=True)
class AppTarget:
    """An app in a cluster."""

    name: str
    cluster: Cluster
    app: App | None = None
    """Content of its folder, where a folder was named."""
    folder: str = ""

    def diagnose(self, *, tails: bool = True) -> tuple[AppSnapshot, AppDiagnosis]:
        """Return the app's objects and their diagnosis; with `tails`, it has the last log lines of a crash."""
        snapshot = take_snapshot(self.cluster, self.name, tails=tails)
        return snapshot, diagnose_app(snapshot)

    def not_deployed(self) -> MissingObjectError:
        """Return the error for an app that is not in the cluster."""
        names = [snapshot.name for snapshot in take_all_snapshots(self.cluster)]
        others = f"There are: {', '.join(names)}" if names else "There are no apps"
        fix = "Run: voxlane app deploy" if self.app else others
        return MissingObjectError(
            f"not deployed in namespace {self.cluster.namespace}", uri=f"app {self.name}", fix=fix
        )


def _print_note(line: str) -> None:
    """Print a note on stderr at once."""
    print(f"note: {line}", file=sys.stderr, flush=True)


# -- deploy ------------------------------------------------------------------------------------------------------------


@record
class AppDeployCommand(TargetOptions):
    """Start an app in the cluster.

    Check the app offline and against the cluster, build and push its image if the registry does not have it, stage its
    data, and start it. If anything fails on the way, or on Ctrl-C, everything that was created is removed.
    """

    replace: bool = False
    """Replace the app if it is already running."""
    no_build: bool = False
    """Do not build; use the image in the registry."""
    no_push: bool = False
    """Build, but do not push, because the nodes use this machine's images."""
    wait: bool = True
    """Wait until the data is staged."""
    timeout: Annotated[str | None, Flag(metavar="TIME")] = None
    """Longest time to wait for the data, such as 2h (default: no limit)."""
    no_node_check: bool = False
    """Do not require that suitable nodes already exist."""
    dry_run: bool = False
    """Check everything, print the plan, and stop."""
    follow: Annotated[bool, Flag("-f")] = False
    """After the start, print the app's logs until it ends."""

    def _run(self) -> int:
        timeout_s = parse_duration(self.timeout, name="--timeout") if self.timeout else None
        if self.app is not None and not os.path.isfile(os.path.join(self.app, FILE)):
            raise ConfigError("there is no app here", uri=self.app, fix="Give the folder that holds its app.yaml")
        target = self.resolve(deep=True)
        app, cluster = target.app, target.cluster
        assert app is not None
        image = build.get_image_reference(app, target.folder)
        manifests = render.render(check_command(app), image, namespace=cluster.namespace)
        validate(manifests)
        preflight.check(cluster, app, manifests, nodes=not self.no_node_check, report=_print_note)
        existing = deploy.read_existing(cluster, manifests)
        snapshot = take_snapshot(cluster, app.name, tails=False)
        plan = deploy.plan(manifests, existing, snapshot, replace=self.replace)
        deploy.dry_run(cluster, plan)
        if self.dry_run:
            for item in plan.remove:
                print_line(f"{title_of(item)}: would be removed first")
            for step in plan.steps:
                print_line(f"{step.title}: {_PLANNED_ACTIONS.get(step.action, 'exists already')}")
            print_line(f"image {image}")
            return 0
        if not self.no_build:
            build.ensure_image(app, target.folder, push=not self.no_push, say=print_line)
        # A terminal that is closed (SIGHUP) hours into the staging rolls back, as Ctrl-C does.
        with signals.interrupted_by("SIGTERM", "SIGHUP"), contextlib.closing(_StagingProgress()) as progress:
            deploy.apply(
                cluster,
                plan,
                report=progress.print_line,
                wait=self.wait,
                progress=progress.show,
                required_nodes=app.nodes,
                timeout_s=timeout_s,
            )
        if self.follow:
            return follow_logs(target, LogQuery(), timestamps=False)
        folder = "" if target.folder == "." else f" {target.folder}"
        print_line(f"next: voxlane app status{folder}; voxlane app logs -f{folder}; voxlane app undeploy{folder}")
        return 0


class _StagingProgress:
    """Progress of staging: a bar on a terminal, else a line for every ten percent."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._last_line = ""

    def close(self) -> None:
        """End the bar, if there is one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def print_line(self, line: str) -> None:
        """Print a line, and end the bar before it."""
        self.close()
        print_line(line)

    def show(self, dataset: Object) -> None:
        """Show the progress of a StagedDataset."""
        current, title = dataset.get("status") or {}, f"data {dataset['metadata']['name']}"
        phase = current.get("phase") or "Pending"
        # With the message: a copier that cannot start stays at 0%, and only the message has the reason.
        message = " ".join(str(current.get("message") or "").split())
        if not sys.stderr.isatty():
            percent = str(current.get("progress") or "0%").rstrip("%")
            rounded = int(percent) // 10 * 10 if percent.isdigit() else percent
            line = f"{phase} {rounded}%" + (f" ({message})" if message else "")
            if line != self._last_line and current.get("phase") not in ("Ready", None):
                print(f"{title}: {line}", file=sys.stderr, flush=True)
            self._last_line = line
            return
        if self._bar is None or self._bar.desc != title:
            from tqdm import tqdm

            self.close()
            self._bar = tqdm(unit="B", unit_scale=True, desc=title, leave=False, dynamic_ncols=True)
        nodes = [node for node in (current.get("nodes") or {}).values() if node.get("totalBytes")]
        done, total = (sum(int(node.get(key) or 0) for node in nodes) for key in ("bytes", "totalBytes"))
        self._bar.total, self._bar.n = total or None, done
        self._bar.set_postfix_str(f"{phase} {current.get('ready') or ''} {message}", refresh=False)
        self._bar.refresh()


# -- status ------------------------------------------------------------------------------------------------------------


@record
class AppStatusCommand(TargetOptions):
    """Show the state of an app, and why it is not running.

    Print a table of the app's queue, workload, jobs, pods, data and TensorBoard, and why it is not running. Without
    APP, in a folder that holds no app, print all apps of the namespace.
    """

    watch: Annotated[bool, Flag("-w")] = False
    """Repeat until the app has ended."""
    json: bool = False
    """Print the status as JSON."""

    def _run(self) -> None:
        last_text = ""
        while True:
            app_status, has_ended = self._read_status() if self.names_an_app else self._read_all_statuses()
            text = json.dumps(app_status, indent=2) if self.json else "\n".join(app_status)
            if not self.watch:
                print(text)
                return
            if sys.stdout.isatty():
                print(f"\x1b[H\x1b[2J{text}", flush=True)
            elif text != last_text:
                print(text + "\n", flush=True)
            last_text = text
            if has_ended:
                return
            time.sleep(_WATCH_S)

    def _read_status(self) -> tuple[Any, bool]:
        """Return the status of the named app, as plain data or lines, and whether it has ended."""
        target = self.resolve()
        snapshot, diagnosis = target.diagnose()
        if diagnosis.state == "absent" and not snapshot.boards and not self.watch:
            raise target.not_deployed()
        format_app = to_dict if self.json else format_status
        return format_app(snapshot, diagnosis), diagnosis.has_ended

    def _read_all_statuses(self) -> tuple[Any, bool]:
        """Return the status of all apps of the namespace, and whether all have ended."""
        cluster = self.connect()
        apps = [(snapshot, diagnose_app(snapshot)) for snapshot in take_all_snapshots(cluster)]
        have_ended = all(diagnosis.has_ended for _, diagnosis in apps)
        if self.json:
            return [to_dict(snapshot, diagnosis) for snapshot, diagnosis in apps], have_ended
        if not apps:
            return [f"no apps in namespace {cluster.namespace}"], have_ended
        return format_overview(apps), have_ended


# -- logs --------------------------------------------------------------------------------------------------------------


@record
class AppLogsCommand(StoreOptions, TargetOptions):
    """Print the output of an app's pods.

    Print the lines of all pods in order of time, each with its pod's name, including pods that have ended. Lines of
    deleted pods come from the archive in the run's bucket; --kept reads only this archive, with all starts of the app.
    """

    follow: Annotated[bool, Flag("-f")] = False
    """Print new lines until the app ends, and exit with its status."""
    since: Annotated[str | None, Flag(metavar="TIME")] = None
    """Print the lines of the last TIME, such as 90s, 10m or 2h."""
    tail: Annotated[int | None, pydantic.Field(ge=0)] = None
    """Print the last N lines of each pod."""
    pod: Annotated[tuple[str, ...], Flag(metavar="NAME")] = ()
    """Print the lines of this pod, such as node-0 (repeatable)."""
    previous: bool = False
    """Print the lines of restarted containers from before the restart."""
    timestamps: bool = False
    """Print the time of each line."""
    archived: Annotated[bool, Flag(long="--kept")] = False
    """Print the archive in the run's bucket, with all starts of the app."""
    board: bool = False
    """Print the lines of the app's TensorBoard."""

    def _run(self) -> int:
        if self.archived and (self.follow or self.previous or self.board):
            raise ConfigError("--kept reads the archive of training", fix="Leave --follow, --previous and --board out")
        if self.board and self.follow:
            raise ConfigError("--board cannot be followed", fix="Leave --follow out")
        since_s = parse_duration(self.since, name="--since") if self.since else None
        query = LogQuery(since_s, self.tail, tuple(self.pod), self.previous)
        target = self.resolve()
        if self.follow:
            return follow_logs(target, query, timestamps=self.timestamps)
        board = self.board or (target.app is not None and target.app.template == "tensorboard")
        pods = [] if self.archived else logs.list_pods(target.cluster, target.name, board=board)
        if not pods and board:
            raise MissingObjectError("no TensorBoard of it is in the cluster", uri=f"app {target.name}")
        if not pods:
            _print_lines(_read_archive(target, query, self), timestamps=self.timestamps)
            return 0
        lines = logs.read_logs(target.cluster, target.name, logs.select_pods(pods, target.name, query.pods), query)
        if not _print_lines(lines, timestamps=self.timestamps):
            signals.print_note(f"nothing was printed yet ({target.diagnose()[1].text})")
        return 0


def _read_archive(target: AppTarget, query: LogQuery, store: StoreOptions) -> Iterable[LogLine]:
    """Return lines from the run's bucket, because the pods are deleted."""
    from voxlane.cluster.kubernetes.app import log_archive

    snapshot, diagnosis = target.diagnose(tails=False)
    run = snapshot.run_uri or (target.app.run_uri if target.app else None)
    if not run:
        if snapshot.workload is None and target.app is None:
            raise target.not_deployed()
        raise MissingObjectError("it has no pods, and no run that logs are kept in", uri=f"app {target.name}")
    config = store.store_config()
    # The labels of deleted pods are lost.
    archived = [{"metadata": {"name": pod}} for pod in log_archive.list_archived_pods(run, config)]
    names = shorten_pod_names(archived, target.name)
    if not names:
        raise MissingObjectError("it has no pods, and nothing is kept yet", uri=f"{run}/logs", fix=diagnosis.sentence)
    pods = [name for name, short in names.items() if not query.pods or {name, short} & set(query.pods)]
    if not pods:
        raise ConfigError(f"no pod {query.pods[0]!r}", uri=run, fix=f"There are: {', '.join(names.values())}")
    since = datetime.now(UTC) - timedelta(seconds=query.since_s) if query.since_s is not None else None
    lines = log_archive.read_archive(run, config, since=since, pods=pods)
    shown_lines = (
        dataclasses.replace(line, pod=names[line.pod], time=f"{line.time[:-4]}Z") for line in lines
    )  # microseconds
    if query.tail is None:
        return shown_lines
    last_lines: dict[str, deque[LogLine]] = {}
    for line in shown_lines:
        last_lines.setdefault(line.pod, deque(maxlen=query.tail)).append(line)
    return sorted((line for lines_of_pod in last_lines.values() for line in lines_of_pod), key=lambda line: line.time)


def follow_logs(target: AppTarget, query: LogQuery, *, timestamps: bool) -> int:
    """Print lines until the app has ended; return 0 if it succeeded."""
    last_state, diagnosis = "", None

    def is_over(pods: Sequence[Object]) -> bool:
        nonlocal last_state, diagnosis
        if any(logs.list_started_containers(pod) and not has_ended(pod) for pod in pods):
            last_state = last_state or "running"
            return False
        diagnosis = target.diagnose(tails=False)[1]
        if diagnosis.state == "absent" and not last_state:
            raise target.not_deployed()
        if not diagnosis.has_ended and diagnosis.state != last_state:
            signals.print_note(diagnosis.text)
        last_state = diagnosis.state
        return diagnosis.has_ended

    _print_lines(logs.LogFollower(target.cluster, target.name, query, is_over), timestamps=timestamps)
    if diagnosis is None or diagnosis.state in ("finished", "absent"):
        return 0
    signals.print_note(target.diagnose()[1].text)
    return 1


def _print_lines(lines: Iterable[LogLine], *, timestamps: bool) -> int:
    """Print lines as they come, and return their number. Pods' names before them are as wide as the widest so far, and
    on a terminal each has its own colour."""
    is_terminal, count, width = sys.stdout.isatty(), 0, 0
    colours: dict[str, int] = {}
    for line in lines:
        width = max(width, len(line.pod))
        prefix = f"{line.pod:<{width}} | "
        if is_terminal and not os.environ.get("NO_COLOR"):
            colour = colours.setdefault(line.pod, _COLOURS[len(colours) % len(_COLOURS)])
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        stamp = f"{line.time} " if timestamps else ""
        print(f"{prefix}{stamp}{line.text}", flush=is_terminal or count % 64 == 0)
        count += 1
    sys.stdout.flush()
    return count


# -- events, exec ------------------------------------------------------------------------------------------------------


@record
class AppEventsCommand(TargetOptions):
    """Print the cluster's events about an app."""

    warnings: bool = False
    """Print only events of type Warning."""

    def _run(self) -> None:
        target = self.resolve()
        listed = fetch_events(target.cluster, target.name)
        if self.warnings:
            listed = [event for event in listed if event.get("type") != "Normal"]
        if not listed:
            print(f"no events of app {target.name}: clusters keep them for an hour")
            return
        print("\n".join(format_events(listed, target.name, datetime.now(UTC))))


@record
class AppExecCommand(TargetOptions):
    """Run a command in one of an app's pods.

    Examples:
      voxlane app exec -- nvidia-smi
      voxlane app exec kits19 --pod node-1 -- bash
    """

    pod: Annotated[str | None, Flag(metavar="NAME")] = None
    """Pod to use, such as node-1 (default: the first running one)."""
    container: Annotated[str | None, Flag(metavar="NAME")] = None
    """Container of the pod to use (default: its first)."""
    stdin: Annotated[bool, Flag("-i")] = False
    """Pass standard input to the command even if it is not a terminal."""
    command: Annotated[tuple[str, ...], REMAINDER]
    """Command to run."""

    def _run(self) -> int:
        target = self.resolve()
        pods = logs.list_pods(target.cluster, target.name)
        candidates = logs.select_pods(pods, target.name, [self.pod] if self.pod else [])
        reason = ""
        if not any(map(is_ready, candidates)):
            snapshot, diagnosis = target.diagnose()
            reason = diagnosis.sentence
            if diagnosis.state == "absent" and not snapshot.boards:
                raise target.not_deployed()
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        pod, container = execute.choose_pod(candidates, target.name, reason), self.container or ""
        stdin = self.stdin or terminal
        return execute.run(target.cluster, pod, self.command, container=container, stdin=stdin, tty=terminal)


# -- tensorboard -------------------------------------------------------------------------------------------------------


@record
class AppTensorboardCommand(TargetOptions):
    """Show TensorBoard of an app's run at a local port.

    TensorBoard runs in the cluster and reads the run from its bucket.
    """

    port: int = 6006
    """Port on 127.0.0.1."""
    no_open: bool = False
    """Do not open a browser."""
    stop: bool = False
    """Remove TensorBoard from the cluster."""

    def _run(self) -> None:
        target = self.resolve()
        if self.stop:
            existed = tensorboard.stop(target.cluster, target.name)
            message = "its TensorBoard is removed" if existed else "no TensorBoard of it was in the cluster"
            print(f"{target.name}: {message}")
            return

        def ready(url: str) -> None:
            print(f"TensorBoard of {target.name}: {url}", flush=True)
            stays = "TensorBoard stays in the cluster until voxlane app tensorboard --stop"
            signals.print_note(f"Ctrl-C ends the connection; {stays}")
            if not self.no_open:
                signals.open_in_browser(url)

        image = ""
        if target.app is not None:
            # The image of the running app can be pulled; the folder may have changed since.
            image = take_snapshot(target.cluster, target.name, tails=False).image
            image = image or build.ensure_image(target.app, target.folder, say=print_line).ref
        with signals.interrupted_by("SIGTERM"), contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the normal end
            if target.app is not None:
                tensorboard.apply(target.cluster, target.app, image)
            tensorboard.show(target.cluster, target.name, self.port, report=signals.print_note, open_url=ready)


# -- undeploy ----------------------------------------------------------------------------------------------------------


@record
class AppUndeployCommand(TargetOptions):
    """Remove everything that an app created in the cluster.

    Remove everything that the app created in the cluster, and nothing else: its workload, its TensorBoard, its files,
    and its data unless that has `keep: true` or another app uses it. The run in the bucket stays.
    """

    all: bool = False
    """Remove every app of the namespace."""
    keep_data: bool = False
    """Keep the app's data on the nodes."""
    no_wait: bool = False
    """Do not wait until everything is deleted."""

    def _run(self) -> None:
        if not self.all:
            target = self.resolve()
            if not self._remove_app(target):
                raise target.not_deployed()
            return
        if self.app is not None:
            raise ConfigError("--all with an app", fix="Give one of them")
        cluster = self.connect()
        names = undeploy.list_apps(cluster)
        if not names:
            print(f"no apps in namespace {cluster.namespace}")
        for name in names:
            self._remove_app(AppTarget(name, cluster))

    def _remove_app(self, target: AppTarget) -> bool:
        """Remove one app; return whether any object of it existed."""
        objects, forbidden = undeploy.list_objects(target.cluster, target.name)
        if forbidden:
            _print_note(f"skipped, because you may not list them: {', '.join(forbidden)}")
        if not objects:
            return False
        has_data = any(item["kind"] == "StagedDataset" for item in objects)
        others = undeploy.list_workloads(target.cluster) if has_data else []
        plan = undeploy.plan(objects, others, target.name, keep_data=self.keep_data)
        undeploy.apply(target.cluster, plan, report=print_line, wait=not self.no_wait)
        if plan.remaining:
            print_line(f"stays: {'; '.join(plan.remaining)}")
        return True
