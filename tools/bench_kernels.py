"""`glm53 bench kernels`: every kernel of a decode step alone, at the shapes of the released model, and its peers.

A kernel is launched on several operands in turn, so that none is still in a cache when its turn comes, and the launches
are recorded as a graph; as in a step, each may begin while the one in front still runs. What the launch in front has
just written, scores and selections, is in a cache in a step too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from conformance.checkpoints.geometry import geometry
from fast import config as configs
from fast.kernels import experts, gemv, indexer, kda, mhc, mla
from fast.kernels.gemv import Product
from tools import bench_peers as peers
from tools import bench_timing as timing
from tools.bench_decode import row_counts, told
from tools.bench_model import Maker
from tools.output import check_outputs, write_json
from tools.progress import step_bar

BANK = 64
"""Experts of the bank that choices are drawn from: more than a cache holds."""
SIDE_BY_SIDE = 32
"""Sequences that fill the chip in one KDA step."""


class Kernels:
    """Measurements for `R` rows; `make` draws the operands."""

    def __init__(self, R: int, bandwidth: float, seed: int = 0) -> None:
        self.text = configs.parse(geometry("full").config).text
        self.R, self.bandwidth, self.make = R, bandwidth, Maker(seed)
        self.device = timing.device()

    def new(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def result(
        self, name: str, size: int, launches: Sequence[Callable[[], Any]], rows: int | None = None
    ) -> dict[str, Any]:
        """`size`: bytes that one of the launches cannot do without."""

        def launch() -> None:
            for run in launches:
                run()

        ms = timing.replayed(launch) / len(launches)
        return {"kernel": name, "rows": rows or self.R} | peers.rate(size, ms, self.bandwidth)

    def products(self, name: str, K: int, widths: list[int], kind: str = "bf16", **options: Any) -> dict[str, Any]:
        """Matrices [N, K] in one launch; swiglu takes two of each width."""
        x = self.make.normal(self.R, K)
        size = 2 * K * sum(widths) * (2 if kind == "swiglu" else 1)
        dtype = torch.float32 if kind == "argmax" else torch.bfloat16
        launches = []
        for _ in range(timing.copies(size)):
            made = [
                Product(
                    self.make.linear(N, K),
                    self.new(self.R, N, dtype=dtype),
                    kind,
                    self.make.linear(N, K) if kind == "swiglu" else None,
                )
                for N in widths
            ]
            launches.append(partial(gemv.project, x, made, pdl=True, **options))
        return self.result(name, size, launches)

    def gemv(self) -> Iterator[dict[str, Any]]:
        t = self.text
        D, H, d, Q = t.hidden_size, t.linear_num_heads, t.linear_head_dim, t.q_lora_rank
        yield self.products("kda in", D, [H * d] * 3 + [kda.RANK, kda.RANK, H])
        yield self.products("kda o", H * d, [D])
        yield self.products("dsa in", D, [Q, t.kv_lora_rank, t.index_head_dim, t.index_head_dim, t.index_n_heads])
        heads = t.num_attention_heads
        queries = [heads * t.qk_nope_head_dim, t.index_n_heads * t.index_head_dim]
        yield self.products("dsa q", Q, queries)
        yield self.products("dsa o", heads * t.v_head_dim, [D])
        yield self.products("dense up", D, [t.intermediate_size], "swiglu", limit=t.swiglu_limit)
        yield self.products("dense down", t.intermediate_size, [D])
        token, best = self.new(self.R, dtype=torch.int32), gemv.argmax_scratch(self.device)
        yield self.products("lm_head", D, [t.vocab_size], "argmax", argmax=gemv.Argmax(token, best))

    def experts(self) -> Iterator[dict[str, Any]]:
        """Gate, up and down of the routed experts, alone and as in a step with the shared expert's down.

        No launch writes what the next one multiplies: `early`.
        """
        t, R = self.text, self.R
        D, width, k = t.hidden_size, t.moe_intermediate_size, t.num_experts_per_tok
        gate, up, down = (self.make.packed(BANK, *shape) for shape in ((width, D), (width, D), (D, width)))
        bank, x = experts.bank(gate, up, down), self.make.normal(R, D)
        h, out, y = self.new(R, k, width), self.new(R, D), self.make.normal(R, t.shared_intermediate_size)
        alone, shared, distinct = [], [], 0
        for _ in range(4):
            order = [torch.randperm(BANK, generator=self.make.generator, device=self.device)[:k] for _ in range(R)]
            ids = torch.stack(order).sort(-1).values.int()
            distinct += len(torch.unique(ids))
            plan = experts.new_plan(self.device)
            experts.make_plan(ids, torch.full((R, k), t.routed_scaling_factor / k, device=self.device), bank, plan)
            run = partial(experts.routed, x, plan, bank, h, out, t.swiglu_limit, early=True, pdl=True)
            alone.append(run)
            shared.append(partial(run, shared=(y, self.make.linear(D, t.shared_intermediate_size))))
        size = 3 * experts.packed_bytes(width, D) * distinct // len(alone)
        yield self.result("experts", size, alone)
        yield self.result("experts, shared down", size + 2 * D * t.shared_intermediate_size, shared)

    def kda(self, sequences: int) -> dict[str, Any]:
        """Launches may overlap: a state is used again by the third one or later, by the 32nd for one sequence, which
        `kda.step` explains."""
        t = self.text
        H, d, C = t.linear_num_heads, t.linear_head_dim, 3 * t.linear_num_heads * t.linear_head_dim
        raw = self.make.normal(sequences, C + 2 * kda.RANK + -(-H // 8) * 8)
        q, k, v, f, g, beta = raw.split([H * d] * 3 + [kda.RANK, kda.RANK, raw.shape[1] - C - 2 * kda.RANK], -1)
        beta = beta[:, :H]
        out, low_rank = self.new(sequences, H * d), 2 * 2 * H * d * kda.RANK
        size = 8 * sequences * H * d * d + 12 * sequences * C + low_rank
        launches = []
        for _ in range(timing.copies(size, 32 if sequences == 1 else 3)):
            weights = kda.Weights(
                self.make.normal(C, 1, 4, scale=0.5),
                self.make.normal(H, dtype=torch.float32),
                self.make.normal(H * d, dtype=torch.float32),
                self.make.norm(d),
                t.gate_lower_bound,
                t.rms_norm_eps,
                f_b=self.make.linear(H * d, kda.RANK),
                g_b=self.make.linear(H * d, kda.RANK),
            )
            state = self.make.normal(sequences, H, d, d, dtype=torch.float32)
            history = self.make.normal(sequences, 3, C)
            launches.append(partial(kda.step, (q, k, v), f, g, beta, weights, history, state, out, pdl=True))
        return self.result("kda step", size, launches, sequences)

    def site(self) -> dict[str, Any]:
        t, R = self.text, self.R
        C, D, M = t.hc_mult, t.hidden_size, t.hc_rows
        setting = mhc.Setting(t.rms_norm_eps, t.hc_eps, t.hc_sinkhorn_iters)
        streams, o, y = self.make.normal(R, C, D), self.make.normal(R, D), self.new(R, D)
        old, new = (mhc.new_mix(R, C, self.device) for _ in range(2))
        launches, size = [], 2 * M * C * D
        for _ in range(timing.copies(size)):
            fn, base = self.make.linear(M, C * D), self.make.normal(M, dtype=torch.float32)
            weights = mhc.Site(fn, base, torch.ones(3, device=self.device), self.make.norm(D))
            launches.append(
                partial(
                    mhc.site, streams, weights, setting, y, previous=(o, old), mix=new, new_streams=streams, pdl=True
                )
            )
        return self.result("mhc site", size, launches)

    def attention(self, context: int) -> Iterator[dict[str, Any]]:
        """Indexer and absorbed MLA of rows that are sequences of `context` tokens."""
        t, R = self.text, self.R
        L, p, h, S = t.kv_lora_rank, t.index_head_dim, t.index_n_heads, t.index_kpool
        width, pools = t.index_topk + S - 1, context // S
        position = torch.full((R,), context - 1, dtype=torch.int32, device=self.device)
        latents, ring = self.make.normal(R, context, L), self.make.normal(R, 4 * S, 2, p)
        kv, key, gate, asked, share = (self.make.normal(R, n) for n in (L, p, p, h * p, -(-h // 8) * 8))
        rows = indexer.Rows(kv, key, gate, asked, share[:, :h])
        weights = indexer.Weights(
            self.make.norm(L),
            self.make.norm(p),
            self.make.norm(p),
            self.make.normal(S, p),
            h,
            t.index_topk,
            t.rms_norm_eps,
        )
        heads = t.num_attention_heads
        scored, attended = 2 * R * pools * p, 2 * heads * (mla.N + mla.O) * L + 2 * R * min(width, context) * L
        attending = timing.copies(attended)
        asking = []
        for _ in range(max(timing.copies(scored), attending)):
            cache = indexer.Cache(latents, self.make.normal(R, pools, p), ring, position)
            choice = indexer.Choice(
                self.new(R, pools, dtype=torch.float32),
                self.new(R, width, dtype=torch.int32),
                self.new(R, dtype=torch.int32),
            )
            asking.append((rows, weights, cache, choice))
        at = f", {context:,} tokens"
        yield self.result(f"indexer score{at}", scored, [partial(indexer.score, *own) for own in asking])
        yield self.result(f"indexer select{at}", 4 * R * pools, [partial(indexer.select, *own) for own in asking])
        query, core = self.make.normal(R, heads * mla.N), self.new(R, heads * mla.O)
        work, attends = mla.workspace(R, heads, width, self.device), []
        for *_, choice in asking[:attending]:  # selections of their own, so other latents
            kv_b = self.make.linear(heads * (mla.N + mla.O), L)
            attends.append(partial(mla.attend, query, kv_b, latents, choice.selected, choice.count, work, core))
        yield self.result(f"mla{at}", attended, attends)


def measure(R: int, context: int, bandwidth: float, advance: Callable[[], None]) -> list[dict[str, Any]]:
    """Every kernel for R rows; what does not depend on the row count is measured with the first."""
    kernels, found = Kernels(R, bandwidth), []
    for row in chain(kernels.gemv(), kernels.experts()):
        found.append(row)
        advance()
    for made in (kernels.site, lambda: kernels.kda(R)):
        found.append(made())
        advance()
    if R == 1:
        found.append(kernels.kda(SIDE_BY_SIDE))
    found.extend(kernels.attention(context))
    torch.cuda.empty_cache()
    return found


def beside(rows: list[int], bandwidth: float) -> list[dict[str, Any]]:
    """The peers of the kernels."""
    t = configs.parse(geometry("full").config).text
    D, HD = t.hidden_size, t.linear_num_heads * t.linear_head_dim
    found = []
    for R in rows:
        for N, K in ((3 * HD, D), (D, HD), (D, t.num_attention_heads * t.v_head_dim), (t.vocab_size, D)):
            found.append(peers.cublas(R, N, K, bandwidth))
    for sequences in (1, SIDE_BY_SIDE):
        found.append(peers.recurrent_kda(sequences, t.linear_num_heads, t.linear_head_dim, bandwidth))
    found.append(peers.humming(1, t.num_experts_per_tok, D, t.moe_intermediate_size, bandwidth))
    return found


app = typer.Typer(add_completion=False)


@app.command("kernels")
def kernels_command(
    rows: Annotated[str | None, typer.Option(help="Row counts; default: those of 1, 4, 8 that there can be.")] = None,
    context: Annotated[int, typer.Option(min=4096, help="Tokens of the attention kernels' sequences.")] = 131072,
    with_peers: Annotated[bool, typer.Option("--peers/--no-peers", help="cuBLAS, FLA, humming beside them.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar, no report.")] = False,
) -> None:
    """Every kernel of a decode step alone: us, GB/s, and the fraction of this GPU's own read bandwidth.

    Example: glm53 bench kernels --rows 1,8 --json kernels.json
    """
    check_outputs({"--json": json_file})
    timing.device()
    counts = row_counts(rows, "1,4,8")
    bandwidth = timing.read_bandwidth()
    result: dict[str, Any] = timing.described() | {"read_bandwidth_gb_per_s": bandwidth, "kernels": []}
    with step_bar("kernels", quiet) as advance:
        for R in counts:
            result["kernels"] += measure(R, context, bandwidth, lambda: advance(12 * len(counts)))
    result["peers"] = beside(counts, bandwidth) if with_peers else []
    write_json(json_file, result)
    if not quiet:
        report(result, Console(highlight=False, soft_wrap=True))


def report(result: dict[str, Any], console: Console) -> None:
    console.print(f"{result['device']}: reads {result['read_bandwidth_gb_per_s']:,.0f} GB/s")
    for row in result["kernels"]:
        console.print(
            f"{row['kernel']:30} {row['rows']:2} rows: {row['us']:9.2f} us, {row['gb_per_s']:,.0f} GB/s, "
            f"{row['of_read_bandwidth']:.3f}"
        )
    for peer in result["peers"]:
        console.print(told(peer))
