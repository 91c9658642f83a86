"""The app that a `voxlane app` command names, and its cluster."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Annotated

from voxlane.cli.app import check_search_space
from voxlane.cluster.kubernetes.app.config import FILE, App
from voxlane.cluster.kubernetes.app.diagnosis import AppDiagnosis, diagnose_app
from voxlane.cluster.kubernetes.app.k8s import AppSnapshot
from voxlane.cluster.kubernetes.app.snapshot import take_all_snapshots, take_snapshot
from voxlane.cluster.kubernetes.client import Cluster
from voxlane.errors import MissingObjectError
from voxlane.settings import ARGUMENT, Flag, record


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


@dataclass(frozen=True)
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


def print_line(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def print_note(line: str) -> None:
    """Print a note on stderr at once."""
    print(f"note: {line}", file=sys.stderr, flush=True)
