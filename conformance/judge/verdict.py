"""The judge's entry: one trace against one checkpoint, per tensor, per step and per token.

A run passes only if something was compared and nothing failed. Names that no table knows, taps of the wrong shape or
dtype, metadata that contradict the checkpoint and tokens other than those asked for are failures, not notes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from conformance import taps
from conformance.judge import bits, drafts, rank_bits, ranks, tokens
from conformance.judge.bits import Operands
from conformance.judge.bounds import FAMILIES
from conformance.judge.rank_bits import RankOperands
from conformance.judge.rebase import FALSE_ALARM, SAMPLES, Rebase
from conformance.judge.result import Coverage, Divergence, Problem, Result, TapRow, TensorRow, TokenRow
from conformance.judge.rows import unfit_row
from conformance.rank_traces import disagreements
from conformance.trace import DTYPE_NAMES, PARTIAL_SUMS, REQUIRED_TAPS, Trace, inspect
from reference.checkpoint import Checkpoint
from reference.errors import DivisionError, MeshError

Progress = Callable[[str], None]
BELONGING = ("config_sha256", "export")
"""Metadata that say of which checkpoint a trace is; where they differ, no step can be expected to agree."""
ARITHMETICS = ("exact", "bf16", "stochastic", "fp16", "fp32", "fp64")


def compare(
    trace: Trace,
    checkpoint: Checkpoint,
    *,
    operands: Operands | RankOperands | None = None,
    expected_tokens: Sequence[int] | np.ndarray | None = None,
    asked: Mapping[str, object] | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
    false_alarm: float = FALSE_ALARM,
    judge: Rebase | None = None,
    progress: Progress | None = None,
    stop: bool = False,
) -> Result:
    """`operands(name)` shows what the engine bound (None: not compared, and said so in the coverage); for several
    ranks it is a `RankOperands`.

    `expected_tokens` are those the run was asked for, `asked` the options that the engine was opened with: a trace that
    names another number of ranks or another arithmetic is of another run. `judge` is a `Rebase` of the same checkpoint
    to go on using; the three numbers before it are then its own. `progress` is called with the name of each tap and
    tensor that was judged. With `stop` nothing is judged after the first step that fails: for those who only ask
    whether and where.
    """
    report = progress or (lambda name: None)
    owner = judge or Rebase(checkpoint, samples=samples, seed=seed, false_alarm=false_alarm)
    problems, unfit = _problems(trace, checkpoint, expected_tokens)
    problems += _other_run(trace.metadata, asked or {})
    tensors: list[TensorRow] = []
    for tensor in _tensors(checkpoint, operands, _has_drafts(trace)):
        tensors.append(tensor)
        report(tensor.name)
    usable = Trace(trace.metadata, {name: tap for name, tap in trace.taps.items() if name not in unfit})
    told = disagreements(trace)
    problems += [Problem("ranks", name, why, "one plan", True, f"tap {name}: {why}") for name, why in told.items()]
    apart = {name: why for name, why in told.items() if name in trace.taps}
    places = {name: place for place, name in enumerate([*owner.order, *drafts.order(owner.config)])}
    rows: list[TapRow] = [
        unfit_row(places[name], name, trace.taps[name], why) for name, why in (unfit | apart).items() if name in places
    ]
    logits: tuple[TokenRow, ...] = ()
    if not any(problem.kind in ("empty", "missing") and problem.fatal for problem in problems):
        for row in chain(owner.rows(usable), drafts.rows(owner, usable)):
            if row.tap not in apart:
                rows.append(row)
            report(row.tap)
            if stop and (not row.passed or row.tap in apart):
                break
        if "logits" in usable.taps and not (stop and any(not row.passed for row in rows)):
            logits = tokens.compare(owner, usable)
    rows.sort(key=lambda row: row.order)
    return _result(trace, checkpoint, owner, problems, tensors, rows, logits)


def _tensors(checkpoint: Checkpoint, operands: Operands | RankOperands | None, block: bool) -> Iterator[TensorRow]:
    """With `block`, those of the draft block too."""
    names = bits.weights(checkpoint, drafts=block)
    if isinstance(operands, RankOperands):
        return rank_bits.compare(checkpoint, operands, names)
    return iter(()) if operands is None else bits.compare(checkpoint, operands, names)


def _has_drafts(trace: Trace) -> bool:
    return any(name.startswith("mtp.") for name in trace.taps)


def _problems(trace: Trace, checkpoint: Checkpoint, expected_tokens: Any) -> tuple[list[Problem], dict[str, str]]:
    """What is wrong with the trace itself, and the taps that cannot be used (name -> why)."""
    found = inspect(trace, checkpoint.config)
    problems = []
    for key, want in zip(BELONGING, (checkpoint.config.sha256, checkpoint.export), strict=True):
        have = trace.metadata.get(key, "")
        if have != want:
            problems.append(_lie(key, have, want))
    problems += _claims(trace.metadata, checkpoint)
    ids = trace.taps.get("tokens")
    for name in REQUIRED_TAPS:
        if name not in trace.taps:
            problems.append(Problem("missing", name, "", "present", True, f"tap {name} is missing"))
    if ids is None or ids.size == 0 or ids.ndim != 1:
        problems.append(Problem("empty", "tokens", "0 tokens", "at least 1", True, "the run holds no token"))
    elif expected_tokens is not None and not np.array_equal(ids, np.asarray(expected_tokens)):
        text = f"tap tokens holds {_start(ids)}, the run was asked for {_start(np.asarray(expected_tokens))}"
        problems.append(Problem("metadata", "tokens", _start(ids), _start(np.asarray(expected_tokens)), True, text))
    unfit = _unfit(trace, checkpoint)
    for name, why in unfit.items():
        kind = "dtype" if why.startswith("dtype") else "shape"
        problems.append(Problem(kind, name, why, "", True, f"tap {name}: {why}"))
        if name in REQUIRED_TAPS:
            problems.append(Problem("missing", name, why, "usable", True, f"tap {name} cannot be used: {why}"))
    told = {problem.name for problem in problems}
    for fault in found.faults:
        if not any(f"tap {name} " in f"{fault} " or f"tap {name}:" in str(fault) for name in told):
            problems.append(Problem("metadata", "trace", str(fault), "", True, str(fault)))
            if "id " in str(fault):
                problems.append(Problem("missing", "tokens", str(fault), "", True, "tokens cannot be used"))
    problems += drafts.problems(trace, checkpoint.config)
    for name in found.unknown:
        problems.append(Problem("extra", name, name, "", True, f"tap {name} is in no table of known names"))
    return problems, unfit


def _claims(metadata: dict[str, str], checkpoint: Checkpoint) -> Iterator[Problem]:
    """What no run of this checkpoint can have: an arithmetic nobody knows, ranks that it does not divide among."""
    if (arithmetic := metadata.get("arithmetic", "")) not in ARITHMETICS:
        yield _lie("arithmetic", arithmetic, " or ".join(ARITHMETICS))
    try:
        ranks.claimed(metadata, checkpoint)
    except (ValueError, MeshError, DivisionError) as error:
        found = ", ".join(metadata.get(key, "") for key in ("tp", "ep"))
        yield _lie("tp, ep", found, f"ranks that the weights divide among ({error})")
    if (sums := metadata.get(PARTIAL_SUMS, "bf16")) not in ("fp32", "bf16"):
        yield _lie(PARTIAL_SUMS, sums, "fp32 or bf16")


def _other_run(metadata: dict[str, str], asked: Mapping[str, object]) -> Iterator[Problem]:
    """Where a trace is not of the run that was asked for; numbers of ranks may have leading zeros."""
    for key in ("tp", "ep", "arithmetic"):
        have, want = metadata.get(key, ""), str(asked.get(key, ""))
        if key in asked and have.lstrip("0") != want:
            text = f"metadata {key} is {have}, the engine was opened with {want}"
            yield Problem("metadata", key, have, want, True, text)


def _lie(key: str, have: str, want: str) -> Problem:
    return Problem("metadata", key, have, want, True, f"metadata {key} is {have}, expected {want}")


def _unfit(trace: Trace, checkpoint: Checkpoint) -> dict[str, str]:
    ids = trace.taps.get("tokens")
    specs = taps.expected(checkpoint.config, len(ids) if ids is not None and ids.ndim else 0)
    out = {}
    for name, tap in trace.taps.items():
        spec = specs.get(name)
        if spec is None:
            continue
        stored = DTYPE_NAMES.get(tap.dtype, str(tap.dtype))
        if stored not in spec.dtypes:
            out[name] = f"dtype {stored}, expected {' or '.join(spec.dtypes)}"
        elif len(tap.shape) != len(spec.shape) or any(
            isinstance(want, int) and want != have for want, have in zip(spec.shape, tap.shape, strict=True)
        ):
            out[name] = f"shape {list(tap.shape)}, expected [{', '.join(map(str, spec.shape))}]"
    if ids is not None and ids.ndim:
        rest = Trace(
            trace.metadata, {name: tap for name, tap in trace.taps.items() if name not in out or name == "tokens"}
        )
        out |= drafts.unfit(rest, checkpoint.config)
    return out


def _start(ids: np.ndarray) -> str:
    shown = ", ".join(str(i) for i in ids.reshape(-1)[:8])
    return f"{ids.size} ids: {shown}{', ..' if ids.size > 8 else ''}"


def _result(
    trace: Trace,
    checkpoint: Checkpoint,
    owner: Rebase,
    problems: list[Problem],
    tensors: list[TensorRow],
    rows: list[TapRow],
    logits: tuple[TokenRow, ...],
) -> Result:
    block = drafts.order(owner.config) if _has_drafts(trace) else []
    known = [*(name for name in owner.order if not name.endswith("attn.u")), *block]
    compared = {row.tap for row in rows if row.compared > 0}
    compared |= {name for name in known if name in trace.taps and trace.taps[name].size == 0}
    shown = {row.name for row in tensors}
    weights = bits.weights(checkpoint, drafts=bool(block))
    judged_nothing = not any(row.compared for row in rows)
    if judged_nothing:
        problems = [*problems, Problem("empty", "taps", "0 compared", "at least 1", True, _nothing(trace, owner))]
    ok = (
        not any(problem.fatal for problem in problems)
        and all(row.passed for row in rows)
        and all(row.passed for row in tensors)
        and all(row.passed for row in logits)
    )
    ids = trace.taps.get("tokens")
    meta = trace.metadata
    return Result(
        engine=_who(meta),
        engine_version=meta.get("engine_version", ""),
        checkpoint=meta.get("checkpoint", ""),
        export=checkpoint.export,
        config_sha256=checkpoint.config.sha256,
        arithmetic=meta.get("arithmetic", ""),
        schedule=meta.get("schedule", ""),
        tokens=tuple(ids.reshape(-1).tolist()) if ids is not None and ids.dtype.kind in "iu" else (),
        layers=checkpoint.config.text.num_hidden_layers,
        passed=ok,
        first_divergence=None if ok else _divergence(problems, tensors, rows, logits),
        problems=tuple(problems),
        tensors=tuple(tensors),
        taps=tuple(rows),
        logits=logits,
        coverage=Coverage(
            taps_known=len(known),
            taps_compared=len(compared),
            taps_missing=tuple(name for name in known if name not in compared),
            taps_unknown=tuple(problem.name for problem in problems if problem.kind == "extra"),
            tensors_known=len(weights),
            tensors_compared=len(shown),
            tensors_missing=tuple(name for name in weights if name not in shown),
            elements=sum(row.compared for row in rows),
        ),
        statistics=replace(owner.statistics(0), checks=len(rows) * FAMILIES),
    )


def _nothing(trace: Trace, owner: Rebase) -> str:
    """Why no step was judged, and what would let it be."""
    untold = [name for node in owner.nodes if node.choice for name in node.outputs if name not in trace.taps]
    if not untold or not all(name in trace.taps for name in REQUIRED_TAPS):
        return "nothing was compared"
    return (
        "nothing was compared: every step rests on choices that the trace does not tell and that a correct engine may "
        f"make otherwise; store layers.i.router.indices and layers.i.indexer.selected ({untold[0]} is the first)"
    )


def _who(meta: dict[str, str]) -> str:
    """The engine, and its ranks where there are several."""
    sizes = [f"{key}{meta[key]}" for key in ("tp", "ep") if meta.get(key, "1") != "1"]
    return " ".join([meta.get("engine", ""), *sizes])


def _divergence(
    problems: list[Problem], tensors: list[TensorRow], rows: list[TapRow], logits: tuple[TokenRow, ...]
) -> Divergence:
    """The first failing step, unless the trace is of another checkpoint; else operands, tokens, the trace itself."""
    for problem in problems:
        if problem.kind == "metadata" and problem.name in BELONGING:
            return _of_problem(problem)
    for row in rows:
        if not row.passed:
            return first_failure(row)
    for tensor in tensors:
        if not tensor.passed:
            line = f"first divergence: TENSOR {tensor.name} ({tensor.part}): {tensor.message}"
            return Divergence(tensor.name, tensor.layer, tensor.part, "operand", line)
    for token in logits:
        if not token.passed:
            line = (
                f"first divergence: TAP logits (free-running) at token {token.position}: largest log-probability "
                f"difference {token.max_diff:.4g}, allowed {token.max_diff_allowed:.4g}"
            )
            return Divergence("logits", None, "tokens -> logits", "token", line)
    return _of_problem(next(problem for problem in problems if problem.fatal))


def _of_problem(problem: Problem) -> Divergence:
    line = f"first divergence: {problem.kind.upper()} {problem.name}: {problem.message}"
    return Divergence(problem.name, None, "", problem.kind, line)


def first_failure(row: TapRow) -> Divergence:
    """`first divergence: TAP name (step): which check, by how much`."""
    bad = next((check for check in row.checks if not check.passed), None)
    name = bad.name if bad is not None else "empty"
    far = f" ({bad.ratio:.3g} times the allowed error)" if bad is not None and math.isfinite(bad.ratio) else ""
    what = row.message or "nothing compared"
    line = f"first divergence: TAP {row.tap} ({row.step}): {what}" + (far if far and far not in what else "")
    return Divergence(row.tap, row.layer, row.step, name, line)
