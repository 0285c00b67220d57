"""How a faulty engine is judged: by its trace and operands, or by what it must encode, decode, read or refuse.

A probe gets a mutant and the bench it runs on, applies the patch itself and answers a `Verdict`. Places that are no
taps have names of their own: `encode.scale`, `decode`, `refuse.nan`, `config.hc_eps`.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from conformance.cases.runs import text_tokens
from conformance.checkpoints.configs import config_json
from conformance.checkpoints.geometry import geometry as geometry_of
from conformance.judge import compare
from conformance.judge import drafts as block
from conformance.mutants.bench import Bench
from conformance.mutants.record import Mutant
from conformance.speculation import Outcome, fast_runner, wrong_at, wrong_in_turn
from conformance.suite import operands_of
from conformance.trace import Trace
from reference import config as reference_config
from reference import nvfp4


@dataclass(frozen=True)
class Verdict:
    """`changed`: some bit of the outcome differs from the sound engine's. `first` is the first divergence, if any,
    `operand` a differing operand: one that the record does not name, where there is any. `places` are all where the
    outcome could have diverged, in order.
    """

    passed: bool
    changed: bool
    first: str = ""
    operand: str = ""
    line: str = ""
    places: tuple[str, ...] = ()

    def at(self, mutant: Mutant) -> bool:
        """Whether the first divergence is the first place that one of the record's globs names, and an operand of the
        record's differs where it names any, but no other."""
        named = [next((p for p in self.places if fnmatchcase(p, glob)), None) for glob in mutant.first_tap]
        return (
            not self.passed
            and self.first in named
            and (not mutant.operand or fnmatchcase(self.operand, mutant.operand))
        )


def trace(mutant: Mutant, bench: Bench) -> Verdict:
    """Rebased comparison up to the first step that fails, and the operands bit by bit."""
    sound = bench.sound(mutant)
    found, engine = bench.run(mutant, mutant.patch)
    result = compare(found, bench.checkpoint, operands=operands_of(engine), judge=bench.judge, stop=True)
    bad = [row.name for row in result.tensors if not row.passed]
    strange = [name for name in bad if not (mutant.operand and fnmatchcase(name, mutant.operand))]
    operand = (strange or bad or [""])[0]
    first = result.first_divergence
    changed = bool(bad) or not same(sound, found)
    steps = [*bench.judge.order, *block.order(bench.judge.config)]
    places = *(name for name in steps if name in sound.taps), *(row.name for row in result.tensors)
    line = first.line if first else ""
    return Verdict(result.passed, changed, first.tap if first else "", operand, line, places)


def same(a: Trace, b: Trace) -> bool:
    return list(a.taps) == list(b.taps) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in zip(a.taps.values(), b.taps.values(), strict=True)
    )


def codec(mutant: Mutant, bench: Bench) -> Verdict:
    """Every code under every scale, encodings of blocks that find every rounding, and what must be refused."""
    with mutant.patch.applied():
        return _first(codec_answers(), _codec_truth())


def config(mutant: Mutant, bench: Bench) -> Verdict:
    """Every field as the reference reads it, and configs that contradict themselves, which must be refused."""
    import fast.config

    raws = {name: json.loads(config_json(geometry_of(name).config, "nvidia")) for name in GEOMETRIES}
    with mutant.patch.applied():
        found = dict(config_answers(raws, fast.config.parse))
    return _first(found.items(), dict(config_answers(raws, reference_config.parse)))


def _first(found: Any, truth: dict[str, Any]) -> Verdict:
    """The first answer that is not the truth; all answers are exact."""
    for name, value in found:
        if value != truth[name]:
            line = f"{name}: {str(value)[:80]}, expected {str(truth[name])[:80]}"
            return Verdict(False, True, name, "", line, tuple(truth))
    return Verdict(True, False)


GEOMETRIES = ("tiny", "odd")


def weights() -> Iterator[tuple[str, np.ndarray]]:
    """Blocks that find a wrong rounding, clamp, tie, sign or rule for zeros. Float32 [rows, 32]."""
    # A largest value of 2688 makes scale_2 one, and a block's largest 6 a block scale of one: quotients are the values.
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], np.float32)
    blocks = np.zeros((6, 32), np.float32)
    blocks[:, 0] = 2688.0
    blocks[0, 16:] = np.concatenate([ties, -ties])
    blocks[1, 16:] = np.concatenate([ties[:4] * 64, -ties * 64, ties[4:] * 64])
    blocks[2, 16:] = np.linspace(-(2.0**-12), 2.0**-12, 16)
    blocks[3, 16:] = np.linspace(-6.0, 6.0, 16)
    blocks[4, 16:] = -0.0
    blocks[5, 16:] = np.concatenate([np.linspace(-0.3, 0.2, 15), [6.0]])
    yield "ties", blocks
    yield "zeros", np.zeros((2, 32), np.float32)
    mixed = np.zeros((2, 32), np.float32)
    mixed[0, 16:] = 1.0
    mixed[1, 0] = -0.0
    yield "zero-block", mixed
    wide = np.array([2.0**e for e in range(-24, 8)], np.float32) * np.float32(1.1)
    yield "range", np.stack([wide, -wide])
    draw = np.random.default_rng(7).standard_normal((64, 32)).astype(np.float32)
    yield "normal", draw
    yield "small", draw * np.float32(2.0**-20)
    spread = draw * np.exp2(np.arange(64, dtype=np.float32)[:, None] / 4 - 12)
    yield "spread", spread.astype(np.float32)


