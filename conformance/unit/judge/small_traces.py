"""The smallest traces that are sound, for tests to spoil."""

import numpy as np

from conformance.trace import Schedule, Trace, metadata

T, V = 6, 40


def described(schedule=None, **changes):
    made = metadata(
        engine="mine",
        engine_version="3",
        checkpoint="tiny",
        config_sha256="0" * 64,
        export="nvidia",
        schedule=schedule or Schedule((T,)),
    )
    return {key: value for key, value in (made | changes).items() if value is not None}


def traced(schedule=None, **taps):
    """A minimal sound trace; keyword names stand for taps, None removes one. Dots are written as double underscores."""
    all_taps = {"tokens": np.arange(T, dtype=np.int32), "logits": np.zeros((T, V), np.float32)}
    for name, value in taps.items():
        all_taps[name.replace("__", ".")] = value
    return Trace(described(schedule), {name: tap for name, tap in all_taps.items() if tap is not None})
