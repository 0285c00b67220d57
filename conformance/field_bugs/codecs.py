"""Both NVFP4 codecs behind one set of calls on NumPy arrays, the tables they must agree with, and ModelOpt's path.

`CODECS` parametrises a test. The tables are written out; nothing here comes from either implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch

import fast.errors
import fast.nvfp4
import reference.errors
import reference.nvfp4

CODES = "0 .5 1 1.5 2 3 4 6 -0 -.5 -1 -1.5 -2 -3 -4 -6"

BYTES = """
    0x0.0p+0 0x1p-9 0x1p-8 0x1.8p-8 0x1p-7 0x1.4p-7 0x1.8p-7 0x1.cp-7
    0x1p-6 0x1.2p-6 0x1.4p-6 0x1.6p-6 0x1.8p-6 0x1.ap-6 0x1.cp-6 0x1.ep-6
    0x1p-5 0x1.2p-5 0x1.4p-5 0x1.6p-5 0x1.8p-5 0x1.ap-5 0x1.cp-5 0x1.ep-5
    0x1p-4 0x1.2p-4 0x1.4p-4 0x1.6p-4 0x1.8p-4 0x1.ap-4 0x1.cp-4 0x1.ep-4
    0x1p-3 0x1.2p-3 0x1.4p-3 0x1.6p-3 0x1.8p-3 0x1.ap-3 0x1.cp-3 0x1.ep-3
    0x1p-2 0x1.2p-2 0x1.4p-2 0x1.6p-2 0x1.8p-2 0x1.ap-2 0x1.cp-2 0x1.ep-2
    0x1p-1 0x1.2p-1 0x1.4p-1 0x1.6p-1 0x1.8p-1 0x1.ap-1 0x1.cp-1 0x1.ep-1
    0x1p+0 0x1.2p+0 0x1.4p+0 0x1.6p+0 0x1.8p+0 0x1.ap+0 0x1.cp+0 0x1.ep+0
    0x1p+1 0x1.2p+1 0x1.4p+1 0x1.6p+1 0x1.8p+1 0x1.ap+1 0x1.cp+1 0x1.ep+1
    0x1p+2 0x1.2p+2 0x1.4p+2 0x1.6p+2 0x1.8p+2 0x1.ap+2 0x1.cp+2 0x1.ep+2
    0x1p+3 0x1.2p+3 0x1.4p+3 0x1.6p+3 0x1.8p+3 0x1.ap+3 0x1.cp+3 0x1.ep+3
    0x1p+4 0x1.2p+4 0x1.4p+4 0x1.6p+4 0x1.8p+4 0x1.ap+4 0x1.cp+4 0x1.ep+4
    0x1p+5 0x1.2p+5 0x1.4p+5 0x1.6p+5 0x1.8p+5 0x1.ap+5 0x1.cp+5 0x1.ep+5
    0x1p+6 0x1.2p+6 0x1.4p+6 0x1.6p+6 0x1.8p+6 0x1.ap+6 0x1.cp+6 0x1.ep+6
    0x1p+7 0x1.2p+7 0x1.4p+7 0x1.6p+7 0x1.8p+7 0x1.ap+7 0x1.cp+7 0x1.ep+7
    0x1p+8 0x1.2p+8 0x1.4p+8 0x1.6p+8 0x1.8p+8 0x1.ap+8 0x1.cp+8 nan
