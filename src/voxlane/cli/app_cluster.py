"""`voxlane app deploy`, `status`, `logs`, `events`, `exec`, `tensorboard` and `undeploy`: an app in a cluster."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from voxlane.cli.store_options import add_store_options, store_config
from voxlane.errors import ConfigError, MissingObjectError

if TYPE_CHECKING:
    from voxlane.app.config import App
    from voxlane.app.deploy import Plan
    from voxlane.app.logs import Line
    from voxlane.app.objects import Object, Seen
    from voxlane.app.why import Verdict
    from voxlane.kube.client import Cluster

Commands = argparse._SubParsersAction
_WATCH_S = 2.0
_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94)
_FILE = "app.yaml"

_DEPLOY = """\
Put an app into the cluster: check it offline and against the cluster, build and push its image if that is not there,
stage its data, and start it. When anything fails on the way, or on Ctrl-C, nothing of it stays behind."""

_STATUS = """\
One table over an app's queue, workload, jobs, pods, data and board, and a sentence on why it is not running. Without
APP, in a folder that is no app's: all apps of the namespace."""

_LOGS = """\
What an app's pods print, by time, each line after its pod's name. Pods that have ended are shown too; of pods that are
gone, what was kept in the run's bucket (--kept shows that in any case, with all starts of the app)."""

_UNDEPLOY = """\
Remove everything that the app made in the cluster, and nothing else: what runs, its board, its files, and its data
unless that has `keep: true` or another app uses it. The run in the bucket stays."""


def add_parsers(inner: Commands[argparse.ArgumentParser]) -> None:
    """Add the commands."""

    def command(name: str, run: Callable[[argparse.Namespace], int], short: str, text: str = "") -> Any:
        raw = argparse.RawDescriptionHelpFormatter
        one = inner.add_parser(
            name, help=short, description=text or f"{short[0].upper()}{short[1:]}.", formatter_class=raw
        )
        if name != "exec":
            one.add_argument("app", metavar="APP", nargs="?", help="an app's folder or name (default: this folder)")
        one.add_argument("--context", metavar="NAME", help="cluster, by its name in kubeconfig (default: the current)")
        one.add_argument("-n", "--namespace", metavar="NAME", help="default: app.yaml's, or the context's")
        one.set_defaults(run=run)
        return one

    deploy = command("deploy", _deploy, "start an app in the cluster", _DEPLOY)
    deploy.add_argument("--replace", action="store_true", help="end the app if it runs, and start this one")
    deploy.add_argument("--no-build", action="store_true", help="the image is in the registry already")
    deploy.add_argument(
        "--no-push", action="store_true", help="build, but do not push: nodes have this machine's images"
    )
    deploy.add_argument(
        "--wait", action=argparse.BooleanOptionalAction, default=True, help="for data to be staged first"
    )
    deploy.add_argument("--timeout", metavar="TIME", help="how long to wait for data, such as 2h (default: no limit)")
    deploy.add_argument("--no-node-check", action="store_true", help="nodes that fit need not be there yet")
    deploy.add_argument("--dry-run", action="store_true", help="check everything, say what would be done, and stop")
    deploy.add_argument("-f", "--follow", action="store_true", help="then print its logs until it ends")
    status = command("status", _status, "where an app stands, and why it is not running", _STATUS)
    status.add_argument("-w", "--watch", action="store_true", help="again and again, until it has ended")
    status.add_argument("--json", action="store_true", help="as JSON")
    logs = command("logs", _logs, "what an app's pods print", _LOGS)
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the app ends; returns its status")
    logs.add_argument("--since", metavar="TIME", help="of the last TIME, such as 90s, 10m or 2h")
    logs.add_argument("--tail", metavar="N", type=int, help="the last N lines of each pod")
    logs.add_argument(
        "--pod", metavar="NAME", action="append", default=[], help="of this pod, such as node-0 (repeatable)"
    )
    logs.add_argument("--previous", action="store_true", help="of containers that were restarted: from before")
    logs.add_argument("--timestamps", action="store_true", help="with the time of each line")
    logs.add_argument("--kept", action="store_true", help="from the run's bucket")
    logs.add_argument("--board", action="store_true", help="of the app's TensorBoard")
    add_store_options(logs)
    events = command("events", _events, "what the cluster reports of an app")
    events.add_argument("--warnings", action="store_true", help="warnings alone")
    run = command("exec", _exec, "run a command in one of an app's pods")
    run.usage = (
        "voxlane app exec [--pod NAME] [--container NAME] [--stdin] [--context NAME] [-n NAME] [APP] -- COMMAND ..."
    )
    run.add_argument("--pod", metavar="NAME", help="such as node-1 (default: the first that runs)")
    run.add_argument("--container", metavar="NAME", help="default: the first")
    run.add_argument("-i", "--stdin", action="store_true", help="pass input on also where it is no terminal")
    run.add_argument("words", metavar="[APP] -- COMMAND ...", nargs=argparse.REMAINDER, help="what to run")
    run.set_defaults(parser=run)
    board = command("tensorboard", _tensorboard, "TensorBoard of an app's run, in the cluster, at a local port")
    board.add_argument("--port", metavar="N", type=int, default=6006, help="on 127.0.0.1 (default 6006)")
    board.add_argument("--no-open", action="store_true", help="do not open it in a browser")
    board.add_argument("--stop", action="store_true", help="remove it from the cluster")
    remove = command("undeploy", _undeploy, "remove all that an app made in the cluster", _UNDEPLOY)
    remove.add_argument("--all", action="store_true", help="every app of the namespace")
    remove.add_argument("--keep-data", action="store_true", help="leave its data on the nodes")
    remove.add_argument("--no-wait", action="store_true", help="do not wait until it is gone")


