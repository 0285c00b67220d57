"""A trace against a config: every name, axis, dtype and id."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from conformance import errors as e
from conformance.trace import (
    Schedule,
    Trace,
    inspect,
    validate,
)
from conformance.unit.judge.small_traces import T, V, described, traced

BF16 = ml_dtypes.bfloat16


def text_config(**changes):
    """A two-layer text config (KDA + dense, DSA + MoE) with the names that the tap table reads."""
    fields = {
        "num_hidden_layers": 2,
        "kda_layers": (0,),
        "hidden_size": 8,
        "hc_mult": 2,
        "linear_num_heads": 2,
        "linear_head_dim": 3,
        "short_conv_kernel_size": 4,
        "num_attention_heads": 3,
        "v_head_dim": 5,
        "q_lora_rank": 7,
        "kv_lora_rank": 6,
        "index_n_heads": 2,
        "index_head_dim": 4,
        "index_kpool": 2,
        "index_topk": 4,
        "n_routed_experts": 9,
        "num_experts_per_tok": 2,
        "vocab_size": V,
        "mtp_layer": 2,
        "is_sparse": lambda layer: layer >= 1,
        "indexer": lambda layer: "full" if layer == 1 else None,
    } | changes
    return SimpleNamespace(text=SimpleNamespace(**fields), vision=None)


CONFIG = text_config()


GOOD = {
    "embed": (T, 8),
    "layers.0.in": (T, 2, 8),
    "layers.0.attn_hc.comb": (T, 2, 2),
    "layers.0.attn.q": (T, 2, 3),
    "layers.0.attn.beta": (T, 2),
    "layers.0.attn.state": (2, 3, 3),
    "layers.0.attn.conv_state": (3, 18),
    "layers.1.attn.q_resid": (T, 7),
    "layers.1.attn.latent": (T, 6),
    "layers.1.attn.core": (T, 3, 5),
    "layers.1.indexer.q": (T, 2, 4),
    "layers.1.indexer.weights": (T, 2),
    "layers.1.indexer.pool_keys": (3, 4),
    "layers.1.indexer.scores": (T, 3),
    "layers.1.router.logits": (T, 9),
    "layers.1.router.weights": (T, 2),
    "layers.1.routed.out": (T, 8),
    "final.norm": (T, 8),
    "mtp.z": (5, 8),
    "mtp.logits": (5, V),
    "mtp.indexer.scores": (5, 2),
    "mtp.indexer.pool_keys": (2, 4),
}


def full(**changes):
    taps = {name: np.zeros(shape, np.float32) for name, shape in GOOD.items()}
    taps["layers.1.indexer.selected"] = np.zeros((T, 5), np.int32)
    taps["layers.1.router.indices"] = np.zeros((T, 2), np.int32)
    made = traced().taps | taps
    return Trace(described(), {k: v for k, v in (made | changes).items() if v is not None})


def test_a_sound_trace_has_no_fault():
    found = validate(full(), CONFIG)
    assert set(found.present) == set(full().taps)
    assert found.unknown == ()
    assert "layers.0.mid" in found.missing
    assert "layers.1.attn.q" not in found.missing, "a DSA layer has no convolved q"


@pytest.mark.parametrize("name", [name for name in GOOD if not name.startswith("mtp.")])
@pytest.mark.parametrize("axis", [0, -1])
def test_every_axis_of_every_tap_is_checked(name, axis):
    shape = list(GOOD[name])
    shape[axis] += 1
    with pytest.raises(e.TapShapeError, match=f"tap {name}: axis"):
        validate(full(**{name: np.zeros(shape, np.float32)}), CONFIG)


def test_a_missing_axis_is_told_with_the_axes_expected():
    with pytest.raises(e.TapShapeError, match=r"tap layers\.0\.in has 2 axes \[6, 16\], expected 3: \[T, C, D\]"):
        validate(full(**{"layers.0.in": np.zeros((T, 16), np.float32)}), CONFIG)


def test_free_axes_must_agree_with_each_other():
    with pytest.raises(e.TapShapeError, match=r"tap mtp\.logits: axis 0 of \[M, V\] is 4, but 5 in tap mtp\.z"):
        validate(full(**{"mtp.logits": np.zeros((4, V), np.float32)}), CONFIG)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("tokens", np.int64),
        ("layers.1.router.indices", np.int64),
        ("layers.1.indexer.selected", np.float32),
        ("logits", BF16),
        ("logits", np.float64),
        ("embed", np.int32),
        ("layers.0.in", np.uint8),
    ],
)
def test_every_dtype_is_checked(name, dtype):
    with pytest.raises(e.TapDtypeError, match=f"tap {name} has dtype"):
        validate(full(**{name: full().taps[name].astype(dtype)}), CONFIG)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BF16])
def test_floats_may_have_any_float_dtype(dtype):
    validate(full(embed=np.zeros((T, 8), dtype)), CONFIG)


@pytest.mark.parametrize("bad", [-1, V, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_named(bad):
    tokens = np.arange(T, dtype=np.int32)
    tokens[4] = bad
    with pytest.raises(e.TokenRangeError, match=f"id {bad} at 4, vocabulary has {V}"):
        validate(full(tokens=tokens), CONFIG)


def test_a_schedule_that_feeds_another_number_of_tokens_is_refused():
    with pytest.raises(e.TraceScheduleError, match="schedule feeds 5 tokens, tap tokens holds 6"):
        validate(traced(Schedule((4,), 1)), CONFIG)


def test_unknown_names_are_reported_and_not_swallowed():
    found = inspect(
        full(**{"layers.2.in": np.zeros(1), "layers.0.attn.latent": np.zeros(1), "Embed": np.zeros(1)}), CONFIG
    )
    assert found.unknown == ("layers.2.in", "layers.0.attn.latent", "Embed")
    assert found.faults == ()


def test_all_faults_are_listed_and_the_first_is_raised_with_their_number():
    bad = full(embed=np.zeros((T, 9), np.int8), tokens=None)
    kinds = [type(fault) for fault in inspect(bad, CONFIG).faults]
    assert kinds == [e.TapMissingError, e.TapDtypeError, e.TapShapeError]
    with pytest.raises(e.TapMissingError, match=r"tap tokens is missing.*\(and 2 more\)"):
        validate(bad, CONFIG)


def test_layers_that_share_a_selection_have_no_indexer_of_their_own():
    config = text_config(indexer=lambda layer: "shared")
    found = inspect(full(), config)
    assert set(found.unknown) == {name for name in GOOD if name.startswith("layers.1.indexer.")}
    assert "layers.1.indexer.selected" in found.present


def test_without_an_mtp_block_its_taps_are_unknown():
    found = inspect(full(), text_config(mtp_layer=None))
    assert set(found.unknown) == {name for name in GOOD if name.startswith("mtp.")}


def test_the_table_holds_every_name_of_the_format():
    """Counted by hand from the format's list: 3 + 6 mHC + 4 sublayer taps per layer, 8 KDA, 3 + 7 DSA, 5 MoE."""
    names = inspect(full(), CONFIG)
    layers = [name for name in (*names.present, *names.missing) if name.startswith("layers.")]
    assert len(layers) == 2 * 13 + 8 + 10 + 5
    mtp = [name for name in (*names.present, *names.missing) if name.startswith("mtp.")]
    assert len(mtp) == 2 + 4 + 10 + 5
