"""What the engine bound for each checkpoint weight, compared with the file bit by bit.

Nothing here is bounded: a code, a scale byte or a value is the file's or it is not. Between file and engine may lie an
upcast that keeps every value, the decoding of a packed weight to float32, for the convolution kernels the rounding to
BF16, and for BF16 experts of the draft block their packing as `nvfp4.encode` does it; nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from conformance.judge.result import TensorRow, Value
from reference import layout, nvfp4
from reference.checkpoint import Checkpoint
from reference.errors import InputError

Operands = Callable[[str], dict[str, np.ndarray] | None]
_PARTS = (".weight_scale", ".weight_scale_2", ".input_scale")
_SHOWN = 8
_WIDTH = {"U8": np.uint8, "F8_E4M3": np.uint8, "BF16": np.uint16, "F32": np.uint32}


def weights(checkpoint: Checkpoint, *, drafts: bool = False) -> list[str]:
    """Names of the text stack's weights in layout order: no scales, no vision tower, the draft block with `drafts`."""
    mtp = checkpoint.config.text.mtp_layer
    return [
        name
        for name, spec in checkpoint.specs.items()
        if not name.endswith(_PARTS)
        and (spec.layer is None or drafts or spec.layer != mtp)
        and (name.startswith(layout.TEXT) or "lm_head" in name)
    ]


def packed_at_load(checkpoint: Checkpoint, name: str) -> bool:
    """Whether an engine may pack a weight that the file has in BF16: the experts of the draft block."""
    spec = checkpoint.specs[name]
    return spec.dtype == "BF16" and spec.family == "routed experts, MTP"


def compare(checkpoint: Checkpoint, operands: Operands, names: list[str] | None = None) -> Iterator[TensorRow]:
    """Rows of every weight that the engine shows operands for; weights it shows none for yield nothing.

    `operands(name)` may raise KeyError or an InputError for a weight that it does not hold.
    """
    for name in weights(checkpoint) if names is None else names:
        try:
            bound = operands(name)
        except (KeyError, InputError):
            bound = None
        if bound:
            yield from rows(checkpoint, name, bound)


def rows(checkpoint: Checkpoint, name: str, bound: dict[str, np.ndarray]) -> Iterator[TensorRow]:
    """One row per part. Parts that do not belong, or a packed weight without all three, are failing rows."""
    dtype = checkpoint.dtype(name)
    if "value" in bound and len(bound) == 1:
        yield _value_row(checkpoint, name, dtype, np.asarray(bound["value"]))
        return
    parts = {"codes": name, "scale": f"{name}_scale", "scale_2": f"{name}_scale_2"}
    if not (dtype == "U8" or packed_at_load(checkpoint, name)) or set(bound) != set(parts):
        found, want = sorted(bound), sorted(parts) if dtype == "U8" else ["value"]
        yield _row(checkpoint, name, "value", "none", (), "identical", 0, 0, (), f"operands {found}, expected {want}")
        return
    rule = "identical" if dtype == "U8" else "packed as NVFP4"
    made = None if dtype == "U8" else encoded(checkpoint, name)
    for part, source in parts.items():
        if made is None:
            stored, shape, data = checkpoint.raw(source)
            expected = np.frombuffer(data, _WIDTH[stored]).reshape(shape)
        else:
            stored, expected = made[part]
        actual = np.asarray(bound[part])
        width = expected.dtype.itemsize
        if actual.dtype.itemsize != width or (stored == "F32") != (actual.dtype == np.float32):
            message = f"dtype {actual.dtype}, expected {stored}"
            yield _row(checkpoint, name, part, str(actual.dtype), actual.shape, rule, 0, 0, (), message)
            continue
        yield _bit_row(checkpoint, name, part, rule, expected, actual)