# -- which app ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Target:
    """What a command is about."""

    name: str
    cluster: Cluster
    app: App | None = None
    """Where a folder was named."""
    folder: str = ""


def _target(options: argparse.Namespace, *, deep: bool = False) -> _Target:
    """The app that was named by its folder or its name, and the cluster. `deep`: with its files read and checked."""
    from voxlane.app.config import App
    from voxlane.kube.client import Cluster

    word = options.app
    named = word is not None and not os.path.isfile(os.path.join(word, _FILE)) and os.sep not in word and word != "."
    if named:
        return _Target(word, Cluster.connect(context=options.context, namespace=options.namespace))
    folder = word or "."
    app = App.load(folder, deep=deep)
    cluster = Cluster.connect(context=options.context, namespace=options.namespace or app.namespace)
    return _Target(app.name, cluster, app, folder)


def _here(options: argparse.Namespace) -> bool:
    """Whether an app is named, or this folder is one."""
    return options.app is not None or os.path.isfile(_FILE)


def _absent(target: _Target) -> MissingObjectError:
    from voxlane.app.look import look_at_all

    there = [seen.name for seen in look_at_all(target.cluster)]
    fix = (
        "Run: voxlane app deploy" if target.app else f"There are: {', '.join(there)}" if there else "There are no apps"
    )
    return MissingObjectError(
        f"not deployed in namespace {target.cluster.namespace}", uri=f"app {target.name}", fix=fix
    )


def _say(line: str) -> None:
    print(line, flush=True)


def _note(line: str) -> None:
    print(f"note: {line}", file=sys.stderr, flush=True)


# -- deploy ------------------------------------------------------------------------------------------------------------


