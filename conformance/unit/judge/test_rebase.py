"""Rebased comparison: correct traces pass, a fault in one tap is found at that tap, coarser traces still localise."""

import re

import ml_dtypes
import numpy as np
import pytest

from conformance.cases.runs import SCHEDULES, text_tokens
from conformance.checkpoints.shared import shared
from conformance.engines.reference import ReferenceEngine
from conformance.judge import Rebase, graph
from conformance.taps import expected
from conformance.trace import Trace
from reference.checkpoint import open_checkpoint

TOKENS = 32
LONG = 72
COARSE = r"tokens|logits|layers\.\d+\.(in|out)"


class Bench:
    """One checkpoint, its judge with a memory, and a clean trace of the reference in bf16."""

    def __init__(self, geometry, export, tokens=TOKENS, samples=8):
        directory = shared(export, geometry)
        self.checkpoint = open_checkpoint(directory)
        self.judge = Rebase(self.checkpoint, samples=samples, remember=True)
        engine = ReferenceEngine()
        engine.open(directory, arithmetic="bf16")
        self.trace = engine.run(text_tokens()[:tokens], SCHEDULES["odd-chunks+decode"](tokens))

    def first(self, taps):
        rows = self.judge.rows(Trace(self.trace.metadata, taps))
        return next((row for row in rows if not row.passed), None)


@pytest.fixture(scope="module", params=[("odd", "nvidia"), ("tiny", "libertai")], ids="-".join)
def bench(request):
    return Bench(*request.param)


@pytest.fixture(scope="module")
def odd():
    return Bench("odd", "nvidia")


def test_every_tap_is_judged_and_a_correct_trace_passes(bench):
    rows = list(bench.judge.rows(bench.trace))
    assert [row.tap for row in rows if not row.passed] == []
    known = {name for name in expected(bench.checkpoint.config, TOKENS) if not name.startswith(("mtp", "vision"))}
    assert {row.tap for row in rows} | {"tokens"} == known
    assert [row.order for row in rows] == sorted(row.order for row in rows)
    assert all(row.compared == bench.trace.taps[row.tap].size for row in rows if not row.tap.endswith(".scores"))


def test_every_tap_has_one_maker_and_only_earlier_inputs(bench):
    seen = {"tokens"}
    for node in graph.nodes(bench.judge.config):
        assert set(node.inputs) <= seen
        assert not set(node.outputs) & seen
        seen |= set(node.outputs)


def test_half_a_percent_on_any_tap_is_found_at_that_tap():
    odd = Bench("odd", "nvidia", LONG, samples=16)
    missed = {}
    for row in odd.judge.rows(odd.trace):
        if row.kind == "bounded" and (row.layer in (None, 0, 4) or row.tap.endswith("state")):
            tap = odd.trace.taps[row.tap].astype(np.float64) * 1.005
            first = odd.first(odd.trace.taps | {row.tap: tap.astype(np.float32)})
            if first is None or first.tap != row.tap:
                missed[row.tap] = first.tap if first else None
    assert missed == {}


@pytest.mark.parametrize("tap", ["embed", "layers.3.in"])
def test_one_ulp_in_a_copy_is_found(odd, tap):
    taken = odd.trace.taps[tap].astype(np.float32)
    taken.reshape(-1)[77] = np.nextafter(taken.reshape(-1)[77], np.float32(9))
    first = odd.first(odd.trace.taps | {tap: taken})
    assert (first.tap, first.kind, first.failing) == (tap, "exact", 1)
    assert first.values[0].expected_hex != first.values[0].actual_hex


@pytest.mark.parametrize("tap", ["layers.2.attn.k", "layers.4.indexer.scores", "logits"])
def test_nan_fails_where_it_appears_and_what_rests_on_it_says_so(odd, tap):
    taken = odd.trace.taps[tap].astype(np.float32)
    taken.reshape(len(taken), -1)[20, 0] = np.nan
    rows = list(odd.judge.rows(Trace(odd.trace.metadata, odd.trace.taps | {tap: taken})))
    failing = [row for row in rows if not row.passed]
    assert failing[0].tap == tap
    assert all(f"input {tap}" in row.message for row in failing[1:])


