"""Where to look first: what the failing tokens have in common, and which taps would name the fault more finely."""

from __future__ import annotations

from itertools import accumulate

from conformance.errors import TraceScheduleError
from conformance.judge.result import Result, TapRow
from conformance.trace import Schedule

BOUNDARIES = ("in", "attn.in", "attn.out", "mid", "mlp.in", "mlp.out", "out")
"""Of a layer, in dataflow order. What lies before `attn.out` or `mlp.out` and is none of them is made inside."""
CHOICES = ("indexer.selected", "router.indices")
SHOWN = 6
INSIDE = {"attn": "attn.out", "indexer": "attn.out", "router": "mlp.out", "routed": "mlp.out", "shared": "mlp.out"}


def hints(result: Result) -> list[str]:
    """Sentences for a reader who has seen the first divergence; none where there is nothing to add."""
    failing = result.failing_taps()
    if result.first_divergence is None or not failing or failing[0].tap != result.first_divergence.tap:
        return []
    return [hint for hint in (_tokens(result, failing), _finer(result, failing[0])) if hint]


def _tokens(result: Result, failing: list[TapRow]) -> str:
    """Which tokens fail in the layer of the first divergence, held against the calls in which they were fed."""
    bad: set[int] = set()
    for row in failing:
        if row.layer == failing[0].layer:
            bad |= {token for token, ratio in enumerate(row.by_token) if not ratio <= 1}
    if not bad:
        return ""
    first, last, count = min(bad), max(bad), len(result.tokens)
    try:
        schedule = Schedule.parse(result.schedule)
    except TraceScheduleError:
        return ""
    prefill, pad = schedule.prefill, schedule.pad
    if not first and pad and last < count - 1:
        return (
            f"only tokens 0 to {last} fail, those nearest to the {pad} of padding: look at what padding leaves behind"
        )
    if not first:
        return ""
    passing = f"tokens 0 to {first - 1} pass here" if first > 1 else "token 0 passes here"
    starts = list(accumulate(prefill))
    if first == sum(prefill):
        return f"{passing}; {first} is the first that was fed alone: look at what prefill hands to decoding"
    if first in starts:
        chunk = starts.index(first) + 2
        return f"{passing}; {first} is the first of prefill chunk {chunk}: look at what one call hands to the next"
    return f"{passing}; {first} is the first that fails"


def _finer(result: Result, row: TapRow) -> str:
    """Taps that the trace does not hold and that the failing step ran across: boundaries of the layer, else what lies
    inside the mixer or the feed-forward."""
    if row.layer is None:
        return ""
    prefix = f"layers.{row.layer}."
    leaf = row.tap.removeprefix(prefix)
    missing = [name for name in result.coverage.taps_missing if name.startswith(prefix)]
    inputs = [name.removeprefix(prefix) for name in row.inputs if name.startswith(prefix)]
    known = [BOUNDARIES.index(name) for name in inputs if name in BOUNDARIES]
    start, end = max(known, default=-1), BOUNDARIES.index(_end(leaf))
    absent = [prefix + name for name in BOUNDARIES[start + 1 : end] if prefix + name in missing]
    if not absent and start + 1 == end:
        family = leaf.split(".")[0]
        inside = [name for name in missing if _end(name.removeprefix(prefix)) == BOUNDARIES[end]]
        inside = [name for name in inside if name.removeprefix(prefix) not in BOUNDARIES and not name.endswith("state")]
        own = [name for name in inside if name.startswith(f"{prefix}{family}.")]
        absent = [name for name in own if name != f"{prefix}router.weights"] if leaf in CHOICES else inside
    if not absent:
        return ""
    begin = BOUNDARIES[start] if known else "the layer before"
    shown = ", ".join(name.removeprefix(prefix) for name in absent[:SHOWN]) + (", .." if len(absent) > SHOWN else "")
    return f"the step runs from {begin} to {leaf}: store {shown} of layers.{row.layer} to see which part of it fails"


def _end(leaf: str) -> str:
    """The boundary that a tap is, or up to which what it is a part of reaches."""
    return leaf if leaf in BOUNDARIES else INSIDE.get(leaf.split(".")[0], "in")
