"""Time on a CUDA device: replays of recorded launches between events, against this device's own read bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import ceil
from statistics import median
from typing import Any

import torch

from fast.recording import recording
from tools.errors import UsageError

Launch = Callable[[], Any]
LONG = 2.0
"""Milliseconds that a measured graph takes at least, a few hundred times what starting it costs."""
WARM = 150.0
"""Milliseconds of work in front of a measurement."""
FETCHED = 1 << 28
"""Bytes of weights that launches on one shape walk through, so that none is still in a cache when its turn comes."""


def device() -> torch.device:
    """The current CUDA device. Raises UsageError where there is none."""
    if not torch.cuda.is_available():
        raise UsageError("this benchmark needs a CUDA device: torch finds none")
    return torch.device("cuda", torch.cuda.current_device())


def described() -> dict[str, Any]:
    """The device and what runs on it."""
    from fast.kernels.compile import compiler_version, target

    capability = torch.cuda.get_device_capability()
    return {
        "device": torch.cuda.get_device_name(),
        "target": target(*capability),
        "compiler": compiler_version(),
        "torch": torch.__version__,
        "memory_bytes": torch.cuda.get_device_properties(device()).total_memory,
    }


def recorded(launch: Launch, passes: int = 1) -> torch.cuda.CUDAGraph:
    """What `launch` puts on the stream, `passes` times, as a graph; it runs once before, which loads and compiles what
    it needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.synchronize()
    with recording(device()) as graph:
        for _ in range(passes):
            launch()
    return graph


def milliseconds(run: Launch, repeats: int, warm: int = 3) -> float:
    """Median time of a call, by events on the stream."""
    for _ in range(warm):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(marks))


def replayed(launch: Launch, repeats: int = 20) -> float:
    """Median milliseconds of `launch` inside a graph.

    A graph takes some microseconds to start: it is recorded as often as makes it LONG, so that they do not count. And
    a device that did nothing has low clocks: it is kept busy for WARM before.
    """
    once = milliseconds(recorded(launch).replay, 3)
    passes = max(1, ceil(LONG / once))
    warm = ceil(WARM / (once * passes))
    return milliseconds(recorded(launch, passes).replay, repeats, warm) / passes


def read_bandwidth(size: int = 1 << 32, repeats: int = 10) -> float:
    """GB/s at which this device reads `size` bytes once: the measuring stick of every fraction."""
    from fast.kernels import stream

    data = torch.empty(size, dtype=torch.uint8, device=device()).random_()
    return size / replayed(lambda: stream.read(data), repeats) / 1e6


def copies(size: int, least: int = 2) -> int:
    """How many operands of `size` bytes to walk through."""
    return max(least, -(-FETCHED // size))