def _codec_truth() -> dict[str, Any]:
    truth: dict[str, Any] = {"decode": _decoded_bytes(_every_code()), "refuse": "refused"}
    for name, w in weights():
        packed = nvfp4.encode(w)
        truth[f"encode.scale_2.{name}"] = np.float32(packed.scale_2).tobytes()
        truth[f"encode.scale.{name}"] = packed.scale.tobytes()
        truth[f"encode.codes.{name}"] = packed.packed.tobytes()
    foreign = nvfp4.encode(_foreign(), amax=FOREIGN)
    truth |= {"encode.scale.foreign": foreign.scale.tobytes(), "encode.codes.foreign": foreign.packed.tobytes()}
    return truth | {f"refuse.{name}": True for name in ("nan", "negative", "scale_2", "infinite")}


FOREIGN = 2688.0
"""Largest value of the tensor that a slice's scale_2 is taken from."""


def _foreign() -> np.ndarray:
    """[8, 32]: larger than the tensor that scale_2 is of; block scales of 463, 464, 465 and 1e4 have to be clamped."""
    w = np.zeros((8, 32), np.float32)
    for row, ratio in enumerate((447, 448, 449, 463, 464, 465, 1e4, 1e6)):
        w[row, :16] = np.linspace(-6.0, 6.0, 16) * ratio
        w[row, 16:] = np.linspace(-6.0, 6.0, 16)
    return w


def _every_code() -> tuple[np.ndarray, np.ndarray]:
    """Codes u8 [127, 256] and scales u8 [127, 32]: every byte under every scale that is a number."""
    codes = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 256), (127, 1))
    scale = np.tile(np.arange(127, dtype=np.uint8)[:, None], (1, 32))
    return codes, scale


def _decoded_bytes(packed: tuple[np.ndarray, np.ndarray]) -> bytes:
    return nvfp4.decode(*packed, np.float32(0.37)).tobytes()


def codec_answers() -> Iterator[tuple[str, Any]]:
    import torch

    import fast.nvfp4 as fast
    from fast.errors import InputError, NonFiniteWeightError

    codes, scale = (torch.from_numpy(x) for x in _every_code())
    yield "decode", fast.decode(fast.Packed(codes, scale, torch.tensor(np.float32(0.37)))).numpy().tobytes()
    for name, w in weights():
        packed = fast.encode(torch.from_numpy(w))
        yield f"encode.scale_2.{name}", packed.scale_2.numpy().tobytes()
        yield f"encode.scale.{name}", packed.scale.numpy().tobytes()
        yield f"encode.codes.{name}", packed.codes.numpy().tobytes()
    foreign = torch.from_numpy(_foreign())
    nibbles, bytes_ = (torch.empty(len(foreign), n, dtype=torch.uint8) for n in (16, 2))
    fast.encode_all(foreign, fast.tensor_scale(torch.tensor(FOREIGN)), nibbles, bytes_)
    yield "encode.scale.foreign", bytes_.numpy().tobytes()
    yield "encode.codes.foreign", nibbles.numpy().tobytes()
    one, unit = torch.full((1, 8), 0x22, dtype=torch.uint8), torch.tensor(1.0)

    def refuses(act: Callable[[Any], object], value: Any, kind: type[InputError] = InputError) -> bool:
        try:
            act(value)
        except kind:
            return True
        except InputError:
            return False
        return False

    def scaled(byte: int) -> Any:
        return fast.Packed(one, torch.tensor([[byte]], dtype=torch.uint8), unit)

    yield "refuse.nan", all(refuses(fast.decode, scaled(b)) for b in (0x7F, 0xFF))
    yield "refuse.negative", all(refuses(fast.decode, scaled(b)) for b in (0x80, 0xB8))
    lies = [torch.tensor(value) for value in (float("nan"), float("inf"), 3e38, -1.0, 0.0)]
    byte = torch.tensor([[0x38]], dtype=torch.uint8)
    yield "refuse.scale_2", all(refuses(fast.decode, fast.Packed(one, byte, s)) for s in lies)
    bad = [torch.ones(2, 16).index_fill(1, torch.tensor([3]), value) for value in (float("nan"), float("inf"))]
    yield "refuse.infinite", all(refuses(fast.encode, w, NonFiniteWeightError) for w in bad)


