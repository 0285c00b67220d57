"""Launching compiled kernels on torch's current stream, through the CUDA driver.

The driver is called directly because a launch needs an attribute that higher interfaces do not offer: programmatic
dependent launch, which lets a kernel start reading its weights while its predecessor still runs. torch owns the memory,
the context and the graphs.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from fast.errors import InputError
from fast.kernels.compile import Variant, build, target

Pointer, Int, Float, Long = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_longlong


class KernelLaunchError(InputError):
    """The driver refused to load or launch a kernel."""


class Parameters(ctypes.Structure):
    """Parameters of a kernel; a misspelt field is an error, not a new attribute."""

    def __setattr__(self, name: str, value: object) -> None:
        if not hasattr(type(self), name):
            raise AttributeError(f"{type(self).__name__} has no field {name}")
        super().__setattr__(name, value)


class _AttributeValue(ctypes.Union):
    _fields_ = [("pad", ctypes.c_char * 64), ("flag", ctypes.c_int)]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", _AttributeValue)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        message = text.value.decode() if text.value else "unknown"
        raise KernelLaunchError(f"{what}: CUDA driver error {status} ({message})")


class Kernel:
    """One kernel of a variant on one device."""

    def __init__(self, variant: Variant, name: str, device: int) -> None:
        self.name, self.device, self._allowed = f"{variant.name}:{name}", device, 0
        self.function = ctypes.c_void_p()
        module = _module(variant, device)
        _check(_driver().cuModuleGetFunction(ctypes.byref(self.function), module, name.encode()), self.name)
        self._attribute = _Attribute(id=_PROGRAMMATIC)
        self._attribute.value.flag = 1

    def __call__(
        self,
        grid: tuple[int, int, int],
        threads: int,
        parameters: ctypes.Structure,
        *,
        shared: int = 0,
        pdl: bool = False,
    ) -> None:
        """Launch on torch's current stream of the device with `shared` bytes of dynamic shared memory.

        With `pdl` it may begin before the kernel in front of it has ended: only for chains whose kernels all wait for
        their predecessor before they touch what it wrote. Raises KernelLaunchError.
        """
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        with torch.cuda.device(self.device):
            if shared > self._allowed:
                _check(_driver().cuFuncSetAttribute(self.function, _MAX_DYNAMIC_SHARED, shared), self.name)
                self._allowed = shared
            config = _Config(
                (ctypes.c_uint * 3)(*grid),
                (ctypes.c_uint * 3)(threads, 1, 1),
                shared,
                torch.cuda.current_stream().cuda_stream,
                ctypes.pointer(self._attribute) if pdl else None,
                1 if pdl else 0,
            )
            _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self.function, arguments, None), self.name)


@cache
def _module(variant: Variant, device: int) -> ctypes.c_void_p:
    binary = build(variant, target(*torch.cuda.get_device_capability(device)))
    module = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.zeros(1, device="cuda")  # makes torch's context of the device current
        _check(_driver().cuModuleLoadData(ctypes.byref(module), binary.code), variant.name)
    return module


@cache
def kernel(variant: Variant, name: str, device: int) -> Kernel:
    return Kernel(variant, name, device)


@cache
def processors(device: int) -> int:
    """Multiprocessors of the device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def roomy(device: int) -> bool:
    """Whether a block may have more than 160 KB of shared memory (data-centre parts; 99 KB elsewhere)."""
    return shared_limit(device) > 160 * 1024


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@cache
def _attribute(device: int, which: int) -> int:
    value = ctypes.c_int()
    _check(_driver().cuDeviceGetAttribute(ctypes.byref(value), which, device), f"device {device}, attribute {which}")
    return value.value


def shared_limit(device: int) -> int:
    """Bytes of shared memory that one block may have."""
    return _attribute(device, 97)  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


@cache
def scratch(device: int) -> Tensor:
    """Zeroed words for counters that every kernel leaves at zero; one stream at a time may use them."""
    return torch.zeros(64, dtype=torch.int32, device=torch.device("cuda", device))
