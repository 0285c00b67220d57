"""Traces of ranks joined by the plan, and what they disagree in carried to the verdict."""

import json
import os

import ml_dtypes
import numpy as np
import pytest

from conformance import rank_traces
from conformance.checkpoints.shared import shared
from conformance.engines import registry
from conformance.errors import EngineOptionError, RankTraceError, TraceUnreadableError
from conformance.judge import Rebase, compare
from conformance.trace import Schedule, Trace, metadata
from reference.checkpoint import open_checkpoint
from reference.errors import DivisionError, InputError, MeshError

T = 5
IDS = np.arange(T, dtype=np.int32)
LOGITS = np.zeros((T, 512), np.float32)


def ranks(tp, ep, **taps):
    """Traces of all ranks; a tap is a list with one array (or None) per rank."""
    described = metadata(
        engine="some",
        engine_version="1",
        checkpoint="tiny",
        config_sha256="",
        export="nvidia",
        schedule=Schedule((T,)),
        tp=tp,
        ep=ep,
    )
    return [
        Trace(
            described | {"rank": str(rank)},
            {"tokens": IDS, "logits": LOGITS}
            | {name: parts[rank] for name, parts in taps.items() if parts[rank] is not None},
        )
        for rank in range(max(tp, ep))
    ]


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


def test_heads_channels_and_sums_join():
    q, whole = [draw(rank, T, 4, 16) for rank in range(2)], draw(9, 3, 3, 8, 16)
    conv = [np.ascontiguousarray(whole[:, :, 4 * rank : 4 * rank + 4]).reshape(3, -1) for rank in range(2)]
    out = [np.full((T, 8), value, np.float32) for value in (2.0**-30, 1.0)]
    taps = {"layers.0.attn.q": q, "layers.0.attn.conv_state": conv, "layers.3.routed.out": out}
    joined = rank_traces.joined(ranks(2, 1, **taps))
    assert rank_traces.disagreements(joined) == {}
    assert "rank" not in joined.metadata
    assert np.array_equal(joined.taps["layers.0.attn.q"], np.concatenate(q, axis=1))
    assert np.array_equal(joined.taps["layers.0.attn.conv_state"], whole.reshape(3, -1))
    assert (joined.taps["layers.3.routed.out"] == 1 + 2.0**-30).all(), "partial sums keep their precision"


def test_expert_ranks_repeat_the_mixers():
    q = [draw(rank % 2, T, 4, 16) for rank in range(4)]
    joined = rank_traces.joined(ranks(2, 4, **{"layers.0.attn.q": q}))
    assert joined.taps["layers.0.attn.q"].shape == (T, 8, 16)
    q[3] = draw(7, T, 4, 16)
    found = rank_traces.disagreements(rank_traces.joined(ranks(2, 4, **{"layers.0.attn.q": q})))
    assert list(found) == ["layers.0.attn.q"]
    assert found["layers.0.attn.q"].startswith("ranks 1 and 3 differ at [0, 0, 0]")


def test_disagreements_are_told_and_the_first_rank_stands():
    inner = [draw(1, T, 8), draw(1, T, 8)]
    inner[1][2, 3] += 1
    joined = rank_traces.joined(ranks(2, 2, **{"layers.0.attn.in": inner}))
    text = json.loads(joined.metadata["rank_disagreements"])["layers.0.attn.in"]
    assert text == f"ranks 0 and 1 differ at [2, 3]: {inner[0][2, 3]} and {inner[1][2, 3]}"
    assert np.array_equal(joined.taps["layers.0.attn.in"], inner[0])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([draw(1, T, 8), None], "ranks do not join: absent on rank 1"),
        ([None, draw(1, T, 8)], "ranks do not join: absent on rank 0"),
        ([draw(1, T, 8), draw(1, T, 4)], "ranks do not join: bfloat16 [5, 4] on rank 1, bfloat16 [5, 8] on 0"),
        ([draw(1, T, 8), draw(1, T, 8).astype(np.float32)], "ranks do not join: float32 [5, 8] on rank 1"),
    ],
)
def test_parts_that_do_not_join_are_told(parts, words):
    joined = rank_traces.joined(ranks(2, 1, **{"layers.0.attn.in": parts}))
    assert rank_traces.disagreements(joined)["layers.0.attn.in"].startswith(words)


