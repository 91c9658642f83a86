"""`voxlane app deploy`, `status`, `events`, `exec`, `tensorboard` and `undeploy`: an app in a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from datetime import UTC, datetime
from typing import Annotated, Any

from voxlane.cli import signals
from voxlane.cli.app import check_command
from voxlane.cli.app_logs import follow_logs
from voxlane.cli.app_target import AppTarget, TargetOptions, print_line, print_note
from voxlane.cluster.kubernetes.app import build, deploy, execute, preflight, render, status, tensorboard, undeploy
from voxlane.cluster.kubernetes.app.config import FILE
from voxlane.cluster.kubernetes.app.diagnosis import diagnose_app
from voxlane.cluster.kubernetes.app.k8s import Object, is_ready, title_of
from voxlane.cluster.kubernetes.app.logs import LogQuery, list_pods, select_pods
from voxlane.cluster.kubernetes.app.snapshot import fetch_events, take_all_snapshots, take_snapshot
from voxlane.cluster.kubernetes.validate import validate
from voxlane.errors import ConfigError
from voxlane.settings import REMAINDER, Flag, record
from voxlane.sizes import parse_duration

_WATCH_S = 2.0
_PLANNED_ACTIONS = {"create": "would be created", "change": "would be changed", "replace": "would be created anew"}


# -- deploy ------------------------------------------------------------------------------------------------------------


@record
class DeployOptions(TargetOptions):
    """Options of `voxlane app deploy`."""

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


def deploy_app(options: DeployOptions) -> int:
    """Start an app in the cluster.

    Check the app offline and against the cluster, build and push its image if the registry does not have it, stage its
    data, and start it. If anything fails on the way, or on Ctrl-C, everything that was created is removed.
    """
    timeout_s = parse_duration(options.timeout, name="--timeout") if options.timeout else None
    if options.app is not None and not os.path.isfile(os.path.join(options.app, FILE)):
        raise ConfigError("there is no app here", uri=options.app, fix="Give the folder that holds its app.yaml")
    target = options.resolve(deep=True)
    app, cluster = target.app, target.cluster
    assert app is not None
    image = build.get_image_reference(app, target.folder)
    manifests = render.render(check_command(app), image, namespace=cluster.namespace)
    validate(manifests)
    preflight.check(cluster, app, manifests, nodes=not options.no_node_check, report=print_note)
    existing = deploy.read_existing(cluster, manifests)
    snapshot = take_snapshot(cluster, app.name, tails=False)
    plan = deploy.plan(manifests, existing, snapshot, replace=options.replace)
    deploy.dry_run(cluster, plan)
    if options.dry_run:
        for item in plan.remove:
            print_line(f"{title_of(item)}: would be removed first")
        for step in plan.steps:
            print_line(f"{step.title}: {_PLANNED_ACTIONS.get(step.action, 'is there already')}")
        print_line(f"image {image}")
        return 0
    if not options.no_build:
        build.ensure_image(app, target.folder, push=not options.no_push, say=print_line)
    # A terminal that is closed (SIGHUP) hours into the staging rolls back, as Ctrl-C does.
    with signals.interrupted_by("SIGTERM", "SIGHUP"), contextlib.closing(_StagingProgress()) as progress:
        deploy.apply(
            cluster,
            plan,
            report=progress.print_line,
            wait=options.wait,
            progress=progress.show,
            required_nodes=app.nodes,
            timeout_s=timeout_s,
        )
    if options.follow:
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
class AppStatusOptions(TargetOptions):
    """Options of `voxlane app status`."""

    watch: Annotated[bool, Flag("-w")] = False
    """Repeat until the app has ended."""
    json: bool = False
    """Print the status as JSON."""


def print_status(options: AppStatusOptions) -> int:
    """Show the state of an app, and why it is not running.

    Print a table of the app's queue, workload, jobs, pods, data and TensorBoard, and why it is not running. Without
    APP, in a folder that holds no app, print all apps of the namespace.
    """
    last_text = ""
    while True:
        app_status, has_ended = _read_status(options) if options.names_an_app else _read_all_statuses(options)
        text = json.dumps(app_status, indent=2) if options.json else "\n".join(app_status)
        if not options.watch:
            print(text)
            return 0
        if sys.stdout.isatty():
            print(f"\x1b[H\x1b[2J{text}", flush=True)
        elif text != last_text:
            print(text + "\n", flush=True)
        last_text = text
        if has_ended:
            return 0
        time.sleep(_WATCH_S)


def _read_status(options: AppStatusOptions) -> tuple[Any, bool]:
    """Return the status of the named app, as plain data or lines, and whether it has ended."""
    target = options.resolve()
    snapshot, diagnosis = target.diagnose()
    if diagnosis.state == "absent" and not snapshot.boards and not options.watch:
        raise target.not_deployed()
    format_app = status.to_dict if options.json else status.format_status
    return format_app(snapshot, diagnosis), diagnosis.has_ended


def _read_all_statuses(options: AppStatusOptions) -> tuple[Any, bool]:
    """Return the status of all apps of the namespace, and whether all have ended."""
    cluster = options.connect()
    apps = [(snapshot, diagnose_app(snapshot)) for snapshot in take_all_snapshots(cluster)]
    have_ended = all(diagnosis.has_ended for _, diagnosis in apps)
    if options.json:
        return [status.to_dict(snapshot, diagnosis) for snapshot, diagnosis in apps], have_ended
    if not apps:
        return [f"no apps in namespace {cluster.namespace}"], have_ended
    return status.format_overview(apps), have_ended


# -- events, exec ------------------------------------------------------------------------------------------------------


@record
class EventsOptions(TargetOptions):
    """Options of `voxlane app events`."""

    warnings: bool = False
    """Print only events of type Warning."""


def print_events(options: EventsOptions) -> int:
    """Print the cluster's events about an app."""
    target = options.resolve()
    listed = fetch_events(target.cluster, target.name)
    if options.warnings:
        listed = [event for event in listed if event.get("type") != "Normal"]
    if not listed:
        print(f"no events of app {target.name}: clusters keep them for an hour")
        return 0
    print("\n".join(status.format_events(listed, target.name, datetime.now(UTC))))
    return 0


