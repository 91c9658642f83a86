"""CUDA C++ kernels, compiled on first use by NVRTC, which is part of torch's CUDA builds, and launched on torch's
current stream."""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

CompileJob = tuple[str, str, tuple[str, ...]]
"""File of this package, architecture for NVRTC such as sm_90a, and macros to define."""


def explain_failure(jobs: Sequence[CompileJob], load: Callable[[], object]) -> str | None:
    """Compile sources in parallel, then call `load`, which finds them compiled; return None, or why that failed."""
    try:
        with ThreadPoolExecutor(len(jobs)) as pool:
            list(pool.map(lambda job: _compile(*job), jobs))
        load()
    except (OSError, RuntimeError) as error:
        return str(error).strip()
    return None


class CompiledKernel:
    """A compiled function on the current device."""

    def __init__(self, job: CompileJob, name: str, threads: int, shared_bytes: int) -> None:
        """Compile and load; `shared_bytes` is the dynamic shared memory of a block of `threads`."""
        self._threads, self._shared_bytes = threads, shared_bytes
        image = _compile(*job)
        torch.cuda.synchronize()  # creates the context that the module is loaded into
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _raise_on_error(_load_driver().cuModuleLoadData(ctypes.byref(self._module), image))
        _raise_on_error(_load_driver().cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))
        dynamic_limit = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _raise_on_error(_load_driver().cuFuncSetAttribute(self._function, dynamic_limit, shared_bytes))

    def __call__(self, grid: tuple[int, int, int], *arguments: torch.Tensor | int) -> None:
        """Launch; tensors are passed as pointers and numbers as 32-bit integers."""
        arguments_c: list[ctypes.c_void_p | ctypes.c_int] = [
            ctypes.c_int(a) if isinstance(a, int) else ctypes.c_void_p(a.data_ptr()) for a in arguments
        ]
        pointers = (ctypes.c_void_p * len(arguments_c))(*(ctypes.addressof(v) for v in arguments_c))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        block = self._threads, 1, 1, self._shared_bytes
        _raise_on_error(_load_driver().cuLaunchKernel(self._function, *grid, *block, stream, pointers, None))


@functools.cache
def _compile(file: str, architecture: str, defines: tuple[str, ...]) -> bytes:
    nvrtc = _load_nvrtc()
    folder = importlib.resources.files("voxlane.model.kernels")
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
            raise RuntimeError(f"{file} for {architecture}: {log.value.decode()}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, image)
        return image.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _load_nvrtc() -> ctypes.CDLL:
    names = [f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}", "libnvrtc.so"]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(f"neither {' nor '.join(names)} can be loaded")


@functools.cache
def _load_driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _raise_on_error(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _load_driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {text.value.decode() if text.value else result}")
