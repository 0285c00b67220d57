"""What else computes a decode step here, timed in the same run: only what is installed, and what is not is said."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from tools import bench_timing as timing
from tools import bench_transformers


def attempt(name: str, package: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` finds; or `missing`, why there is nothing: the package is not installed, or it failed here."""
    if importlib.util.find_spec(package) is None:
        return {"peer": name, "missing": "not installed"}
    try:
        return {"peer": name} | run()
    except Exception as error:
        # Whatever another project raises is its answer, not a failure of this benchmark.
        return {"peer": name, "missing": f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def layers(context: int, own: float | None) -> list[dict[str, Any]]:
    """Decoding one sequence with whole layers after `context` tokens. `own`: milliseconds a layer of the captured step
    of one sequence, where it was timed."""
    return [attempt("transformers, eager", "transformers", lambda: bench_transformers.measure(context, own))]


def recurrent_kda(sequences: int, heads: int, width: int, bandwidth: float) -> dict[str, Any]:
    """FLA's recurrence alone: no convolution, no gates, no norm, which our kernel does in the same launch."""

    def run() -> dict[str, Any]:
        from fla.ops.kda import fused_recurrent_kda

        size = sequences * heads * width * width * 4
        rows = [torch.randn(sequences, 1, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        g = -torch.rand(sequences, 1, heads, width, device="cuda")
        beta = torch.rand(sequences, 1, heads, device="cuda")
        states = [torch.randn(sequences, heads, width, width, device="cuda") for _ in range(timing.copies(size))]

        def launch() -> None:
            for state in states:
                fused_recurrent_kda(
                    *rows, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
                )

        ms = timing.replayed(launch) / len(states)
        return {"version": version("fla-core")} | rate(2 * size, ms, bandwidth)

    return attempt(f"FLA fused_recurrent_kda, {sequences} sequences", "fla", run)


def cublas(rows: int, N: int, K: int, bandwidth: float) -> dict[str, Any]:
    """torch's BF16 product of the same shape."""
    size = 2 * N * K
    weights = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(timing.copies(size))]
    x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)

    def launch() -> None:
        for w in weights:
            F.linear(x, w)

    return {"peer": f"cuBLAS [{rows}, {K}] x [{N}, {K}]"} | rate(
        size, timing.replayed(launch) / len(weights), bandwidth
    )


def humming(rows: int, experts: int, hidden: int, width: int, bandwidth: float) -> dict[str, Any]:
    """Dense NVFP4 products of the same bytes as `experts` experts of one row: gate and up of all in one product, down
    of all in another. No routing, no gathering, no SwiGLU: less work than ours."""

    def run() -> dict[str, Any]:
        from humming.layer import HummingLayer

        total, ms = 0, 0.0
        for N, K in ((2 * experts * width, hidden), (hidden, experts * width)):
            size = N * K * 9 // 16
            made = []
            for _ in range(timing.copies(size)):
                config = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
                layer = HummingLayer(shape_n=N, shape_k=K, weight_config=config, torch_dtype=torch.bfloat16).cuda()
                codes = torch.randint(0, 256, (N, K // 2), device="cuda", dtype=torch.uint8)
                scale = torch.randint(0x30, 0x40, (N, K // 16), device="cuda", dtype=torch.uint8)
                one = torch.ones(1, device="cuda")
                parts = {"weight": codes, "weight_scale": scale.view(torch.float8_e4m3fn), "weight_scale_2": one}
                layer.load_from_tensors(parts)
                layer.transform()
                made.append(layer)
            x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)

            def launch(made: list[Any] = made, x: torch.Tensor = x) -> None:
                for layer in made:
                    layer(x)

            ms += timing.replayed(launch) / len(made)
            total += size
        return {"version": version("humming-kernels")} | rate(total, ms, bandwidth)

    return attempt(f"humming-kernels, NVFP4, {rows} rows", "humming", run)


def rate(size: int, ms: float, bandwidth: float) -> dict[str, float]:
    return {"us": 1e3 * ms, "gb_per_s": size / ms / 1e6, "of_read_bandwidth": size / ms / 1e6 / bandwidth}
