"""The fast engine's NVFP4: the oracle's bytes, exact values, refusals, and no more scratch than it admits to."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fast import errors as e
from fast import nvfp4
from reference import nvfp4 as oracle

SHAPES = [(1, 16), (3, 48), (16, 256), (5, 4096)]


def normal(rng, shape):
    return rng.standard_normal(shape)


def tied(rng, shape):
    """Every value on a bound between two codes, or on a code, under a block scale that is exact."""
    grid = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 7.0])
    values = grid[rng.integers(0, 16, shape)] * rng.choice([-1.0, 1.0], shape)
    values[..., ::16] = 6.0
    return values * 2.0**-4


def heavy(rng, shape):
    return rng.standard_normal(shape) / np.maximum(np.abs(rng.standard_normal(shape)), 1e-6) ** 3


def tiny(rng, shape):
    return rng.standard_normal(shape) * 1e-36


def subnormal(rng, shape):
    return rng.standard_normal(shape) * 1e-42


def ranges(rng, shape):
    """Blocks whose ratio to the largest runs from above 448 / 448 down past the smallest E4M3 number."""
    return rng.standard_normal(shape) * 2.0 ** rng.integers(-40, 1, (*shape[:-1], shape[-1] // 16)).repeat(16, -1)


def half_zero(rng, shape):
    return rng.standard_normal(shape) * rng.integers(0, 2, (*shape[:-1], shape[-1] // 16)).repeat(16, -1)


def zero(rng, shape):
    return np.zeros(shape) * rng.choice([-1.0, 1.0], shape)


def huge(rng, shape):
    return rng.standard_normal(shape) * 1e37


KINDS = [normal, tied, heavy, tiny, subnormal, ranges, half_zero, zero, huge]


@pytest.mark.parametrize("bf16", [False, True], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_encode_is_the_oracle_bit_for_bit(kind, shape, bf16):
    w = torch.tensor(kind(np.random.default_rng(shape[1]), shape), dtype=torch.float32)
    w = w.bfloat16() if bf16 else w
    made, wanted = nvfp4.encode(w), oracle.encode(w.float().numpy())
    np.testing.assert_array_equal(made.scale.numpy(), wanted.scale)
    np.testing.assert_array_equal(made.codes.numpy(), wanted.packed)
    assert made.scale_2.numpy().tobytes() == np.float32(wanted.scale_2).tobytes()
    assert nvfp4.decode(made).numpy().tobytes() == oracle.decode(wanted.packed, wanted.scale, wanted.scale_2).tobytes()


def test_every_scale_byte_with_every_code():
    """Row s holds all 256 code bytes under block scale byte s."""
    codes = torch.arange(256, dtype=torch.uint8).expand(127, 256).contiguous()
    scale = torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 32).contiguous()
    scale_2 = torch.tensor(0.37)
    wanted = oracle.decode(codes.numpy(), scale.numpy(), np.float32(0.37))
    assert nvfp4.decode(nvfp4.Packed(codes, scale, scale_2)).numpy().tobytes() == wanted.tobytes()
    exact = nvfp4.unscaled(codes, scale, torch.float32)
    assert torch.equal(nvfp4.unscaled(codes, scale, torch.bfloat16).float(), exact)


def test_unscaled_takes_leading_axes():
    w = torch.tensor(normal(np.random.default_rng(3), (4, 8, 32)), dtype=torch.float32)
    packed = [nvfp4.encode(x) for x in w]
    stacked = nvfp4.unscaled(torch.stack([p.codes for p in packed]), torch.stack([p.scale for p in packed]), w.dtype)
    for one, p in zip(stacked, packed, strict=True):
        assert torch.equal(one, nvfp4.unscaled(p.codes, p.scale, w.dtype))


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_encoding_what_was_decoded_changes_nothing(kind):
    """Up to the sign of zero codes, which a decoded -0.0 no longer shows."""
    once = nvfp4.encode(torch.tensor(kind(np.random.default_rng(9), (8, 64)), dtype=torch.float32))
    values = nvfp4.decode(once)
    twice = nvfp4.encode(values)
    if torch.equal(twice.scale_2, once.scale_2) and torch.equal(twice.scale, once.scale):
        assert torch.equal(nvfp4.decode(twice), values)
    again = nvfp4.encode(nvfp4.decode(twice))
    assert torch.equal(nvfp4.decode(again), nvfp4.decode(twice))


def test_rows_are_encoded_alike_however_many_at_a_time(monkeypatch):
    w = torch.tensor(heavy(np.random.default_rng(4), (37, 64)), dtype=torch.float32)
    whole = nvfp4.encode(w)
    monkeypatch.setattr(nvfp4, "ENCODE_ELEMENTS", 128)
    parts = nvfp4.encode(w)
    assert torch.equal(parts.codes, whole.codes)
    assert torch.equal(parts.scale, whole.scale)


class Live(TorchDispatchMode):
    """Counts the bytes of tensors made inside it that are alive at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(storage.data_ptr())
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.data_ptr(), storage.nbytes())
                self.most = max(self.most, self.now)
        return out

    def _gone(self, pointer, n):
        self.seen.discard(pointer)
        self.now -= n


