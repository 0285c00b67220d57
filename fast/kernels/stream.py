"""Read bandwidth of this GPU, the measuring stick of every fraction (stream.cu)."""

from __future__ import annotations

from torch import Tensor

from fast.kernels import driver
from fast.kernels.compile import Variant
from fast.kernels.driver import Long, Parameters, Pointer, address

VARIANT = Variant("stream")


class _Stream(Parameters):
    _fields_ = (("data", Pointer), ("sink", Pointer), ("bytes", Long))


def read(data: Tensor, blocks_per_processor: int = 4) -> None:
    """Read every byte of `data` once."""
    device = data.device.index
    p = _Stream(address(data), address(driver.scratch(device)[63:]), data.nbytes)
    blocks = driver.processors(device) * blocks_per_processor
    driver.kernel(VARIANT, "stream_read", device)((blocks, 1, 1), 512, p, pdl=False)
