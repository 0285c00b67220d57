"""The judge judged: traces that are damaged, incomplete or untrue each fail, or pass, as written here."""

import json

import ml_dtypes
import numpy as np
import pytest

from conformance.cases.runs import SCHEDULES, text_tokens
from conformance.checkpoints.shared import shared
from conformance.engines.reference import ReferenceEngine
from conformance.errors import TraceTruncatedError
from conformance.judge import Rebase, Result, compare
from conformance.judge.bounds import Step
from conformance.judge.rows import copy_row
from conformance.trace import Trace
from reference.checkpoint import open_checkpoint

TOKENS = 24


class Bench:
    def __init__(self):
        directory = shared("libertai", "odd")
        self.checkpoint = open_checkpoint(directory)
        self.judge = Rebase(self.checkpoint, samples=8, remember=True)
        self.engine = ReferenceEngine()
        self.engine.open(directory, arithmetic="bf16")
        self.ids = text_tokens()[:TOKENS]
        self.trace = self.engine.run(self.ids, SCHEDULES["one-go+decode"](TOKENS))

    def judged(self, taps=None, metadata=None, **options) -> Result:
        trace = Trace(
            self.trace.metadata if metadata is None else self.trace.metadata | metadata,
            self.trace.taps if taps is None else taps,
        )
        return compare(trace, self.checkpoint, judge=self.judge, **options)

    def with_tap(self, name, tap, **options):
        return self.judged(self.trace.taps | {name: tap}, **options)

    def without(self, *names):
        return {name: tap for name, tap in self.trace.taps.items() if name not in names}


@pytest.fixture(scope="module")
def bench():
    return Bench()


@pytest.fixture(scope="module")
def clean(bench):
    return bench.judged(operands=bench.engine.operands, expected_tokens=bench.ids)


def test_a_correct_run_passes_whole(clean, bench):
    assert clean.passed
    assert clean.first_divergence is None
    assert clean.problems == ()
    assert clean.coverage.taps_missing == clean.coverage.tensors_missing == ()
    assert clean.coverage.taps_compared == len(bench.trace.taps) - 1
    assert clean.tokens == tuple(bench.ids)
    assert clean.statistics.checks > 1000


def test_a_result_survives_json(clean):
    text = clean.to_json()
    assert Result.from_json(text) == clean
    assert Result.from_json(text).to_json() == text
    with pytest.raises(ValueError, match="not a glm53-result"):
        Result.from_json(json.dumps({"format": "other"}))
    with pytest.raises(ValueError, match="nested too deeply"):
        Result.from_json("[" * 100_000)


def test_the_heat_map_has_a_cell_per_layer_and_token(clean, bench):
    cells = np.array(clean.heat_map())
    assert cells.shape == (bench.checkpoint.config.text.num_hidden_layers, TOKENS)
    assert (cells > 0).all()
    assert (cells < 1).all()


@pytest.mark.parametrize("tap", ["layers.1.attn.latent", "layers.3.routed.out", "final.norm"])
def test_a_zeroed_tensor_is_named(bench, tap):
    result = bench.with_tap(tap, np.zeros_like(bench.trace.taps[tap]))
    assert result.first_divergence.tap == tap
    assert result.first_divergence.line.startswith(f"first divergence: TAP {tap} (")


@pytest.mark.parametrize("value", [np.inf, np.nan], ids=str)
def test_infinity_and_nan_fail_where_they_are(bench, value):
    tap = bench.trace.taps["layers.2.mlp.in"].astype(np.float32)
    tap[3, 4] = value
    result = bench.with_tap("layers.2.mlp.in", tap)
    assert result.first_divergence.tap == "layers.2.mlp.in"
    assert result.first_divergence.check == "finite"


def test_logits_that_are_nan_everywhere_fail(bench):
    result = bench.with_tap("logits", np.full_like(bench.trace.taps["logits"], np.nan))
    assert not result.passed
    assert not any(row.passed for row in result.logits)
    assert Result.from_json(result.to_json()).to_json() == result.to_json()


def test_negative_zero_is_the_value_zero_in_a_copy():
    source = np.array([[0.0, -0.0, 1.0], [2.0, 3.0, 4.0]])
    step = Step(0, "embed", None, "tokens -> embed", ("tokens",))
    assert copy_row(step, np.array([[-0.0, 0.0, 1.0], [2.0, 3.0, 4.0]], np.float32), source).passed
    other = copy_row(step, np.array([[-0.0, 1e-45, 1.0], [2.0, 3.0, 4.0]], np.float32), source)
    assert (other.passed, other.failing, other.worst_row) == (False, 1, 0)


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("layers.0.mid", np.int32, "dtype"),
        ("layers.3.router.indices", np.float32, "dtype"),
        ("logits", ml_dtypes.bfloat16, "dtype"),
        ("tokens", np.float32, "dtype"),
    ],
)
def test_a_wrong_dtype_fails(bench, name, kind, told):
    result = bench.with_tap(name, bench.trace.taps[name].astype(kind))
    assert not result.passed
    assert told in {problem.kind for problem in result.problems}
    assert any(problem.name == name for problem in result.problems)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_tokens_that_are_no_numbers_fail(bench, value):
    result = bench.with_tap("tokens", np.full(bench.trace.taps["tokens"].shape, value, np.float32))
    assert not result.passed
    assert ("dtype", "tokens") in {(problem.kind, problem.name) for problem in result.problems}
    assert result.tokens == ()


def test_a_wider_float_that_keeps_the_values_passes(bench):
    taps = {
        name: tap.astype(np.float32) if tap.dtype == ml_dtypes.bfloat16 else tap
        for name, tap in bench.trace.taps.items()
    }
    assert bench.judged(taps).passed


