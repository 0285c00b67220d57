"""Launches taken into a CUDA graph instead of being made."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def recording(device: torch.device) -> Iterator[torch.cuda.CUDAGraph]:
    """-> the graph that takes what is launched inside.

    CUDA breaks a recording off when its thread destroys another graph, as a garbage collection at the wrong moment does
    with a step that nobody holds any more: none happens inside. Other threads may use the device meanwhile, and record
    when this one has ended.
    """
    with _ONE_AT_A_TIME, torch.cuda.device(device):
        graph, stream, collecting = torch.cuda.CUDAGraph(), torch.cuda.Stream(), gc.isenabled()
        gc.disable()
        try:
            # The stream is of this device, and left again whatever ends the recording: torch's own is neither.
            with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                yield graph
        finally:
            if collecting:
                gc.enable()
