"""NVFP4, both implementations: every byte and code, ModelOpt's bytes, fixed points, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from conformance.field_bugs.codecs import (
    BYTE_VALUES,
    CODE_VALUES,
    CODECS,
    FAST,
    REFERENCE,
    Codec,
    Triple,
    modelopt,
    pack,
    table_value,
    unpack,
)
from reference import nvfp4
from reference.errors import TensorDtypeError, TensorShapeError

codecs = pytest.mark.parametrize("codec", CODECS)
ALL_CODES = np.tile(np.arange(16, dtype=np.uint8), (127, 1))
ALL_BYTES = np.arange(127, dtype=np.uint8)[:, None]
BF16_MIDDLE = (2 - Fraction(1, 256)) * 2**127
"""Half way from the largest finite BF16 number to the next power of two: what is not below rounds to infinity."""
BF16_MAX = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
LARGEST = float(np.nextafter(np.float32(BF16_MIDDLE / 2688), np.float32(0)))
"""The largest float32 whose product with 2688 is under `BF16_MIDDLE`."""


def bits(x: np.ndarray) -> list[int]:
    return np.asarray(x, np.float32).view(np.uint32).reshape(-1).tolist()


def same(got: Triple, want: Triple, codec: str = "") -> None:
    assert got.scale_2.tobytes() == want.scale_2.tobytes(), (codec, got.scale_2, want.scale_2)
    for field in ("scale", "packed"):
        a, b = getattr(got, field), getattr(want, field)
        assert a.shape == b.shape
        if (a != b).any():
            at = tuple(int(i) for i in np.argwhere(a != b)[0])
            pytest.fail(f"{codec} {field}{list(at)}: 0x{a[at]:02x}, expected 0x{b[at]:02x}")


def test_the_reference_tables_are_the_literals() -> None:
    assert bits(nvfp4.E2M1) == bits(CODE_VALUES)
    assert bits(nvfp4.E4M3[:-1]) == bits(BYTE_VALUES[:-1])
    assert np.isnan(nvfp4.E4M3[-1])
    assert np.isnan(BYTE_VALUES[-1])


@codecs
@pytest.mark.parametrize("scale_2", [1.0, 2.0**-9, 0.1, 3e-5, 1e30, 1e-42, 2.0**-149, LARGEST])
def test_every_scale_byte_with_every_code(codec: Codec, scale_2: float) -> None:
    got = codec.decode(pack(ALL_CODES), ALL_BYTES, np.float32(scale_2))
    want = table_value(ALL_CODES, np.broadcast_to(ALL_BYTES, ALL_CODES.shape), np.float32(scale_2))
    assert np.isfinite(want.astype(ml_dtypes.bfloat16)).all()
    assert got.dtype == np.float32
    assert bits(got) == bits(want)


@codecs
@pytest.mark.parametrize("byte", range(0x7F, 0x100), ids=hex)
def test_every_other_scale_byte_is_refused(codec: Codec, byte: int) -> None:
    scale = np.full((3, 4), 0x38, np.uint8)
    scale[1, 2] = byte
    kind = "nan scale" if byte in (0x7F, 0xFF) else "negative scale"
    with pytest.raises(codec.error(kind), match=rf"(?i)some\.weight.*0x{byte:02x}.*1.*2"):
        codec.decode(np.zeros((3, 32), np.uint8), scale, 1.0, "some.weight")


@codecs
def test_nibble_order_and_block_order(codec: Codec) -> None:
    """Byte j holds column 2j low and 2j+1 high; scale [r, b] covers columns 16b to 16b+15 of row r."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (5, 64))
    scale = rng.integers(1, 0x7F, (5, 4)).astype(np.uint8)
    got = codec.decode(pack(codes), scale, np.float32(0.37))
    assert bits(got) == bits(table_value(codes, scale.repeat(16, axis=1), np.float32(0.37)))