"""

CODE_VALUES = np.array([float(v) for v in CODES.split()], np.float32)
BYTE_VALUES = np.array([float.fromhex(v) for v in BYTES.split()], np.float32)  # bytes 0x00 to 0x7F, the last one NaN


class Triple(NamedTuple):
    packed: np.ndarray
    scale: np.ndarray
    scale_2: np.float32


@dataclass(frozen=True)
class Codec:
    """encode(w, name), encode_under(w, amax) and decode(packed, scale, scale_2, name), and whose errors they raise."""

    name: str
    encode: Callable[..., Triple]
    encode_under: Callable[[np.ndarray, float], Triple]
    decode: Callable[..., np.ndarray]
    errors: ModuleType

    def error(self, kind: str) -> type[Exception]:
        """One name for what the two sides call differently."""
        names = {
            "nan scale": ("BlockScaleError", "ScaleNaNError"),
            "negative scale": ("BlockScaleError", "ScaleNegativeError"),
        }
        oracle, engine = names.get(kind, (kind, kind))
        return getattr(self.errors, oracle if self.name == "reference" else engine)


def tensor(x: np.ndarray) -> torch.Tensor:
    x = np.ascontiguousarray(x)
    return (
        torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        if x.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(x)
    )


def _reference_encode(w: np.ndarray, name: str = "weight") -> Triple:
    return Triple(*reference.nvfp4.encode(w, name=name))


def _reference_encode_under(w: np.ndarray, amax: float) -> Triple:
    return Triple(*reference.nvfp4.encode(w, amax=amax))


def _reference_decode(
    packed: np.ndarray, scale: np.ndarray, scale_2: np.ndarray | float, name: str = "weight"
) -> np.ndarray:
    return reference.nvfp4.decode(packed, scale, scale_2, name=name)


def _fast_encode(w: np.ndarray, name: str = "weight") -> Triple:
    packed = fast.nvfp4.encode(tensor(w), name)
    return Triple(packed.codes.numpy(), packed.scale.numpy(), np.float32(packed.scale_2.item()))


def _fast_encode_under(w: np.ndarray, amax: float) -> Triple:
    scale_2 = fast.nvfp4.tensor_scale(torch.tensor(amax))
    codes = torch.empty(w.shape[0], w.shape[1] // 2, dtype=torch.uint8)
    scale = torch.empty(w.shape[0], w.shape[1] // 16, dtype=torch.uint8)
    fast.nvfp4.encode_all(tensor(w), scale_2, codes, scale)
    return Triple(codes.numpy(), scale.numpy(), np.float32(scale_2.item()))


def _fast_decode(
    packed: np.ndarray, scale: np.ndarray, scale_2: np.ndarray | float, name: str = "weight"
) -> np.ndarray:
    multiplier = torch.tensor(np.asarray(scale_2, np.float32))
    return fast.nvfp4.decode(fast.nvfp4.Packed(tensor(packed), tensor(scale), multiplier), name).numpy()


REFERENCE = Codec("reference", _reference_encode, _reference_encode_under, _reference_decode, reference.errors)
FAST = Codec("fast", _fast_encode, _fast_encode_under, _fast_decode, fast.errors)
CODECS = [pytest.param(codec, id=codec.name) for codec in (REFERENCE, FAST)]


def pack(codes: np.ndarray) -> np.ndarray:
    """Codes [rows, cols] -> bytes [rows, cols/2], the even column in the low nibble."""
    codes = np.asarray(codes, np.uint8)
    return codes[:, 0::2] + 16 * codes[:, 1::2]


def unpack(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed % 16, packed // 16], axis=-1).reshape(len(packed), -1)


def table_value(code: np.ndarray, byte: np.ndarray, scale_2: np.float32) -> np.ndarray:
    """(code * block scale) * scale_2 from the tables, left to right in float32."""
    return (CODE_VALUES[code] * BYTE_VALUES[byte]) * np.float32(scale_2)


def modelopt(w: np.ndarray) -> Triple:
    """The dynamic path of exports.md 3.2 in torch float32, with the two departures of model.md section 4: scale_2 of
    one where amax / 2688 vanishes, and code 0 where a vanished divisor meets a zero."""
    x = tensor(w)
    scale_2 = x.abs().max().float() / (6.0 * 448.0)
    if scale_2 == 0:
        scale_2 = torch.tensor(1.0)
    blocks = x.view(len(x), -1, 16)
    per_block = blocks.abs().amax(dim=-1).float() / (6.0 * scale_2)
    per_block[per_block == 0] = 1.0
    scale = per_block.clamp(min=2**-9, max=448.0).to(torch.float8_e4m3fn)
    scaled = (blocks / (scale.to(torch.float32) * scale_2).unsqueeze(-1)).view(x.shape)
    magnitude = scaled.abs().nan_to_num(nan=0.0, posinf=float("inf"))
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    code = torch.searchsorted(bounds, magnitude) + (magnitude[..., None] == bounds[1::2]).any(dim=-1)
    code = code + 8 * (scaled < 0)
    return Triple(pack(code.numpy()), scale.view(torch.uint8).numpy(), np.float32(scale_2.item()))
