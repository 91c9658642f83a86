"""`voxlane app logs`: output of an app's pods, from the cluster or from the run's bucket."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated

import pydantic

from voxlane.cli.app_target import AppTarget, TargetOptions
from voxlane.cli.config_options import StoreOptions
from voxlane.cli.signals import print_note
from voxlane.cluster.kubernetes.app import logs
from voxlane.cluster.kubernetes.app.k8s import Object, has_ended, shorten_pod_names
from voxlane.cluster.kubernetes.app.logs import LogLine, LogQuery
from voxlane.errors import ConfigError, MissingObjectError
from voxlane.settings import Flag, record
from voxlane.sizes import parse_duration

_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94)


@record
class AppLogsOptions(TargetOptions):
    """Options of `voxlane app logs`."""

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


def print_logs(options: AppLogsOptions, store: StoreOptions) -> int:
    """Print the output of an app's pods.

    Print the lines of all pods in order of time, each with its pod's name, including pods that have ended. Lines of
    deleted pods come from the archive in the run's bucket; --kept reads only this archive, with all starts of the app.
    """
    if options.archived and (options.follow or options.previous or options.board):
        raise ConfigError("--kept reads the archive of training", fix="Leave --follow, --previous and --board out")
    if options.board and options.follow:
        raise ConfigError("--board cannot be followed", fix="Leave --follow out")
    since_s = parse_duration(options.since, name="--since") if options.since else None
    query = LogQuery(since_s, options.tail, tuple(options.pod), options.previous)
    target = options.resolve()
    if options.follow:
        return follow_logs(target, query, timestamps=options.timestamps)
    board = options.board or (target.app is not None and target.app.template == "tensorboard")
    pods = [] if options.archived else logs.list_pods(target.cluster, target.name, board=board)
    if not pods and board:
        raise MissingObjectError("no TensorBoard of it is in the cluster", uri=f"app {target.name}")
    if not pods:
        _print_lines(_read_archive(target, query, store), timestamps=options.timestamps)
        return 0
    lines = logs.read_logs(target.cluster, target.name, logs.select_pods(pods, target.name, query.pods), query)
    if not _print_lines(lines, timestamps=options.timestamps):
        print_note(f"nothing was printed yet ({target.diagnose()[1].text})")
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
    shown_lines = (replace(line, pod=names[line.pod], time=f"{line.time[:-4]}Z") for line in lines)  # microseconds
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
            print_note(diagnosis.text)
        last_state = diagnosis.state
        return diagnosis.has_ended

    _print_lines(logs.LogFollower(target.cluster, target.name, query, is_over), timestamps=timestamps)
    if diagnosis is None or diagnosis.state in ("finished", "absent"):
        return 0
    print_note(target.diagnose()[1].text)
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
