"""Faults that ports shipped in their NVFP4 codec or quantiser, each on its smallest input, for oracle and engine."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.field_bugs.codecs import BYTE_VALUES, CODECS, Codec, pack, unpack
from reference.arithmetic import matmul

codecs = pytest.mark.parametrize("codec", CODECS)
ONE_CODE = np.full((1, 16), 2)  # sixteen times 1.0


def decoded_scale(codec: Codec, byte: int) -> float:
    return float(codec.decode(pack(ONE_CODE), np.array([[byte]], np.uint8), 1.0)[0, 0])


@codecs
def test_fb01_subnormal_block_scales(codec: Codec) -> None:
    """The formula for normal numbers would give 0.0087890625 for byte 0x01."""
    got = {byte: decoded_scale(codec, byte) for byte in range(0x7F)}
    assert (got[0x00], got[0x01], got[0x07], got[0x08]) == (0.0, 0.001953125, 0.013671875, 0.015625)
    assert list(got.values()) == BYTE_VALUES[:-1].tolist()


@codecs
def test_fb03_a_zero_group_stays_zero_and_leaves_its_neighbour_alone(codec: Codec) -> None:
    """Its stored scale is 1.0, ModelOpt's choice; its codes and values are zeros, and nothing is divided by it."""
    w = np.concatenate([np.zeros((1, 16)), np.ones((1, 16))], axis=1).astype(np.float32)
    e = codec.encode(w)
    assert e.scale.tolist() == [[0x38, 0x7E]]
    assert unpack(e.packed)[0].tolist() == [0] * 16 + [7] * 16
    values = codec.decode(*e)
    assert values[0, :16].tobytes() == bytes(64)
    assert (np.abs(values[0, 16:] - 1) <= np.spacing(np.float32(1))).all()
    # Other encoders store 0x00 there; the values are the same zeros.
    assert codec.decode(e.packed, np.array([[0x00, 0x7E]], np.uint8), e.scale_2).tobytes() == values.tobytes()


@codecs
def test_fb03_an_all_zero_tensor_has_no_nan(codec: Codec) -> None:
    e = codec.encode(np.zeros((2, 32), np.float32))
    assert e.scale_2 == 1.0
    assert (e.scale == 0x38).all()
    assert codec.decode(*e).tobytes() == bytes(4 * 64)


@codecs
def test_fb05_midpoints_go_to_the_even_code(codec: Codec) -> None:
    """With scale 1 exactly: a row of 16 whose largest value is 6, beside a row that sets the tensor's 2688."""
    x = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    w = np.zeros((2, 16), np.float32)
    w[0] = np.array([*x, *(-v for v in x)])
    w[1, 0] = 2688.0
    e = codec.encode(w)
    assert (e.scale_2, int(e.scale[0, 0])) == (1.0, 0x38)
    rounded = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert codec.decode(*e)[0].tolist() == [*rounded, *(-v for v in rounded)]
    assert np.signbit(codec.decode(*e)[0, 8])


@codecs
def test_fb05_above_six_saturates_and_a_scaled_midpoint_is_a_midpoint(codec: Codec) -> None:
    """A block scale rounds down, 6.25 / 6 to 1.0, so the block's 6.25 lies above 6; -0.625 / 0.5 is -1.25."""
    w = np.zeros((3, 16), np.float32)
    w[0, :2] = [6.25, -6.25]
    w[1, :2] = [3.0, -0.625]
    w[2, 0] = 2688.0
    e = codec.encode(w)
    assert e.scale[:2, 0].tolist() == [0x38, 0x30]
    assert codec.decode(*e)[:2, :2].tolist() == [[6.0, -6.0], [3.0, -0.5]]


@codecs
def test_fb08_the_tensor_scale_multiplies(codec: Codec) -> None:
    """amax 0.75: the other format would store 2688 / 0.75 = 3584 and divide.

    Taken for a multiplier, that is 1.3e7 times too much.
    """
    w = np.full((1, 32), 0.75, np.float32)
    w[0, 16:] = 0.375
    e = codec.encode(w)
    assert e.scale_2 == np.float32(1) / np.float32(3584)
    for shape in ((), (1,)):
        got = codec.decode(e.packed, e.scale, np.full(shape, e.scale_2, np.float32))
        assert np.abs(got - w).max() <= np.spacing(np.float32(0.75))


@codecs
@pytest.mark.parametrize("byte", [0x7E, 0x01])
def test_fb10_negative_zero_is_zero(codec: Codec, byte: int) -> None:
    values = codec.decode(pack(np.full((1, 16), 8)), np.array([[byte]], np.uint8), np.float32(0.1))
    assert (values == 0).all()
    assert np.signbit(values).all()
    dot = matmul(values, np.ones((16, 1)))
    assert dot.tobytes() == np.zeros((1, 1)).tobytes()
    again = codec.encode(values)
    assert set(np.unique(unpack(again.packed))) <= {0, 8}
    assert (codec.decode(*again) == 0).all()


@codecs
@pytest.mark.parametrize("ratio", [447.0, 463.0, 464.0, 465.0, 1e4])
def test_fb12_block_scales_saturate_before_the_cast(codec: Codec, ratio: float) -> None:
    """A ratio above 448 comes from an amax that belongs to other values; a plain cast past 464 gives the NaN byte."""
    w = np.zeros((1, 32), np.float32)
    w[0, 0], w[0, 16:] = 6 * ratio, 6.0
    e = codec.encode_under(w, 2688.0)
    assert e.scale_2 == 1.0
    assert e.scale.tolist() == [[0x7E, 0x38]]
    assert unpack(e.packed)[0, :16].tolist() == [7] + [0] * 15
    assert np.isfinite(codec.decode(*e)).all()


@codecs
@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80, 0xB8])
def test_fb55_one_bad_scale_byte_is_found(codec: Codec, byte: int) -> None:
    scale = np.full((6, 5), 0x38, np.uint8)
    scale[4, 3] = byte
    kind = "nan scale" if byte & 0x7F == 0x7F else "negative scale"
    with pytest.raises(codec.error(kind), match=r"experts\.5\.up_proj\.weight.*4.*3"):
        codec.decode(np.zeros((6, 40), np.uint8), scale, 1.0, "experts.5.up_proj.weight")


@codecs
@pytest.mark.parametrize("scale_2", [np.nan, np.inf, -1.0, 0.0])
def test_fb55_one_bad_tensor_scale_is_found(codec: Codec, scale_2: float) -> None:
    with pytest.raises(codec.error("TensorScaleError"), match=r"experts\.5\.up_proj\.weight"):
        codec.decode(pack(ONE_CODE), np.array([[0x38]], np.uint8), scale_2, "experts.5.up_proj.weight")


@codecs
def test_fb55_zero_is_legal_for_an_unused_expert(codec: Codec) -> None:
    values = codec.decode(np.zeros((1, 8), np.uint8), np.array([[0x38]], np.uint8), 0.0)
    assert values.tobytes() == bytes(64)


@codecs
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_fb55_nothing_non_finite_is_ever_written(codec: Codec, value: float) -> None:
    w = np.ones((3, 32), np.float32)
    w[2, 17] = value
    with pytest.raises(codec.error("NonFiniteWeightError"), match=r"experts\.5\.up_proj\.weight.*2.*17"):
        codec.encode(w, "experts.5.up_proj.weight")
