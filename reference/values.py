"""Stored bytes as float32 values, and the refusal of bytes that are no usable value."""

import ml_dtypes
import numpy as np

from reference import errors as e
from reference import nvfp4

TENSOR_SCALE, INPUT_SCALE = "weight_scale_2", "input_scale"


def check(where: str, dtype: str, shape: tuple[int, ...], data: memoryview, first_row: int = 0) -> None:
    """Refuse NaN and infinity; in scales also a sign, and a weight_scale_2 that `nvfp4.usable_scale` refuses.
    A convolution in F32 is used as BF16, so it has to be finite there. Any byte is a pair of codes, so U8 passes.

    `where` ends in the tensor's name, `first_row` is the row that `data` starts with, for the message.
    Raises `NonFiniteWeightError`, `BlockScaleError` or `TensorScaleError`.
    """
    if dtype == "BF16":
        bits = np.frombuffer(data, "<u2").reshape(shape)
        bad = (bits & 0x7F80) == 0x7F80
        kind: type[e.InputError] = e.NonFiniteWeightError
    elif dtype == "F32":
        numbers = np.frombuffer(data, "<f4").reshape(shape)
        bad = ~np.isfinite(numbers)
        kind = e.NonFiniteWeightError
        if where.endswith("_conv1d.weight"):
            with np.errstate(over="ignore", invalid="ignore"):
                bad |= ~np.isfinite(numbers.astype(ml_dtypes.bfloat16))
        if where.endswith((TENSOR_SCALE, INPUT_SCALE)):
            bad |= np.signbit(numbers)
            kind = e.TensorScaleError
        if where.endswith(TENSOR_SCALE) and not bad.any():
            for scale_2 in numbers.reshape(-1):
                if not nvfp4.usable_scale(scale_2):
                    raise e.TensorScaleError(f"{where}: {nvfp4.unusable_scale(scale_2)}")
    elif dtype == "F8_E4M3":
        # 0x7F is NaN and everything above carries a sign.
        bad = np.frombuffer(data, np.uint8).reshape(shape) >= 0x7F
        kind = e.BlockScaleError
    else:
        assert dtype == "U8", dtype
        return
    if bad.any():
        index = [int(axis[0]) for axis in np.nonzero(np.atleast_1d(bad))]
        start = int(np.ravel_multi_index(tuple(index), np.atleast_1d(bad).shape)) if shape else 0
        width = {"BF16": 2, "F32": 4, "F8_E4M3": 1}[dtype]
        stored = int.from_bytes(data[start * width : (start + 1) * width], "little")
        index[0] += first_row
        limit = "" if kind is e.NonFiniteWeightError else " without a sign"
        at = f" at {index}" if shape else ""
        raise kind(f"{where}{at}: {dtype} 0x{stored:0{2 * width}x}, expected a finite number{limit}")


def decode(where: str, dtype: str, shape: tuple[int, ...], data: memoryview, first_row: int = 0) -> np.ndarray:
    """float32 values [shape] of BF16, F32 or (as block scales) F8_E4M3 bytes; exact. Raises as `check`."""
    check(where, dtype, shape, data, first_row)
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if dtype == "F32":
        return np.frombuffer(data, "<f4").astype(np.float32).reshape(shape)
    assert dtype == "F8_E4M3", dtype
    return nvfp4.E4M3[np.frombuffer(data, np.uint8).reshape(shape)]