def draw(kind: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (24, 160)
    per_block = (24, 10)
    x = rng.standard_normal(shape)
    if kind == "heavy":
        x = rng.standard_t(1.2, shape)
    if kind == "blocks":  # ratios from 448 down past the smallest E4M3 value
        x *= (2.0 ** rng.uniform(-22, 0, per_block)).repeat(16, axis=1)
    if kind == "tied":  # on codes and on bounds between codes, under block scales that are powers of two
        grid = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6]
        x = (
            rng.choice(grid, shape)
            * rng.choice([-1.0, 1.0], shape)
            * (2.0 ** rng.integers(-6, 0, per_block)).repeat(16, 1)
        )
        x[::4, ::16] = 6.0 * 448 / 512
    if kind == "tied scales":  # block maxima on the bounds between neighbouring E4M3 values
        middle = (BYTE_VALUES[:126] + BYTE_VALUES[1:127]) / 2
        x = np.clip(x, -1, 1) * 6.0 * rng.choice(middle, per_block).repeat(16, axis=1)
        x[:, ::16] = 6.0 * rng.choice(middle, per_block)
        x[0, 0] = 6.0 * 448
    if kind == "tiny":
        x *= 1e-33
    if kind == "subnormal":
        x *= 2.0 ** rng.uniform(-149, -125)
    if kind == "vanishing":  # quotients and block scales under the float32 range
        x[0, 0] = 3e37
        x *= 10.0 ** -rng.integers(0, 45, per_block).repeat(16, axis=1)
    if kind == "huge":
        x = np.clip(x, -4, 4) * 8e37
    if kind == "zero":
        x = rng.choice([0.0, -0.0], shape)
    if kind == "zero blocks":
        x *= rng.integers(0, 2, per_block).repeat(16, axis=1)
    x = x.astype(np.float32)
    return x.astype(ml_dtypes.bfloat16) if kind.startswith("bf16") else x


KINDS = ["normal", "heavy", "blocks", "tied", "tied scales", "tiny", "subnormal", "vanishing", "huge", "zero"]
KINDS += ["zero blocks", "bf16"]


@codecs
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_encoder_gives_modelopts_bytes(codec: Codec, kind: str, seed: int) -> None:
    w = draw(kind, seed)
    same(codec.encode(w), modelopt(w), codec.name)


@settings(max_examples=200, deadline=None)
@given(arrays(np.float32, (2, 32), elements=st.floats(-BF16_MAX, BF16_MAX, width=32)))
def test_encoder_gives_modelopts_bytes_for_anything(w: np.ndarray) -> None:
    want = modelopt(w)
    for codec in (REFERENCE, FAST):
        same(codec.encode(w), want, codec.name)


def test_e4m3_grid_rounds_as_torch_casts() -> None:
    """Every value, every bound between two, and both neighbours of each: nearest, ties to the even byte."""
    values = BYTE_VALUES[1:127]
    points = np.concatenate([values, (values[:-1] + values[1:]) / 2])
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(500))])
    points = points[(points >= 2.0**-9) & (points <= 448)]
    want = torch.from_numpy(points).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (nvfp4._nearest(points, nvfp4.E4M3[:-1]) == want).all()


def round_trip(codec: Codec, e: Triple) -> Triple:
    return codec.encode(codec.decode(*e))


def without_negative_zero(e: Triple) -> Triple:
    codes = unpack(e.packed)
    return e._replace(packed=pack(np.where(codes == 8, 0, codes)))


def largest_codes(e: Triple) -> np.ndarray:
    """Largest code magnitude (0 to 7) of every block."""
    return (unpack(e.packed) & 7).reshape(*e.scale.shape, 16).max(axis=-1)


@codecs
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["normal", "heavy", "tied", "tiny", "zero", "zero blocks", "bf16", "huge"])
def test_encoded_weights_are_a_fixed_point(codec: Codec, kind: str, seed: int) -> None:
    """Bytes come back, but for code 8 (-0.0), which comes back as 0; from the second time on nothing moves at all."""
    e = codec.encode(draw(kind, seed))
    low_blocks = (e.scale <= 2) & (largest_codes(e) < 7)
    e = e._replace(scale=np.where(low_blocks, 0x38, e.scale), packed=zeroed(e, low_blocks))
    again = round_trip(codec, e)
    same(again, without_negative_zero(e), codec.name)
    same(round_trip(codec, again), again, codec.name)
    assert (codec.decode(*again) == codec.decode(*e)).all()


def zeroed(e: Triple, blocks: np.ndarray) -> np.ndarray:
    return np.where(blocks.repeat(8, axis=1), 0, e.packed).astype(np.uint8)


