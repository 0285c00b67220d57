"""Synthetic source weights: the same values on every machine, any range of them without the others.

Element i of a tensor is a function of (seed, tensor name, i) alone. splitmix64 of a counter gives 64 bits; the sum of
their four 16-bit fields is an integer with a near-normal distribution (Irwin-Hall of four); one float32 multiplication
scales it and, where there is a centre, one addition moves it. BF16 tensors are then rounded to nearest even. Integer
operations and single IEEE operations leave nothing to the machine.

The spreads are chosen so that no term of the model is hidden by another: normalised activations stay near 1, the SwiGLU
limits are reached by about one value in a hundred, decays, pools, router choices and stream mixtures vary, no parameter
is zero or one, and FP32 parameters are not BF16 values. The sublayers add to the streams about what the embedding put
there: outputs that swamp it would double every rounding error from layer to layer, until correct engines part.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from reference.config import ModelConfig, parse
from reference.layout import TensorSpec, classify, tensors

BLOCK = 1 << 16
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
HALF = 2 * 65535  # the middle of the sum of four 16-bit fields
DEVIATION = math.sqrt(4 * (65536**2 - 1) / 12)
LOW = 0x0000FFFF0000FFFF


class Source(Protocol):
    """What an export is written from: every tensor of the `bf16` layout, float32 values, any range of rows."""

    config: ModelConfig
    gate_rank: int

    def rows(self, spec: TensorSpec, start: int, stop: int) -> np.ndarray:
        """Values [stop - start, ...] of a tensor of the `bf16` layout; representable in `spec.dtype`."""

    def input_scale(self, layer: int, projection: str) -> np.float32:
        """The activation scale of a layer's gate and up ("gate_up") or down ("down") projections."""


@dataclass(frozen=True)
class Rule:
    """value = centre + deviation * (a standard variable moved away from zero by `gap`); see `Synthetic.rule`.

    Several centres are those of the elements of a vector as long.
    """

    deviation: float
    centre: tuple[float, ...] = (0.0,)
    gap: float = 0.0


def key_of(seed: int, name: str) -> int:
    """The 64-bit key of a tensor."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")


def integers(key: int, start: int, count: int) -> np.ndarray:
    """Elements start .. start+count-1 of a key's sequence: int32, symmetric around 0, |value| <= 131070."""
    out = np.empty(count, np.int32)
    for first in range(0, count, BLOCK):
        size = min(BLOCK, count - first)
        z = np.arange(start + first + 1, start + first + 1 + size, dtype=np.uint64)
        z *= np.uint64(GOLDEN)
        z += np.uint64(key)
        z ^= z >> np.uint64(30)
        z *= np.uint64(MIX_1)
        z ^= z >> np.uint64(27)
        z *= np.uint64(MIX_2)
        z ^= z >> np.uint64(31)
        pairs = z & np.uint64(LOW)
        z >>= np.uint64(16)
        z &= np.uint64(LOW)
        pairs += z
        part = out[first : first + size]
        np.copyto(part, (pairs + (pairs >> np.uint64(32))).astype(np.uint32).view(np.int32))
        part -= HALF
    return out


