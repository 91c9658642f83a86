"""`voxlane app`: a training app on Kubernetes. This module: its folder, image, manifests and the entry point of its
containers; `app_cluster`: the app in a cluster."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from voxlane import __version__
from voxlane.cli.config_options import StoreOptions, format_fields
from voxlane.cli.signals import print_note
from voxlane.cluster.commands import STOPPED_VARIABLE, resolve_status
from voxlane.cluster.kubernetes.app import build, folder, render
from voxlane.cluster.kubernetes.app.config import App
from voxlane.cluster.kubernetes.validate import validate
from voxlane.errors import BuildError, ConfigError, VoxlaneError
from voxlane.settings import ARGUMENT, REMAINDER, Flag, PathOrUri, record
from voxlane.temporary import temporary_folder

HELP = """\
Run a training app on Kubernetes. An app is a folder with one app.yaml, which declares the command, its resources and
its data.

  voxlane app init kits19 --data gs://my-bucket/kits19 --run gs://my-bucket/runs/a --image registry.example/kits19
  cd kits19
  voxlane app deploy        build the image if needed, push it, stage data, run
  voxlane app status        state of the app, and why it is not running
  voxlane app logs -f       logs of all its pods, also of deleted ones
  voxlane app tensorboard   TensorBoard of its run, also after its pods are deleted
  voxlane app undeploy      remove everything that it created; the run stays
"""


@record
class FolderOptions:
    """Options of commands on an app's folder."""

    folder: Annotated[str, ARGUMENT] = "."
    """The app's folder (default: this one)."""


# -- init, templates, fields, update -----------------------------------------------------------------------------------


@record
class AppInitCommand:
    """Create the folder of an app from a template.

    Create a folder with app.yaml, which describes the app, and the files that it uses, such as a Dockerfile and the
    config of the training.

    Examples:
      voxlane app init kits19
      voxlane app init search --template rayjob --dir apps/search
    """

    name: Annotated[str, ARGUMENT]
    """Name of the app: lower-case letters, digits and -."""
    template: str = "jobset"
    """Template: jobset, rayjob, trainjob or tensorboard."""
    dir: Annotated[str | None, Flag(metavar="FOLDER")] = None
    """Folder to create (default: NAME)."""
    image: str | None = None
    """Name of the app's image in a registry, without a tag."""
    data: PathOrUri | None = None
    """URI of the prepared dataset."""
    run: PathOrUri | None = None
    """URI for the run."""

    def _run(self) -> None:
        target = self.dir or self.name
        values = {"image": self.image, "data": self.data, "run": self.run}
        files = folder.init(self.name, self.template, target, version=__version__, **values)
        print(f"{target}: {', '.join(files)}")
        print(f"next: edit {os.path.join(target, 'app.yaml')}, then voxlane app deploy {target}")


@record
class AppTemplatesCommand:
    """List the templates that `voxlane app init` offers."""

    def _run(self) -> None:
        for name, description in folder.TEMPLATES.items():
            print(f"{name:<12} {description}")


@record
class AppFieldsCommand:
    """List the fields of app.yaml, with their defaults."""

    def _run(self) -> None:
        text, _, _ = format_fields(App).partition("\n  files=")  # the last field, which app.yaml does not have
        print(f"Fields of app.yaml:\n{text}")


@record
class AppUpdateCommand(FolderOptions):
    """Merge a template's changes into an app.

    Merge what changed in the template since `init`, or since the last update, into the app's files. If you changed the
    same lines, both versions are marked in the file, the file is named, and the exit status is 1.
    """

    dry_run: bool = False
    """Only report the changes."""

    def _run(self) -> int:
        changes = folder.update(self.folder, version=__version__, dry_run=self.dry_run)
        for change in changes:
            print(f"{change.name}: {change.action}")
        if not changes:
            print(f"{self.folder} is up to date with its template")
        conflicts = [change.name for change in changes if change.action == "conflict"]
        if conflicts and not self.dry_run:
            message = f"both sides changed the same lines of {', '.join(conflicts)}"
            raise ConfigError(message, uri=self.folder, fix="Resolve what lies between <<<<<<< and >>>>>>>")
        return 1 if conflicts else 0


# -- build, render -----------------------------------------------------------------------------------------------------


