"""The public torch classes as a peer of the decode step: eager, BF16, with FLA's recurrence where it is installed.

    python -m tools.bench_transformers --context 2048          alone, telling on stderr what it is at

Measured is one token after `context` tokens through one KDA and one DSA layer of full width with all their experts. The
weights are random: the classes' own initial ones. The cache is filled by calls of `PIECE` tokens through the torch form
of the chunked rule, which ships with the classes as what they fall back to: FLA's chunked kernels would first compile
and time dozens of variants of themselves, for minutes, and no decode step calls them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import typer

from conformance.checkpoints.geometry import geometry
from tools import bench_timing as timing

LAYERS = (4, 7)
"""Of the released model: KDA and experts, DSA and experts."""
PIECE = 512
CHUNKED, RECURRENT, CONV = "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", "causal_conv1d_update"

Say = Callable[[str], object]


class Layers:
    """The text stack of the classes for a `text_config`, with a cache and a sequence of random tokens.

    Keys of `settings` are those of config.json. The weights are made on `device` in `dtype`.
    """

    def __init__(self, settings: dict[str, Any], device: torch.device, dtype: torch.dtype, say: Say) -> None:
        from transformers.cache_utils import DynamicCache
        from transformers.models.glm5_next import modeling_glm5_next
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

        self.modeling: Any = modeling_glm5_next
        say(f"imported; decode through {implementation(self.modeling, RECURRENT)}")
        plain = {"pad_token_id": None, "attn_implementation": "eager", "experts_implementation": "eager"}
        config = Glm5NextTextConfig(**settings | plain)
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                self.model = self.modeling.Glm5NextTextModel(config).eval()
        finally:
            torch.set_default_dtype(usual)
        say(f"{sum(p.numel() for p in self.model.parameters()):,} weights made")
        names = inspect.signature(self.model.forward).parameters
        self.key = "cache" if "cache" in names else "past_key_values"
        self.cache, self.device, self.vocab = DynamicCache(config=self.model.config), device, config.vocab_size

    @torch.no_grad()
    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [1, T] -> hidden [1, T, D]; the cache grows by T tokens."""
        return self.model(input_ids=ids, use_cache=True, **{self.key: self.cache}).last_hidden_state

    def fill(self, ids: torch.Tensor, piece: int, say: Say) -> None:
        """ids [1, T] into the cache, `piece` tokens a call."""
        with replaced(self.modeling, CHUNKED, inspect.unwrap(getattr(self.modeling, CHUNKED))):
            for part in ids.split(piece, dim=1):
                self.feed(part)
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                say(f"{part.shape[1]} tokens more in the cache")


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def implementation(modeling: Any, name: str) -> str:
    """What the classes call under a name: FLA's function, say, or their own torch form where FLA cannot be imported."""
    function = getattr(modeling, name)
    held = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    found = held.get("implementation", function)
    return f"{getattr(found, '__module__', '?')}.{getattr(found, '__qualname__', type(found).__name__)}"


def measure(context: int, own: float | None = None, repeats: int = 20, say: Say = lambda text: None) -> dict[str, Any]:
    """Median milliseconds a layer of a decode step, embedding and final norm included. `own`: ours, to compare with.

    Raises whatever the classes raise, and UsageError without a CUDA device.
    """
    device = timing.device()
    say("importing transformers, and through it FLA")
    layers = Layers(geometry("full", layers=LAYERS, vocab=2048).config["text_config"], device, torch.bfloat16, say)
    ids = torch.randint(0, layers.vocab, (1, context + 1), device=device)
    layers.fill(ids[:, :context], PIECE, say)
    decode = {name: implementation(layers.modeling, name) for name in (RECURRENT, CONV)}
    layers.feed(ids[:, context:])
    torch.cuda.synchronize()
    say("first decode step done")
    ms = timing.milliseconds(lambda: layers.feed(ids[:, context:]), repeats) / len(LAYERS)
    say(f"{ms:.3f} ms a layer")
    found = importlib.util.find_spec("fla") is not None
    compared = {} if own is None else {"own_ms_a_layer": own, "times_slower": ms / own}
    return {
        "version": importlib.metadata.version("transformers"),
        "fla": importlib.metadata.version("fla-core") if found else "not installed",
        "kda": decode[RECURRENT],
        "conv": decode[CONV],
        "cache": f"{context} tokens, {PIECE} a call, through the classes' own torch form of the chunked rule",
        "ms_a_layer": ms,
    } | compared


def main(
    context: Annotated[int, typer.Option(min=1, help="Tokens in the cache.")] = 2048,
    repeats: Annotated[int, typer.Option(min=1, help="Decode steps that are timed.")] = 20,
) -> None:
    """Milliseconds a layer of a decode step of the public torch classes, as JSON; progress on stderr."""
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.1f} s  {text}", file=sys.stderr, flush=True)

    print(json.dumps(measure(context, repeats=repeats, say=say), indent=2))


if __name__ == "__main__":
    typer.run(main)