Change = Callable[[dict[str, Any]], object]
LIES: dict[str, Change] = {
    "gate_lower_bound": lambda t: t["linear_attn_config"].pop("gate_lower_bound"),
    "index_kpool": lambda t: t.pop("index_kpool"),
    "both-lists": lambda t: t["linear_attn_config"]["kda_layers"].append(
        t["linear_attn_config"]["full_attn_layers"][0]
    ),
    "neither-list": lambda t: t["linear_attn_config"]["kda_layers"].pop(),
    "out-of-range": lambda t: t["linear_attn_config"]["kda_layers"].append(t["num_hidden_layers"]),
    "one-based": lambda t: t["linear_attn_config"].update(
        kda_layers=[i + 1 for i in t["linear_attn_config"]["kda_layers"]]
    ),
    "layer_types": lambda t: t["layer_types"].__setitem__(0, "deepseek_sparse_attention"),
    "unknown-layer-type": lambda t: t["layer_types"].__setitem__(0, "mamba"),
    "mlp_layer_types": lambda t: t["mlp_layer_types"].__setitem__(0, "sparse"),
    "scoring_func": lambda t: t.update(scoring_func="softmax"),
    "topk_method": lambda t: t.update(topk_method="greedy"),
    "hidden_act": lambda t: t.update(hidden_act="gelu"),
    "rms_norm_eps": lambda t: t.pop("rms_norm_eps"),
    "swiglu_limit": lambda t: t.pop("swiglu_limit"),
    "qk_rope_head_dim": lambda t: t.update(qk_rope_head_dim=64),
    "positive-bound": lambda t: t["linear_attn_config"].update(gate_lower_bound=5.0),
    "topk-of-pools": lambda t: t.update(index_topk=t["index_topk"] + 1),
    "group-count": lambda t: t.update(n_group=7),
}
"""text_config edits after which the config must be refused."""


def config_answers(raws: dict[str, dict[str, Any]], parse: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
    """Fields that both readers name alike, of every geometry, then which lies are refused (True for each)."""
    import fast.errors
    import reference.errors

    names = {f.name for f in fields(reference_config.TextConfig)}
    for geometry, raw in raws.items():
        text = parse(copy.deepcopy(raw)).text
        for f in fields(text):
            if f.name in names:
                value = getattr(text, f.name)
                yield f"config.{f.name}.{geometry}", tuple(value) if isinstance(value, (list, tuple)) else value
        for name, lie in LIES.items():
            changed = copy.deepcopy(raw)
            lie(changed["text_config"])
            try:
                parse(changed)
                yield f"refuse.{name}.{geometry}", False
            except (fast.errors.InputError, reference.errors.InputError):
                yield f"refuse.{name}.{geometry}", True


DRAFTS, PROMPT, NEW = 4, 30, 24
"""Drafts a round, and tokens: the prompt ends inside a pool of either geometry."""


def drafts(mutant: Mutant, bench: Bench) -> Verdict:
    """One round each with the first wrong draft at every place, and a longer run, against plain decoding: the tokens,
    then every state of target and block by name.
    """
    prompt = text_tokens()[:PROMPT].tolist()
    sound = _plain(bench.directory)
    truth = sound(NEW).tokens
    with mutant.patch.applied():
        faulty = fast_runner(bench.directory)
        vocab = faulty.vocab
        scripts = [None, *(wrong_at(place, vocab) for place in range(DRAFTS + 1))]
        found = [faulty.once(prompt, truth, DRAFTS, script) for script in scripts]
        found.append(faulty.drafted(prompt, truth, DRAFTS, wrong_in_turn(vocab)))
    for outcome in found:
        count = len(truth) if len(outcome.rounds) > 1 else 2 + outcome.rounds[0].right
        expected = sound(count)
        first = ["tokens"] if outcome.tokens != expected.tokens else expected.same_states(outcome)
        if first:
            line = f"{first[0]} differs from plain decoding of {count} tokens"
            places = "tokens", *sorted(expected.states.keys() | outcome.states.keys())
            return Verdict(False, True, first[0], "", line, places)
    return Verdict(True, False)


@functools.cache
def _plain(directory: Path) -> Callable[[int], Outcome]:
    """count -> plain decoding by the sound engine."""
    runner, prompt = fast_runner(directory), text_tokens()[:PROMPT].tolist()
    return functools.cache(lambda count: runner.plain(prompt, count))


PROBES: dict[str, Callable[[Mutant, Bench], Verdict]] = {
    "trace": trace,
    "codec": codec,
    "config": config,
    "drafts": drafts,
}