def _deploy(options: argparse.Namespace) -> int:
    from voxlane.app import build, deploy, preflight
    from voxlane.app.look import look, now
    from voxlane.app.render import render
    from voxlane.app.validate import validate
    from voxlane.cli.app import checked
    from voxlane.sizes import seconds_of

    timeout_s = seconds_of(options.timeout, what="--timeout") if options.timeout else None
    if options.app is not None and not os.path.isfile(os.path.join(options.app, _FILE)):
        raise ConfigError("there is no app here", uri=options.app, fix="Give the folder that holds its app.yaml")
    target = _target(options, deep=True)
    app, cluster = target.app, target.cluster
    assert app is not None
    manifests = render(checked(app), build.reference(app, target.folder), namespace=cluster.namespace)
    validate(manifests)
    found = preflight.check(cluster, preflight.needs(manifests, keys=_keys(app)), nodes=not options.no_node_check)
    for note in found.notes:
        _note(note)
    preflight.refuse(found, app.name)
    there = deploy.read(cluster, manifests)
    doing = deploy.plan(manifests, there, look(cluster, app.name, tails=False), now(), replace=options.replace)
    deploy.rehearse(cluster, doing)
    if options.dry_run:
        _say_plan(doing, build.reference(app, target.folder))
        return 0
    if not options.no_build:
        build.ensure(app, target.folder, push=not options.no_push, say=_say)
    # A terminal that is closed (SIGHUP) hours into the staging takes back what was made, as Ctrl-C does.
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with _Bar() as bar:
            deploy.carry_out(
                cluster,
                app.name,
                doing,
                tell=bar.say,
                wait=options.wait,
                progress=bar.show,
                needed=app.nodes,
                timeout_s=timeout_s,
            )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if options.follow:
        return _follow(target, _wanted(options, follow_only=True), timestamps=False)
    where = "" if target.folder == "." else f" {target.folder}"
    _say(f"next: voxlane app status{where}; voxlane app logs -f{where}; voxlane app undeploy{where}")
    return 0


def _interrupt(number: int, _: object) -> None:
    if number == signal.SIGHUP:  # nobody reads any more, and what is printed to no terminal would be an error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    raise KeyboardInterrupt


