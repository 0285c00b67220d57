"""`glm53 bench decode`: the captured decode step of the whole model against this GPU's own read bandwidth.

Weights are synthetic and made on the device: every layer has its own backbone; the routed experts of some layers are
those of others when the device cannot hold all (`tools.bench_model`), which the result says.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from conformance.checkpoints.geometry import geometry
from fast import config as configs
from fast.graph import DecodeStep
from fast.kernels import experts
from fast.kernels.indexer import Cache
from tools import bench_peers
from tools import bench_timing as timing
from tools.errors import UsageError
from tools.output import check_outputs, write_json
from tools.progress import step_bar

WARM_STEPS = 30
"""Steps in front of those that are timed."""
KEPT_FREE = 24 << 30
"""Bytes left beside the weights, for states and workspaces."""


def banks_that_fit(text: Any) -> int:
    """Routed banks, one a MoE layer if the device holds them, beside the rest of the model."""
    free, _ = torch.cuda.mem_get_info()
    E, D, width = text.n_routed_experts, text.hidden_size, text.moe_intermediate_size
    bank = 3 * E * experts.packed_bytes(D, width)
    layers = text.num_hidden_layers
    backbone = 2 * (140_000_000 + 3 * D * text.shared_intermediate_size) * layers + 4 * text.vocab_size * D
    sparse = sum(text.is_sparse(i) for i in range(layers))
    return max(1, min(sparse, int((free - backbone - KEPT_FREE) // bank)))


def filled(step: DecodeStep, context: int, seed: int) -> None:
    """States of sequences that hold `context` tokens, of normal values; tokens and positions to start from."""
    g = torch.Generator(device=step.device).manual_seed(seed)
    for state in step.states:
        tensors = (
            (state.latents, state.pools, state.ring) if isinstance(state, Cache) else (state.history, state.matrix)
        )
        for x in tensors:
            x.normal_(generator=g)
    V = step.model.text.vocab_size
    step.token.copy_(torch.randint(0, V, step.token.shape, generator=g, device=step.device))
    step.position.fill_(context)


def distinct_experts(step: DecodeStep) -> list[int]:
    """Experts that the rows of one step choose, layer by layer."""
    found = []
    for part in step.parts:
        part.launch(False)
        if part.name == "router, shared up":
            found.append(len(torch.unique(step.buffers.ids)))
    return found


def step_bytes(step: DecodeStep, chosen: list[int], context: int) -> int:
    """Bytes that a step cannot do without: weights and chosen experts once, states of every row, the tokens and pools
    that attention and indexer read."""
    text, R = step.model.text, step.rows
    fixed = sum(part.weights + R * part.state for part in step.parts)
    layers = [part.per_expert for part in step.parts if part.name == "experts"]
    packed = sum(part.per_expert for part in step.parts if part.name == "dense")
    routed = sum(count * size for count, size in zip(chosen, layers, strict=True))
    selected = min(context, text.index_topk + text.index_kpool - 1)
    pools = context // text.index_kpool if context > text.index_topk else 0
    cached = sum(isinstance(state, Cache) for state in step.states) * 2 * R
    return fixed + packed + routed + cached * (selected * text.kv_lora_rank + pools * text.index_head_dim)


def breakdown(step: DecodeStep, chosen: list[int], bandwidth: float, repeats: int) -> list[dict[str, Any]]:
    """Launches of one name as a graph of their own, one behind the other; slowest first.

    Alone they overlap with nothing, so their times add up to more than a step takes. The expert launches all read what
    the last layer chose, more than a cache holds.
    """
    names = list(dict.fromkeys(part.name for part in step.parts))
    mean = sum(chosen) / max(1, len(chosen))
    rows = []
    for name in names:
        parts = [part for part in step.parts if part.name == name]

        def launch(parts: list[Any] = parts) -> None:
            for part in parts:
                part.launch(False)

        ms = timing.replayed(launch, repeats)
        each = [
            part.weights + step.rows * part.state + int(part.per_expert * (mean if name == "experts" else 1))
            for part in parts
        ]
        rows.append(
            {
                "kernel": name,
                "launches": len(parts),
                "ms": ms,
                "us_each": 1e3 * ms / len(parts),
                "bytes": sum(each),
                "gb_per_s": sum(each) / ms / 1e6,
                "of_read_bandwidth": sum(each) / ms / 1e6 / bandwidth,
            }
        )
    return sorted(rows, key=lambda row: -row["ms"])


def measure(
    model: Any, rows: int, context: int, bandwidth: float, repeats: int, *, parts: bool = False
) -> dict[str, Any]:
    """One row count and context. Rows are sequences of their own."""
    step = DecodeStep(model, sequences=rows, capacity=context + WARM_STEPS + repeats)
    filled(step, context, seed=rows)
    chosen = distinct_experts(step)
    step.capture()
    filled(step, context, seed=rows)
    ms = timing.milliseconds(step.replay, repeats, WARM_STEPS)
    size = step_bytes(step, chosen, context)
    found: dict[str, Any] = {
        "rows": rows,
        "context": context,
        "ms": ms,
        "tokens_per_s": 1e3 * rows / ms,
        "bytes": size,
        "gb_per_s": size / ms / 1e6,
        "of_read_bandwidth": size / ms / 1e6 / bandwidth,
        "distinct_experts": sum(chosen) / max(1, len(chosen)),
    }
    if parts:
        filled(step, context, seed=rows)
        found["kernels"] = breakdown(step, chosen, bandwidth, max(3, repeats // 4))
    return found


def decode(
    *,
    rows: list[int],
    contexts: list[int],
    banks: int | None = None,
    layers: tuple[int, ...] | None = None,
    repeats: int = 20,
    seed: int = 0,
    advance: Callable[[int], None] = lambda total: None,
) -> dict[str, Any]:
    """What `glm53 bench decode` reports of this engine. `layers` reduces the model to some of its layers."""
    from tools import bench_model

    timing.device()
    text = configs.parse(geometry("full", layers=layers).config).text
    sparse = sum(text.is_sparse(i) for i in range(text.num_hidden_layers))
    count = banks_that_fit(text) if banks is None else min(banks, max(1, sparse))
    bandwidth = timing.read_bandwidth()
    total = text.num_hidden_layers + len(rows) * len(contexts)
    result: dict[str, Any] = timing.described() | {
        "read_bandwidth_gb_per_s": bandwidth,
        "layers": text.num_hidden_layers,
        "routed_banks": count,
        "moe_layers": sparse,
        "note": None if count >= sparse else f"{sparse} MoE layers take turns with {count} banks of routed experts",
    }
    model = bench_model.build(text, banks=count, seed=seed, step=lambda _: advance(total))
    result["steps"] = []
    for context in contexts:
        for R in rows:
            first = not result["steps"]
            result["steps"].append(measure(model, R, context, bandwidth, repeats, parts=first))
            advance(total)
            gc.collect()  # a step's launches refer to the step
            torch.cuda.empty_cache()
    return result


def numbers(option: str, value: str, most: int) -> list[int]:
    """ "1,2,4-8" -> [1, 2, 4, 5, 6, 7, 8]. Raises UsageError."""
    found: list[int] = []
    for part in value.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"{option} {value}: expected numbers such as 1,2,4-8")
        found.extend(range(int(first), int(last or first) + 1))
    if not found or min(found) < 1 or max(found) > most:
        raise UsageError(f"{option} {value}: expected 1 to {most}")
    return found


def row_counts(value: str | None, usual: str) -> list[int]:
    """--rows, or those of the usual that a step of the released model can have on this device. Raises UsageError."""
    hidden = configs.parse(geometry("full").config).text.hidden_size
    most = min(experts.ROWS, experts.rows_at_once(timing.device().index, hidden))
    if value is None:
        return [rows for rows in numbers("--rows", usual, experts.ROWS) if rows <= most]
    return numbers("--rows", value, most)


app = typer.Typer(add_completion=False)


@app.command("decode")
def decode_command(
    rows: Annotated[
        str | None, typer.Option(help="Row counts, each row a sequence; default: all there can be.")
    ] = None,
    contexts: Annotated[str, typer.Option(help="Tokens that every sequence holds.")] = "2048,32768,131072",
    banks: Annotated[int | None, typer.Option(min=1, help="Banks of routed experts; default: as many as fit.")] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Steps that are timed.")] = 20,
    peers: Annotated[bool, typer.Option(help="Run transformers (with FLA where installed) beside it.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar, no report.")] = False,
) -> None:
    """The whole decode step on this GPU, as a graph: ms, tokens/s, bytes, and the fraction of its read bandwidth.

    Example: glm53 bench decode --rows 1,4 --contexts 2048,131072 --json decode.json
    """
    check_outputs({"--json": json_file})
    timing.device()
    counts, lengths = row_counts(rows, "1-8"), numbers("--contexts", contexts, 1 << 20)
    with step_bar("decode", quiet) as advance:
        result = decode(rows=counts, contexts=lengths, banks=banks, repeats=repeats, advance=advance)
    write_json(json_file, result)
    console = Console(highlight=False, soft_wrap=True, quiet=quiet)
    report(result, console)
    if peers:
        torch.cuda.empty_cache()
        result["peers"] = bench_peers.layers(lengths[0], of_one_row(result, lengths[0]))
        write_json(json_file, result)
        for peer in result["peers"]:
            console.print(told(peer))


def of_one_row(result: dict[str, Any], context: int) -> float | None:
    """Milliseconds a layer of the step of one sequence after `context` tokens, if it was timed: what the peers do."""
    found = (s["ms"] for s in result["steps"] if (s["rows"], s["context"]) == (1, context))
    return next((ms / result["layers"] for ms in found), None)


def report(result: dict[str, Any], console: Console) -> None:
    console.print(f"{result['device']}: reads {result['read_bandwidth_gb_per_s']:,.0f} GB/s")
    if result["note"]:
        console.print(result["note"])
    for s in result["steps"]:
        console.print(
            f"rows {s['rows']} context {s['context']:>7,}: {s['ms']:.3f} ms, {s['tokens_per_s']:,.1f} tok/s, "
            f"{s['bytes'] / 1e9:.2f} GB, {s['gb_per_s']:,.0f} GB/s, {s['of_read_bandwidth']:.3f} of the read bandwidth"
        )
    names = Counter({row["kernel"]: row["ms"] for row in result["steps"][0].get("kernels", [])})
    for row in result["steps"][0].get("kernels", []):
        console.print(
            f"  {row['kernel']:20} {row['launches']:3} x {row['us_each']:8.2f} us = {row['ms']:.3f} ms "
            f"({row['ms'] / names.total():.0%}), {row['gb_per_s']:,.0f} GB/s, {row['of_read_bandwidth']:.3f}"
        )


def told(peer: dict[str, Any]) -> str:
    """One line about a peer: its numbers, or why there are none."""
    numbers = ", ".join(f"{key} {value:,.3f}" for key, value in peer.items() if isinstance(value, float))
    return f"{peer['peer']}: {peer.get('missing') or numbers}"
