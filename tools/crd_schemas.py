"""Write src/voxlane/cluster/kubernetes/schemas from the CRD files that JobSet, KubeRay and Kubeflow Trainer publish.

    python tools/crd_schemas.py FOLDER

FOLDER holds YAML files with one CustomResourceDefinition each. The result is what validation needs: the structural
schema of one version, without descriptions, defaults and CEL rules, which only a server evaluates.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from voxlane.cluster.kubernetes.validate import CONSTRAINTS

VERSIONS = {("JobSet", "v1alpha2"), ("RayJob", "v1"), ("TrainJob", "v1alpha1")}
SCHEMA_FOLDER = Path(__file__).parent.parent / "src/voxlane/cluster/kubernetes/schemas"
_KEYWORDS = {
    *CONSTRAINTS,
    "items",
    "additionalProperties",
    "x-kubernetes-int-or-string",
    "x-kubernetes-preserve-unknown-fields",
}


def strip_schema(schema: Any) -> Any:
    """Return a schema with only the keywords that validation reads."""
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            result[key] = {name: strip_schema(inner) for name, inner in value.items()}
        elif key in _KEYWORDS:
            result[key] = strip_schema(value) if key in ("items", "additionalProperties") else value
    return result


def main() -> None:
    """Write one file for each kind."""
    SCHEMA_FOLDER.mkdir(exist_ok=True)
    written = set()
    for path in sorted(Path(sys.argv[1]).glob("*.yaml")):
        crd = yaml.safe_load(path.read_text(encoding="utf-8"))
        spec, kind = crd["spec"], crd["spec"]["names"]["kind"]
        for version in spec["versions"]:
            if (kind, version["name"]) not in VERSIONS:
                continue
            written.add((kind, version["name"]))
            schema = strip_schema(version["schema"]["openAPIV3Schema"])
            schema["properties"].pop("status", None)  # written by the controller, never by voxlane
            stored = {"apiVersion": f"{spec['group']}/{version['name']}", "kind": kind, "schema": schema}
            text = json.dumps(stored, sort_keys=True, separators=(",", ":")).encode()
            # mtime=0, so that the same CRD gives the same file.
            (SCHEMA_FOLDER / f"{kind.lower()}.json.gz").write_bytes(gzip.compress(text, 9, mtime=0))
            print(f"{kind} {version['name']}: {len(text):,} bytes, {len(gzip.compress(text, 9)):,} compressed")
    if VERSIONS - written:
        sys.exit(f"not found: {VERSIONS - written}")


if __name__ == "__main__":
    main()
