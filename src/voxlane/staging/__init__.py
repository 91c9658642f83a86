"""Objects of a bucket on a machine's own disk: copied in parallel, checked, shared by content.

`stage` makes or updates a copy of a source below a root folder, `staged` lists the copies there, `remove` and `evict`
take them away. `shelf` says how a root is laid out.
"""

from voxlane.staging.datasets import RESERVE_BYTES, Progress, Report, Staged, evict, remove, stage, staged, touch
from voxlane.staging.sources import Survey, Wanted, default_name, survey

__all__ = [
    "RESERVE_BYTES",
    "Progress",
    "Report",
    "Staged",
    "Survey",
    "Wanted",
    "default_name",
    "evict",
    "remove",
    "stage",
    "staged",
    "survey",
    "touch",
]
