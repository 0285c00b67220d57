"""Op by op: the reference and the fast engine on the case tables, both in double precision.

The fast op runs lifted to float64, so that what is left between the two is mathematics: they agree to a few thousand
units of float64 rounding of the op's own scale, where a wrong constant or term shows at a millionth of the value or
more. Choices must be the same.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from conformance.cases import indexer, kda, mhc, mla, mlp, norm, router
from conformance.lift import lifted
from fast.ops import indexer as fast_indexer
from fast.ops import kda as fast_kda
from fast.ops import mhc as fast_mhc
from fast.ops import mla as fast_mla
from fast.ops import mlp as fast_mlp
from fast.ops import norm as fast_norm
from fast.ops import router as fast_router
from reference.arithmetic import Sliced, get_arithmetic
from reference.ops import indexer as slow_indexer
from reference.ops import kda as slow_kda
from reference.ops import mhc as slow_mhc
from reference.ops import mla as slow_mla
from reference.ops import mlp as slow_mlp
from reference.ops import norm as slow_norm
from reference.ops import router as slow_router
from reference.weights import Weights

ROOT = Path(__file__).parents[3]
EXACT = get_arithmetic("exact")
ROUNDINGS = 2.0**12 * 2.0**-53


class Bank:
    """Experts as the fast engine holds them."""

    def __init__(self, i):
        self.gate, self.up, self.down = (list(t(i[f"{name}_proj"])) for name in ("gate", "up", "down"))
        self.first, self.count = 0, len(self.gate)


def t(array):
    """A tensor of the same values: float64, or int64 for integers."""
    return torch.from_numpy(np.array(array))


def slow_rule(i, run):
    inputs = slow_kda.inputs(EXACT, i["q"], i["k"], i["v"], i["g"], i["beta"])
    return run(inputs, i["state"])


def fast_rule(i, run):
    width = i["q"].shape[-1]
    inputs = fast_kda.unit(t(i["q"])) * width**-0.5, fast_kda.unit(t(i["k"])), *(t(i[n]) for n in ("v", "g", "beta"))
    return run(*inputs, t(i["state"]))


def slow_conv(i):
    named = {f"{n}_conv1d.weight": part for n, part in zip("qkv", np.split(i["weight"], 3), strict=True)}
    return slow_kda.conv(EXACT, i["u"], i["history"], Weights.of(named))


def slow_decay(i):
    """The gates of a token whose bottleneck output is f, through projections that are the identity."""
    eye = np.eye(i["f"].shape[1])
    named = {"f_a_proj.weight": eye, "f_b_proj.weight": eye, "b_proj.weight": eye[: len(i["A_log"])]}
    scope = Weights.of(named | {"A_log": i["A_log"], "dt_bias": i["dt_bias"]})
    return slow_kda.gates(EXACT, i["f"], scope, len(i["A_log"]), i["lower_bound"])[:1]


def slow_routed(i):
    def expert(e):
        return Weights.of({f"{n}.weight": i[n][e] for n in ("gate_proj", "up_proj", "down_proj")})

    return (slow_mlp.routed(EXACT, i["x"], i["indices"], i["weights"], expert, i["limit"]),)


def slow_site(i):
    made = slow_mhc.site_weights(
        EXACT,
        i["streams"],
        Sliced.of_weight(i["fn"]),
        i["base"],
        i["scale"],
        rms_norm_eps=i["rms_norm_eps"],
        hc_eps=i["hc_eps"],
        hc_sinkhorn_iters=i["iterations"],
    )
    return (*made, slow_mhc.collapse(EXACT, i["streams"], made.pre))


def fast_site(i):
    streams = t(i["streams"])
    weights = fast_mhc.Weights(t(i["fn"]), t(i["base"]), t(i["scale"]))
    made = fast_mhc.mix(streams, weights, norm_eps=i["rms_norm_eps"], hc_eps=i["hc_eps"], iterations=i["iterations"])
    return (*made, fast_mhc.collapse(streams, made.pre))


def fast_scores(i):
    visible = torch.arange(len(i["q"])) + i["seen"] + 1
    return (fast_indexer.masked(t(i["q"]), t(i["weights"]), t(i["pool_keys"]), visible, i["S"]),)


def fast_select(i):
    visible = torch.arange(len(i["scores"])) + i["seen"] + 1
    pools = fast_indexer.best(t(i["scores"]), i["topk"] // i["S"])
    return (fast_indexer.tokens(pools, visible, i["S"], i["topk"] + i["S"] - 1),)


def fast_pool(i):
    S, p = i["ape"].shape
    return (fast_indexer.pool(t(i["k"]).view(-1, S, p), t(i["gate"]).view(-1, S, p), t(i["ape"])),)


def slow_attend(i, form):
    return (slow_mla.attend(EXACT, i["q"], i["c"], i["selected"], Weights.of({"kv_b_proj.weight": i["kv_b"]}), form),)


def fast_attend(i, absorbed):
    return (
        fast_mla.attend(t(i["q"]), t(i["c"]), t(i["selected"]), t(i["kv_b"]), values=i["values"], absorbed=absorbed),
    )


PAIRS = {
    (norm, "rms"): (
        lambda i: (slow_norm.rms_norm(EXACT, i["x"], i["weight"], i["eps"], "x"),),
        [lambda i: (fast_norm.rms(t(i["x"]), t(i["weight"]), i["eps"]),)],
    ),
    (norm, "layer"): (
        lambda i: (slow_norm.layer_norm(EXACT, i["x"], i["weight"], i["bias"], i["eps"], "x"),),
        [lambda i: (fast_norm.layer(t(i["x"]), t(i["weight"]), t(i["bias"]), i["eps"]),)],
    ),
    (mhc, "site"): (slow_site, [fast_site]),
    (mhc, "combine"): (
        lambda i: (slow_mhc.combine(EXACT, i["streams"], i["out"], slow_mhc.HC(i["post"], i["post"], i["comb"])),),
        [lambda i: (fast_mhc.combine(t(i["streams"]), t(i["out"]), t(i["post"]), t(i["comb"])),)],
    ),
    (kda, "rule"): (
        lambda i: slow_rule(i, lambda x, M: slow_kda.recurrent(EXACT, x, M)),
        [
            lambda i: fast_rule(i, fast_kda.recurrent),
            *(lambda i, w=w: fast_rule(i, lambda *x: fast_kda.chunked(w, *x)) for w in (16, 64)),
        ],
    ),
    (kda, "conv"): (slow_conv, [lambda i: fast_kda.conv(t(i["u"]), t(i["weight"]), t(i["history"]))]),
    (kda, "decay"): (
        slow_decay,
        [lambda i: (fast_kda.decay(t(i["f"]), t(i["A_log"]), t(i["dt_bias"]), i["lower_bound"]),)],
    ),
    (indexer, "pool"): (lambda i: (slow_indexer.pool(EXACT, i["k"], i["gate"], i["ape"]),), [fast_pool]),
    (indexer, "scores"): (
        lambda i: (slow_indexer.scores(EXACT, i["q"], i["weights"], i["pool_keys"], i["seen"], i["S"]),),
        [fast_scores],
    ),
    (indexer, "select"): (
        lambda i: (slow_indexer.select(i["scores"], i["seen"], i["topk"], i["S"]),),
        [fast_select],
    ),
    (mla, "attend"): (
        lambda i: slow_attend(i, "expanded"),
        [lambda i: fast_attend(i, False), lambda i: fast_attend(i, True)],
    ),
    (mlp, "activation"): (
        lambda i: (slow_mlp.activation(EXACT, i["gate"], i["up"], i["limit"], "x"),),
        [lambda i: (fast_mlp.swiglu(t(i["gate"]), t(i["up"]), i["limit"]),)],
    ),
    (mlp, "routed"): (
        slow_routed,
        [lambda i: (fast_mlp.routed(t(i["x"]), Bank(i), t(i["indices"]), t(i["weights"]), i["limit"]),)],
    ),
    (router, "choose"): (
        lambda i: (slow_router.choose(EXACT, i["scores"] + i["bias"], i["k"], i["groups"], i["kept"]),),
        [lambda i: (fast_router.choose(t(i["scores"]), t(i["bias"]), i["k"], i["groups"], i["kept"]),)],
    ),
    (router, "weigh"): (
        lambda i: (slow_router.routing_weights(EXACT, i["scores"], i["indices"], i["normalise"], i["factor"]),),
        [lambda i: (fast_router.weigh(t(i["scores"]), t(i["indices"]), normalise=i["normalise"], factor=i["factor"]),)],
    ),
}
TABLES = (norm, mhc, kda, indexer, mla, mlp, router)
RUNS = [
    pytest.param(case, truth, form, id=f"{table.__name__.rpartition('.')[2]}-{case}-form{place}")
    for table in TABLES
    for case in table.CASES
    for truth, forms in [PAIRS[table, case.op]]
    for place, form in enumerate(forms)
]


@pytest.mark.parametrize(("case", "truth", "form"), RUNS)
def test_both_rooms_compute_the_same(case, truth, form):
    expected = truth(case.make())
    with lifted():
        found = [value.numpy() for value in form(case.make())]
    assert len(expected) == len(found) > 0
    for want, have in zip(expected, found, strict=True):
        assert want.shape == have.shape
        if want.dtype.kind in "iu":
            assert np.array_equal(want, have)
            continue
        assert have.dtype == np.float64, "the op left double precision"
        finite = np.isfinite(want)
        assert np.array_equal(want[~finite], have[~finite])
        scale = np.abs(want[finite]).max(initial=0.0)
        assert np.abs(want[finite] - have[finite]).max(initial=0.0) <= ROUNDINGS * scale


def test_every_case_has_a_name_of_its_own():
    for table in TABLES:
        names = [str(case) for case in table.CASES]
        assert len(set(names)) == len(names) > 0


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_inputs_are_float32_values_and_the_same_every_time(table):
    for case in table.CASES:
        first, second = case.make(), case.make()
        assert set(first) == set(second)
        for name, value in first.items():
            assert np.array_equal(value, second[name]), (case, name)
            if isinstance(value, np.ndarray) and value.dtype.kind == "f":
                assert np.array_equal(value.astype(np.float32).astype(np.float64), value), (case, name)


def test_the_rooms_mirror_each_other():
    """Every operation is one file of the same name in the reference, in the fast engine and among the case tables."""

    def names(*place):
        return {path.stem for path in ROOT.joinpath(*place).glob("*.py")} - {"__init__"}

    assert names("reference", "ops") == names("fast", "ops") == names("conformance", "cases") - {"case", "runs"}