def test_logits_of_bf16_values_fail(odd):
    """However wide the tap that holds them."""
    taken = odd.trace.taps["logits"].astype(ml_dtypes.bfloat16).astype(np.float32)
    first = odd.first(odd.trace.taps | {"logits": taken})
    assert first.tap == "logits"
    assert [check.name for check in first.checks if not check.passed] == ["grid"]


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_score_of_what_is_no_candidate_fails(odd, value):
    tap = "layers.4.indexer.scores"
    taken = odd.trace.taps[tap].copy()
    assert taken[20, -1] == -np.inf
    taken[20, -1] = value
    first = odd.first(odd.trace.taps | {tap: taken})
    assert first.tap == tap
    assert next(check.name for check in first.checks if not check.passed) == "finite"
    assert first.values[0].index == (20, taken.shape[1] - 1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("tap", ["layers.0.mid", "layers.2.attn.state", "logits"])
def test_a_huge_value_fails_without_a_warning(odd, tap):
    taken = odd.trace.taps[tap].astype(np.float64)
    taken.reshape(len(taken), -1)[1, 2] = 2.0**127
    assert odd.first(odd.trace.taps | {tap: taken}).tap == tap


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("tap", ["layers.0.attn.in", "layers.2.attn.state", "logits"])
def test_values_past_float32_fail_without_a_warning(odd, tap):
    taken = odd.trace.taps[tap].astype(np.float64)
    taken.reshape(len(taken), -1)[1, 2] = 1e300
    rows = [row for row in odd.judge.rows(Trace(odd.trace.metadata, odd.trace.taps | {tap: taken})) if not row.passed]
    assert rows[0].tap == tap
    assert all("not finite in float32" in row.message for row in rows[1:])


def test_a_wrong_expert_fails_at_the_choice_and_is_replayed_after_it(odd):
    name = "layers.3.router.indices"
    taken = odd.trace.taps[name].copy()
    c = odd.checkpoint.config.text
    size = c.n_routed_experts // c.n_group
    group = taken[20, 0] // size
    spare = next(e for e in range(group * size, (group + 1) * size) if e not in taken[20])
    taken[20, 0] = spare
    rows = [row for row in odd.judge.rows(Trace(odd.trace.metadata, odd.trace.taps | {name: taken})) if not row.passed]
    assert rows[0].tap == name
    assert [flip.chosen for flip in rows[0].flips] == [spare]
    assert {row.tap for row in rows[1:]} == {"layers.3.router.weights", "layers.3.routed.out"}


def test_a_wrong_token_set_fails_at_the_choice(odd):
    name = "layers.4.indexer.selected"
    taken = odd.trace.taps[name].copy()
    taken[20, 0] = 30
    first = odd.first(odd.trace.taps | {name: taken})
    assert first.tap == name
    assert "causal" in {check.name for check in first.checks if not check.passed}


def test_token_sets_that_are_all_empty_fail_at_the_choice(odd):
    name = "layers.4.indexer.selected"
    taps = odd.trace.taps | {name: np.full_like(odd.trace.taps[name], -1)}
    rows = [row for row in odd.judge.rows(Trace(odd.trace.metadata, taps)) if not row.passed]
    assert [row.tap for row in rows[:2]] == [name, "layers.4.attn.core"]


def test_choices_have_no_order():
    """Not the experts of a token, with their weights beside them, and not its token set, -1 included."""
    odd = Bench("odd", "nvidia", tokens=20)
    pattern = r"layers\.(4|5)\..*(in|out|core|q_resid|latent|scores|selected|router.*)"
    taps = {name: tap for name, tap in odd.trace.taps.items() if name == "tokens" or re.fullmatch(pattern, name)}
    turned = {
        name: tap[:, ::-1] for name, tap in taps.items() if re.search(r"selected|router\.(indices|weights)", name)
    }
    assert {"layers.4.indexer.selected", "layers.4.router.weights", "layers.5.indexer.selected"} <= set(turned)
    assert all((tap[:, 0] < 0).all() for name, tap in turned.items() if name.endswith("selected"))
    assert odd.first(taps | {name: np.ascontiguousarray(tap) for name, tap in turned.items()}) is None


def thinned(trace, pattern):
    return {name: tap for name, tap in trace.taps.items() if re.fullmatch(pattern, name)}


def test_a_trace_of_layer_inputs_and_outputs_passes_and_localises(bench):
    taps = thinned(bench.trace, COARSE)
    rows = list(bench.judge.rows(Trace(bench.trace.metadata, taps)))
    assert [row.tap for row in rows if not row.passed] == []
    judged = {row.tap for row in rows}
    layers = bench.checkpoint.config.text.num_hidden_layers
    assert {f"layers.{i}.out" for i in range(layers)} | {"logits"} <= judged
    outs = [row for row in rows if row.tap.endswith(".out")]
    assert all(row.inputs == (row.tap.replace("out", "in"),) for row in outs if row.tap != "layers.5.out")
    for layer in (1, layers - 1):
        name = f"layers.{layer}.out"
        wrong = taps | {name: (taps[name].astype(np.float64) * 1.02).astype(np.float32)}
        if layer + 1 < layers:
            wrong[f"layers.{layer + 1}.in"] = wrong[name]
        assert bench.first(wrong).tap == name


def test_missing_taps_make_steps_coarser(odd):
    lacking = r"layers\.0\.(attn_hc\..*|attn\.(in|q|g))"
    taps = {name: tap for name, tap in odd.trace.taps.items() if not re.fullmatch(lacking, name)}
    steps = {row.tap: row for row in odd.judge.rows(Trace(odd.trace.metadata, taps))}
    assert steps["layers.0.attn.k"].step == "in -> attn.k"
    assert steps["layers.0.mid"].inputs == ("layers.0.in", "layers.0.attn.out")
    assert steps["layers.0.attn.core"].inputs == (
        "layers.0.in", "layers.0.attn.k", "layers.0.attn.v", "layers.0.attn.beta",
    )  # fmt: skip
    assert all(row.passed for row in steps.values())


def test_without_the_choices_doubtful_tokens_are_left_out(bench):
    taps = {k: v for k, v in bench.trace.taps.items() if not k.endswith((".indices", ".selected", ".scores"))}
    taps = {k: v for k, v in taps.items() if ".router." not in k and ".indexer." not in k}
    rows = list(bench.judge.rows(Trace(bench.trace.metadata, taps)))
    assert [row.tap for row in rows if not row.passed] == []
    routed = [row for row in rows if row.tap.endswith("routed.out")]
    assert routed
    assert all(0 < row.compared <= bench.trace.taps[row.tap].size for row in routed)


def test_tokens_and_logits_alone_are_judged_as_one_step(odd):
    """Where the choices are told as well: without, a correct engine may have taken another path for every token."""
    taps = thinned(odd.trace, r"tokens|logits|.*\.(indices|selected)")
    assert all(row.passed for row in odd.judge.rows(Trace(odd.trace.metadata, taps)))
    first = odd.first(taps | {"logits": taps["logits"] * np.float32(1.3)})
    assert first.tap == "logits"
    assert "tokens" in first.inputs
    assert list(odd.judge.rows(Trace(odd.trace.metadata, thinned(odd.trace, "tokens|logits")))) == []


def test_the_same_trace_gets_the_same_verdict(odd):
    again = Rebase(odd.checkpoint, samples=8)
    names = [name for name in odd.trace.taps if name.startswith(("layers.0", "tokens"))]
    trace = Trace(odd.trace.metadata, {name: odd.trace.taps[name] for name in names})
    assert list(again.rows(trace)) == list(odd.judge.rows(trace))


@pytest.mark.parametrize("tap", ["layers.4.attn.latent", "layers.0.attn.in", "layers.0.attn.k"])
def test_memory_and_no_memory_agree(odd, tap):
    """Also where a step's own input (attn.u, conv inputs) is no tap and follows from one that changed."""
    names = [name for name in odd.trace.taps if name.startswith((tap[: len("layers.0")], "tokens"))]
    taps = {name: odd.trace.taps[name] for name in names}
    assert "layers.0.attn.u" not in taps
    list(odd.judge.rows(Trace(odd.trace.metadata, taps)))
    taps[tap] = (taps[tap].astype(np.float64) * 1.01).astype(np.float32)
    fresh = list(Rebase(odd.checkpoint, samples=8).rows(Trace(odd.trace.metadata, taps)))
    assert fresh == list(odd.judge.rows(Trace(odd.trace.metadata, taps)))
    assert list(odd.judge.rows(Trace(odd.trace.metadata, {name: odd.trace.taps[name] for name in names}))) != fresh
