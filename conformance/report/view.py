"""A `Result` arranged for reading: what every report shows first, and the tables of the HTML page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.judge.result import Check, Result, TapRow, TensorRow
from conformance.report.numbers import NOTHING, count, plural, ratio, short

MAP_COLUMNS = 400
SHOWN_FAILURES = 24
SHOWN_TENSORS = 200
_CEILING = 1e9


@dataclass(frozen=True)
class Tile:
    """One of the figures at the top: what it is, its value, and what it is measured against."""

    label: str
    value: str
    note: str
    failed: bool = False


@dataclass(frozen=True)
class Cell:
    """Worst found / allowed of one tap of one layer; `text` is empty where nothing was compared."""

    text: str
    level: int
    failed: bool
    title: str


@dataclass(frozen=True)
class MatrixRow:
    layer: str
    kind: str
    failed: bool
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class TensorGroup:
    """All operands of one role and part."""

    role: str
    part: str
    rule: str
    tensors: int
    elements: int
    differing: int
    failing: int


def verdict(result: Result) -> str:
    """One sentence that says why the run passed or failed."""
    if result.passed:
        return f"every compared tap is within its computed bound ({plural(len(result.taps), 'step')})"
    if result.first_divergence is not None:
        return result.first_divergence.line
    fatal = [problem for problem in result.problems if problem.fatal]
    return fatal[0].message if fatal else "nothing was compared"


def worst_check(row: TapRow) -> Check:
    """The check of a step that comes closest to its allowance or exceeds it most; without checks, its largest value."""
    element = Check("element", row.max_ratio, 1.0, row.max_ratio, row.max_ratio <= 1, "")
    return max(row.checks, key=lambda check: _order(check.ratio), default=element)


def severity(row: TapRow) -> float:
    """Found / allowed of the worst check of a step: above 1 exactly when the step fails."""
    return worst_check(row).ratio


def tiles(result: Result) -> list[Tile]:
    rows = result.taps
    worst = max(rows, key=lambda row: _order(severity(row)), default=None)
    failing = sum(not row.passed for row in rows)
    bad_tensors = sum(not row.passed for row in result.tensors)
    agree = sum(row.agree for row in result.logits)
    kl = max(result.logits, key=lambda row: _order(share(row.kl, row.kl_allowed)), default=None)
    bad_tokens = sum(not row.passed for row in result.logits)
    coverage = result.coverage
    return [
        Tile(
            "Steps within bounds",
            f"{count(len(rows) - failing)} / {count(len(rows))}",
            f"{plural(coverage.elements, 'value')} compared",
            failing > 0 or not rows,
        ),
        Tile(
            "Worst found / allowed",
            ratio(severity(worst)) if worst else NOTHING,
            worst.tap if worst else "nothing compared",
            bool(worst and not worst.passed),
        ),
        Tile(
            "Operands as in the file",
            f"{count(len(result.tensors) - bad_tensors)} / {count(len(result.tensors))}" if result.tensors else NOTHING,
            "bit by bit" if result.tensors else "the engine shows no operands",
            bad_tensors > 0,
        ),
        Tile(
            "Discrete choices",
            count(result.choices),
            f"{plural(result.flips, 'flip')}, {count(result.excused)} excused by margin",
            result.flips > result.excused,
        ),
        Tile(
            "Top-1 agreement",
            f"{count(agree)} / {count(len(result.logits))}" if result.logits else NOTHING,
            f"{plural(bad_tokens, 'position')} outside the bound" if bad_tokens else "free-running logits",
            bad_tokens > 0,
        ),
        Tile(
            "Worst KL / allowed",
            ratio(share(kl.kl, kl.kl_allowed)) if kl else NOTHING,
            f"{kl.kl:.2e} nats at position {kl.position}" if kl else "no logits",
            bool(kl and kl.kl > kl.kl_allowed),
        ),
    ]


def suffix(row: TapRow) -> str:
    """The tap's name within its layer."""
    return row.tap if row.layer is None else row.tap.removeprefix(f"layers.{row.layer}.")


def matrix(result: Result) -> tuple[list[str], list[MatrixRow]]:
    """(tap names in dataflow order, one row per layer): the worst ratio of every tap of every layer."""
    cells: dict[tuple[int, str], list[TapRow]] = {}
    names: list[str] = []
    for layer in range(result.layers):
        before = -1
        for row in sorted((row for row in result.taps if row.layer == layer), key=lambda row: row.order):
            name = suffix(row)
            cells.setdefault((layer, name), []).append(row)
            if name not in names:
                names.insert(before + 1, name)
            before = names.index(name)
    return names, [
        MatrixRow(
            str(layer),
            layer_kind(result, layer),
            any(not row.passed for row in result.taps if row.layer == layer),
            tuple(_cell(f"layer {layer} {name}", cells.get((layer, name), [])) for name in names),
        )
        for layer in range(result.layers)
        if any(row.layer == layer for row in result.taps)
    ]


