"""`glm53 bench reference`: what exactness costs: the exact product against a plain `@`, and a real-size layer."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from conformance.checkpoints import geometry, make
from reference.arithmetic import Sliced, matmul, round_bf16, round_f32
from reference.nvfp4 import decode, encode
from tools.output import write_json
from tools.progress import step_bar

LARGE = (8, 4096, 8192)
SMALL = (1, 128, 128)
TARGET = 12.0
GIB = 1 << 30

Works = dict[str, Callable[[], Any]]


def cpu_time(work: Callable[[], Any]) -> float:
    """Processor seconds of this process, all threads: other work on the machine matters less than to a wall clock."""
    start = time.process_time()
    work()
    return time.process_time() - start


def operands(m: int, k: int, n: int, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Activations [M,K] and weights [N,K] as the arithmetics meet them."""
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((m, k)), rng.standard_normal((n, k)).astype(np.float32)
    packed = encode(w)
    weights = {
        "bf16": round_bf16(w).astype(np.float32),
        "nvfp4": decode(packed.packed, packed.scale, packed.scale_2),
        "float32": w,
    }
    return {"bf16": round_bf16(x), "float32": round_f32(x), "float64": x}, weights


def product_cost(repeats: int, step: Callable[[int], None] = lambda total: None) -> list[dict[str, Any]]:
    """Processor time of the exact product over that of float64 `@`, medians of interleaved rounds."""
    activations, weights = operands(*LARGE)
    plain_w = {name: w.astype(np.float64) for name, w in weights.items()}
    rows = []
    for w_name, w in weights.items():
        start = time.perf_counter()
        right = Sliced.of_weight(w)
        cutting = time.perf_counter() - start
        for x_name, x in activations.items():
            plain = plain_w[w_name].T
            works: Works = {
                "plain": partial(np.matmul, x, plain),
                "exact": partial(matmul, x, right),
            }
            rounds = [{name: cpu_time(work) for name, work in works.items()} for _ in range(repeats + 1)][1:]
            rows.append(
                {
                    "activations": x_name,
                    "weights": w_name,
                    "slices": right.count,
                    "cutting_s": cutting,
                    "plain_s": median(r["plain"] for r in rounds),
                    "exact_s": median(r["exact"] for r in rounds),
                    "ratio": median(r["exact"] / r["plain"] for r in rounds),
                }
            )
            step(len(weights) * len(activations))
    return rows


def small_product_us(repeats: int = 200) -> dict[str, float]:
    """Microseconds per small product with kept slices, the best of many: the tiny model pays it thousands of times."""
    activations, weights = operands(*SMALL)
    right, best = Sliced.of_weight(weights["bf16"]), {}
    for name, x in activations.items():
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            matmul(x, right)
            times.append(time.perf_counter() - start)
        best[name] = min(times) * 1e6
    return best


def layers_cost(experts: int, vocab: int, tokens: int) -> dict[str, float]:
    """The `one-layer` geometry through the reference in a process of its own: seconds, and its largest memory."""
    code = (
        "import json, resource, sys, time, numpy as np\n"
        "from reference.checkpoint import open_checkpoint\n"
        "from reference.model import TextModel\n"
        "directory, tokens = sys.argv[1], int(sys.argv[2])\n"
        "start, cpu = time.perf_counter(), time.process_time()\n"
        "model = TextModel(open_checkpoint(directory), 'bf16')\n"
        "model.prefill(np.arange(tokens) % model.config.vocab_size, lambda name, array: None)\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "print(json.dumps({'seconds': time.perf_counter() - start, 'cpu_seconds': time.process_time() - cpu, "
        "'peak_bytes': peak}))\n"
    )
    with tempfile.TemporaryDirectory(prefix="glm53-bench-") as root:
        directory = make(Path(root) / "one-layer", "nvidia", geometry("one-layer", experts=experts, vocab=vocab))
        done = subprocess.run(
            [sys.executable, "-c", code, str(directory), str(tokens)], capture_output=True, text=True, check=True
        )
    return dict(json.loads(done.stdout))


app = typer.Typer(add_completion=False)


@app.command("reference")
def reference_command(
    repeats: Annotated[int, typer.Option(help="Rounds per measurement.")] = 5,
    layers: Annotated[bool, typer.Option(help="Also run the one-layer geometry (real widths).")] = True,
    experts: Annotated[int, typer.Option(help="Routed experts of the one-layer geometry, at most 288.")] = 16,
    vocab: Annotated[int, typer.Option(help="Its vocabulary.")] = 4096,
    tokens: Annotated[int, typer.Option(help="Tokens through it.")] = 8,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers as JSON.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar, no table.")] = False,
) -> None:
    """Exact product against plain float64 `@` for [8,4096] x [4096,8192], small products, and real-size layers.

    Example: glm53 bench reference --experts 288
    """
    with step_bar("exact products", quiet) as step:
        result: dict[str, Any] = {"products": product_cost(repeats, step)}
    result["small_product_us"] = small_product_us()
    if layers:
        result["one_layer"] = layers_cost(experts, vocab, tokens)
    write_json(json_file, result)
    if quiet:
        return
    console = Console(highlight=False, soft_wrap=True)
    for row in result["products"]:
        console.print(
            f"{row['weights']:>8} weights, {row['activations']:>8} activations: {row['slices']} weight slices, "
            f"{1e3 * row['exact_s']:.0f} ms against {1e3 * row['plain_s']:.0f} ms, ratio {row['ratio']:.1f} "
            f"(allowed {TARGET:.0f})"
        )
    console.print(
        ", ".join(f"[1,128] x [128,128] {name} {us:.0f} us" for name, us in result["small_product_us"].items())
    )
    if layers:
        cost = result["one_layer"]
        console.print(
            f"one-layer, {tokens} tokens, {experts} experts: {cost['seconds']:.1f} s, "
            f"{cost['cpu_seconds']:.1f} s of processor, {cost['peak_bytes'] / GIB:.2f} GiB"
        )


if __name__ == "__main__":
    app()
