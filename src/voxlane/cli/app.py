"""`voxlane app`: a training app on Kubernetes. This module: its folder, image and manifests; in the cluster:
`app_cluster`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from voxlane.cli import app_cluster, app_entry
from voxlane.errors import BuildError, ConfigError, VoxlaneError

if TYPE_CHECKING:
    from voxlane.app.build import Built
    from voxlane.app.config import App

Commands = argparse._SubParsersAction
_TEMPLATES = ("jobset", "rayjob", "trainjob", "tensorboard")

_APP = """\
A training app on Kubernetes: one folder, with one app.yaml that says what runs, on what, with which data.

  voxlane app init kits19 --data gs://my-bucket/kits19 --run gs://my-bucket/runs/a --image registry.example/kits19
  cd kits19
  voxlane app deploy        build the image if need be, push it, stage data, run
  voxlane app status        what it does, and why it is not running
  voxlane app logs -f       of all its pods, also once they are gone
  voxlane app tensorboard   of its run, also once its pods are gone
  voxlane app undeploy      remove all that it made; the run stays"""


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "app",
        help="a training app on Kubernetes: init, build, render, deploy, status, logs, undeploy",
        description=_APP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=lambda options: _help(parser))
    inner = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_init(inner)
    _add_templates(inner)
    _add_fields(inner)
    _add_build(inner)
    _add_render(inner)
    _add_update(inner)
    app_cluster.add_parsers(inner)
    app_entry.add_parser(inner)


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Add the app's folder."""
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default=".", help="the app's folder (default: this one)")


# -- init, templates, fields, update -----------------------------------------------------------------------------------


def _add_init(inner: Commands[argparse.ArgumentParser]) -> None:
    parser = inner.add_parser(
        "init",
        help="make an app's folder from a template",
        description="Make a folder with app.yaml, the one file to edit, and a Dockerfile.",
        epilog="examples:\n  voxlane app init kits19\n  voxlane app init search --template rayjob --dir apps/search",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="the app's name: small letters, digits and -")
    parser.add_argument("--template", metavar="T", default="jobset", help=f"{', '.join(_TEMPLATES)} (default jobset)")
    parser.add_argument("--dir", metavar="FOLDER", help="where (default: a new folder NAME)")
    parser.add_argument("--image", metavar="IMAGE", help="where its image is pushed, without a tag")
    parser.add_argument("--data", metavar="URI", help="the prepared dataset")
    parser.add_argument("--run", dest="run_uri", metavar="URI", help="where its run is kept")
    parser.set_defaults(run=_init)


def _init(options: argparse.Namespace) -> int:
    from voxlane import __version__
    from voxlane.app.folder import init

    folder = options.dir or options.name
    made = init(
        options.name,
        options.template,
        folder,
        version=__version__,
        image=options.image,
        data=options.data,
        run=options.run_uri,
    )
    print(f"{folder}: {', '.join(made)}")
    print(f"next: edit {os.path.join(folder, 'app.yaml')}, then voxlane app deploy {folder}")
    return 0


def _add_templates(inner: Commands[argparse.ArgumentParser]) -> None:
    parser = inner.add_parser("templates", help="list the templates of init", description="List the templates of init.")
    parser.set_defaults(run=_templates)


def _templates(options: argparse.Namespace) -> int:
    from voxlane.app.folder import TEMPLATES

    for name, what in TEMPLATES.items():
        print(f"{name:<12} {what}")
    return 0


def _add_fields(inner: Commands[argparse.ArgumentParser]) -> None:
    parser = inner.add_parser(
        "fields", help="list the fields of app.yaml", description="List the fields of app.yaml, with their defaults."
    )
    parser.set_defaults(run=_fields)


def _fields(options: argparse.Namespace) -> int:
    from voxlane.app.config import App
    from voxlane.settings import help_text

    text, _, _ = help_text(App).partition("\n  files=")  # the last one, which is not app.yaml's
    print(f"Fields of app.yaml:\n{text}")
    return 0