def round_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> nearest BF16 (ties to even) as float32; finite inputs only."""
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    rounded &= np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


class Synthetic:
    """The source model of a seed. `layer_keys` maps stored layers to the layers whose names key the values."""

    def __init__(self, config: dict, gate_rank: int, seed: int, layer_keys: tuple[int, ...] | None = None) -> None:
        self.config = parse(config)
        self.gate_rank = gate_rank
        self.seed = seed
        layers = self.config.text.num_hidden_layers
        self.layer_keys = tuple(range(layers + 1)) if layer_keys is None else layer_keys

    def specs(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in tensors(self.config, "bf16", self.gate_rank)}

    def rows(self, spec: TensorSpec, start: int, stop: int) -> np.ndarray:
        shape = (stop - start, *spec.shape[1:])
        width = math.prod(spec.shape[1:])
        key = key_of(self.seed, self._key_name(spec))
        rule = self.rule(spec, key)
        values = np.empty(shape[0] * width, np.float32)
        scale, gap = np.float32(rule.deviation / DEVIATION), np.int32(rule.gap * DEVIATION)
        for first in range(0, values.size, BLOCK):
            part = values[first : first + BLOCK]
            whole = integers(key, start * width + first, part.size)
            if rule.gap:
                whole += np.where(whole < 0, -gap, gap)
            np.multiply(whole.astype(np.float32), scale, out=part)
            if len(rule.centre) > 1:
                part += np.resize(np.array(rule.centre, np.float32), spec.shape[0])[start:stop]
            elif rule.centre[0]:
                part += np.float32(rule.centre[0])
            if spec.dtype == "BF16":
                part[:] = round_bf16(part)
        return values.reshape(shape)

    def input_scale(self, layer: int, projection: str) -> np.float32:
        key = key_of(self.seed, f"{self.layer_keys[layer]}/{projection}.input_scale")
        return np.float32(8 + (key >> 48) / 8192) / np.float32(2688)

    def _key_name(self, spec: TensorSpec) -> str:
        if spec.layer is None:
            return spec.name
        return spec.name.replace(f".layers.{spec.layer}.", f".layers.{self.layer_keys[spec.layer]}.", 1)

    def rule(self, spec: TensorSpec, key: int) -> Rule:
        """The distribution of a tensor, by its role."""
        role = classify(spec.name)[0].removeprefix("model.language_model.").removeprefix("layers.N.")
        if role.startswith("model.visual."):
            return self._vision_rule(role.removeprefix("model.visual."), spec)
        leaf = role.removeprefix("self_attn.").removeprefix("indexer.")
        fixed = FIXED.get(leaf)
        if fixed is not None:
            return fixed
        if leaf.endswith("norm.weight"):
            return NORM
        fan_in = spec.shape[-1]
        gain = GAINS.get(leaf)
        if gain is None:
            gain = _swiglu_gain(leaf, self.config.text.swiglu_limit, 0.2) * (0.7 + (key >> 48) / 65536 * 0.7)
        return Rule(gain / math.sqrt(fan_in))

    def _vision_rule(self, leaf: str, spec: TensorSpec) -> Rule:
        assert self.config.vision is not None
        if len(spec.shape) == 1:
            return NORM if leaf.endswith(("norm.weight", "norm1.weight", "norm2.weight")) else Rule(0.3)
        fan_in = math.prod(spec.shape[1:])
        gain = 1.4 if ".qkv." in leaf else 1.0
        if leaf.endswith(("gate_proj.weight", "up_proj.weight", "down_proj.weight")):
            gain = _swiglu_gain(leaf, self.config.vision.swiglu_limit, 1.0)
        return Rule(gain / math.sqrt(fan_in))


NORM = Rule(0.15, (1.0,))
CONV = Rule(0.4, gap=0.2)
BASE = Rule(0.8)
SCALE = Rule(0.05, (0.8, 1.1, 1.35))
FIXED = {
    "embed_tokens.weight": Rule(1.0),
    "q_conv1d.weight": CONV,
    "k_conv1d.weight": CONV,
    "v_conv1d.weight": CONV,
    "A_log": Rule(0.3, (0.75,)),
    "dt_bias": Rule(1.0, (-0.75,)),
    "k_norm.bias": Rule(0.4),
    "index_kpool_compress_ape": Rule(1.0),
    "hc_attn_base": BASE,
    "hc_ffn_base": BASE,
    "hc_attn_scale": SCALE,
    "hc_ffn_scale": SCALE,
    # Near 7 a BF16 step is 1/32, as for the released biases: one that is rounded chooses other experts.
    "mlp.gate.e_score_correction_bias": Rule(0.1, (7.0,)),
}
# Output deviation of a linear layer for inputs of deviation 1.
GAINS = {
    "lm_head.weight": 2.0,
    "q_proj.weight": 1.0,
    "k_proj.weight": 1.0,
    "v_proj.weight": 1.5,
    "f_a_proj.weight": 1.0,
    "f_b_proj.weight": 0.7,
    "g_a_proj.weight": 1.0,
    "g_b_proj.weight": 1.5,
    "b_proj.weight": 1.5,
    "o_proj.weight": 0.35,
    "q_a_proj.weight": 1.0,
    "q_b_proj.weight": 1.4,
    "kv_a_proj_with_mqa.weight": 1.0,
    "kv_b_proj.weight": 1.4,
    "wq_b.weight": 1.5,
    "wk.weight": 1.0,
    "weights_proj.weight": 1.0,
    "index_kpool_compress_gate": 1.5,
    "hc_attn_fn": 0.7,
    "hc_ffn_fn": 0.7,
    "mlp.gate.weight": 1.5,
    "eh_proj.weight": 1.0,
}


def _swiglu_gain(leaf: str, limit: float, output: float) -> float:
    """Gate and up outputs of deviation 0.4 * limit, so that about 1 % meet the limit; down brings back `output`."""
    deviation = 0.4 * limit
    if not leaf.endswith("down_proj.weight"):
        return deviation
    square = deviation * deviation
    return output / (deviation * math.sqrt(square / 4 * (1 + square / (1 + square))))
