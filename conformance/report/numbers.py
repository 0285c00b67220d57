"""How numbers are written in every report: three significant digits, exact values as hex floats."""

from __future__ import annotations

import math

NOTHING = "–"


def ratio(value: float) -> str:
    """error / allowed with three significant digits; `∞` and `–` for infinite and undefined."""
    if math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if 0.001 <= abs(value) < 10_000:
        exponent = int(f"{value:.2e}".partition("e")[2])
        return f"{value:.{max(0, 2 - exponent)}f}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def short(value: float) -> str:
    """A ratio where room is scarce: two decimals, and what they cannot show as a bound."""
    if math.isnan(value) or math.isinf(value) or value == 0 or value >= 100:
        return ratio(value)
    return f"{value:.2f}" if value >= 0.005 else "<.01"


def decimal(value: float) -> str:
    """A compared value: nine significant digits tell any two float32 values apart."""
    return f"{value:.9g}"


def percent(value: float) -> str:
    """A signed relative shift."""
    if not math.isfinite(value):
        return NOTHING
    sign = "+" if value > 0 else ""
    return f"{sign}{ratio(value * 100)} %"


def count(value: int) -> str:
    """Thousands apart by a thin space, which no screen reader takes for a decimal comma."""
    return f"{value:,}".replace(",", "\u2009")


def plural(number: int, noun: str) -> str:
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")