@record
class ExecOptions(TargetOptions):
    """Options of `voxlane app exec`."""

    pod: Annotated[str | None, Flag(metavar="NAME")] = None
    """Pod to use, such as node-1 (default: the first running one)."""
    container: Annotated[str | None, Flag(metavar="NAME")] = None
    """Container of the pod to use (default: its first)."""
    stdin: Annotated[bool, Flag("-i")] = False
    """Pass standard input to the command even if it is not a terminal."""
    command: Annotated[tuple[str, ...], REMAINDER]
    """Command to run."""


def exec_command(options: ExecOptions) -> int:
    """Run a command in one of an app's pods.

    Examples:
      voxlane app exec -- nvidia-smi
      voxlane app exec kits19 --pod node-1 -- bash
    """
    target = options.resolve()
    pods = list_pods(target.cluster, target.name)
    candidates = select_pods(pods, target.name, [options.pod] if options.pod else [])
    reason = ""
    if not any(map(is_ready, candidates)):
        snapshot, diagnosis = target.diagnose()
        reason = diagnosis.sentence
        if diagnosis.state == "absent" and not snapshot.boards:
            raise target.not_deployed()
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    pod, container = execute.choose_pod(candidates, target.name, reason), options.container or ""
    stdin = options.stdin or terminal
    return execute.run(target.cluster, pod, options.command, container=container, stdin=stdin, tty=terminal)


# -- tensorboard -------------------------------------------------------------------------------------------------------


@record
class AppTensorBoardOptions(TargetOptions):
    """Options of `voxlane app tensorboard`."""

    port: int = 6006
    """Port on 127.0.0.1."""
    no_open: bool = False
    """Do not open a browser."""
    stop: bool = False
    """Remove TensorBoard from the cluster."""


def show_tensorboard(options: AppTensorBoardOptions) -> int:
    """Show TensorBoard of an app's run at a local port.

    TensorBoard runs in the cluster and reads the run from its bucket.
    """
    target = options.resolve()
    if options.stop:
        existed = tensorboard.stop(target.cluster, target.name)
        message = "its TensorBoard is removed" if existed else "no TensorBoard of it was in the cluster"
        print(f"{target.name}: {message}")
        return 0

    def ready(url: str) -> None:
        print(f"TensorBoard of {target.name}: {url}", flush=True)
        stays = "TensorBoard stays in the cluster until voxlane app tensorboard --stop"
        signals.print_note(f"Ctrl-C ends the connection; {stays}")
        if not options.no_open:
            signals.open_in_browser(url)

    image = ""
    if target.app is not None:
        # The image of the running app can be pulled; the folder may have changed since.
        image = take_snapshot(target.cluster, target.name, tails=False).image
        image = image or build.ensure_image(target.app, target.folder, say=print_line).ref
    with signals.interrupted_by("SIGTERM"), contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the normal end
        if target.app is not None:
            tensorboard.apply(target.cluster, target.app, image)
        tensorboard.show(target.cluster, target.name, options.port, report=signals.print_note, open_url=ready)
    return 0


# -- undeploy ----------------------------------------------------------------------------------------------------------


@record
class UndeployOptions(TargetOptions):
    """Options of `voxlane app undeploy`."""

    all: bool = False
    """Remove every app of the namespace."""
    keep_data: bool = False
    """Keep the app's data on the nodes."""
    no_wait: bool = False
    """Do not wait until everything is deleted."""


def undeploy_app(options: UndeployOptions) -> int:
    """Remove everything that an app created in the cluster.

    Remove everything that the app created in the cluster, and nothing else: its workload, its TensorBoard, its files,
    and its data unless that has `keep: true` or another app uses it. The run in the bucket stays.
    """
    if not options.all:
        target = options.resolve()
        if not _remove_app(target, options):
            raise target.not_deployed()
        return 0
    if options.app is not None:
        raise ConfigError("--all with an app", fix="Give one of them")
    cluster = options.connect()
    names = undeploy.list_apps(cluster)
    if not names:
        print(f"no apps in namespace {cluster.namespace}")
    for name in names:
        _remove_app(AppTarget(name, cluster), options)
    return 0


def _remove_app(target: AppTarget, options: UndeployOptions) -> bool:
    """Remove one app; return whether any object of it existed."""
    objects, forbidden = undeploy.list_objects(target.cluster, target.name)
    if forbidden:
        print_note(f"skipped, because you may not list them: {', '.join(forbidden)}")
    if not objects:
        return False
    has_data = any(item["kind"] == "StagedDataset" for item in objects)
    others = undeploy.list_workloads(target.cluster) if has_data else []
    plan = undeploy.plan(objects, others, target.name, keep_data=options.keep_data)
    undeploy.apply(target.cluster, plan, report=print_line, wait=not options.no_wait)
    if plan.remaining:
        print_line(f"stays: {'; '.join(plan.remaining)}")
    return True
