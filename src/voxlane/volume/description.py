"""What a dataset is about: its channels, its labels and the regions to segment."""

from __future__ import annotations

from collections.abc import Mapping

import pydantic

from voxlane.settings import record


@record
class Description:
    """Channels, labels and regions of one dataset."""

    name: str
    """The dataset's name."""
    channels: tuple[str, ...] = pydantic.Field(min_length=1)
    """One name a channel, in order, such as CT, or FLAIR, T1w, T1gd, T2w. "CT" chooses CT normalisation."""
    labels: Mapping[str, int]
    """Name to value of every class in the label files; background, which is 0, included."""
    regions: Mapping[str, tuple[int, ...]] = pydantic.Field(default_factory=dict)
    """Overlapping regions to segment instead of the classes: name to the label values it joins, such as
    {"WT": [1, 2, 3], "TC": [2, 3], "ET": [3]}. In order from the largest to the smallest."""
    region_values: tuple[int, ...] | None = None
    """The label value written into a predicted mask for each region, later ones over earlier ones; when left out, the
    values that a region has and none of the later ones has."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Description:
        values = list(self.labels.values())
        if 0 not in values:
            raise ValueError("labels: no background, a name with value 0")
        if len(set(values)) != len(values):
            raise ValueError("labels: two names have the same value")
        if len(values) < 2:
            raise ValueError("labels: only background")
        if max(values) > 255 or min(values) < 0:
            raise ValueError("labels: values lie between 0 and 255")
        for name, members in self.regions.items():
            unknown = sorted(set(members) - set(values))
            if unknown or not members or 0 in members:
                raise ValueError(f"regions.{name}: {list(members)} are not all label values above 0")
        if self.region_values is not None and len(self.region_values) != len(self.regions):
            raise ValueError("region_values: one value a region")
        return self

    @property
    def targets(self) -> tuple[str, ...]:
        """What is segmented and scored, in the order of the network's foreground outputs."""
        return tuple(self.regions) or tuple(name for name, value in self.foreground)

    @property
    def foreground(self) -> tuple[tuple[str, int], ...]:
        """Name and value of each class but background, by value."""
        return tuple(sorted(((n, v) for n, v in self.labels.items() if v != 0), key=lambda item: item[1]))

    @property
    def target_values(self) -> tuple[tuple[int, ...], ...]:
        """The label values that make up each target."""
        if self.regions:
            return tuple(tuple(v) for v in self.regions.values())
        return tuple((value,) for _, value in self.foreground)

    @property
    def outputs(self) -> int:
        """Channels of the network's output: one a region (sigmoid), or one a class with background (softmax)."""
        return len(self.regions) or len(self.labels)

    @property
    def mask_values(self) -> tuple[int, ...]:
        """The label value a predicted mask has for each target, later targets over earlier ones."""
        if not self.regions:
            return tuple(value for _, value in self.foreground)
        if self.region_values is not None:
            return self.region_values
        members = list(self.target_values)
        left = [sorted(set(own) - {v for later in members[i + 1 :] for v in later}) for i, own in enumerate(members)]
        return tuple((rest or sorted(own))[0] for rest, own in zip(left, members, strict=True))