@codecs
def test_blocks_scaled_by_3_or_more_always_hold_a_six(codec: Codec) -> None:
    """The condition of the fixed point, over block maxima all along the E4M3 range; it fails for bytes 1 and 2 only."""
    ratio = np.concatenate([np.linspace(2.0**-10, 2.0**-5, 20001), 2.0 ** np.linspace(-5, np.log2(448), 20000)])
    w = np.zeros((len(ratio) + 1, 16), np.float32)
    w[:-1, 3] = 6 * ratio
    w[-1, 0] = 2688.0
    e = codec.encode(w)
    assert e.scale_2 == 1.0
    without = np.unique(e.scale[largest_codes(e) < 7])
    assert without.tolist() == [1, 2]


@codecs
def test_where_the_fixed_point_ends(codec: Codec) -> None:
    """A block whose ratio of 1.6 * 2^-9 is stored as 0x02 and code 4, which read back ask for 0x01 and code 6."""
    w = np.zeros((2, 16), np.float32)
    w[0, 0] = 2688.0
    w[1, 0] = 6 * 1.6 * 2.0**-9
    e = codec.encode(w)
    assert e.scale[:, 0].tolist() == [0x7E, 0x02]
    assert largest_codes(e)[:, 0].tolist() == [7, 6]
    again = round_trip(codec, e)
    assert again.scale[:, 0].tolist() == [0x7E, 0x01]
    assert largest_codes(again)[:, 0].tolist() == [7, 7]


def test_tensor_scales_made_from_an_amax_survive_decoding() -> None:
    """s = RN(amax / 2688) gives RN(RN(2688 s) / 2688) = s for every float32 significand. Not so for an arbitrary s,
    whose weight may come back under the neighbouring scale."""
    n = np.float32(2688.0)
    amax = (np.arange(1 << 23, dtype=np.uint32) | 0x3F800000).view(np.float32)
    s = amax / n
    assert ((s * n) / n == s).all()
    free = np.arange(1 << 23, dtype=np.uint32) | 0x3F800000
    free = free.view(np.float32)
    assert ((free * n) / n != free).any()


@codecs
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_non_finite_weights_are_refused(codec: Codec, value: float, dtype: type) -> None:
    w = np.ones((70, 48), np.float32)
    w[67, 33] = value
    w[68, 0] = value
    with pytest.raises(codec.error("NonFiniteWeightError"), match=r"experts\.5\.weight.*67.*33"):
        codec.encode(w.astype(dtype), "experts.5.weight")


def test_the_largest_tensor_scale_is_one_step_below_the_first_that_overflows() -> None:
    above = np.nextafter(np.float32(LARGEST), np.float32(np.inf))
    assert Fraction(LARGEST) * 2688 < BF16_MIDDLE <= Fraction(float(above)) * 2688
    assert nvfp4.usable_scale(np.float32(LARGEST))
    assert not nvfp4.usable_scale(above)


@codecs
@pytest.mark.parametrize("value", [float(np.nextafter(np.float32(LARGEST), np.float32(np.inf))), 3e38])
def test_a_tensor_scale_beyond_any_value_is_refused_whatever_the_codes(codec: Codec, value: float) -> None:
    """The same rule for every tensor and every part of one: codes of zero make no exception."""
    for byte in (0x00, 0x11):
        packed = np.full((1, 8), byte, np.uint8)
        with pytest.raises(
            codec.error("TensorScaleError"), match=r"experts\.5\.weight.*6 x 448 x weight_scale_2 finite"
        ):
            codec.decode(packed, np.full((1, 1), 0x01, np.uint8), value, "experts.5.weight")


@codecs
def test_magnitudes_are_encoded_as_far_as_bf16_goes(codec: Codec) -> None:
    w = np.ones((2, 16), np.float32)
    w[1, 3] = np.float32(3.396e38)
    made = codec.encode(w, "experts.5.weight")
    assert np.isfinite(codec.decode(made.packed, made.scale, made.scale_2).astype(ml_dtypes.bfloat16)).all()
    w[1, 3] = np.finfo(np.float32).max
    with pytest.raises(codec.error("TensorScaleError"), match=r"experts\.5\.weight"):
        codec.encode(w, "experts.5.weight")