def test_a_tap_left_out_is_not_covered_and_passes(bench):
    result = bench.judged(bench.without("layers.2.attn.q", "layers.5.mid"))
    assert result.passed
    assert result.coverage.taps_missing == ("layers.2.attn.q", "layers.5.mid")


@pytest.mark.parametrize("name", ["tokens", "logits"])
def test_what_every_trace_needs_may_not_be_left_out(bench, name):
    result = bench.judged(bench.without(name))
    assert not result.passed
    assert ("missing", name) in {(problem.kind, problem.name) for problem in result.problems}


def test_a_renamed_tap_fails_and_both_names_are_told(bench):
    taps = bench.without("layers.2.attn.q") | {"layers.2.attn.query": bench.trace.taps["layers.2.attn.q"]}
    result = bench.judged(taps)
    assert not result.passed
    assert result.coverage.taps_unknown == ("layers.2.attn.query",)
    assert result.coverage.taps_missing == ("layers.2.attn.q",)
    assert "layers.2.attn.query" in result.first_divergence.line


@pytest.mark.parametrize("name", ["layers.7.in", "layers.0.attn.latent", "layers.0.router.logits", "notes"])
def test_a_tap_that_no_table_knows_fails(bench, name):
    result = bench.judged(bench.trace.taps | {name: np.zeros((TOKENS, 4), np.float32)})
    assert not result.passed
    assert result.coverage.taps_unknown == (name,)


@pytest.mark.parametrize("name", ["layers.0.in", "layers.4.indexer.scores", "layers.6.attn.state", "logits"])
def test_a_tap_with_rows_cut_off_fails_at_that_tap(bench, name):
    result = bench.with_tap(name, bench.trace.taps[name][:-1])
    assert not result.passed
    assert result.first_divergence.tap == name
    assert "shape" in result.first_divergence.line


def test_a_truncated_file_is_refused(bench, tmp_path):
    path = tmp_path / "cut.trace"
    bench.trace.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TraceTruncatedError, match=r"cut\.trace"):
        Trace.load(path)


def test_an_empty_run_fails(bench):
    empty = {name: tap[:0] for name, tap in bench.trace.taps.items()}
    for taps in (empty, {}):
        result = bench.judged(taps)
        assert not result.passed
        assert "empty" in {problem.kind for problem in result.problems}
        assert result.first_divergence.line.startswith("first divergence: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("config_sha256", "0" * 64),
        ("export", "nvidia"),
        ("schedule", '{"prefill": [7], "decode": 1}'),
        ("schedule", "all at once"),
        ("arithmetic", "float8"),
        ("tp", "5"),
        ("ep", "1000"),
        ("ep", "two"),
    ],
)
def test_metadata_that_lie_fail(bench, key, value):
    result = bench.judged(metadata={key: value})
    assert not result.passed
    assert "metadata" in {problem.kind for problem in result.problems}
    assert value in result.first_divergence.line or key in result.first_divergence.line


@pytest.mark.parametrize(("key", "value"), [("config_sha256", "0" * 64), ("export", "nvidia")])
def test_a_trace_of_another_checkpoint_is_that_before_any_tap(bench, key, value):
    shift = bench.trace.taps | {
        "embed": bench.trace.taps["embed"][:, :-1],
        "final.norm": -bench.trace.taps["final.norm"],
    }
    result = bench.judged(shift, metadata={key: value})
    assert not all(row.passed for row in result.taps)
    assert result.first_divergence.line.startswith(f"first divergence: METADATA {key}: ")


def test_other_tokens_than_asked_for_fail(bench):
    other = bench.ids.copy()
    other[3] += 1
    result = bench.judged(expected_tokens=other)
    assert not result.passed
    assert result.first_divergence.tap == "tokens"


@pytest.mark.parametrize("asked", [{"tp": 2}, {"ep": 4}, {"arithmetic": "fp32"}], ids=str)
def test_another_run_than_the_engine_was_opened_for_fails(bench, asked):
    result = bench.judged(asked=asked)
    assert not result.passed
    ((key, want),) = asked.items()
    assert [(p.name, p.expected) for p in result.problems if p.fatal] == [(key, str(want))]


def test_the_run_that_was_asked_for_passes(bench):
    assert bench.judged(asked={"tp": 1, "ep": 1, "arithmetic": "bf16", "seed": 3, "device": "cpu"}).passed


def test_tokens_that_do_not_belong_to_the_taps_fail_at_the_embedding(bench):
    other = bench.ids.copy()
    other[3] += 1
    result = bench.with_tap("tokens", other)
    assert result.first_divergence.tap == "embed"


def test_an_id_past_the_vocabulary_fails(bench):
    other = bench.ids.copy()
    other[3] = bench.checkpoint.config.text.vocab_size
    result = bench.with_tap("tokens", other)
    assert not result.passed
    assert "vocabulary" in result.first_divergence.line


def test_an_operand_that_is_off_by_one_bit_fails(bench):
    target = "model.language_model.layers.2.self_attn.dt_bias"

    def operands(name):
        bound = {key: np.array(value) for key, value in bench.engine.operands(name).items()}
        if name == target:
            bound["value"].view(np.uint32)[5] ^= 1
        return bound

    result = bench.judged(operands=operands)
    assert result.first_divergence.line.startswith(f"first divergence: TENSOR {target} (value)")
    assert [row.name for row in result.tensors if not row.passed] == [target]


def test_logits_that_drift_beyond_their_allowance_fail(bench):
    taps = {name: tap for name, tap in bench.trace.taps.items() if "final" not in name}
    logits = taps["logits"] + np.random.default_rng(0).normal(size=taps["logits"].shape).astype(np.float32)
    result = bench.judged(taps | {"logits": logits})
    assert not result.passed
    assert not all(row.passed for row in result.logits)