@pytest.mark.parametrize(
    ("tap", "shape", "words"),
    [
        ("layers.0.attn.q", (T,), "[5] on every rank, expected 3 axes, one of them heads"),
        ("layers.0.attn.g", (T, 64), "[5, 64] on every rank, expected 3 axes"),
        ("mtp.attn.core", (), "[] on every rank, expected 3 axes"),
        ("layers.0.attn.beta", (T,), "[5] on every rank, expected 2 axes"),
        ("layers.0.attn.state", (16, 16), "[16, 16] on every rank, expected 3 axes"),
        ("layers.0.attn.conv_state", (9,), "[9] on every rank, expected a last axis of as many q, k and v"),
        ("layers.0.attn.conv_state", (3, 20), "[3, 20] on every rank, expected a last axis"),
    ],
)
def test_axes_that_hold_no_heads_are_told(tap, shape, words):
    """As much on every rank, and no such axis to join along: the tap fails, not the command."""
    joined = rank_traces.joined(ranks(2, 1, **{tap: [draw(rank, *shape) for rank in range(2)]}))
    assert rank_traces.disagreements(joined)[tap].startswith(f"ranks do not join: {words}")


def test_a_conv_state_without_rows_joins():
    conv = [draw(rank, 0, 12) for rank in range(2)]
    joined = rank_traces.joined(ranks(2, 1, **{"layers.0.attn.conv_state": conv}))
    assert joined.taps["layers.0.attn.conv_state"].shape == (0, 24)


@pytest.mark.parametrize("kind", [np.int32, bool])
def test_what_cannot_be_a_partial_sum_is_told(kind):
    joined = rank_traces.joined(ranks(2, 1, **{"layers.3.routed.out": [np.ones((T, 8), kind)] * 2}))
    words = f"ranks do not join: {np.dtype(kind)} on every rank, expected floating point to add"
    assert rank_traces.disagreements(joined) == {"layers.3.routed.out": words}
    assert joined.taps["layers.3.routed.out"].dtype == kind


def test_a_shared_expert_outside_the_first_group_is_told():
    here = draw(1, T, 8)
    assert not rank_traces.disagreements(rank_traces.joined(ranks(1, 2, **{"layers.3.shared.out": [here, None]})))
    found = rank_traces.disagreements(rank_traces.joined(ranks(1, 2, **{"layers.3.shared.out": [here, here]})))
    assert found == {"layers.3.shared.out": "ranks 1 have a part that belongs to no sum"}


def test_ranks_that_are_too_few_are_refused():
    with pytest.raises(RankTraceError, match="1 traces, expected 2 of tp 2, ep 1"):
        rank_traces.joined(ranks(2, 1)[:1])


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        '{"a": 1}',
        "{",
        "",
        pytest.param("[" * 100_000, id="deep"),
        '{"logits": "\\u001b[2J"}',
        '{"\\u0007": "rank 1"}',
    ],
)
def test_metadata_that_tell_nothing_are_refused(text):
    trace = ranks(1, 1)[0]
    with pytest.raises(RankTraceError, match="rank_disagreements is"):
        rank_traces.disagreements(Trace(trace.metadata | {"rank_disagreements": text}, trace.taps))


def saved(traces, folder, **described):
    """A folder of rank traces, `described` being added to the metadata of the last."""
    *others, last = traces
    rank_traces.save([*others, Trace(last.metadata | described, last.taps)], folder)
    return folder


def test_hosts_may_call_the_checkpoint_otherwise(tmp_path):
    joined = rank_traces.of_path(saved(ranks(2, 2), tmp_path, checkpoint="a-snapshot"))
    assert joined.metadata["checkpoint"] == "tiny"


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({"rank": "9" * 5000}, "expected the number of a rank"),
        ({"rank": "-1"}, "expected the number of a rank"),
        ({"tp": "9" * 5000}, "expected a number, 1 to 999999"),
        ({"ep": "10" * 9}, "expected a number, 1 to 999999"),
    ],
)
def test_numbers_past_all_bounds_are_refused_with_the_file(tmp_path, described, words):
    trace, path = ranks(2, 2)[1], tmp_path / "one.trace"
    Trace(trace.metadata | described, trace.taps).save(path)
    with pytest.raises(InputError, match=words) as raised:
        rank_traces.load(tmp_path)
    assert str(raised.value).startswith(f"{path}: metadata ")


