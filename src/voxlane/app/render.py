"""An app as manifests. Pure: no file, no cluster, no clock; the same app renders the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from voxlane.app import jobset, pod, rayjob, tensorboard, trainjob
from voxlane.app.config import App, Stage
from voxlane.app.pod import Manifest, Target
from voxlane.errors import ConfigError
from voxlane.kube.names import API_VERSION

_WORKLOADS: Mapping[str, Callable[[Target], Manifest]] = {
    "jobset": jobset.render,
    "rayjob": rayjob.render,
    "trainjob": trainjob.render,
    "tensorboard": tensorboard.render,
}


def render(app: App, image: str, *, namespace: str = "default") -> list[Manifest]:
    """What the app makes in a cluster, in the order to apply it: files, data, and last what runs."""
    if missing := set(app.file_names) - set(app.files):
        raise ConfigError(f"{min(missing)} was not read", fix="Load the app with App.load(folder)")
    target = Target(app, image, namespace)
    first = [_config(target)] if app.files else []
    data = [_staged(target, one) for one in app.stage if one.source]
    return _marked([*first, *data, _WORKLOADS[app.template](target)])


def render_board(app: App, image: str, *, namespace: str = "default") -> list[Manifest]:
    """A TensorBoard of the app's run, which outlives what trains."""
    return _marked([tensorboard.render(Target(app, image, namespace))])


def content(manifests: Sequence[Manifest]) -> str:
    """A hash of manifests, whatever the order of their fields."""
    return hashlib.sha256(json.dumps(manifests, sort_keys=True).encode()).hexdigest()[:16]


def to_yaml(manifests: Sequence[Manifest]) -> str:
    """Manifests as one YAML text of several documents."""
    import yaml

    text: str = yaml.dump_all(manifests, Dumper=_dumper(), sort_keys=False, explicit_start=True, width=120)
    return text


def _marked(manifests: list[Manifest]) -> list[Manifest]:
    """The same, where what runs says what all of them were when it started."""
    manifests[-1]["metadata"]["annotations"]["voxlane.dev/content"] = content(manifests)
    return manifests


def _config(target: Target) -> Manifest:
    app = target.app
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": pod.metadata(target, pod.config_name(app), pod.labels(app, "config")),
        "data": dict(app.files),
    }


def _staged(target: Target, stage: Stage) -> Manifest:
    app = target.app
    selector = stage.node_selector if stage.node_selector is not None else app.node_selector
    replicas = stage.replicas or (app.nodes if not stage.node_selector else None)
    said = {
        "secret": app.credentials.secret,
        "file": app.credentials.file,
        "serviceAccount": app.credentials.service_account,
        "endpoint": app.credentials.endpoint,
    }
    credentials = {name: value for name, value in said.items() if value}
    spec = {
        "source": stage.source,
        "replicas": replicas,
        "nodeSelector": dict(selector) or None,
        "capacity": stage.capacity,
        "dataPath": stage.data_path,
        "credentials": credentials or None,
        "timeout": stage.timeout,
        "keep": stage.keep or None,
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "StagedDataset",
        "metadata": pod.metadata(target, stage.name, pod.labels(app, "data")),
        "spec": {name: value for name, value in spec.items() if value is not None},
    }


def _dumper() -> Any:
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Without anchors; text of several lines as it reads."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return Dumper