@record
class AppBuildCommand(FolderOptions):
    """Build and push the app's image.

    Build the folder's Dockerfile with docker, podman or buildah, whichever is installed, and push the image. Its tag is
    a hash of the files that it is built from, so an existing image is not built again.
    """

    no_push: bool = False
    """Build the image, but do not push it."""
    watch: bool = False
    """Build again whenever a file changes, until interrupted."""
    builder: build.BuilderName | None = None
    """Builder to use (default: the first that works)."""
    verbose: Annotated[bool, Flag("-v")] = False
    """Show the builder's output as it comes."""

    def _run(self) -> None:
        print_line = partial(print, file=sys.stderr, flush=True)

        def build_once() -> None:
            result = build.ensure_image(
                App.load(self.folder, deep=False),
                self.folder,
                push=not self.no_push,
                builder=self.builder,
                say=print_line,
                output=print_line if self.verbose else lambda _: None,
            )
            steps = [step for step, done in (("built", result.built), ("pushed", result.pushed)) if done]
            took = f"{' and '.join(steps)} with {result.builder} in {result.seconds:.0f} s"
            print(f"{result.ref}: {took if steps else 'exists already'}", flush=True)

        if not self.watch:
            build_once()
            return
        app = App.load(self.folder, deep=False)
        if not app.is_built:
            raise BuildError(f"image {app.image} has a tag of its own, so there is nothing to build")
        with contextlib.suppress(KeyboardInterrupt):
            for _ in build.watch_folder(self.folder):
                try:
                    build_once()
                except VoxlaneError as error:  # the next change may repair it
                    print_note(str(error))


@record
class AppRenderCommand(FolderOptions):
    """Print the app's manifests.

    Print the manifests that deploy applies, checked against the schemas of their kinds. This needs no cluster and
    builds no image.

    Examples:
      voxlane app render | kubectl diff -f -
      voxlane app render -o manifests
    """

    out: Annotated[str | None, Flag("-o", metavar="DIR")] = None
    """Write one file per manifest to this folder instead."""
    namespace: Annotated[str | None, Flag("-n", metavar="NAME")] = None
    """Namespace to use instead of app.yaml's (default: default)."""
    board: bool = False
    """Print the manifests of `voxlane app tensorboard` instead."""

    def _run(self) -> None:
        app = check_command(App.load(self.folder, check_space=check_search_space))
        image = build.get_image_reference(app, self.folder)
        namespace = self.namespace or app.namespace or "default"
        manifests = (render.render_tensorboard if self.board else render.render)(app, image, namespace=namespace)
        validate(manifests)
        if self.out is None:
            sys.stdout.write(render.to_yaml(manifests))
            return
        files = {
            f"{manifest['kind'].lower()}-{manifest['metadata']['name']}.yaml": render.to_yaml([manifest])
            for manifest in manifests
        }
        folder.write_files(self.out, files)
        print(f"{self.out}: {', '.join(files)}")


def check_command(app: App) -> App:
    """Return `app`, or raise UsageError here, and not in a pod, if its voxlane command has a mistake."""
    from voxlane.cli.main import parse

    if app.command is not None and app.command[0] == "voxlane":
        parse(app.command[1:])
    return app


def check_search_space(values: Mapping[str, Any], origin: str) -> None:
    """Raise ConfigError if `values` are not a valid search space; `origin` names their file."""
    from voxlane.tune.space import parse_space

    parse_space(values, origin=origin)


# -- entry -------------------------------------------------------------------------------------------------------------


@record
class AppEntryCommand(StoreOptions):
    """Run a command as the first process of a container.

    Forward COMMAND's output and signals, archive the output below --logs, and end with its status. Values of
    variables that look secret are printed as ***.
    """

    logs: PathOrUri | None = None
    """Archive the output below URI/POD (POD_NAME, or the host's name)."""
    hide: Annotated[tuple[str, ...], Flag(metavar="NAME")] = ()
    """Variable whose value is a secret (repeatable)."""
    command: Annotated[tuple[str, ...], REMAINDER]
    """Command to run."""

    def _run(self) -> int:
        from voxlane.cluster.kubernetes.app.entry import run
        from voxlane.cluster.kubernetes.app.log_archive import LogArchiver
        from voxlane.redaction import collect_secrets

        pod = os.environ.get("POD_NAME") or socket.gethostname()
        archiver = LogArchiver(self.logs, pod, self.store_config()) if self.logs else None
        with temporary_folder("entry") as temporary:
            os.environ[STOPPED_VARIABLE] = os.path.join(temporary, "stopped")
            secrets = collect_secrets(os.environ, self.hide, self.command)
            status = resolve_status(run(self.command, secrets, archiver), os.environ)
        if archiver is not None and not archiver.close():
            sys.stderr.flush()
            os._exit(status)  # a request to a bucket that does not respond must not hold the container up
        return status
