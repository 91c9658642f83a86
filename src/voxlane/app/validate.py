"""An app's manifests checked as the cluster would, without one."""

from __future__ import annotations

from collections.abc import Sequence

from voxlane.app.pod import Manifest
from voxlane.kube import validate as kube


def validate(manifests: Sequence[Manifest]) -> None:
    """Raise ManifestError for the first field that its kind does not have or take."""
    from voxlane.operator.crd import CRD

    kube.validate(manifests, crds=[CRD])
