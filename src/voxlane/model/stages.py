"""The stage of a network that a tensor belongs to, from the tensor's name in a state dict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from voxlane.model.networks import MLPERF_FEATURES

if TYPE_CHECKING:  # as in networks
    from voxlane.volume.plan import Network


@dataclass(frozen=True)
class TensorPlace:
    """A tensor's place in a U-Net. Networks of different depth have the same places at the resolutions they share."""

    part: Literal["encoder", "decoder", "head"]
    level: int
    """Resolution, from 0, the finest."""
    name: str
    """Name of the tensor within that stage."""

    @property
    def layer(self) -> tuple[str, int, str]:
        """The layer that the tensor belongs to, such as a convolution with weight and bias."""
        return self.part, self.level, self.name.rpartition(".")[0]

    def stages_after(self, network: Network) -> int:
        """Return the number of stages between this one and the logits, counting the logits' own: the heads have 0, the
        finest stage of the decoder 1, and the first stage of the encoder the most."""
        if self.part == "head":
            return 0
        return 1 + self.level if self.part == "decoder" else 2 * count_levels(network) - 1 - self.level


def locate_tensor(name: str, network: Network) -> TensorPlace:
    """Return the place of a tensor of a network that `networks.build` built."""
    first, _, rest = name.partition(".")
    index, _, inner = rest.partition(".")
    match first:
        case "enter":
            return TensorPlace("encoder", 0, rest)
        case "down":
            return TensorPlace("encoder", int(index) + (network.kind == "mlperf"), inner)
        case "up" | "merge":  # coarse to fine
            return TensorPlace("decoder", count_levels(network) - 2 - int(index), f"{first}.{inner}")
        case "heads":
            return TensorPlace("head", int(index), inner)
        case "head":
            return TensorPlace("head", 0, rest)
    raise ValueError(f"{name!r} belongs to no stage of a U-Net")


def count_levels(network: Network) -> int:
    """Return the number of resolutions of a network."""
    return len(MLPERF_FEATURES) if network.kind == "mlperf" else len(network.features)