def test_as_many_ranks_as_no_folder_holds(tmp_path):
    folder = saved([Trace(one.metadata | {"ep": "999998"}, one.taps) for one in ranks(2, 2)], tmp_path)
    with pytest.raises(RankTraceError, match=r"ranks \[0, 1\], expected 0 to 999997 of tp 2, ep 999998"):
        rank_traces.load(folder)


def test_one_rank_of_several_is_not_the_model(tmp_path):
    """Its heads and partial sums would fail against the whole model's, step by step."""
    path = saved(ranks(2, 1), tmp_path) / "rank-1.trace"
    with pytest.raises(RankTraceError, match=r"rank-1\.trace: rank 1 of 2, expected the folder with all of them"):
        rank_traces.of_path(path)
    alone = saved(ranks(1, 1), tmp_path / "alone") / "rank-0.trace"
    assert rank_traces.of_path(alone).metadata["rank"] == "0"


def test_a_pipe_is_no_trace(tmp_path):
    os.mkfifo(tmp_path / "rank-1.trace")
    with pytest.raises(TraceUnreadableError, match=r"rank-1\.trace: cannot be read: not a regular file"):
        rank_traces.load(tmp_path)


# --- engines and verdicts --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made():
    """Joined trace of the reference on two ranks, and its checkpoint."""
    engine = registry.create("reference")
    engine.open(shared("libertai", "odd"), arithmetic="bf16", tp=2, ep=2)
    return engine.run(np.arange(3, 24), Schedule((18,), 3)), open_checkpoint(shared("libertai", "odd"))


@pytest.mark.parametrize(
    ("tap", "later"),
    [("layers.1.attn.latent", ()), ("tokens", ()), ("layers.0.in", ("layers.3.attn.out", "final.norm"))],
)
def test_a_disagreement_fails_whatever_the_numbers_say(made, tap, later):
    trace, checkpoint = made
    judge = Rebase(checkpoint, samples=4)
    sound = compare(trace, checkpoint, judge=judge)
    assert sound.passed
    assert sound.engine == "reference tp2 ep2"
    apart = dict.fromkeys((*later, tap), "ranks 0 and 1 differ at [0]: 1 and 2")
    told = Trace(trace.metadata | {"rank_disagreements": json.dumps(apart)}, trace.taps)
    result = compare(told, checkpoint, judge=judge)
    assert not result.passed
    assert result.first_divergence is not None
    assert result.first_divergence.tap == tap
    assert "ranks 0 and 1 differ at [0]: 1 and 2" in result.first_divergence.line
    assert [problem.name for problem in result.problems if problem.kind == "ranks"] == list(apart)
    assert [row.tap for row in result.taps if not row.passed] == [name for name in (tap, *later) if name != "tokens"]
    assert len(result.taps) == len(sound.taps)


def test_a_disagreement_in_a_tap_that_was_left_out_fails(made):
    """The word of the ranks counts, whoever filtered the taps since."""
    trace, checkpoint = made
    few = {name: trace.taps[name] for name in ("tokens", "logits", "final.norm")}
    told = Trace(trace.metadata | {"rank_disagreements": '{"layers.0.attn.out": "ranks 0 and 1 differ"}'}, few)
    result = compare(told, checkpoint, samples=4)
    assert not result.passed
    assert result.first_divergence is not None
    assert result.first_divergence.line.endswith("tap layers.0.attn.out: ranks 0 and 1 differ")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tp": 4}, DivisionError, "6 heads do not divide among 4 ranks"),
        ({"tp": 2}, DivisionError, "48 columns among 2 ranks are 24 each"),
        ({"tp": 2, "ep": 3}, MeshError, "tp 2, ep 3"),
        ({"ep": 0}, MeshError, "ep 0"),
        ({"tp": "2"}, EngineOptionError, "tp"),
    ],
)
def test_the_reference_refuses_what_cannot_be(options, error, words):
    with pytest.raises(error, match=words):
        registry.create("reference").open(shared("libertai", "odd"), **options)
