"""Tables of the codec and of the portable arithmetic: inputs made of integers, and what the reference made of them."""

from __future__ import annotations

import numpy as np

from conformance.checkpoints.source import DEVIATION, integers, key_of
from conformance.goldens.case import Case, Item, Made, Workspace
from reference import arithmetic as ar
from reference import nvfp4

SEED = 11
BLOCK_KINDS = ("normal", "heavy", "ranges", "tied", "tiny", "zero blocks", "zero", "signed zero")


def standard(name: str, *shape: int) -> np.ndarray:
    """Near-normal float64 values of deviation about 1."""
    count = int(np.prod(shape))
    return integers(key_of(SEED, name), 0, count).astype(np.float64).reshape(shape) / np.float64(np.rint(DEVIATION))


def power(name: str, low: int, high: int, *shape: int) -> np.ndarray:
    """Powers of two with exponents low .. high."""
    exponent = integers(key_of(SEED, name), 0, int(np.prod(shape))).reshape(shape) % (high - low + 1) + low
    return np.ldexp(np.ones(shape), exponent)


def weights(kind: str) -> np.ndarray:
    """float32 [8, 64]; `tied` sits on codes and on the middles between them, under power-of-two block scales."""
    x = standard(kind, 8, 64)
    per_block = (8, 4)
    if kind == "heavy":
        x = x * x * x
    if kind == "ranges":
        x = x * power("ranges.scale", -24, 0, *per_block).repeat(16, axis=1)
    if kind == "tied":
        grid = np.array([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0])
        x = grid[integers(key_of(SEED, "tied.choice"), 0, 512).reshape(8, 64) % 15] * np.where(x < 0, -1.0, 1.0)
        x = x * power("tied.scale", -6, 0, *per_block).repeat(16, axis=1)
        x[0, 0] = 6.0 * 448 / 512
    if kind == "tiny":
        x = x * 2.0**-118
    if kind == "zero blocks":
        x = x * (integers(key_of(SEED, "zero.choice"), 0, 32).reshape(per_block) % 2).repeat(16, axis=1)
    if kind in ("zero", "signed zero"):
        x = np.where((x < 0) & (kind == "signed zero"), -0.0, 0.0)
    return x.astype(np.float32)


def codec(workspace: Workspace) -> Made:
    """Every scale byte with every code, and the encodings of some weights."""
    table = np.broadcast_to(np.arange(16, dtype=np.uint8), (127, 16))
    packed = table[:, 0::2] | (table[:, 1::2] << 4)
    scale = np.arange(127, dtype=np.uint8)[:, None]
    items = {
        "decode.packed": Item(packed, logical="F4_E2M1 x2"),
        "decode.scale": Item(scale, logical="F8_E4M3"),
    }
    for name, scale_2 in (("one", 1.0), ("tenth", 0.1), ("subnormal", 1e-41)):
        items[f"decode.values.{name}"] = Item(nvfp4.decode(packed, scale, np.float32(scale_2)))
    for kind in BLOCK_KINDS:
        w = weights(kind)
        got = nvfp4.encode(w)
        items[f"encode.{kind}.weight"] = Item(w)
        items[f"encode.{kind}.packed"] = Item(got.packed, logical="F4_E2M1 x2")
        items[f"encode.{kind}.scale"] = Item(got.scale, logical="F8_E4M3")
        items[f"encode.{kind}.scale_2"] = Item(np.array([got.scale_2]))
        items[f"encode.{kind}.values"] = Item(nvfp4.decode(got.packed, got.scale, got.scale_2))
    middles = (nvfp4.E4M3[:-2] + nvfp4.E4M3[1:-1]) / np.float32(2)
    points = np.concatenate([nvfp4.E4M3[1:-1], middles[1:]])
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(500))])
    blocks = np.zeros((len(points) + 1, 16), np.float32)
    blocks[:-1, 0], blocks[-1, 0] = np.float32(6) * points, 2688
    items["scale.points"] = Item(points)
    items["scale.bytes"] = Item(nvfp4.encode(blocks, amax=2688.0).scale[:-1, 0], logical="F8_E4M3")
    return Made(items)


