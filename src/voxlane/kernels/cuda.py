"""Kernels in CUDA C++, compiled when first used by NVRTC, which comes with torch's CUDA builds, and launched on torch's
current stream."""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch


class CompileError(RuntimeError):
    """NVRTC is missing, or refused the source."""


Job = tuple[str, str, tuple[str, ...]]
"""A file of this package, an architecture as NVRTC takes it, such as sm_90a, and names to define."""


def compile_ahead(jobs: Sequence[Job]) -> None:
    """Compile, all at once, what is asked for later."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(lambda job: _compile(*job), jobs))


class Kernel:
    """One compiled function on the current device."""

    def __init__(self, job: Job, name: str, shared_bytes: int) -> None:
        """`shared_bytes`: dynamic shared memory of a block."""
        self._shared_bytes = shared_bytes
        image = _compile(*job)
        torch.cuda.synchronize()  # creates the context that the module is loaded into
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(self._module), image))
        _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))
        dynamic_limit = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(_driver().cuFuncSetAttribute(self._function, dynamic_limit, shared_bytes))

    def __call__(self, grid: tuple[int, int, int], threads: int, *arguments: torch.Tensor | int | None) -> None:
        """Launch; tensors are passed as pointers, None as a null pointer, numbers as 32-bit integers."""
        values: list[ctypes.c_void_p | ctypes.c_int] = [
            ctypes.c_int(a) if isinstance(a, int) else ctypes.c_void_p(None if a is None else a.data_ptr())
            for a in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(
            _driver().cuLaunchKernel(self._function, *grid, threads, 1, 1, self._shared_bytes, stream, pointers, None)
        )


@functools.cache
def _compile(file: str, architecture: str, defines: tuple[str, ...]) -> bytes:
    nvrtc = _nvrtc()
    folder = importlib.resources.files("voxlane.kernels")
    source = "".join(folder.joinpath(name).read_text() for name in ("common.cu", file))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), file.encode(), 0, None, None)
    try:
        options = [f"--gpu-architecture={architecture}", "-std=c++17", *(f"-D{define}" for define in defines)]
        failed = nvrtc.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        )
        if failed:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(f"{file} for {architecture}: {log.value.decode()}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, image)
        return image.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    names = [f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}", "libnvrtc.so"]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CompileError(f"neither {' nor '.join(names)} can be loaded")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {text.value.decode() if text.value else result}")
