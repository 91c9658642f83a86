"""Convert VolumeManager resources of kube-volume-controller to StagedDatasets.

A VolumeManager lists volumes; each becomes a StagedDataset. Every field is converted or named in a warning that says
why it is not. A field that kube-volume-controller does not have is an error, because it would be lost without a word.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from voxlane.cluster.kubernetes.credentials import NAME
from voxlane.cluster.kubernetes.names import API_VERSION
from voxlane.cluster.kubernetes.validate import validate
from voxlane.errors import ManifestError
from voxlane.settings import suggest_field
from voxlane.sizes import parse_bytes

_OPTIONS = {
    "S3": (
        *("sourceURL", "endpointURL", "awsCredentialsSecretName", "dataPath", "timeoutForDataDownload"),
        *("distributionStrategy", "resync"),
    ),
    "NFS": ("server", "path"),
}
"""Options of each source type that can be converted."""
_VOLUME_FIELDS = (
    *("id", "replicas", "sourceType", "accessMode", "capacity", "nodeAffinity", "tolerations", "labels", "options"),
    *("sourceURL", "endpointURL"),  # options until version 0.2
)
_SERVER_METADATA = frozenset(
    {"uid", "resourceVersion", "generation", "creationTimestamp", "selfLink", "clusterName", "managedFields"}
    | {"deletionTimestamp", "deletionGracePeriodSeconds"}
)
_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_GO_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MAX_NAME_LENGTH = 63


@dataclass
class Conversion:
    """StagedDatasets, and what could not be converted."""

    datasets: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """Sentences, each of which begins with the name of a dataset or VolumeManager and of a field."""


def convert(text: str, origin: str) -> Conversion:
    """Convert all VolumeManagers of a YAML or JSON text, which may hold several documents and lists of resources.
    Raises ManifestError, naming `origin`, if one of them cannot be converted."""
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ManifestError(f"not YAML or JSON{line}", uri=origin) from None
    conversion = Conversion()
    try:
        for resource in _flatten(documents):
            _convert_resource(resource, conversion)
        _check_unique(conversion.datasets)
    except ManifestError as error:
        raise ManifestError(str(error), uri=origin) from None
    if not conversion.datasets:
        raise ManifestError("there is no VolumeManager", uri=origin, fix="Give a manifest of kind VolumeManager")
    return conversion


def _flatten(documents: Iterable[Any]) -> Iterable[Mapping[str, Any]]:
    """Yield the VolumeManagers among the documents and in their lists, such as `kubectl get -o yaml` prints."""
    for document in documents:
        kind = document.get("kind") if isinstance(document, Mapping) else None
        if kind in ("List", "VolumeManagerList"):
            yield from _flatten(document.get("items") or ())
        elif kind == "VolumeManager":
            yield document
        else:
            got = f"kind {kind}" if kind else f"{str(document)[:60]!r}, which has no kind"
            raise ManifestError(f"expected a VolumeManager, got {got}", fix="Give VolumeManagers only")


def _convert_resource(resource: Mapping[str, Any], conversion: Conversion) -> None:
    metadata = _read_mapping(resource, "metadata", "VolumeManager")
    manager = metadata.get("name")
    if not isinstance(manager, str) or not re.match(NAME, manager):
        raise ManifestError(f"metadata.name: expected a name, got {manager!r}")
    title = f"VolumeManager {manager}"
    _check_known(resource, ("apiVersion", "kind", "metadata", "spec", "status"), title, "")
    known_metadata = ("name", "namespace", "labels", "annotations", "ownerReferences", "finalizers", "generateName")
    _check_known(metadata, (*known_metadata, *_SERVER_METADATA), title, "metadata.")
    spec = _read_mapping(resource, "spec", title)
    _check_known(spec, ("volumeConfigs", "state"), title, "spec.")
    if resource.get("status"):
        conversion.warnings.append(f"{title}: status: left out; the operator reports hostPath and nodeAffinity itself")
    if spec.get("state"):
        conversion.warnings.append(f"{title}: spec.state: left out; the operator reports the phase in status.phase")
    for name in ("ownerReferences", "finalizers", "generateName"):
        if metadata.get(name):
            conversion.warnings.append(f"{title}: metadata.{name}: left out; it belongs to the VolumeManager alone")
    volumes = spec.get("volumeConfigs")
    if not isinstance(volumes, list) or not volumes or not all(isinstance(volume, Mapping) for volume in volumes):
        raise ManifestError(f"{title}: spec.volumeConfigs: expected a list of volumes")
    for volume in volumes:
        converter = _VolumeConverter(manager, metadata, volume)
        conversion.datasets.append(converter.convert())
        conversion.warnings += converter.warnings


@dataclass
class _VolumeConverter:
    """Converts one entry of `volumeConfigs`."""

    manager: str
    metadata: Mapping[str, Any]
    volume: Mapping[str, Any]
    title: str = ""
    warnings: list[str] = field(default_factory=list)

    def convert(self) -> dict[str, Any]:
        """Return the StagedDataset."""
        name = self.name()
        self.title = f"StagedDataset {name}"
        _check_known(self.volume, _VOLUME_FIELDS, self.title, "")
        self.check_placement()
        spec: dict[str, Any] = {"source": self.source()}
        spec["replicas"] = self.replicas()
        if selector := self.node_selector():
            spec["nodeSelector"] = selector
        if self.volume.get("capacity") is not None:
            spec["capacity"] = self.capacity()
        if path := self.option("dataPath"):
            spec["dataPath"] = path
            self.warn("dataPath", f"the operator must allow it: voxlane operator install --data-path {path}")
        if credentials := self.credentials():
            spec["credentials"] = credentials
        if timeout := self.option("timeoutForDataDownload"):
            spec["timeout"] = self.timeout(timeout)
        self.warn_about_rest()
        return {
            "apiVersion": API_VERSION,
            "kind": "StagedDataset",
            "metadata": self.dataset_metadata(name),
            "spec": spec,
        }

    def warn(self, name: str, reason: str) -> None:
        self.warnings.append(f"{self.title}: {name}: {reason}")

    def fail(self, name: str, problem: str, fix: str = "") -> ManifestError:
        return ManifestError(f"{self.title}: {name}: {problem}", fix=fix)

    def option(self, name: str) -> str:
        """Return the text of an option, also where older versions had it; empty without it."""
        value = self.options.get(name, self.volume.get(name) if name in _VOLUME_FIELDS else None)
        if value is not None and (isinstance(value, (dict, list)) or "<" in str(value)):
            raise self.fail(f"options.{name}", f"expected a value, got {value!r}")
        if isinstance(value, bool):
            return str(value).lower()
        return "" if value is None else str(value)

    @property
    def options(self) -> Mapping[str, Any]:
        value = self.volume.get("options") or {}
        if not isinstance(value, Mapping):
            raise self.fail("options", f"expected named values, got {value!r}")
        return value

    def name(self) -> str:
        """Return MANAGER-ID, because ids are unique only within a VolumeManager."""
        identifier = self.volume.get("id")
        if not isinstance(identifier, str | int) or isinstance(identifier, bool) or not str(identifier):
            raise ManifestError(f"VolumeManager {self.manager}: id: expected a name, got {identifier!r}")
        raw = f"{self.manager}-{identifier}"
        name = re.sub(r"[^a-z0-9.-]+", "-", raw.lower()).strip("-.")
        if len(name) > _MAX_NAME_LENGTH:
            fix = f"Shorten the id or the name to {_MAX_NAME_LENGTH} characters in all"
            raise ManifestError(f"VolumeManager {self.manager}: id: the name {name} is too long", fix=fix)
        if name != raw:
            self.title = f"StagedDataset {name}"
            self.warn("id", f"{raw!r} is not a valid name")
        return name

    def dataset_metadata(self, name: str) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": name}
        if (namespace := self.metadata.get("namespace")) is not None:
            if not isinstance(namespace, str) or not re.match(NAME, namespace):
                raise self.fail("metadata.namespace", f"expected a name, got {namespace!r}")
            metadata["namespace"] = namespace
        labels = {**self.read_texts(self.metadata, "labels"), **self.read_texts(self.volume, "labels")}
        annotations = self.read_texts(self.metadata, "annotations")
        annotations.pop(_APPLIED, None)
        return metadata | {k: v for k, v in (("labels", labels), ("annotations", annotations)) if v}

    def read_texts(self, values: Mapping[str, Any], name: str) -> dict[str, str]:
        texts = values.get(name) or {}
        if not isinstance(texts, Mapping) or not all(isinstance(value, str) for value in texts.values()):
            raise self.fail(name, f"expected named texts, got {texts!r}", "Quote numbers, true and false")
        return dict(texts)

    # -- spec ----------------------------------------------------------------------------------------------------

    def source(self) -> str:
        kind = self.volume.get("sourceType")
        if kind == "S3-Dev":
            kind = "S3"
        if kind not in _OPTIONS:
            fix = "Copy the files to a bucket, and write its URI as spec.source of a StagedDataset"
            raise self.fail("sourceType", f"a StagedDataset has no source of type {kind!r}", fix)
        _check_known(self.options, _OPTIONS[str(kind)], self.title, "options.")
        if kind == "NFS":
            server, path = self.option("server"), self.option("path")
            if not server or not path.startswith("/"):
                name = "options.path" if server else "options.server"
                raise self.fail(name, "expected the server and a path that begins with /")
            self.warn(
                "sourceType", "the files are copied to the nodes' disks; kube-volume-controller mounted the server"
            )
            return f"nfs://{server}{path}"
        url = self.option("sourceURL")
        if not re.match(r"s3://[^/\s]+", url):
            raise self.fail("options.sourceURL", f"expected s3://BUCKET/PREFIX/, got {url!r}")
        if re.match(r"s3://[^/]+/.*[^/]$", url):
            self.warn(
                "sourceURL", "the folder of this name is staged; for a single object, give the folder that holds it"
            )
        return url

    def replicas(self) -> int:
        value = self.volume.get("replicas", 1 if self.volume.get("sourceType") == "NFS" else None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fail("replicas", f"expected an integer, 1 or more, got {value!r}")
        return value

    def capacity(self) -> Any:
        value = self.volume["capacity"]
        try:
            parse_bytes(value)
        except ValueError:
            raise self.fail("capacity", f"expected a size such as 100Gi, got {value!r}") from None
        self.warn("capacity", "a larger source is not staged; kube-volume-controller ignored this field")
        return value

    def credentials(self) -> dict[str, str]:
        credentials = {}
        if secret := self.option("awsCredentialsSecretName"):
            if not re.match(NAME, secret):  # it may be the secret itself
                raise self.fail("options.awsCredentialsSecretName", "not the name of a Secret")
            credentials["secret"] = secret
            self.warn(
                "awsCredentialsSecretName",
                f"rename the keys of the Secret {secret}: awsAccessKeyID to AWS_ACCESS_KEY_ID, awsSecretAccessKey to "
                "AWS_SECRET_ACCESS_KEY",
            )
        if endpoint := self.option("endpointURL"):
            if "://" not in endpoint:
                endpoint = f"http://{endpoint}"
                self.warn("endpointURL", f"it has no scheme; converted to {endpoint}")
            credentials["endpoint"] = endpoint
        return credentials

    def timeout(self, text: str) -> str:
        """Return a duration of Go, such as 1h30m or 1.5h, in whole seconds or more."""
        parts = re.findall(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)", text)
        seconds = sum(float(number) * _GO_UNITS_S[unit] for number, unit in parts)
        if "".join(number + unit for number, unit in parts) != text or seconds <= 0:
            raise self.fail("options.timeoutForDataDownload", f"expected a duration such as 30m, got {text!r}")
        minutes, rest = divmod(max(1, round(seconds)), 60)
        return f"{minutes}m" if not rest else f"{minutes * 60 + rest}s"

    def check_placement(self) -> None:
        """Raise for nodeAffinity and tolerations that no pod could have."""
        affinity, tolerations = self.volume.get("nodeAffinity") or {}, self.volume.get("tolerations") or []
        spec = {"containers": [{"name": "copy"}], "affinity": {"nodeAffinity": affinity}, "tolerations": tolerations}
        try:
            validate([{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "copy"}, "spec": spec}])
        except ManifestError as error:
            problem = str(error).removeprefix(f"{error.uri}: ")
            raise ManifestError(f"{self.title}: {problem}") from None

    def node_selector(self) -> dict[str, str]:
        """Return the labels that a nodeAffinity requires; a warning names one that is not a list of labels."""
        affinity = self.volume.get("nodeAffinity")
        if not affinity:
            return {}
        required = affinity.get(_REQUIRED)
        terms = (required or {}).get("nodeSelectorTerms") or []
        expressions = terms[0].get("matchExpressions") or [] if len(terms) == 1 else []
        selector = {
            str(expression["key"]): str(expression["values"][0])
            for expression in expressions
            if expression.get("operator") == "In" and len(expression.get("values") or ()) == 1
        }
        if affinity != {_REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": expressions}]}} or (
            len(selector) < len(expressions)
        ):
            result = f"converted to nodeSelector {selector} only" if selector else "left out"
            self.warn("nodeAffinity", f"{result}; a StagedDataset selects nodes by labels that all must match")
        return selector

    def warn_about_rest(self) -> None:
        """Warn about the fields that a StagedDataset has no counterpart for."""
        if self.volume.get("accessMode") not in (None, "ReadOnlyMany"):
            self.warn("accessMode", "left out; copies are for reading only, on any number of nodes")
        if self.volume.get("tolerations"):
            self.warn("tolerations", "left out; name the taints of nodes that may hold copies in spec.tolerations")
        if self.option("distributionStrategy"):
            self.warn("distributionStrategy", "left out; every node gets the whole source, not a part of it")
        if self.option("resync").lower() not in ("", "false", "0", "f"):
            self.warn("resync", "left out; nothing is written back to the source")


def _check_unique(datasets: Iterable[Mapping[str, Any]]) -> None:
    names = Counter((d["metadata"].get("namespace"), d["metadata"]["name"]) for d in datasets)
    repeated = sorted(name for (_, name), count in names.items() if count > 1)
    if repeated:
        raise ManifestError(f"several volumes would be called {', '.join(repeated)}", fix="Give each its own id")


def _read_mapping(values: Mapping[str, Any], name: str, title: str) -> Mapping[str, Any]:
    value = values.get(name)
    if not isinstance(value, Mapping):
        raise ManifestError(f"{title}: {name}: expected fields, got {value!r}")
    return value


def _check_known(values: Mapping[str, Any], fields: Iterable[str], title: str, prefix: str) -> None:
    names = sorted(fields)
    for name in values:
        if name not in names:
            nearest = suggest_field(str(name), names)
            fix = f"Did you mean {prefix}{nearest}?" if nearest else f"Choose from: {', '.join(names)}"
            raise ManifestError(f"{title}: {prefix}{name}: kube-volume-controller has no such field", fix=fix)