def encoded(checkpoint: Any, name: str) -> dict[str, tuple[str, npt.NDArray]]:
    """A BF16 weight packed by the reference: part -> (dtype as stored, bits). A view of one rank cuts out its own."""
    if hasattr(checkpoint, "encoded"):
        return checkpoint.encoded(name)
    made = nvfp4.encode(checkpoint.weight(name), name=name)
    return {
        "codes": ("U8", made.packed),
        "scale": ("F8_E4M3", made.scale.view(np.uint8)),
        "scale_2": ("F32", np.array(made.scale_2, np.float32).view(np.uint32)),
    }


def missing(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], message: str) -> TensorRow:
    """A failing row of a weight that is there or absent against expectation."""
    return _row(checkpoint, name, "whole", "none", shape, "identical", 0, 0, (), message)


def _value_row(checkpoint: Checkpoint, name: str, dtype: str, actual: npt.NDArray) -> TensorRow:
    stored = checkpoint.weight(name)
    if str(actual.dtype) == "bfloat16" and dtype == "BF16":
        return _bit_row(checkpoint, name, "value", "identical", stored.astype(ml_dtypes.bfloat16), actual)
    if str(actual.dtype) == "bfloat16" and dtype == "F32" and "conv1d" in name:
        return _bit_row(checkpoint, name, "value", "rounded to BF16", stored.astype(ml_dtypes.bfloat16), actual)
    if actual.dtype in (np.float32, np.float64):
        rule = {"F32": "identical", "U8": "decoded to F32"}.get(dtype, "upcast")
        return _bit_row(checkpoint, name, "value", rule, stored.astype(actual.dtype), actual)
    message = f"held as {actual.dtype}, which does not keep the values of {dtype}"
    return _row(checkpoint, name, "value", str(actual.dtype), actual.shape, "identical", 0, 0, (), message)


def _bit_row(
    checkpoint: Checkpoint, name: str, part: str, rule: str, expected: npt.NDArray, actual: npt.NDArray
) -> TensorRow:
    """Shapes must agree up to axes of length 1; every element must have the same bits, the sign of zero included."""
    if [n for n in actual.shape if n != 1] != [n for n in expected.shape if n != 1]:
        message = f"shape {list(actual.shape)}, expected {list(expected.shape)}"
        return _row(checkpoint, name, part, str(actual.dtype), actual.shape, rule, 0, 0, (), message)
    width = np.dtype(f"u{expected.dtype.itemsize}")
    want = np.ascontiguousarray(expected).reshape(-1).view(width)
    got = np.ascontiguousarray(actual).reshape(-1).view(width)
    different = np.flatnonzero(want != got)
    values = tuple(_value(int(at), expected, actual, want, got) for at in different[:_SHOWN])
    message = f"{len(different)} of {want.size} differ" if len(different) else ""
    count = len(different)
    return _row(checkpoint, name, part, str(actual.dtype), actual.shape, rule, want.size, count, values, message)


def _value(at: int, expected: npt.NDArray, actual: npt.NDArray, want: npt.NDArray, got: npt.NDArray) -> Value:
    index = tuple(int(i) for i in np.unravel_index(at, expected.shape)) if expected.shape else ()
    digits = 2 * want.dtype.itemsize
    a, b = float(expected.reshape(-1)[at]), float(np.asarray(actual).reshape(-1)[at])
    return Value(index, None, a, b, f"0x{want[at]:0{digits}x}", f"0x{got[at]:0{digits}x}", abs(a - b), 0.0, math.inf)


def _row(
    checkpoint: Checkpoint,
    name: str,
    part: str,
    bound_dtype: str,
    shape: tuple[int, ...],
    rule: str,
    compared: int,
    differing: int,
    values: tuple[Value, ...],
    message: str,
) -> TensorRow:
    spec: Any = checkpoint.specs[name]
    return TensorRow(
        name=name,
        role=spec.role,
        part=part,
        layer=spec.layer,
        file_dtype=spec.dtype,
        bound_dtype=bound_dtype,
        shape=tuple(int(n) for n in shape),
        rule=rule,
        passed=not message,
        compared=compared,
        differing=differing,
        values=values,
        message=message,
    )