def _keys(app: App) -> list[str]:
    """Keys that the credentials' Secret must have for the buckets that the app names."""
    from voxlane.app.pod import schemes

    must = {"s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "az": ("AZURE_STORAGE_ACCOUNT",)}
    return [key for scheme in schemes(app) for key in must.get(scheme, ())]


def _say_plan(doing: Plan, image: str) -> None:
    words = {"create": "would be created", "change": "would be changed", "replace": "would be created anew"}
    for one in doing.remove:
        _say(f"{one['kind']} {one['metadata']['name']}: would be removed first")
    for step in doing.steps:
        _say(f"{step.title}: {words.get(step.action, 'is there already')}")
    _say(f"image {image}")


class _Bar:
    """Progress of staging: a bar on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._told = ""
        self._name = ""

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def say(self, line: str) -> None:
        """Print a line; the bar is of what came before it."""
        self._close()
        _say(line)

    def show(self, data: Object) -> None:
        """How far a dataset is."""
        from tqdm import tqdm

        said, name = data.get("status") or {}, data["metadata"]["name"]
        nodes = [one for one in (said.get("nodes") or {}).values() if one.get("totalBytes")]
        done, total = (sum(int(one.get(key) or 0) for one in nodes) for key in ("bytes", "totalBytes"))
        # With the message: a copier that cannot start stays at 0%, and only that says why.
        message = " ".join(str(said.get("message") or "").split())
        if not sys.stderr.isatty():
            # By tens, so that a log of hours stays short.
            step = str(said.get("progress") or "0%").rstrip("%")
            told = f"{said.get('phase') or 'Pending'} {int(step) // 10 * 10 if step.isdigit() else step}%"
            told += f" ({message})" if message else ""
            if told != self._told and said.get("phase") not in ("Ready", None):
                print(f"data {name}: {told}", file=sys.stderr, flush=True)
            self._told = told
            return
        if self._bar is None or name != self._name:
            self._close()
            self._bar = tqdm(unit="B", unit_scale=True, desc=f"data {name}", leave=False, dynamic_ncols=True)
            self._name = name
        self._bar.total, self._bar.n = total or None, done
        self._bar.set_postfix_str(
            f"{said.get('phase') or 'Pending'} {said.get('ready') or ''} {message}", refresh=False
        )
        self._bar.refresh()


# -- status ------------------------------------------------------------------------------------------------------------


def _status(options: argparse.Namespace) -> int:
    from voxlane.app import status

    while True:
        if _here(options):
            target = _target(options)
            seen, found, moment = _look(target)
            if found.state == "absent" and not seen.boards and not options.watch:
                raise _absent(target)
            shown = status.plain(seen, found, moment) if options.json else status.text(seen, found, moment)
            ended = found.ended
        else:
            shown, ended = _all(options)
        text = json.dumps(shown, indent=2) if options.json else "\n".join(shown)
        if not options.watch:
            print(text)
            return 0
        _paint(text)
        if ended:
            return 0
        time.sleep(_WATCH_S)


_painted = ""


def _paint(text: str) -> None:
    """Over what was there, on a terminal; elsewhere only what is new."""
    global _painted
    if sys.stdout.isatty():
        print(f"\x1b[H\x1b[2J{text}", flush=True)
    elif text != _painted:
        print(text + "\n", flush=True)
    _painted = text


def _look(target: _Target) -> tuple[Seen, Verdict, Any]:
    from voxlane.app.look import look, now
    from voxlane.app.why import verdict

    seen, moment = look(target.cluster, target.name), now()
    return seen, verdict(seen, moment), moment


def _all(options: argparse.Namespace) -> tuple[Any, bool]:
    """All apps of the namespace, and whether all have ended."""
    from voxlane.app import status
    from voxlane.app.look import look_at_all, now
    from voxlane.app.why import verdict
    from voxlane.kube.client import Cluster

    cluster, moment = Cluster.connect(context=options.context, namespace=options.namespace), now()
    apps = [(seen, verdict(seen, moment)) for seen in look_at_all(cluster)]
    ended = all(found.ended for _, found in apps)
    if options.json:
        return [status.plain(seen, found, moment) for seen, found in apps], ended
    if not apps:
        return [f"no apps in namespace {cluster.namespace}"], ended
    return status.overview(apps, moment), ended


# -- logs --------------------------------------------------------------------------------------------------------------


def _wanted(options: argparse.Namespace, *, follow_only: bool = False) -> Any:
    from voxlane.app.logs import Wanted
    from voxlane.sizes import seconds_of

    if follow_only:
        return Wanted()
    if options.tail is not None and options.tail < 0:
        raise ConfigError(f"--tail {options.tail}", fix="Give a number of lines, zero or more")
    since_s = seconds_of(options.since, what="--since") if options.since else None
    return Wanted(since_s, options.tail, tuple(options.pod), options.previous)


def _logs(options: argparse.Namespace) -> int:
    from voxlane.app import logs

    if options.kept and (options.follow or options.previous or options.board):
        raise ConfigError("--kept is of what training printed before", fix="Leave --follow, --previous and --board out")
    if options.board and options.follow:
        raise ConfigError("--board shows what was printed", fix="Leave --follow out")
    wanted, target = _wanted(options), _target(options)
    if options.follow:
        return _follow(target, wanted, timestamps=options.timestamps)
    part = "board" if options.board or (target.app is not None and target.app.template == "tensorboard") else ""
    pods = [] if options.kept else logs.pods_of(target.cluster, target.name, part=part)
    if not pods and part:
        raise MissingObjectError("no TensorBoard of it is in the cluster", uri=f"app {target.name}")
    if not pods:
        return _kept(target, wanted, options)
    lines = logs.read(target.cluster, target.name, logs.chosen(pods, target.name, wanted.pods), wanted)
    printed = _print(lines, _Prefix(), timestamps=options.timestamps)
    if not printed:
        _, found, _ = _look(target)
        print(f"voxlane: nothing was printed yet ({found.text})", file=sys.stderr)
    return 0


def _kept(target: _Target, wanted: Any, options: argparse.Namespace) -> int:
    """Lines from the run's bucket, because the pods are gone."""
    from datetime import timedelta

    from voxlane.app import kept
    from voxlane.app.look import look, now
    from voxlane.app.objects import RUN, annotation

    seen = look(target.cluster, target.name, tails=False)
    run = annotation(seen.workload, RUN) if seen.workload else ""
    run = run or (target.app.run_uri if target.app else None) or ""
    if not run:
        if seen.workload is None and target.app is None:
            raise _absent(target)
        raise MissingObjectError("it has no pods, and no run that logs are kept in", uri=f"app {target.name}")
    config = store_config(options)
    names = _kept_names(kept.pods_of(run, config), target.name)
    if not names:
        raise MissingObjectError("it has no pods, and nothing is kept yet", uri=f"{run}/logs", fix=_why_none(target))
    chosen = [name for name, short in names.items() if not wanted.pods or {name, short} & set(wanted.pods)]
    if not chosen:
        raise ConfigError(f"no pod {wanted.pods[0]!r}", uri=run, fix=f"There are: {', '.join(names.values())}")
    since = now() - timedelta(seconds=wanted.since_s) if wanted.since_s is not None else None
    found = kept.read(run, config, since=since, pods=chosen)
    _print(_as_lines(found, names, wanted.tail), _Prefix(), timestamps=options.timestamps)
    return 0


def _why_none(target: _Target) -> str:
    _, found, _ = _look(target)
    return f"{found.text[0].upper()}{found.text[1:]}"


def _kept_names(pods: Sequence[str], app: str) -> dict[str, str]:
    """Short names of pods that are gone, by their whole names; their labels are not known any more."""
    import re

    short = {pod: re.sub(r"^node-0-(\d+)-[a-z0-9]{5}$", r"node-\1", pod.removeprefix(f"{app}-")) for pod in pods}
    often = [one for one in short.values() if list(short.values()).count(one) > 1]
    return {pod: pod.removeprefix(f"{app}-") if one in often else one for pod, one in short.items()}


def _as_lines(found: Iterator[Any], names: dict[str, str], tail: int | None) -> Iterator[Line]:
    from collections import deque

    from voxlane.app.logs import Line

    made = (Line(one.time.strftime("%Y-%m-%dT%H:%M:%S.%fZ"), names.get(one.pod, one.pod), one.text) for one in found)
    if tail is None:
        yield from made
        return
    last: dict[str, deque[Line]] = {}
    for line in made:
        last.setdefault(line.pod, deque(maxlen=tail)).append(line)
    yield from sorted((line for lines in last.values() for line in lines), key=lambda line: line.time)


def _follow(target: _Target, wanted: Any, *, timestamps: bool) -> int:
    """Print lines until the app has ended; returns 0 where it ended well."""
    from voxlane.app import logs, why
    from voxlane.app.look import look, now

    told, outcome = "", None

    def over(pods: Sequence[Object]) -> bool:
        nonlocal told, outcome
        if any(logs.containers(pod) and not logs.ended(pod) for pod in pods):
            told = told or "running"
            return False
        seen = look(target.cluster, target.name, tails=False)
        outcome = why.verdict(seen, now())
        if outcome.state == "absent" and not told:
            raise _absent(target)
        if not outcome.ended and outcome.state != told:
            print(f"voxlane: {outcome.text}", file=sys.stderr, flush=True)
        told = outcome.state
        return outcome.ended

    _print(logs.Follower(target.cluster, target.name, wanted, over), _Prefix(), timestamps=timestamps)
    if outcome is None or outcome.state in ("finished", "absent"):
        return 0
    _, found, _ = _look(target)
    print(f"voxlane: {found.text}", file=sys.stderr)
    return 1


class _Prefix:
    """Pods' names before their lines, as wide as the widest so far, in a colour of their own on a terminal."""

    def __init__(self) -> None:
        self._coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._seen: dict[str, int] = {}
        self._width = 0

    def __call__(self, pod: str) -> str:
        number = self._seen.setdefault(pod, len(self._seen))
        self._width = max(self._width, len(pod))
        shown = f"{pod:<{self._width}} | "
        return f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{shown}\x1b[0m" if self._coloured else shown


def _print(lines: Any, prefix: _Prefix, *, timestamps: bool) -> int:
    """Print lines as they come; returns how many."""
    count = 0
    for line in lines:
        stamp = f"{line.time} " if timestamps else ""
        print(f"{prefix(line.pod)}{stamp}{line.text}", flush=sys.stdout.isatty() or count % 64 == 0)
        count += 1
    sys.stdout.flush()
    return count


# -- events, exec ------------------------------------------------------------------------------------------------------


def _events(options: argparse.Namespace) -> int:
    from voxlane.app import events
    from voxlane.app.look import now

    target = _target(options)
    found = events.fetch(target.cluster, target.name)
    if options.warnings:
        found = [event for event in found if event.get("type") != "Normal"]
    if not found:
        print(f"no events of app {target.name}: clusters keep them for an hour")
        return 0
    print("\n".join(events.lines(found, target.name, now())))
    return 0


def _exec(options: argparse.Namespace) -> int:
    from voxlane.app import execute, logs

    words: list[str] = options.words
    if "--" not in words:
        raise ConfigError("no command was given", fix="Write it after --, such as: voxlane app exec -- nvidia-smi")
    place = words.index("--")
    before, command = words[:place], words[place + 1 :]
    if not command:
        raise ConfigError("no command was given", fix="Write it after --, such as: voxlane app exec -- nvidia-smi")
    options.app = before[0] if before else None
    if len(before) > 1:  # options after the app's name
        options.parser.parse_args([*before[1:], "--", *command], namespace=options)
    target = _target(options)
    pods = logs.pods_of(target.cluster, target.name)
    chosen = logs.chosen(pods, target.name, [options.pod] if options.pod else [])
    if not pods or not any(logs.containers(pod) and not logs.ended(pod) for pod in chosen):
        seen, found, _ = _look(target)
        if found.state == "absent" and not seen.boards:
            raise _absent(target)
    pod = execute.choose(chosen, target.name, _why_none(target) if not chosen else _why_not(target, chosen))
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return execute.run(
        target.cluster,
        pod,
        command,
        container=options.container or "",
        stdin=options.stdin or terminal,
        tty=terminal,
    )


def _why_not(target: _Target, pods: Sequence[Object]) -> str:
    """Why none of these pods runs; asked only where none does."""
    from voxlane.app.trouble import ready

    return "" if any(map(ready, pods)) else _why_none(target)


def _tensorboard(options: argparse.Namespace) -> int:
    from voxlane.app.look import look
    from voxlane.app.objects import IMAGE, annotation
    from voxlane.cli import app_board

    target, image = _target(options), ""
    if target.app is not None and not options.stop:
        from voxlane.app import build

        # What runs in the cluster is there to be pulled; the folder may have changed since.
        seen = look(target.cluster, target.name, tails=False)
        image = annotation(seen.workload, IMAGE) if seen.workload else ""
        image = image or build.ensure(target.app, target.folder, say=_say)
    return app_board.run(
        target.cluster,
        target.name,
        target.app,
        image,
        options.port,
        stop=options.stop,
        browser=not options.no_open,
    )


# -- undeploy ----------------------------------------------------------------------------------------------------------


def _undeploy(options: argparse.Namespace) -> int:
    from voxlane.app import undeploy
    from voxlane.kube.client import Cluster

    if options.all:
        if options.app is not None:
            raise ConfigError("--all with an app", fix="Give one of them")
        cluster = Cluster.connect(context=options.context, namespace=options.namespace)
        names = undeploy.apps(cluster)
        if not names:
            print(f"no apps in namespace {cluster.namespace}")
        for name in names:
            _remove(_Target(name, cluster), options)
        return 0
    target = _target(options)
    if not _remove(target, options):
        raise _absent(target)
    return 0


def _remove(target: _Target, options: argparse.Namespace) -> bool:
    """Remove one app; returns whether anything of it was there."""
    from voxlane.app import undeploy

    own, unread = undeploy.found(target.cluster, target.name)
    if unread:
        _note(f"not looked for, because you may not list them: {', '.join(unread)}")
    if not own:
        return False
    data = any(one["kind"] == "StagedDataset" for one in own)
    others = undeploy.users(target.cluster) if data else []
    doing = undeploy.plan(own, others, target.name, keep_data=options.keep_data)
    undeploy.run(target.cluster, target.name, doing, tell=_say, wait=not options.no_wait)
    if doing.stays:
        _say(f"stays: {'; '.join(doing.stays)}")
    return True
