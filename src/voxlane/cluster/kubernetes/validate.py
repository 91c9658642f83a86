"""Check manifests offline and strictly, before a cluster sees them: a field that its kind does not have is an error.

Core kinds are checked against the schemas of kubernetes-validate; JobSet, RayJob and TrainJob against those that their
projects publish, stored in `schemas/` by tools/crd_schemas.py; StagedDataset against voxlane's own definition.
"""

from __future__ import annotations

import difflib
import functools
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from voxlane.cluster.kubernetes.names import API_VERSION
from voxlane.cluster.kubernetes.operator.crd import CRD
from voxlane.errors import ManifestError, MissingExtraError

Schema = dict[str, Any]
KUBERNETES_VERSION = "1.37"
"""Version whose core kinds are used. Older servers accept the same fields, as far as they have them."""
_MAX_SHOWN = 60
_STORED_SCHEMAS = ("jobset", "rayjob", "trainjob")
CONSTRAINTS = (
    *("type", "required", "enum", "pattern", "minimum", "maximum"),
    *("minLength", "maxLength", "minItems", "maxItems"),
)
"""Keywords of a schema that constrain a value itself, not its parts."""
_TYPE_NAMES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
}


def validate(manifests: Sequence[Mapping[str, Any]]) -> None:
    """Raise ManifestError for the first field that does not fit its kind's schema. Needs no cluster."""
    try:
        import jsonschema
        import kubernetes_validate
    except ImportError:
        raise MissingExtraError.of("kubernetes", "Kubernetes") from None
    for manifest in manifests:
        title = f"{manifest['kind']} {manifest['metadata']['name']}"
        plain = json.loads(json.dumps(manifest))  # lists instead of tuples
        if schema := _load_schemas().get((manifest["apiVersion"], manifest["kind"])):
            _raise_first(jsonschema.Draft202012Validator(schema).iter_errors(plain), title)
            # A CRD does not describe metadata, which is the same for all kinds.
            plain = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": plain["metadata"]}
        try:
            kubernetes_validate.validate(plain, KUBERNETES_VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            _raise_first([error], title)


def strict(schema: Any) -> Any:
    """Convert a CRD's structural schema to a JSON Schema that rejects the fields which a server would drop."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        pattern = {"pattern": schema["pattern"]} if "pattern" in schema else {}
        return {"anyOf": [{"type": "integer"}, {"type": "string", **pattern}]}
    result = {key: value for key, value in schema.items() if key in CONSTRAINTS}
    if "properties" in schema:
        result["properties"] = {name: strict(inner) for name, inner in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if key in schema:
            result[key] = strict(schema[key])
    return result


def _raise_first(errors: Iterable[Any], title: str) -> None:
    ordered = sorted(errors, key=lambda error: [str(part) for part in error.absolute_path])
    if not ordered:
        return
    message, fix = _explain(ordered[0])
    more = f" (and {len(ordered) - 1} more)" if len(ordered) > 1 else ""
    raise ManifestError(f"{message}{more}", uri=title, fix=fix) from None


def _explain(error: Any) -> tuple[str, str]:
    """Return the message for a schema error, with its field's path, and the fix."""
    path = field_path(error.absolute_path)
    value = repr(error.instance)
    value = value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."
    prefix = f"{path}: " if path else ""
    if error.validator == "additionalProperties":
        names = list(error.schema.get("properties", {}))
        unknown = next(name for name in error.instance if name not in names)
        close = difflib.get_close_matches(unknown, names, 1, 0.5)
        fix = f"Did you mean {close[0]}?" if close else f"Its fields are: {', '.join(sorted(names)) or 'none'}"
        return f"{field_path([*error.absolute_path, unknown])}: no such field", fix
    if error.validator == "required":
        missing = next(name for name in error.validator_value if name not in error.instance)
        return f"{field_path([*error.absolute_path, missing])}: missing", ""
    if error.validator in ("type", "anyOf"):
        types = error.validator_value
        if error.validator == "anyOf":
            types = [str(option.get("type", "another value")) for option in types]
        names = [_TYPE_NAMES.get(name, name) for name in ([types] if isinstance(types, str) else types)]
        return f"{prefix}expected {' or '.join(name for name in names if name != 'null')}, got {value}", ""
    if error.validator == "enum":
        return f"{prefix}unexpected value {value}", f"Use one of {', '.join(map(str, error.validator_value))}"
    return f"{prefix}{error.message if len(error.message) < 2 * _MAX_SHOWN else value + ' is not valid'}", ""


def field_path(parts: Iterable[Any]) -> str:
    """Join the parts of a path as in `spec.containers[0].image`."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


@functools.cache
def _load_schemas() -> dict[tuple[str, str], Schema]:
    """Return the schemas of custom resources by their apiVersion and kind."""
    folder = resources.files("voxlane.cluster.kubernetes") / "schemas"
    schemas = {(API_VERSION, "StagedDataset"): strict(CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"])}
    for name in _STORED_SCHEMAS:
        stored = json.loads(gzip.decompress((folder / f"{name}.json.gz").read_bytes()))
        schemas[stored["apiVersion"], stored["kind"]] = strict(stored["schema"])
    return schemas
