"""The peer's measurement, all but the clock, at a size for a CPU."""

import functools
from types import SimpleNamespace

import pytest
import torch

from conformance import pairwise
from conformance.checkpoints.geometry import geometry
from tools import bench_transformers as bench

pytestmark = pytest.mark.transformers


@pytest.mark.parametrize("piece", [3, 64])
def test_a_filled_cache_decodes_as_a_whole_text_does(piece):
    """A step after a filled cache = the last row of one call with all tokens, both in float32."""
    torch.manual_seed(4)
    said: list[str] = []
    settings = geometry("tiny", layers=bench.LAYERS).config["text_config"]
    layers = bench.Layers(settings, torch.device("cpu"), torch.float32, said.append)
    ids = torch.randint(0, layers.vocab, (1, 50))
    layers.fill(ids[:, :-1], piece, said.append)
    step = layers.feed(ids[:, -1:])[0, -1]
    with torch.no_grad():
        whole = layers.model(input_ids=ids).last_hidden_state[0, -1]
    # Two float32 runs of one model: each within what is promised of exact arithmetic.
    assert float((step - whole).norm() / whole.norm()) <= 2 * pairwise.PROMISED
    assert len(said) == 2 + -(-49 // piece)
    assert "recurrent_kimi_delta_attention" in said[0]
    assert torch.get_default_dtype() == torch.float32


def test_only_filling_goes_round_the_chunked_kernel(monkeypatch):
    """What the classes call for chunks and for steps: the first is replaced while the cache is filled, not after."""
    called: list[str] = []
    settings = geometry("tiny", layers=bench.LAYERS).config["text_config"]
    layers = bench.Layers(settings, torch.device("cpu"), torch.float32, lambda text: None)
    for name in (bench.CHUNKED, bench.RECURRENT):
        usual = getattr(layers.modeling, name)

        @functools.wraps(usual)
        def noted(*args, name=name, usual=usual, **kwargs):
            called.append(name)
            return usual(*args, **kwargs)

        monkeypatch.setattr(layers.modeling, name, noted)
    layers.fill(torch.zeros((1, 6), dtype=torch.long), 4, lambda text: None)
    assert called == []
    layers.feed(torch.zeros((1, 1), dtype=torch.long))
    layers.feed(torch.zeros((1, 2), dtype=torch.long))
    assert called == [bench.RECURRENT, bench.CHUNKED]


def test_who_computes_is_told():
    def made(implementation):
        def wrapped():
            return implementation()

        return SimpleNamespace(name=wrapped)

    assert bench.implementation(made(pairwise.compare), "name") == "conformance.pairwise.compare"
    assert bench.implementation(SimpleNamespace(name=pairwise.compare), "name") == "conformance.pairwise.compare"
    assert bench.implementation(SimpleNamespace(name=3), "name").endswith(".int")
