"""An app's folder: created from a template, and updated when the template changes.

NAME/
  app.yaml  Dockerfile  .dockerignore  train.yaml or space.yaml
  .voxlane/template.json      the template, its version and the values that it was filled with
  .voxlane/template/FILE      each file as the template created it, so that `update` knows what the user changed
"""

from __future__ import annotations

import json
import os
import string
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import yaml

from voxlane import settings
from voxlane.cluster.kubernetes.app.config import FILE, App, get_name_limit
from voxlane.errors import ConfigError, MissingExtraError

STATE_FOLDER = ".voxlane"
TEMPLATES = {
    "jobset": "train, or run any program, on one or more nodes (JobSet)",
    "rayjob": "search hyperparameters with `voxlane tune` (KubeRay)",
    "trainjob": "train, or run any program, with a runtime of Kubeflow Trainer",
    "tensorboard": "show runs of a bucket in TensorBoard",
}
_EXTRAS = {"rayjob": "ray,gcs,s3,azure"}
_STATE_FILE = "template.json"


def template_files(template: str, values: Mapping[str, str]) -> dict[str, str]:
    """Return a template's files by name, filled with `values`: name, image, data, run, version."""
    folder = resources.files("voxlane.cluster.kubernetes.app") / "templates"
    sources = {"Dockerfile": folder / "common/Dockerfile", ".dockerignore": folder / "common/dockerignore"}
    sources |= {file.name: file for file in sorted((folder / template).iterdir(), key=lambda file: file.name)}
    values = {"extras": _EXTRAS.get(template, "train,gcs,s3,azure"), **values}
    texts = {name: source.read_text(encoding="utf-8") for name, source in sources.items()}
    return {name: string.Template(text).substitute(values) for name, text in texts.items()}


def init(name: str, template: str, folder: str, *, version: str, **values: str | None) -> list[str]:
    """Create an app's folder and return the names of its files; `values` (image, data and run) replace the template's
    own unless they are None. Raise ConfigError if the folder is not empty."""
    if template not in TEMPLATES:
        raise ConfigError(f"no template {template!r}", fix=f"There are: {', '.join(TEMPLATES)}")
    limit = get_name_limit(template, 1)
    if len(name) > limit:
        fix = f"Use at most {limit}, so that the pods of a {template} can be named"
        raise ConfigError(f"{name!r} has {len(name)} characters", fix=fix)
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise ConfigError("it already exists and is not empty", uri=folder, fix="Name another folder with --dir")
    filled = {
        "name": name,
        "image": values.get("image") or f"registry.example/{name}",
        "data": values.get("data") or "gs://my-bucket/prepared",
        "run": values.get("run") or f"gs://my-bucket/runs/{name}",
        "version": version,
    }
    files = template_files(template, filled)
    # Check app.yaml before anything is written.
    settings.build(App, yaml.safe_load(files[FILE]), origin=os.path.join(folder, FILE))
    write_files(folder, files)
    _write_state(folder, template, filled, files)
    return sorted(files)


def write_files(folder: str, files: Mapping[str, str]) -> None:
    """Write texts by the names of their files, each all or not at all; the folder is created if needed."""
    try:
        os.makedirs(folder, exist_ok=True)
        for name, text in files.items():
            part = os.path.join(folder, f"{name}.part")
            with open(part, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(part, os.path.join(folder, name))
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", uri=folder) from None


def _write_state(folder: str, template: str, values: Mapping[str, str], files: Mapping[str, str]) -> None:
    write_files(os.path.join(folder, STATE_FOLDER, "template"), files)
    state = {"template": template, "values": dict(values)}
    write_files(os.path.join(folder, STATE_FOLDER), {_STATE_FILE: json.dumps(state, indent=1) + "\n"})


# -- update ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TemplateChange:
    """What an update does to a file."""

    name: str
    action: Literal["new", "merged", "conflict", "deleted here"]
    """new: the template has a new file. merged: the template's changes were merged. conflict: both sides changed the
    same lines, which are marked. deleted here: the user deleted the file, and it stays deleted."""
    text: str | None = None


def plan_update(
    base: Mapping[str, str], current: Mapping[str, str], template: Mapping[str, str]
) -> list[TemplateChange]:
    """Return the changes that bring the files `current`, created from the template `base`, up to date with `template`;
    files that need no change are left out. Pure."""
    changes = []
    for name, new in template.items():
        old = base.get(name)
        if new == old:
            continue
        if name not in current:
            changes.append(TemplateChange(name, "new", new) if old is None else TemplateChange(name, "deleted here"))
            continue
        text, is_clean = merge(old or "", current[name], new)
        if text != current[name]:
            changes.append(TemplateChange(name, "merged" if is_clean else "conflict", text))
    return changes


def merge(base: str, current: str, template: str) -> tuple[str, bool]:
    """Merge both sides' changes of `base`; return the text, in which conflicts are marked, and whether it is clean."""
    try:
        from merge3 import Merge3
    except ImportError:
        raise MissingExtraError.of("kubernetes", "Kubernetes") from None
    merged = Merge3(*(text.splitlines(keepends=True) for text in (base, current, template)))
    is_clean = all(region[0] != "conflict" for region in merged.merge_regions())
    return "".join(merged.merge_lines(name_a="yours", name_b="template")), is_clean


def update(folder: str, *, version: str, dry_run: bool = False) -> list[TemplateChange]:
    """Bring a folder up to date with its template of this version; return [] if it is. After a conflict, files contain
    marks that the user must resolve. With `dry_run`, nothing is written."""
    state = _read_state(folder)
    template, values = state["template"], {**state["values"], "version": version}
    if template not in TEMPLATES:
        raise ConfigError(f"no template {template!r} in this version", uri=folder)
    files = template_files(template, values)
    base = _read_files(os.path.join(folder, STATE_FOLDER, "template"), files)
    changes = plan_update(base, _read_files(folder, files), files)
    if not dry_run and files != base:
        write_files(folder, {change.name: change.text for change in changes if change.text is not None})
        _write_state(folder, template, values, files)
    return changes


def _read_state(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, STATE_FOLDER, _STATE_FILE)
    try:
        with open(path, encoding="utf-8") as file:
            state = json.load(file)
        values = state["values"]
        if not all(isinstance(values[name], str) for name in ("name", "image", "data", "run")):
            raise TypeError
    except FileNotFoundError:
        message = "this folder was not created by `voxlane app init`, so its template is unknown"
        raise ConfigError(message, uri=path) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError("it cannot be read", uri=path, fix="Restore it from your version control") from None
    return dict(state)


def _read_files(folder: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the text of those of the named files that exist."""
    files = {}
    for name in names:
        path = os.path.join(folder, name)
        try:
            with open(path, encoding="utf-8") as file:
                files[name] = file.read()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot be read: {getattr(error, 'strerror', 'not text')}", uri=path) from None
    return files
