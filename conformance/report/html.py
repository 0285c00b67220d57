"""One self-contained HTML page: no external font, script, style or image; it can be mailed or kept as an artifact."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from conformance.files import write_whole
from conformance.judge.result import Result
from conformance.pairwise import Pair
from conformance.report import numbers, view
from conformance.report.hints import hints

_HERE = Path(__file__).parent


def write(results: Sequence[Result], path: str | os.PathLike[str], pairs: Sequence[Pair] = ()) -> None:
    """Write the page under a temporary name and rename it. An empty list is a page that says FAIL."""
    write_whole(path, render(results, pairs).encode())


def render(results: Sequence[Result], pairs: Sequence[Pair] = ()) -> str:
    """The page as text; `pairs` are the taps of two traces held against each other."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    for name in ("ratio", "decimal", "percent", "count", "plural"):
        environment.filters[name] = getattr(numbers, name)
    return environment.get_template("page.html.j2").render(
        title=", ".join(dict.fromkeys(f"{result.engine} on {result.checkpoint}" for result in results)) or "no run",
        passed=bool(results) and all(result.passed for result in results),
        runs=[_run(result) for result in results],
        pairs=[pair for pair in pairs if pair.rows or pair.fault],
        pairs_total=len(pairs),
        share=view.share,
        severity=view.severity,
        worst_check=view.worst_check,
        style=_inline("page.css"),
        script=_inline("page.js"),
    )


def _run(result: Result) -> dict[str, Any]:
    names, matrix = view.matrix(result)
    failing = result.failing_taps()
    bad_tensors = [row for row in result.tensors if not row.passed]
    return {
        "result": result,
        "verdict": view.verdict(result),
        "hints": hints(result),
        "tiles": view.tiles(result),
        "fatal": [problem for problem in result.problems if problem.fatal],
        "notes": [problem for problem in result.problems if not problem.fatal and problem.kind != "missing"],
        "failures": failing[: view.SHOWN_FAILURES],
        "failures_left": max(0, len(failing) - view.SHOWN_FAILURES),
        "heat": view.heat_data(result),
        "matrix_names": names,
        "matrix": matrix,
        "taps": sorted(result.taps, key=lambda row: row.order),
        "chart": view.kl_chart(result),
        "groups": view.tensor_groups(result.tensors),
        "bad_tensors": bad_tensors[: view.SHOWN_TENSORS],
        "bad_tensors_left": max(0, len(bad_tensors) - view.SHOWN_TENSORS),
    }


def _inline(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