@pytest.mark.parametrize("shape", [(64, 4096), (512, 512), (2048, 256), (7, 16)], ids=str)
def test_scratch_stays_inside_its_stated_size(shape):
    """Storages are counted from the outside; inputs and outputs exist before the count begins."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes = torch.empty(shape[0], shape[1] // 2, dtype=torch.uint8)
    scale = torch.empty(shape[0], shape[1] // 16, dtype=torch.uint8)
    scale_2 = nvfp4.tensor_scale(nvfp4.amax(w))
    live = Live()
    live.seen |= {t.untyped_storage().data_ptr() for t in (w, codes, scale, scale_2)}
    gc.disable()
    try:
        with live:
            nvfp4.encode_all(w, scale_2, codes, scale)
    finally:
        gc.enable()
    assert 0 < live.most <= nvfp4.encode_workspace(*shape)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_encode_refuses_what_is_not_finite(bad):
    w = torch.zeros(4, 32)
    w[2, 17] = bad
    with pytest.raises(e.NonFiniteWeightError, match=r"w1: .* at \[2, 17\]"):
        nvfp4.encode(w, "w1")


@pytest.mark.parametrize("shape", [(4, 24), (16,), (2, 2, 16), (0, 16)], ids=str)
def test_encode_refuses_shapes(shape):
    with pytest.raises(e.WrongShapeError, match="w1"):
        nvfp4.encode(torch.zeros(shape), "w1")


@pytest.mark.parametrize(
    ("byte", "error"),
    [(0x7F, e.ScaleNaNError), (0xFF, e.ScaleNaNError), (0x80, e.ScaleNegativeError), (0xFE, e.ScaleNegativeError)],
)
def test_decode_refuses_block_scales(byte, error):
    packed = nvfp4.encode(torch.ones(3, 48))
    packed.scale[1, 2] = byte
    with pytest.raises(error, match=rf"w1: block scale byte {byte:#04x} at \[1, 2\]"):
        nvfp4.decode(packed, "w1")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_decode_refuses_tensor_scales(value):
    packed = nvfp4.encode(torch.ones(3, 48))
    packed.scale_2.fill_(value)
    with pytest.raises(e.TensorScaleError, match="w1"):
        nvfp4.decode(packed, "w1")


def test_zero_tensor_scale_above_zero_codes_is_zero():
    packed = nvfp4.Packed(
        torch.full((2, 8), 0x80, dtype=torch.uint8), torch.full((2, 1), 56, dtype=torch.uint8), torch.zeros(())
    )
    assert not nvfp4.decode(packed).any()


def test_codes_and_scales_of_different_weights():
    with pytest.raises(e.WrongShapeError, match=r"\[4, 8\] and scales \[4, 2\]"):
        nvfp4.unscaled(torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8), torch.float32)