def layer_kind(result: Result, layer: int) -> str:
    """ "DSA" or "KDA" where the compared taps tell, else ""."""
    names = {suffix(row) for row in result.taps if row.layer == layer}
    if any(name.startswith("indexer.") or name in ("attn.latent", "attn.q_resid") for name in names):
        return "DSA"
    return "KDA" if names & {"attn.g", "attn.beta", "attn.state", "attn.conv_state"} else ""


def _cell(title: str, rows: Sequence[TapRow]) -> Cell:
    if not rows:
        return Cell("", 0, False, f"{title}: not compared")
    worst = max((severity(row) for row in rows), key=_order)
    failed = any(not row.passed for row in rows)
    return Cell(short(worst), level(worst), failed, f"{title}: {ratio(worst)} of what is allowed")


def level(value: float) -> int:
    """Shade 1 (nothing of the allowed error used) to 9 (all of it), by square root; 0 where there is no value."""
    return 0 if math.isnan(value) else 1 + math.floor(math.sqrt(min(max(value, 0.0), 1.0)) * 8)


def heat_data(result: Result) -> str:
    """JSON for the page's heat map: per tap name and layer the ratio of each token (or group of tokens)."""
    tokens = len(result.tokens)
    group = max(1, math.ceil(tokens / MAP_COLUMNS))
    layers: dict[str, dict[str, list[float | None]]] = {}
    outside: dict[str, list[float | None]] = {}
    for row in sorted(result.taps, key=lambda row: row.order):
        if not row.by_token or len(row.by_token) != tokens:
            continue
        values = _grouped(row.by_token, group)
        where = outside if row.layer is None else layers.setdefault(suffix(row), {})
        key = row.tap if row.layer is None else str(row.layer)
        where[key] = [_larger(a, b) for a, b in zip(where[key], values, strict=True)] if key in where else values
    data = {
        "tokens": list(result.tokens),
        "group": group,
        "layers": [[layer, layer_kind(result, layer)] for layer in range(result.layers)],
        "taps": layers,
        "outside": outside,
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")


def _grouped(values: Sequence[float], group: int) -> list[float | None]:
    out: list[float | None] = []
    for start in range(0, len(values), group):
        known = [value for value in values[start : start + group] if not math.isnan(value)]
        out.append(float(f"{min(max(known), _CEILING):.3g}") if known else None)
    return out


def _larger(a: float | None, b: float | None) -> float | None:
    return max((value for value in (a, b) if value is not None), default=None)


def tensor_groups(tensors: Iterable[TensorRow]) -> list[TensorGroup]:
    """Operands counted by role, part and rule; groups with a failure first."""
    groups: dict[tuple[str, str, str], list[TensorRow]] = {}
    for row in tensors:
        groups.setdefault((row.role, row.part, row.rule), []).append(row)
    made = [
        TensorGroup(
            *key,
            tensors=len(rows),
            elements=sum(row.compared for row in rows),
            differing=sum(row.differing for row in rows),
            failing=sum(not row.passed for row in rows),
        )
        for key, rows in groups.items()
    ]
    return sorted(made, key=lambda group: (-group.failing, group.role, group.part))


def kl_chart(result: Result, width: int = 960, height: int = 120) -> dict[str, Any] | None:
    """Geometry of the KL / allowed line over positions: polyline points, the y of 1.0, and what lies above it."""
    shares = [share(row.kl, row.kl_allowed) for row in result.logits]
    finite = [value for value in shares if math.isfinite(value) and value > 0]
    if len(shares) < 2 or not finite:
        return None
    low = math.floor(math.log10(max(min(finite), 1e-6)))
    high = max(math.ceil(math.log10(max(finite))), low + 1, 0)
    step = width / max(len(shares) - 1, 1)

    def y(value: float) -> float:
        clamped = math.log10(min(max(value, 10.0**low), 10.0**high)) if value == value else low
        return round(height - (clamped - low) / (high - low) * height, 1)

    return {
        "width": width,
        "height": height,
        "points": " ".join(f"{index * step:.1f},{y(value)}" for index, value in enumerate(shares)),
        "limit": y(1.0),
        "over": [
            (round(index * step, 1), y(value), row.position)
            for index, (value, row) in enumerate(zip(shares, result.logits, strict=True))
            if not row.passed
        ],
        "low": f"1e{low}",
        "high": f"1e{high}",
    }


def share(value: float, allowed: float) -> float:
    """value / allowed; nothing allowed and nothing found is 0."""
    if allowed == 0:
        return 0.0 if value == 0 else math.inf
    return value / allowed


def _order(value: float) -> float:
    """Sort key: undefined ratios are worse than any number, since a check that cannot be computed did not pass."""
    return math.inf if math.isnan(value) else value