SPECIAL = (0.0, -0.0, 5e-324, -5e-324, 2.0**-1022, -(2.0**-1022), 1.0, -1.0, 709.78, 709.79, -745.13, -745.14)


def elementary(workspace: Workspace) -> Made:
    """The functions on [-16, 16] and around it, on every 16th binade, and at their edges; softmax and total on rows."""
    x = standard("elementary", 384)
    wide = np.concatenate([x * 4, x[:64] * 100, np.array([*SPECIAL, np.inf, -np.inf, np.nan])])
    binades = np.concatenate([np.ldexp(1.0 + np.abs(x[: len(n)]) / 8, n) for n in [np.arange(-1074, 1024, 16)]])
    rows = standard("rows", 6, 75) * np.array([[0.1], [1.0], [10.0], [100.0], [1000.0], [1.0]])
    rows[5, ::2] = -np.inf
    finite = np.where(np.isfinite(rows), rows, 0.0)
    items = {"x": Item(wide), "positive": Item(binades), "rows": Item(rows)}
    for name in ("exp", "sigmoid", "silu"):
        items[name] = Item(getattr(ar, name)(wide))
    for name in ("log", "rsqrt"):
        items[name] = Item(getattr(ar, name)(binades))
    return Made(items | {"softmax": Item(ar.softmax(rows)), "total": Item(ar.total(finite))})


def products(workspace: Workspace) -> Made:
    """Exact products of operands that a plain `@` gets wrong: wide, cancelling, long, at the ends of the range."""
    items = {}
    for name, (m, k, n), spread in (
        ("plain", (5, 300, 7), 0),
        ("spread 40", (4, 513, 5), 40),
        ("spread 200", (3, 65, 4), 200),
        ("long", (2, 16384, 2), 4),
    ):
        a, b = standard(f"{name}.a", m, k), standard(f"{name}.b", k, n)
        if spread:
            a, b = a * power(f"{name}.pa", -spread, spread, m, k), b * power(f"{name}.pb", -spread, spread, k, n)
        items[name] = Item(ar.matmul(a, b))
        items[f"{name}, cancelling"] = Item(ar.matmul(np.concatenate([a, -a], axis=1), np.concatenate([b, b * 1.5])))
    for name, shift in (("overflow", 512), ("underflow", -530), ("vanishing", -539)):
        a, b = standard(f"{name}.a", 6, 20), standard(f"{name}.b", 20, 6)
        items[name] = Item(ar.matmul(np.ldexp(a, shift), np.ldexp(b, shift)))
    small = standard("weights", 24, 64).astype(np.float32)
    right, x = ar.Sliced.of_weight(small), standard("inputs", 4, 64)
    for arithmetic in ("exact", "bf16", "stochastic"):
        rounding = ar.get_arithmetic(arithmetic, SEED)
        for out in ("bf16", "fp32", "none"):
            items[f"linear.{arithmetic}.{out}"] = Item(rounding.linear(x, right, "golden", out=out))
    values = np.concatenate([standard("rounded", 512) * power("rounded.power", -160, 130, 512), np.array(SPECIAL)])
    items["rounded.x"] = Item(values)
    items["rounded.bf16"], items["rounded.f32"] = Item(ar.round_bf16(values)), Item(ar.round_f32(values))
    for call in ("store", "single"):
        items[f"rounded.{call}"] = Item(getattr(ar.get_arithmetic("stochastic", SEED), call)(values, "golden"))
    return Made(items)


def cases() -> list[Case]:
    return [
        Case("table-codec", codec, ".safetensors", SEED, {"what": "NVFP4 decode and encode"}),
        Case("table-elementary", elementary, ".safetensors", SEED, {"what": "exp, log and what follows from them"}),
        Case("table-products", products, ".safetensors", SEED, {"what": "exact products and roundings"}),
    ]