def _add_update(inner: Commands[argparse.ArgumentParser]) -> None:
    parser = inner.add_parser(
        "update",
        help="merge a template's changes into an app",
        description="Merge what changed in the app's template since `init` (or the last update) into its files. Lines "
        "that were changed here too are marked, named, and the exit status is 1.",
    )
    add_folder(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say what would change")
    parser.set_defaults(run=_update)


def _update(options: argparse.Namespace) -> int:
    from voxlane import __version__
    from voxlane.app.folder import update

    changes = update(options.folder, version=__version__, dry_run=options.dry_run)
    for change in changes:
        print(f"{change.name}: {change.what}")
    if not changes:
        print(f"{options.folder} is up to date with its template")
    conflicts = [change.name for change in changes if change.what == "conflict"]
    if conflicts and not options.dry_run:
        raise ConfigError(
            f"both sides changed the same lines of {', '.join(conflicts)}",
            uri=options.folder,
            fix="Resolve what lies between <<<<<<< and >>>>>>>",
        )
    return 1 if conflicts else 0


# -- build, render -----------------------------------------------------------------------------------------------------


def _add_build(inner: Commands[argparse.ArgumentParser]) -> None:
    parser = inner.add_parser(
        "build",
        help="build and push the app's image",
        description="Build the folder's Dockerfile with docker, podman or buildah, whichever is there, and push it. "
        "The tag is a hash of the files that it is built from: what is there already is not built again.",
    )
    add_folder(parser)
    parser.add_argument("--no-push", action="store_true", help="build only")
    parser.add_argument("--watch", action="store_true", help="again whenever a file changes, until interrupted")
    parser.add_argument("--builder", choices=("docker", "podman", "buildah"), help="instead of the first that works")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the builder's output as it comes")
    parser.set_defaults(run=_build)


def _heard(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _unheard(line: str) -> None:
    pass


def _build(options: argparse.Namespace) -> int:
    from voxlane.app import build
    from voxlane.app.config import App

    def once(app: App) -> None:
        made = build.make(
            app,
            options.folder,
            push=not options.no_push,
            wanted=options.builder,
            say=_heard,
            output=_heard if options.verbose else _unheard,
        )
        print(outcome(made), flush=True)

    def load() -> App:
        return App.load(options.folder, deep=False)

    if not options.watch:
        once(load())
        return 0
    if not load().built:
        raise BuildError(f"image {load().image} has a tag of its own, so that there is nothing to build")
    try:
        for _ in build.watch(options.folder):
            try:
                once(load())
            except VoxlaneError as error:  # the next change may repair it
                print(f"voxlane: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return 0
    return 0


def outcome(made: Built) -> str:
    """What is said of an image."""
    if not made.built and made.engine is None:
        return f"{made.ref}: there already"
    did = [word for word, done in (("built", made.built), ("pushed", made.pushed)) if done]
    how = " and ".join(did) if did else "there already"
    return f"{made.ref}: {how}" + (f" with {made.engine} in {made.seconds:.0f} s" if did else "")


def _add_render(inner: Commands[argparse.ArgumentParser]) -> None:
    parser = inner.add_parser(
        "render",
        help="print the app's manifests",
        description="Print the manifests that deploy applies, checked against their kinds' schemas. No cluster is "
        "asked, and no image is built.",
        epilog="examples:\n  voxlane app render | kubectl diff -f -\n  voxlane app render -o manifests",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_folder(parser)
    parser.add_argument("-o", "--out", metavar="DIR", help="write one file a manifest there instead")
    parser.add_argument("-n", "--namespace", metavar="NS", help="instead of app.yaml's (default: default)")
    parser.add_argument("--board", action="store_true", help="those of `voxlane app tensorboard` instead")
    parser.set_defaults(run=_render)


def checked(app: App) -> App:
    """The same; a command of voxlane's own that is wrong ends here, with that command's usage, and not in a pod."""
    from voxlane.cli.main import parse

    if app.command is not None and app.command[0] == "voxlane":
        parse(app.command[1:])
    return app


def _render(options: argparse.Namespace) -> int:
    from voxlane.app import build
    from voxlane.app.config import App
    from voxlane.app.render import render, render_board, to_yaml
    from voxlane.app.validate import validate

    app = checked(App.load(options.folder))
    image = build.reference(app, options.folder)
    namespace = options.namespace or app.namespace or "default"
    manifests = (render_board if options.board else render)(app, image, namespace=namespace)
    validate(manifests)
    if options.out is None:
        sys.stdout.write(to_yaml(manifests))
        return 0
    written = _write(options.out, [(file_name(one), to_yaml([one])) for one in manifests])
    print(f"{options.out}: {', '.join(written)}")
    return 0


def file_name(manifest: dict[str, Any]) -> str:
    """Of a manifest's file: jobset-NAME.yaml."""
    return f"{manifest['kind'].lower()}-{manifest['metadata']['name']}.yaml"


def _write(folder: str, files: Sequence[tuple[str, str]]) -> list[str]:
    try:
        os.makedirs(folder, exist_ok=True)
        for name, text in files:
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", uri=error.filename or folder) from None
    return [name for name, _ in files]
