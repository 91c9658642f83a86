"""Where there is a GPU the kernels run on it; elsewhere Triton's interpreter runs them, on the CPU."""

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel, which asks for it once

pytest.importorskip("triton")


def _let_loops_run() -> None:
    """Triton 3.6 counts an interpreted loop by int() of an array of one, which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if not torch.cuda.is_available():
    _let_loops_run()


@pytest.fixture
def device() -> torch.device:
    """Where kernels are tested."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
