"""Find the dataset of a run, also after the run, the dataset or both were moved, and recognise it by its digest."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

from voxlane import uri as uris
from voxlane.errors import NotFoundError, PreparedError, RunError
from voxlane.sizes import format_plural
from voxlane.train.run import Run, TrainedRun
from voxlane.volume.prepared_dataset import Prepared


def describe_location(run: Run, data_uri: str) -> dict[str, str]:
    """Return what run.json stores about the place of a dataset: its URI and, where run and dataset lie in one bucket or
    below one folder, its path from the run's folder."""
    folder, data = uris.parse(run.folder_uri), uris.parse(data_uri)
    location = {"uri": data_uri}
    if folder.root != data.root:
        return location
    shares_folder = folder.key.split("/")[0] == data.key.split("/")[0]
    if folder.scheme != "file" or shares_folder:  # all files of a machine share /, which nobody renames
        location["path_from_run"] = posixpath.relpath(f"/{data.key}", f"/{folder.key}")
    return location


def possible_locations(run: Run, data: Mapping[str, Any]) -> list[str]:
    """Return the URIs at which the dataset that run.json describes as `data` may lie, the most probable first."""
    locations = [str(data["uri"])]
    path = data.get("path_from_run")
    folder = uris.parse(run.folder_uri)
    if isinstance(path, str) and path.count("../") + path.endswith("..") <= len(folder.key.split("/")):
        locations.insert(0, folder.root + posixpath.normpath(f"/{folder.key}/{path}").lstrip("/"))
    return list(dict.fromkeys(locations))


def load_dataset(run: Run, trained: TrainedRun, uri: str | None = None) -> Prepared:
    """Load the dataset of a run from `uri`, or else from where the run last knew it or from the same place relative to
    the run. Raises RunError if it is nowhere, or if it is another dataset."""
    if uri is not None:
        prepared = Prepared.load(uri, run.config)
        check_dataset(run, trained, prepared)
        return prepared
    other: Prepared | None = None
    missing: list[str] = []
    for location in possible_locations(run, trained.facts["data"]):
        try:
            prepared = Prepared.load(location, run.config)
        except (PreparedError, NotFoundError) as error:
            missing.append(str(error))
            continue
        if not explain_difference(trained, prepared):
            return prepared
        other = other or prepared
    if other is not None:
        check_dataset(run, trained, other)
    raise RunError(
        f"the run's dataset is not where it was: {missing[-1].split('. ')[0]}",
        uri=run.folder_uri,
        fix="If it was moved, say where it is now: --data URI",
    )


def check_dataset(run: Run, trained: TrainedRun, prepared: Prepared) -> None:
    """Raise RunError unless `prepared` is the dataset that the run was started with."""
    if difference := explain_difference(trained, prepared):
        raise RunError(
            f"{prepared.uri} is not the dataset of the run: {difference}",
            uri=run.folder_uri,
            fix="Name the run's dataset with --data URI, or start a new run",
        )


def explain_difference(trained: TrainedRun, prepared: Prepared) -> str:
    """Say what distinguishes a dataset from the one that the run was started with; empty if nothing does."""
    if prepared.digest == trained.data_digest:
        return ""
    own_cases, cases = {*trained.training_cases, *trained.held_out_cases}, set(prepared.ids)
    if missing := sorted(own_cases - cases):
        return f"{len(missing)} of the run's {len(own_cases)} cases are not in it, such as {missing[0]}"
    if new := sorted(cases - own_cases):
        return f"it has {format_plural(len(new), 'more case')}, such as {new[0]}"
    if prepared.description != trained.description:
        return "it has other channels, labels or regions"
    if prepared.plan != trained.plan:
        return "it was prepared with another plan (spacing, normalisation, patch, batch or network)"
    if len(prepared.digest) != len(trained.data_digest):
        return ""  # digests of two versions of voxlane, which cannot be compared
    digests = f"its digest is {prepared.digest[:12]}, that of the run's was {trained.data_digest[:12]}"
    return f"its cases have other content, or it was prepared again ({digests})"
