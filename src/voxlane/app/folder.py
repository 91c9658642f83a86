"""An app's folder: made from a template, and brought up to date with it.

NAME/
  app.yaml  Dockerfile  .dockerignore  train.yaml or space.yaml
  .voxlane/template.json      which template, of which version, filled with what
  .voxlane/template/FILE      each file as the template gave it, so that `update` knows what the user changed
"""

from __future__ import annotations

import json
import os
import string
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, get_args

from voxlane.app.config import FILE, Template, name_limit
from voxlane.errors import ConfigError, MissingExtraError

KEPT = ".voxlane"
TEMPLATES: Mapping[Template, str] = {
    "jobset": "train, or any program, on one or more nodes (JobSet)",
    "rayjob": "search hyperparameters with `voxlane tune` (KubeRay)",
    "trainjob": "train, or any program, by a runtime of Kubeflow Trainer",
    "tensorboard": "a TensorBoard of runs in a bucket",
}
_EXTRAS = {"rayjob": "ray,gcs,s3,azure"}
_FACTS = "template.json"
_COMMON = {"Dockerfile": "Dockerfile", ".dockerignore": "dockerignore"}
_OWN = {
    "jobset": ("app.yaml", "train.yaml"),
    "trainjob": ("app.yaml", "train.yaml"),
    "rayjob": ("app.yaml", "space.yaml"),
}


def template_files(template: Template, values: Mapping[str, str]) -> dict[str, str]:
    """The template's files by name, filled with `values`: name, image, data, run, version."""
    folder = resources.files("voxlane.app") / "templates"
    sources = {name: folder / "common" / source for name, source in _COMMON.items()}
    sources |= {name: folder / template / name for name in _OWN.get(template, ("app.yaml",))}
    filled = {"extras": _EXTRAS.get(template, "train,gcs,s3,azure"), **values}
    return {
        name: string.Template(source.read_text(encoding="utf-8")).substitute(filled) for name, source in sources.items()
    }


def init(
    name: str,
    template: Template,
    folder: str,
    *,
    version: str,
    image: str | None = None,
    data: str | None = None,
    run: str | None = None,
) -> list[str]:
    """Make an app's folder; returns the files in it. A folder with something in it is refused."""
    if template not in TEMPLATES:
        raise ConfigError(f"no template {template!r}", fix=f"There are: {', '.join(get_args(Template))}")
    limit = name_limit(template, 1)
    if len(name) > limit:
        raise ConfigError(f"{name!r} has {len(name)} characters", fix=f"Names of pods leave a {template} {limit}")
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise ConfigError("something is there already", uri=folder, fix="Name another folder with --dir")
    values = {
        "name": name,
        "image": image or f"registry.example/{name}",
        "data": data or "gs://my-bucket/prepared",
        "run": run or f"gs://my-bucket/runs/{name}",
        "version": version,
    }
    made = template_files(template, values)
    _check(made[FILE], os.path.join(folder, FILE))
    try:
        _write(folder, made)
        _keep(folder, template, values, made)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", uri=folder) from None
    return sorted(made)


def _check(text: str, origin: str) -> None:
    """What app.yaml would refuse is refused before anything is written."""
    import yaml

    from voxlane import settings
    from voxlane.app.config import App

    settings.build(App, yaml.safe_load(text), origin=origin)


def _write(folder: str, files: Mapping[str, str]) -> None:
    os.makedirs(folder, exist_ok=True)
    for name, text in files.items():
        part = os.path.join(folder, f"{name}.part")
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, os.path.join(folder, name))


def _keep(folder: str, template: str, values: Mapping[str, str], files: Mapping[str, str]) -> None:
    _write(os.path.join(folder, KEPT, "template"), files)
    facts = {"template": template, "values": dict(values)}
    _write(os.path.join(folder, KEPT), {_FACTS: json.dumps(facts, indent=1) + "\n"})


# -- update ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What an update does to a file."""

    name: str
    what: Literal["new", "merged", "conflict", "deleted here"]
    """new: the template has it since. merged: its changes are in. conflict: both changed the same lines, which are
    marked. deleted here: it stays so."""
    text: str | None = None


def plan_update(base: Mapping[str, str], ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[Change]:
    """What brings `ours`, which came from the template `base`, up to the template `theirs`; files that need no change
    are left out. Pure."""
    changes = []
    for name, new in theirs.items():
        old = base.get(name)
        if new == old:
            continue
        if name not in ours:
            changes.append(Change(name, "deleted here") if old is not None else Change(name, "new", new))
            continue
        text, clean = merge(old or "", ours[name], new)
        if text != ours[name]:
            changes.append(Change(name, "merged" if clean else "conflict", text))
    return changes


def merge(base: str, ours: str, theirs: str) -> tuple[str, bool]:
    """Both sides' changes of `base`; lines that both changed in different ways are marked, and it is not clean."""
    try:
        from merge3 import Merge3
    except ImportError:
        raise MissingExtraError.of("kubernetes", "Kubernetes") from None
    made = Merge3(*(text.splitlines(keepends=True) for text in (base, ours, theirs)))
    clean = all(region[0] != "conflict" for region in made.merge_regions())
    return "".join(made.merge_lines(name_a="yours", name_b="template")), clean


def update(folder: str, *, version: str, dry_run: bool = False) -> list[Change]:
    """Bring a folder up to date with its template of this version; [] where it is. With conflicts, files hold marks
    that the user resolves; `dry_run` writes nothing."""
    facts = _facts(folder)
    template, values = facts["template"], {**facts["values"], "version": version}
    if template not in TEMPLATES:
        raise ConfigError(f"no template {template!r} in this version", uri=folder)
    theirs = template_files(template, values)
    base = _read_all(os.path.join(folder, KEPT, "template"), theirs)
    changes = plan_update(base, _read_all(folder, theirs), theirs)
    if not dry_run and theirs != base:
        _write(folder, {change.name: change.text for change in changes if change.text is not None})
        _keep(folder, template, values, theirs)
    return changes


def _facts(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, KEPT, _FACTS)
    try:
        with open(path, encoding="utf-8") as file:
            facts = json.load(file)
        values = facts["values"]
        if not all(isinstance(values[name], str) for name in ("name", "image", "data", "run")):
            raise TypeError
    except FileNotFoundError:
        raise ConfigError(
            "this folder was not made by `voxlane app init`, so that nothing is known of its template", uri=path
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError("it cannot be read", uri=path, fix="Take it back from your version control") from None
    return dict(facts)


def _read_all(folder: str, names: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name in names:
        path = os.path.join(folder, name)
        try:
            with open(path, encoding="utf-8") as file:
                found[name] = file.read()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot be read: {getattr(error, 'strerror', 'not text')}", uri=path) from None
    return found
