"""Make src/voxlane/kube/schemas from the CRD files that JobSet, KubeRay and Kubeflow Trainer publish.

    python tools/crd_schemas.py FOLDER

FOLDER holds one CustomResourceDefinition a YAML file. Kept is what validation needs: one version's structural schema,
without descriptions, defaults and CEL rules, which only a server runs.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from voxlane.kube.validate import CHECKED

WANTED = {("JobSet", "v1alpha2"), ("RayJob", "v1"), ("TrainJob", "v1alpha1")}
INTO = Path(__file__).parent.parent / "src/voxlane/kube/schemas"
_KEPT = {
    *CHECKED,
    "items",
    "additionalProperties",
    "x-kubernetes-int-or-string",
    "x-kubernetes-preserve-unknown-fields",
}


def stripped(schema: Any) -> Any:
    """A schema with the keys that validation reads."""
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            kept[key] = {name: stripped(inner) for name, inner in value.items()}
        elif key in _KEPT:
            kept[key] = stripped(value) if key in ("items", "additionalProperties") else value
    return kept


def main() -> None:
    """Write one file a kind."""
    INTO.mkdir(exist_ok=True)
    found = set()
    for path in sorted(Path(sys.argv[1]).glob("*.yaml")):
        crd = yaml.safe_load(path.read_text(encoding="utf-8"))
        spec, kind = crd["spec"], crd["spec"]["names"]["kind"]
        for version in spec["versions"]:
            if (kind, version["name"]) not in WANTED:
                continue
            found.add((kind, version["name"]))
            schema = stripped(version["schema"]["openAPIV3Schema"])
            schema["properties"].pop("status", None)  # the controller's, never ours
            known = {"apiVersion": f"{spec['group']}/{version['name']}", "kind": kind, "schema": schema}
            text = json.dumps(known, sort_keys=True, separators=(",", ":")).encode()
            # mtime=0: the same CRD gives the same file.
            (INTO / f"{kind.lower()}.json.gz").write_bytes(gzip.compress(text, 9, mtime=0))
            print(f"{kind} {version['name']}: {len(text):,} bytes, {len(gzip.compress(text, 9)):,} packed")
    if WANTED - found:
        sys.exit(f"not found: {WANTED - found}")


if __name__ == "__main__":
    main()
