"""What the tests of two GPUs say and refuse, on traces made by hand."""

import contextlib
import dataclasses

import numpy as np

from conformance import pairwise, real, test_two_gpus
from conformance.trace import Trace
from conformance.unit.judge.small_traces import T, traced

MESH = (2, 2)


def refused(trace: Trace, alone: Trace) -> list[str]:
    return list(test_two_gpus.held(MESH, alone, trace, lambda text: None))


def test_ranks_farther_from_one_rank_than_promised_are_refused():
    rng = np.random.default_rng(5)
    alone = traced(layers__0__attn__out=rng.standard_normal((T, 8)).astype(np.float32))
    assert refused(alone, alone) == []
    for factor, count in ((1.0, 0), (3.0, 1)):
        taps = dict(alone.taps)
        taps["layers.0.attn.out"] = taps["layers.0.attn.out"] * np.float32(1 + factor * pairwise.PROMISED)
        found = refused(Trace(alone.metadata, taps), alone)
        assert len(found) == count
        assert all(line.startswith("tp2 ep2 against one rank, fp32: layers.0.attn.out: ") for line in found)
    for more, less in ((alone, traced()), (traced(), alone)):
        assert refused(more, less) == ["tp2 ep2 against one rank, fp32: other taps"]


def test_what_is_said_is_noted_and_shown_at_once(capfd):
    noted: list[str] = []
    with real.telling(noted.append, contextlib.nullcontext) as say:
        say("first")
        assert capfd.readouterr().err.endswith(" s  first\n")
    assert [line.split(" s  ")[1] for line in noted] == ["first"]


def test_the_real_widths_lose_nothing_that_text_passes(tmp_path, monkeypatch):
    """Reduced are the experts, the vocabulary and what images pass; nothing else differs from the released config."""
    made = {}

    def noted(directory, export, geometry, seed, workers):
        made["config"] = geometry.config
        raise KeyboardInterrupt

    monkeypatch.setattr(real, "make", noted)
    with contextlib.suppress(KeyboardInterrupt):
        real.checkpoint(tmp_path, lambda text: None, 1)
    ours, whole = made["config"], real.geometry("full").config
    assert dataclasses.asdict(real.CUTS) == {"prefill": (12, 4), "decode": 8, "pad": 0}
    apart = {key for key, value in whole["text_config"].items() if ours["text_config"][key] != value}
    assert apart == {
        "eos_token_id",
        "first_k_dense_replace",
        "indexer_types",
        "layer_types",
        "linear_attn_config",
        "mlp_layer_types",
        "n_routed_experts",
        "num_hidden_layers",
        "pad_token_id",
        "vocab_size",
    }
    lists = {"kda_layers", "full_attn_layers"}
    attention = [
        {k: v for k, v in c["text_config"]["linear_attn_config"].items() if k not in lists} for c in (ours, whole)
    ]
    assert attention[0] == attention[1]
    assert {key for key, value in whole["vision_config"].items() if ours["vision_config"][key] != value} == {"depth"}
