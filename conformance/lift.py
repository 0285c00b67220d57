"""Run torch code in double precision although it asks for single precision by name.

What remains between it and a float64 implementation is then mathematics, not rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class Lift(TorchFunctionMode):
    """Inside, `.float()` gives float64, and so does every torch function that is passed `torch.float32`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **named)


@contextmanager
def lifted() -> Iterator[None]:
    """`Lift`, with the name `torch.float32` itself meaning float64: for code that compares dtypes."""
    with mock.patch.object(torch, "float32", torch.float64), _Lifted():
        yield


class _Lifted(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].double() if func is torch.Tensor.float else func(*args, **(kwargs or {}))
