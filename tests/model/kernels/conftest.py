"""The kernels run on a GPU if there is one, and in Triton's interpreter on the CPU otherwise."""

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it once, when the first kernel is imported.

pytest.importorskip("triton")


def _support_interpreted_loops() -> None:
    """Let Triton 3.6 interpret loops: it calls int() on an array of one element, which NumPy 2.4 rejects."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if not torch.cuda.is_available():
    _support_interpreted_loops()


@pytest.fixture
def device() -> torch.device:
    """Return the device on which kernels are tested."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
