"""What a dataset is about: its channels, its labels and the regions to segment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import pydantic

from voxlane.settings import record

_Millimetres = Annotated[float, pydantic.Field(gt=0)]


@record
class Description:
    """Channels, labels and regions of one dataset."""

    name: str
    """Name of the dataset."""
    channels: tuple[str, ...] = pydantic.Field(min_length=1)
    """Name of each channel in order, such as CT, or FLAIR, T1w, T1gd, T2w. "CT" selects CT normalisation."""
    labels: Mapping[str, int]
    """Name and value of every class in the label files, including background with value 0."""
    regions: Mapping[str, tuple[int, ...]] = pydantic.Field(default_factory=dict)
    """Overlapping regions to segment instead of the classes: name and label values of each, from the largest region to
    the smallest, such as {"WT": [1, 2, 3], "TC": [2, 3], "ET": [3]}."""
    region_values: tuple[int, ...] | None = None
    """Label value of each region in a predicted mask; later regions overwrite earlier ones. By default a value that the
    region has and later regions lack."""

    spacing: tuple[_Millimetres, _Millimetres, _Millimetres] | None = None
    """Millimetres between voxels along z, y and x of scans whose files store no spacing (.npy). null: 1 mm."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Description:
        values = list(self.labels.values())
        if 0 not in values:
            raise ValueError("labels: missing background, a name with value 0")
        if len(set(values)) != len(values):
            raise ValueError("labels: two names have the same value")
        if len(values) < 2:
            raise ValueError("labels: expected at least one class besides background")
        if max(values) > 255 or min(values) < 0:
            raise ValueError("labels: expected values from 0 to 255")
        for name, members in self.regions.items():
            unknown = sorted(set(members) - set(values))
            if unknown or not members or 0 in members:
                raise ValueError(f"regions.{name}: expected values of labels above 0, got {list(members)}")
        if self.region_values is not None and len(self.region_values) != len(self.regions):
            raise ValueError("region_values: expected one value per region")
        return self

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the targets to segment and score, in the order of the network's foreground outputs."""
        return tuple(self.regions) or tuple(name for name, value in self.foreground)

    @property
    def foreground(self) -> tuple[tuple[str, int], ...]:
        """Name and value of each class except background, by value."""
        return tuple(sorted(((n, v) for n, v in self.labels.items() if v != 0), key=lambda item: item[1]))

    @property
    def target_values(self) -> tuple[tuple[int, ...], ...]:
        """Label values of each target."""
        if self.regions:
            return tuple(tuple(v) for v in self.regions.values())
        return tuple((value,) for _, value in self.foreground)

    @property
    def outputs(self) -> int:
        """Channels of the network's output: one per region (sigmoid), or one per class with background (softmax)."""
        return len(self.regions) or len(self.labels)

    @property
    def mask_values(self) -> tuple[int, ...]:
        """Label value of each target in a predicted mask; later targets overwrite earlier ones."""
        if not self.regions:
            return tuple(value for _, value in self.foreground)
        if self.region_values is not None:
            return self.region_values
        values = list(self.target_values)
        exclusive = [sorted(set(own) - {v for later in values[i + 1 :] for v in later}) for i, own in enumerate(values)]
        return tuple((rest or sorted(own))[0] for rest, own in zip(exclusive, values, strict=True))
