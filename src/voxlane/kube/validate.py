"""Manifests checked offline and strictly, before a cluster sees them: a field that its kind does not have is refused.

Core kinds by the schemas of kubernetes-validate; JobSet, RayJob and TrainJob by those that their projects publish, kept
in `schemas/` (made by tools/crd_schemas.py); others by the CustomResourceDefinitions that the caller gives.
"""

from __future__ import annotations

import difflib
import functools
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from voxlane.errors import ManifestError, MissingExtraError

Schema = dict[str, Any]
KUBERNETES = "1.37"
"""The version whose core kinds are meant: fields that are older servers' too, where they have them."""
_SHOWN = 60
_VENDORED = ("jobset", "rayjob", "trainjob")
CHECKED = (
    "type",
    "required",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
)
"""What a schema may say of a value, besides its parts."""


def validate(manifests: Sequence[Mapping[str, Any]], *, crds: Sequence[Mapping[str, Any]] = ()) -> None:
    """Raise ManifestError for the first field that is wrong; `crds`: definitions of further kinds."""
    known = {**_vendored(), **_defined(crds)}
    seen: set[tuple[str, str, str]] = set()
    for number, manifest in enumerate(manifests):
        kind, name = _named(manifest, number)
        api_version = manifest["apiVersion"]
        one = (api_version, kind, name)
        if one in seen:
            raise ManifestError("it is there twice", uri=f"{kind} {name}", fix="Give one of them another name")
        seen.add(one)
        schema = known.get((api_version, kind))
        if schema is not None:
            _check_custom(manifest, schema, f"{kind} {name}")
        else:
            _check_core(manifest, f"{kind} {name}", sorted(version for version, other in known if other == kind))


def strict(schema: Any) -> Any:
    """A CRD's structural schema as JSON Schema that refuses fields which a server would drop."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        pattern = {"pattern": schema["pattern"]} if "pattern" in schema else {}
        return {"anyOf": [{"type": "integer"}, {"type": "string", **pattern}]}
    made = {key: value for key, value in schema.items() if key in CHECKED}
    if "properties" in schema:
        made["properties"] = {name: strict(inner) for name, inner in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if key in schema:
            made[key] = strict(schema[key])
    return made


def _named(manifest: Mapping[str, Any], number: int) -> tuple[str, str]:
    if not isinstance(manifest, Mapping):
        raise ManifestError(f"document {number + 1} holds no fields")
    kind = manifest.get("kind")
    for field in ("apiVersion", "kind"):
        if not isinstance(manifest.get(field), str):
            raise ManifestError(f"{field}: missing", uri=f"document {number + 1}")
    meta = manifest.get("metadata")
    name = meta.get("name") if isinstance(meta, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ManifestError("metadata.name: missing", uri=f"document {number + 1}, a {kind}")
    return str(kind), name


def _check_custom(manifest: Mapping[str, Any], schema: Schema, where: str) -> None:
    try:
        import jsonschema
    except ImportError:
        raise MissingExtraError.of("kubernetes", "Kubernetes") from None
    validator = jsonschema.Draft202012Validator(schema)
    _raise_first(validator.iter_errors(_plain(manifest)), where)
    # A CRD says nothing of metadata, which is the same for all kinds.
    _check_core({"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest["metadata"]}, where, [])


def _check_core(manifest: Mapping[str, Any], where: str, others: Sequence[str]) -> None:
    try:
        import kubernetes_validate
    except ImportError:
        raise MissingExtraError.of("kubernetes", "Kubernetes") from None
    try:
        kubernetes_validate.validate(_plain(manifest), KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        _raise_first([error], where)
    except kubernetes_validate.SchemaNotFoundError:
        what = f"no schema of {manifest['apiVersion']} {manifest['kind']} is known"
        fix = f"Known is: {', '.join(others)}" if others else "Check apiVersion and kind"
        raise ManifestError(what, uri=where, fix=fix) from None


def _plain(manifest: Mapping[str, Any]) -> Any:
    """Nested dicts and lists, as JSON has them: a tuple is a list."""
    return json.loads(json.dumps(manifest))


def _raise_first(errors: Iterable[Any], where: str) -> None:
    found = sorted(errors, key=lambda error: [str(part) for part in error.absolute_path])
    if not found:
        return
    said, fix = _in_words(found[0])
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raise ManifestError(f"{said}{more}", uri=where, fix=fix) from None


def _in_words(error: Any) -> tuple[str, str]:
    """What is wrong by its field's path, and what would fit."""
    path = field_path(error.absolute_path)
    value = repr(error.instance)
    got = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
    at = f"{path}: " if path else ""
    if error.validator == "additionalProperties":
        names = list(error.schema.get("properties", {}))
        wrong = next(name for name in error.instance if name not in names)
        near = difflib.get_close_matches(wrong, names, 1, 0.5)
        fix = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(sorted(names)) or 'none'}"
        return f"{field_path([*error.absolute_path, wrong])}: no such field", fix
    if error.validator == "required":
        missing = next(name for name in error.validator_value if name not in error.instance)
        return f"{field_path([*error.absolute_path, missing])}: missing", ""
    if error.validator in ("type", "anyOf"):
        types = [_TYPES.get(one, one) for one in _types(error) if one != "null"]
        return f"{at}{' or '.join(types)} is wanted, not {got}", ""
    if error.validator == "enum":
        return f"{at}{got} is none of its values", f"Give {', '.join(str(one) for one in error.validator_value)}"
    return f"{at}{error.message if len(error.message) < 2 * _SHOWN else got + ' does not fit'}", ""


_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "named fields",
}


def _types(error: Any) -> list[str]:
    if error.validator == "anyOf":
        return [str(one.get("type", "another value")) for one in error.validator_value]
    return [error.validator_value] if isinstance(error.validator_value, str) else list(error.validator_value)


def field_path(parts: Iterable[Any]) -> str:
    """`spec.containers[0].image`."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


@functools.cache
def _vendored() -> dict[tuple[str, str], Schema]:
    folder = resources.files("voxlane.kube") / "schemas"
    found = {}
    for name in _VENDORED:
        known = json.loads(gzip.decompress((folder / f"{name}.json.gz").read_bytes()))
        found[known["apiVersion"], known["kind"]] = strict(known["schema"])
    return found


def _defined(crds: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Schema]:
    return {
        (f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"]): strict(
            version["schema"]["openAPIV3Schema"]
        )
        for crd in crds
        for version in crd["spec"]["versions"]
    }
