"""`glm53 bench load` and `bench lies`: what loading costs in time and memory, and a long run of lying files."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from conformance import lying_files
from conformance.checkpoints import make
from fast.loader import load
from fast.sharding import Mesh
from tools.errors import UsageError
from tools.output import check_outputs, write_json
from tools.plan import source
from tools.progress import byte_bar

MIB = 1 << 20
BUFFER = 8 * MIB
TICK = 0.01
"""Seconds of processor time that can be told apart."""


def plain_read(directory: Path, *, keep: bool) -> int:
    """Read every shard as plainly as can be: through one small buffer, or (`keep`) all of it into fresh memory."""
    total = 0
    held = []
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            buffer = memoryview(bytearray(size if keep else BUFFER))
            done = 0
            while n := file.readinto(buffer[done : done + BUFFER] if keep else buffer):
                done += n
            held.append(buffer if keep else None)
            total += done
    return total


def timed(work: Callable[[], int]) -> dict[str, float]:
    """GB per second of wall clock and of processor time, for work that returns its bytes."""
    before, start = os.times(), time.perf_counter()
    n = work()
    wall, after = time.perf_counter() - start, os.times()
    cpu = after.user + after.system - before.user - before.system
    rates = {"gb_per_s": n / wall / 1e9, "gb_per_cpu_s": n / max(cpu, TICK) / 1e9}
    return {"bytes": n, "seconds": wall, "cpu_seconds": cpu} | rates


def throughput(directory: Path, *, device: str, mtp: bool, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` warm rounds of a plain read, a read into fresh memory, and a load, interleaved."""
    works: dict[str, Callable[[], int]] = {
        "plain read": lambda: plain_read(directory, keep=False),
        "read into fresh memory": lambda: plain_read(directory, keep=True),
        "load": lambda: load(directory, device=device, mtp=mtp, vision=True, progress=False).log.bytes_read,
    }
    works["plain read"]()
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(repeats):
        rounds.append({name: timed(work) for name, work in works.items()})
    result: dict[str, Any] = {
        name: {key: median(r[name][key] for r in rounds) for key in rounds[0][name]} for name in works
    }
    for name in ("plain read", "read into fresh memory"):
        result[f"load / {name}"] = {
            key: median(r["load"][key] / r[name][key] for r in rounds) for key in ("gb_per_s", "gb_per_cpu_s")
        }
    return result


def peak(directory: Path, mesh: Mesh, *, device: str, mtp: bool) -> dict[str, Any]:
    """One rank's load in a fresh process: the ledger's numbers beside the process's own maximum RSS."""
    code = (
        "import json, sys, torch; from fast.loader import load; from conformance.lying_files import peak_memory\n"
        "directory, options = sys.argv[1], json.loads(sys.argv[2])\n"
        "torch.ones(64, 64).bfloat16().float().sum(); before = peak_memory(reset=True)\n"
        "w = load(directory, progress=False, **options)\n"
        "out = {'rss_grown': peak_memory() - before, 'resident': w.log.resident, 'ledger_peak': w.log.peak,"
        " 'ledger_peak_host': w.log.peak_host, 'bytes_read': w.log.bytes_read, 'roles': w.log.roles}\n"
        "cuda = w.store.device.type == 'cuda'\n"
        "out['cuda_peak'] = torch.cuda.max_memory_allocated(w.store.device) if cuda else None\n"
        "out['cuda_reserved'] = torch.cuda.max_memory_reserved(w.store.device) if cuda else None\n"
        "print(json.dumps(out))"
    )
    options = {"device": device, "tp": mesh.tp, "ep": mesh.ep, "rank": mesh.rank, "mtp": mtp}
    command = [sys.executable, "-c", code, str(directory), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}, without a message"]
        raise UsageError(f"loading rank {mesh.rank} failed: {said[-1]}")
    return json.loads(done.stdout) | {"tp": mesh.tp, "ep": mesh.ep, "rank": mesh.rank, "mtp": mtp}