@codecs
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0, -1e-30, -0.0])
def test_tensor_scales_that_are_none_are_refused(codec: Codec, value: float) -> None:
    with pytest.raises(codec.error("TensorScaleError"), match=r"experts\.5\.weight"):
        codec.decode(np.zeros((1, 8), np.uint8), np.full((1, 1), 0x38, np.uint8), value, "experts.5.weight")


@codecs
def test_tensor_scale_zero_belongs_to_zero_codes(codec: Codec) -> None:
    scale = np.full((2, 1), 0x38, np.uint8)
    zeros = np.full((2, 8), 0x80, np.uint8)
    assert (codec.decode(zeros, scale, 0.0) == 0).all()
    zeros[1, 3] = 0x10
    with pytest.raises(codec.error("TensorScaleError"), match=r"some\.weight.*0"):
        codec.decode(zeros, scale, 0.0, "some.weight")


@codecs
def test_a_shared_amax_stands_in_for_the_tensors_own(codec: Codec) -> None:
    w = draw("normal", 3)
    own = float(np.abs(w).max())
    same(codec.encode_under(w, own), codec.encode(w), codec.name)
    shared = codec.encode_under(w, 4 * own)
    assert shared.scale_2 == np.float32(4 * own) / np.float32(2688)
    joint = codec.encode(np.concatenate([w, np.full((1, 160), 4 * own, np.float32)]))
    same(shared, Triple(joint.packed[:-1], joint.scale[:-1], joint.scale_2), codec.name)


@pytest.mark.parametrize(
    ("shape", "dtype", "error"),
    [
        ((2, 24), np.float32, TensorShapeError),
        ((32,), np.float32, TensorShapeError),
        ((2, 2, 16), np.float32, TensorShapeError),
        ((2, 16), np.float64, TensorDtypeError),
        ((2, 16), np.int32, TensorDtypeError),
    ],
    ids=str,
)
def test_what_cannot_be_encoded(shape: tuple[int, ...], dtype: type, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"some\.weight"):
        nvfp4.encode(np.zeros(shape, dtype), name="some.weight")


U8 = np.uint8


@pytest.mark.parametrize(
    ("packed", "scale", "scale_2", "error"),
    [
        (np.zeros((2, 12), U8), np.zeros((2, 1), U8), 1.0, TensorShapeError),
        (np.zeros(8, U8), np.zeros((1, 1), U8), 1.0, TensorShapeError),
        (np.zeros((2, 16), U8), np.zeros((2, 1), U8), 1.0, TensorShapeError),
        (np.zeros((2, 16), U8), np.zeros((1, 2), U8), 1.0, TensorShapeError),
        (np.zeros((2, 16), U8), np.zeros((2, 2), U8), np.ones(2), TensorShapeError),
        (np.zeros((2, 16), np.int8), np.zeros((2, 2), U8), 1.0, TensorDtypeError),
        (np.zeros((2, 16), U8), np.zeros((2, 2), np.float32), 1.0, TensorDtypeError),
    ],
    ids=["width", "rank", "too few scales", "too few rows", "two multipliers", "signed codes", "float scales"],
)
def test_what_cannot_be_decoded(
    packed: np.ndarray, scale: np.ndarray, scale_2: np.ndarray | float, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"some\.weight"):
        nvfp4.decode(packed, scale, scale_2, name="some.weight")


def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    w = draw("heavy", 5)
    whole = nvfp4.encode(w)
    values = nvfp4.decode(whole.packed, whole.scale, whole.scale_2)
    monkeypatch.setattr(nvfp4, "_CHUNK", 7 * w.shape[1])
    same(Triple(*nvfp4.encode(w)), Triple(*whole))
    assert bits(nvfp4.decode(whole.packed, whole.scale, whole.scale_2)) == bits(values)
    w[23, 1] = np.inf
    with pytest.raises(Exception, match="row 23, column 1"):
        nvfp4.encode(w)


@codecs
def test_one_element_multipliers_of_either_rank(codec: Codec) -> None:
    packed, scale = pack(ALL_CODES), ALL_BYTES
    want = codec.decode(packed, scale, np.float32(0.3))
    assert bits(codec.decode(packed, scale, np.full(1, 0.3, np.float32))) == bits(want)
    assert bits(codec.decode(packed, scale, np.array(0.3, np.float32))) == bits(want)
