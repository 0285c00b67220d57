"""The same verification under other SIMD levels, BLAS kernels, thread counts and NumPy releases.

Each run is a process of its own that reports what it really computed with; a lane whose setting did not take effect has
shown nothing, and counts as failed.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
X86_CORES = ("Prescott", "Nehalem", "Sandybridge", "Haswell", "SkylakeX")
ARM_CORES = ("ARMV8", "CORTEXA57", "NEOVERSEN1")
FEWEST_CORES = 2
WORKERS = 2  # processes at a time
THREADS = (1, 2)
CORE_NAME = ("scipy_openblas_get_corename64_", "openblas_get_corename64_", "openblas_get_corename")
THREAD_COUNT = ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads")


@dataclass
class Outcome:
    """One run: `problem` is empty where it agreed and its setting was seen to take effect."""

    label: str
    digest: str = ""
    problem: str = ""
    environment: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        e = self.environment
        with_ = (
            f"NumPy {e['numpy']}, SIMD {e['simd'][-1] if e['simd'] else 'baseline'}, BLAS {e['core']} x{e['threads']}"
            if e
            else "did not run"
        )
        return f"{self.label}: {self.problem or 'identical'}; sha256 {self.digest or '-'}; {with_}"


Progress = Callable[[str], None]


def environment() -> dict[str, Any]:
    """What this process computes with: versions, NumPy's enabled SIMD features beyond its baseline, BLAS kernels."""
    core = importlib.import_module("numpy._core._multiarray_umath")
    enabled = [name for name in core.__cpu_dispatch__ if core.__cpu_features__.get(name)]
    np.matmul(np.ones((64, 64)), np.ones((64, 64)))
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "numpy": np.__version__,
        "ml_dtypes": importlib.metadata.version("ml_dtypes"),
        "simd": enabled,
        "core": _ask_blas(CORE_NAME, ctypes.c_char_p),
        "threads": _ask_blas(THREAD_COUNT, ctypes.c_int),
    }


def _ask_blas(symbols: Iterable[str], result: Any) -> Any:
    """What the loaded OpenBLAS answers; "unknown" where the process maps none."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    for path in dict.fromkeys(line.split()[-1] for line in lines if "openblas" in line):
        library = ctypes.CDLL(path)
        for symbol in symbols:
            if hasattr(library, symbol):
                function = getattr(library, symbol)
                function.restype = result
                value = function()
                return value.decode() if isinstance(value, bytes) else value
    return "unknown"


def run(label: str, python: Sequence[str], directory: Path, settings: Mapping[str, str]) -> Outcome:
    """`python -m conformance.goldens` with these variables; what it reported."""
    # One BLAS thread unless a lane asks for more: two spin against each other on a busy machine.
    fixed = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
    variables = os.environ | fixed | dict(settings)
    done = subprocess.run(
        [*python, "-m", "conformance.goldens", str(directory.resolve())], env=variables, capture_output=True, text=True
    )
    try:
        report = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        return Outcome(label, problem=f"exit {done.returncode} without a report: {lines[-1] if lines else 'no output'}")
    problem = "; ".join(report["findings"][:3])
    return Outcome(label, report["digest"], problem, report["environment"])


@dataclass(frozen=True)
class Job:
    """One run of this interpreter under `settings`; `took` says why the run shows nothing, if it does not."""

    label: str
    settings: Mapping[str, str]
    took: Callable[[dict[str, Any]], str]


def _run_all(jobs: Iterable[Job], directory: Path, progress: Progress) -> Iterator[Outcome]:
    """The jobs' outcomes in order; `WORKERS` processes at a time."""

    def one(job: Job) -> Outcome:
        outcome = run(job.label, [sys.executable], directory, job.settings)
        if not outcome.problem and (why := job.took(outcome.environment)):
            outcome.problem = f"the setting did not take effect: {why}"
        return outcome

    with ThreadPoolExecutor(WORKERS) as pool:
        for outcome in pool.map(one, jobs):
            progress(outcome.label)
            yield outcome


def features(directory: Path, progress: Progress = lambda label: None) -> Iterator[Outcome]:
    """(a) NumPy's dispatched SIMD features switched off, the higher half of them and then all."""
    names = environment()["simd"]
    if not names:
        yield Outcome("features", problem="NumPy dispatches on no CPU feature here; there is nothing to switch off")
        return

    def job(off: list[str]) -> Job:
        def took(environment: dict[str, Any]) -> str:
            return f"SIMD is {environment['simd']}" if set(environment["simd"]) & set(off) else ""

        return Job(f"features: without {' '.join(off)}", {"NPY_DISABLE_CPU_FEATURES": " ".join(off)}, took)

    cuts = sorted({len(names) // 2, 0}, reverse=True)
    yield from _run_all((job(names[kept:]) for kept in cuts), directory, progress)


def blas(directory: Path, progress: Progress = lambda label: None) -> Iterator[Outcome]:
    """(b) Several OpenBLAS kernels with one thread and with two, in turn; the first with both."""

    def job(core: str, threads: int) -> Job:
        def took(environment: dict[str, Any]) -> str:
            return "" if environment["threads"] == threads else f"{environment['threads']} threads"

        count = str(threads)
        settings = {"OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": count, "OMP_NUM_THREADS": count}
        return Job(f"blas: {core}, {count} thread{'s' if threads > 1 else ''}", settings, took)

    cores = X86_CORES if platform.machine() in ("x86_64", "AMD64") else ARM_CORES
    runs = blas_runs(cores)
    seen = set()
    for outcome in _run_all((job(core, threads) for core, threads in runs), directory, progress):
        seen.add(outcome.environment.get("core"))
        yield outcome
    if len(seen - {None, "unknown"}) < FEWEST_CORES:
        yield Outcome(
            "blas", problem=f"the setting did not take effect: OpenBLAS only ever ran {sorted(map(str, seen))}"
        )


def blas_runs(cores: Sequence[str]) -> list[tuple[str, int]]:
    """(kernel, threads): each kernel once, the threads in turn, and the first kernel with every count."""
    turns = [(core, THREADS[place % len(THREADS)]) for place, core in enumerate(cores)]
    return [*((cores[0], threads) for threads in THREADS[1:]), *turns]


def oldest_numpy() -> dict[str, str]:
    """The lower bounds of NumPy and ml_dtypes that the project declares."""
    bounds = {}
    for requirement in importlib.metadata.requires("glm53-conformance") or []:
        match = re.fullmatch(r"(numpy|ml_dtypes)>=([0-9.]+)", requirement.replace(" ", ""))
        if match:
            version = match[2]
            bounds[match[1]] = version + ".0" * (2 - version.count("."))
    return bounds


def numpy(directory: Path, workdir: Path, progress: Progress = lambda label: None) -> Iterator[Outcome]:
    """(c) The oldest NumPy that the project allows, with the oldest ml_dtypes, and the newest that installs."""
    for age, packages in (
        ("oldest", [f"{name}=={version}" for name, version in oldest_numpy().items()]),
        ("newest", ["numpy", "ml_dtypes"]),
    ):
        label = f"numpy: {age}"
        progress(label)
        home = workdir / f"numpy-{age}"
        python = home / "bin" / "python"
        if not python.exists():
            venv.create(home, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--upgrade", "--only-binary=:all:", *packages]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            yield Outcome(label, problem=f"cannot install {' '.join(packages)}: {lines[-1] if lines else 'no output'}")
            continue
        yield run(label, [str(python)], directory, {})
