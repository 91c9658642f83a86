"""What torch's errors mean.

torch raises a RuntimeError, ValueError, KeyError or UnpicklingError for each of these and gives no code or type to tell
them apart. All matching of torch's message texts is here; tests raise each of them through torch.
"""

from __future__ import annotations

_LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer")
_MISMATCH = ("Missing key in checkpoint", "Size mismatch", "mismatch sizes")
_DAMAGED_ARCHIVE = ("PytorchStreamReader", "zip archive")


def is_lost_connection(error: RuntimeError) -> bool:
    """Return whether a collective call failed because another rank is gone."""
    return any(mark in str(error) for mark in _LOST_CONNECTION)


def is_mismatch(error: BaseException) -> bool:
    """Return whether a load failed because the checkpoint does not fit the state dict."""
    return isinstance(error, RuntimeError | ValueError | KeyError) and any(mark in str(error) for mark in _MISMATCH)


def is_unsafe_pickle(error: Exception) -> bool:
    """Return whether `torch.load(weights_only=True)` refused a file because reading it could run code."""
    return "Weights only load failed" in str(error)


def is_damaged_archive(error: Exception) -> bool:
    """Return whether `torch.load` could not read a file as an archive: it is truncated, or is no checkpoint."""
    return isinstance(error, EOFError) or any(mark in str(error) for mark in _DAMAGED_ARCHIVE)


def find_refused_type(error: Exception) -> str:
    """Return what `torch.load(weights_only=True)` refused, such as "GLOBAL builtins.print"."""
    for line in str(error).splitlines():
        if "GLOBAL" in line or "Unsupported" in line:
            return line.strip().removeprefix("WeightsUnpickler error: ").split(" was not an allowed")[0]
    return "a type that torch does not allow"
