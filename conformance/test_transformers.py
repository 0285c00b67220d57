"""The reference against the public torch classes: two implementations that share no line agree on every tap.

Twice: in float32 within the relative L2 distance of 2e-5 that the project promises, and in float64, where the same
allowance counted in units of rounding (2e-5 * 2^-53 / 2^-24) leaves no room for a wrong constant.
"""

import functools

import numpy as np
import pytest

from conformance import checkpoints, pairwise
from conformance.cases.runs import SCHEDULES, random_tokens, text_tokens
from conformance.engines import registry
from conformance.taps import expected
from conformance.trace import Schedule

pytestmark = pytest.mark.transformers

ALLOWED = {"fp32": pairwise.PROMISED, "fp64": pairwise.PROMISED * 2.0**-53 / 2.0**-24}
# A trace keeps logits in float32 on both sides: half a unit in the last place each.
STORED_LOGITS = 2 * 2.0**-24
TOKENS = 72
RUNS = [(0, schedule) for schedule in SCHEDULES] + [
    (seed, schedule) for seed in (1, 2) for schedule in ("one-go+decode", "left-pad+odd-chunks")
]
GEOMETRIES = ("tiny", "odd")
EXPORTS = ("nvidia", "libertai")


class Bench:
    """Opened engines and their traces, made when first asked for; one checkpoint's engines are kept at a time."""

    def __init__(self, tmp_path_factory):
        self.directory = functools.cache(
            lambda geometry, export, seed: checkpoints.make(
                tmp_path_factory.mktemp("made") / "checkpoint", export, geometry, seed
            )
        )
        self.reference = functools.lru_cache(maxsize=1)(lambda *key: opened("reference", self.directory(*key), "exact"))
        self.public = functools.lru_cache(maxsize=2)(
            lambda arithmetic, *key: opened("transformers", self.directory(*key), arithmetic)
        )
        self.truth = functools.lru_cache(maxsize=1)(
            lambda key, tokens, schedule: self.reference(*key).run(np.array(tokens), schedule)
        )


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory)


def opened(name, directory, arithmetic):
    """By name, so that this file is collected without the transformers extra too; selected, it then fails."""
    engine = registry.create(name)
    engine.open(directory, arithmetic=arithmetic)
    return engine


def compare(bench, key, arithmetic, tokens, schedule):
    """Both traces hold every tap of the text stack; choices are the same sets, floats within the allowance."""
    ours = bench.truth(key, tuple(tokens.tolist()), schedule)
    theirs = bench.public(arithmetic, *key).run(tokens, schedule)
    known = expected(bench.reference(*key).config, len(tokens))
    text = {name for name in known if not name.startswith(("mtp.", "vision."))}
    assert set(ours.taps) == set(theirs.taps) == text
    wrong = []
    for pair in pairwise.compare(ours, theirs):
        allowed = ALLOWED[arithmetic] + (STORED_LOGITS if pair.tap == "logits" else 0.0)
        if pair.fault or not pair.relative_l2 <= allowed:
            wrong.append(f"{pair.tap}: relative L2 {pair.relative_l2:.3g}, allowed {allowed:.3g} {pair.fault}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("arithmetic", ALLOWED)
@pytest.mark.parametrize(("seed", "schedule"), RUNS)
@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_tap_of_random_tokens(bench, geometry, export, seed, arithmetic, schedule):
    key = (geometry, export, seed)
    tokens = random_tokens(seed, bench.reference(*key).config.text.vocab_size, TOKENS)
    compare(bench, key, arithmetic, tokens, SCHEDULES[schedule](TOKENS))


@pytest.mark.parametrize("arithmetic", ALLOWED)
@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_tap_of_a_text(bench, geometry, export, arithmetic):
    tokens = text_tokens()
    assert len(tokens) >= 216
    compare(bench, (geometry, export, 0), arithmetic, tokens, SCHEDULES["one-go+decode"](len(tokens)))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_sequences_shorter_than_a_pool_or_a_convolution(bench, geometry, count):
    compare(bench, (geometry, "nvidia", 0), "fp64", random_tokens(count, 256, count), Schedule.of(count))


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("export", EXPORTS)
def test_operands_are_the_decoded_weights(bench, geometry, export):
    """What the classes compute with is what the file says, for every weight they hold."""
    reference, public = bench.reference(geometry, export, 0), bench.public("fp32", geometry, export, 0)
    compared = 0
    for name in reference.checkpoint.names():
        bound = public.operands(name)
        if bound is not None:
            assert (bound["value"].reshape(-1) == reference.checkpoint.weight(name).reshape(-1)).all(), name
            compared += 1
    text = reference.config.text
    assert compared > text.n_routed_experts * 3 * (text.num_hidden_layers - text.first_k_dense_replace)
