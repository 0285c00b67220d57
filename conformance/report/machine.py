"""The report for programs: `{"format": "glm53-report/1", "passed": ..., "results": [...], "pairs": [...]}`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conformance.files import write_whole
from conformance.judge.result import Result
from conformance.pairwise import Pair

FORMAT = "glm53-report/1"


def render(results: Sequence[Result], pairs: Sequence[Pair] = ()) -> str:
    """Every result whole (`Result.to_dict`), the overall verdict and the first divergence of each failing run.

    `pairs`: the taps of two traces held against each other, infinite distances as the string "inf".
    """
    return json.dumps(
        {
            "format": FORMAT,
            "passed": bool(results) and all(result.passed for result in results),
            "first_divergences": [result.first_divergence.line for result in results if result.first_divergence],
            "results": [result.to_dict() for result in results],
            "pairs": [_finite(asdict(pair)) for pair in pairs],
        },
        allow_nan=False,
    )


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    return {key: "inf" if value == math.inf else value for key, value in record.items()}


def write(results: Sequence[Result], path: str | os.PathLike[str], pairs: Sequence[Pair] = ()) -> None:
    """Write `render` under a temporary name and rename it."""
    write_whole(path, render(results, pairs).encode())


def read(path: str | os.PathLike[str]) -> list[Result]:
    """The results of a file that `write` made; raises ValueError for anything else."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError:
        data = None
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("results"), list):
        raise ValueError(f"{path}: not a {FORMAT} report")
    return [Result.from_json(json.dumps(item)) for item in data["results"]]