def lies(files: int, seed: int, *, quiet: bool = False) -> dict[str, Any]:
    """`files` mutated directories, half of each export. Raises AssertionError naming the first case that is neither
    loaded right nor refused, that takes over two seconds of processor, or that makes the process grow by 200 MiB."""
    out: dict[str, Any] = {"files": files, "seed": seed, "answers": {}}
    with tempfile.TemporaryDirectory(prefix="glm53-") as root, byte_bar("lying files", files, quiet) as advance:
        for export, count in (("nvidia", files - files // 2), ("libertai", files // 2)):
            directory = Path(root) / export
            make(directory, export, "tiny", seed=1, layers=(2, 3), experts=4, vocab=32)
            sound = lying_files.read_files(directory)
            lying_files.run(directory, sound, seed + 1, range(20))
            before = lying_files.peak_memory(reset=True)
            tally = lying_files.run(directory, sound, seed, range(count), lambda: advance("", 1))
            grown = lying_files.peak_memory() - before
            assert tally.slowest < 2.0, f"{tally.slowest:.2f} s for {tally.slowest_case}"
            assert grown < 200 * MIB, f"{export}: the process grew by {grown:,} bytes"
            out["answers"][export] = dict(tally.answers.most_common())
            out[f"slowest_{export}"] = {"cpu_seconds": tally.slowest, "case": tally.slowest_case}
            out[f"grown_{export}"] = grown
            shutil.rmtree(directory)
    return out


def meshes(text: str) -> list[Mesh]:
    """ "1x1,2x1" -> every rank of every tp x ep. Raises UsageError."""
    try:
        pairs = [tuple(int(n) for n in pair.split("x")) for pair in text.split(",")]
        return [Mesh(tp, ep, rank) for tp, ep in pairs for rank in range(Mesh(tp, ep).world)]
    except ValueError:
        raise UsageError(f"--meshes {text}: expected TPxEP pairs such as 1x1,2x1,1x2") from None


app = typer.Typer(add_completion=False, help="Loading: time, memory, lying files.")


@app.command("load")
def load_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint directory.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    mtp: Annotated[bool, typer.Option("--mtp", help="Bind the MTP block too.")] = False,
    meshes_: Annotated[str, typer.Option("--meshes", help="TPxEP pairs whose ranks to measure.")] = "1x1,2x1,1x2,2x2",
    repeats: Annotated[int, typer.Option(min=0, help="Rounds of the throughput measurement; 0 leaves it out.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No report.")] = False,
) -> None:
    """Throughput against plain reads of the same bytes from the page cache, and the peak memory of every rank.

    Two plain reads stand beside a load. One passes all bytes through a buffer of 8 MiB that stays in the processor's
    cache: what the page cache can deliver. The other keeps them, as a load has to: it pays for the pages that the
    kernel hands out and clears, and is the ceiling of anything that leaves weights in memory. It holds the whole
    directory at once, beside one load; --repeats 0 measures peaks alone where memory is short. A load also looks at
    every value for NaN and infinity.

    Example: glm53 bench load /data/one-layer --mtp --meshes 1x1,2x1,1x2
    """
    check_outputs({"--json": json_file}, keeps=[directory])
    source(directory, None, "full")
    result: dict[str, Any] = {
        "directory": str(directory),
        "throughput": throughput(directory, device=device, mtp=mtp, repeats=repeats) if repeats else {},
        "peaks": [peak(directory, mesh, device=device, mtp=mtp) for mesh in meshes(meshes_)],
    }
    write_json(json_file, result)
    if quiet:
        return
    console = Console(highlight=False, soft_wrap=True)
    for name, r in result["throughput"].items():
        numbers = f"{r['gb_per_s']:.2f} GB/s, {r['gb_per_cpu_s']:.2f} GB per processor second"
        ratio = f"{r['gb_per_s']:.2f} by the clock, {r['gb_per_cpu_s']:.2f} by processor time"
        console.print(f"{name}: {ratio if ' / ' in name else numbers}")
    for p in result["peaks"]:
        console.print(
            f"tp {p['tp']} ep {p['ep']} rank {p['rank']}: read {p['bytes_read']:,}, resident {p['resident']:,}, "
            f"ledger peak +{p['ledger_peak'] - p['resident']:,}, process peak {p['rss_grown'] - p['resident']:+,} "
            "against resident" + (f", CUDA peak {p['cuda_peak']:,}" if p["cuda_peak"] else "")
        )


@app.command("lies")
def lies_command(
    files: Annotated[int, typer.Option(min=2, help="Mutated directories.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Seed of the mutations.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar, no report.")] = False,
) -> None:
    """Mutated checkpoints: each loads to exactly what it holds or is refused by one of the loader's own errors.

    Example: glm53 bench lies --files 20000 --seed 7
    """
    check_outputs({"--json": json_file})
    try:
        result = lies(files, seed, quiet=quiet)
    except AssertionError as error:
        typer.echo(f"lies: {error}", err=True)
        raise typer.Exit(1) from None
    write_json(json_file, result)
    if not quiet:
        typer.echo(json.dumps(result, indent=2))
