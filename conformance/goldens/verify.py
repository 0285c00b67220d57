"""Rewriting and checking `golden/`."""

from __future__ import annotations

import fnmatch
import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from conformance.files import write_whole
from conformance.goldens import manifest as m
from conformance.goldens import records, tables, traces
from conformance.goldens.case import Case, Made, Workspace
from conformance.goldens.compare import Difference, compare
from conformance.processes import processes
from reference.errors import InputError

Progress = Callable[[str], None]
CASES_PER_WORKER = 2
"""With fewer, one process has made them before another has begun."""


class ReasonError(InputError):
    """Goldens are to be rewritten without saying why."""


class CaseNameError(InputError):
    """No case has the name asked for."""


def catalogue() -> list[Case]:
    return [*tables.cases(), *records.cases(), *traces.cases()]


def chosen(only: str, cases: Iterable[Case] | None = None) -> list[Case]:
    """The cases whose name matches a glob. Raises `CaseNameError` when none does."""
    every = catalogue() if cases is None else list(cases)
    found = [case for case in every if fnmatch.fnmatchcase(case.name, only)]
    if not found:
        raise CaseNameError(f"--only {only}: no such case; there are {', '.join(case.name for case in every)}")
    return found


@dataclass
class Finding:
    """One case that is not what it was. `differences` are in the order in which the tensors are computed."""

    case: str
    problem: str = ""
    differences: list[Difference] = field(default_factory=list)

    def lines(self, most: int = 4) -> Iterator[str]:
        """For a person: what is wrong, the first differences, the first with values in any case, how many more."""
        if self.problem:
            yield f"{self.case}: {self.problem}"
        shown = self.differences[:most]
        for difference in shown:
            yield f"{self.case}: {difference}"
        valued = next((difference for difference in self.differences if difference.index), None)
        if valued is not None and valued not in shown:
            yield f"{self.case}: then {valued}"
        if len(self.differences) > most:
            yield f"{self.case}: and {len(self.differences) - most} more tensors that differ"


@dataclass
class Verdict:
    """What `verify` found. `digests`: sha256 of everything each case made here; `digest`: of all of them."""

    findings: list[Finding] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    digest: str = ""
    expected_digest: str = ""

    @property
    def sound(self) -> bool:
        return not self.findings


def verify(
    directory: Path,
    *,
    only: str = "*",
    computed: bool = False,
    workers: int = 1,
    cases: Iterable[Case] | None = None,
    progress: Progress = lambda name: None,
) -> Verdict:
    """Make every case again and compare bit for bit; missing, unused and edited files are findings too.

    With `only`, files of other cases are still hashed but not made again; with `computed`, those of cases that NumPy
    has no part in. Up to `workers` processes share the catalogue; `cases` of the caller's own are made here.
    Raises `ManifestError`, `CaseNameError`.
    """
    kept = m.read(directory)
    every = catalogue() if cases is None else list(cases)
    verdict = Verdict(expected_digest=kept.digest())
    verdict.findings += _files(directory, kept, every)
    now = m.Manifest(kept.reason, kept.history, kept.versions, dict(kept.cases))
    wanted = [case for case in chosen(only, every) if case.computed or not computed]
    for name, (fresh, found) in _made(directory, kept, wanted, workers if cases is None else 1, progress):
        verdict.digests[name] = fresh.sha256
        now.cases[name] = fresh
        if found:
            verdict.findings.append(Finding(name, "", found))
    verdict.digest = now.digest()
    return verdict


Again = tuple[m.Record, list[Difference]]
"""A case made again: its record, and how it differs from what was kept of it."""


def _made(
    directory: Path, kept: m.Manifest, cases: list[Case], workers: int, progress: Progress
) -> Iterator[tuple[str, Again]]:
    workers = min(workers, len(cases) // CASES_PER_WORKER)
    if workers < 2:
        with Workspace() as workspace:
            for case in cases:
                progress(case.name)
                yield case.name, _make(case, workspace, directory, kept)
        return
    with (
        tempfile.TemporaryDirectory(prefix="glm53-golden-") as place,
        processes(workers, _begin, directory, kept, Path(place)) as pool,
    ):
        names = [case.name for case in cases]
        for name, again in zip(names, pool.map(_make_named, names), strict=True):
            progress(name)
            yield name, again


def _make(case: Case, workspace: Workspace, directory: Path, kept: m.Manifest) -> Again:
    made = case.build(workspace)
    fresh = m.record(case, made)
    before = kept.cases.get(case.name)
    same = before is None or fresh.sha256 == before.sha256
    return fresh, [] if same else differences(directory, made, fresh, kept.cases[case.name])


_SHARED: list[tuple[Workspace, Path, m.Manifest]] = []
"""Of a worker: what it makes cases in, and compares them with."""


def _begin(directory: Path, kept: m.Manifest, place: Path) -> None:
    _SHARED.append((Workspace(place), directory, kept))


def _make_named(name: str) -> Again:
    (case,) = (case for case in catalogue() if case.name == name)
    return _make(case, *_SHARED[0])


def _files(directory: Path, kept: m.Manifest, cases: list[Case]) -> Iterator[Finding]:
    """Everything that can be wrong without computing anything."""
    names = {case.name: case for case in cases}
    for name in sorted(set(kept.cases) | set(names)):
        if name not in kept.cases:
            yield Finding(name, f"missing from {m.NAME}: the catalogue has it, nothing was recorded")
        elif name not in names:
            yield Finding(name, f"unused: {m.NAME} has it, the catalogue does not")
        elif (kept.cases[name].settings, kept.cases[name].seed) != (names[name].settings, names[name].seed):
            yield Finding(
                name, f"{m.NAME} describes it as {kept.cases[name].settings}, the catalogue as {names[name].settings}"
            )
    listed = {record.file: (name, record) for name, record in kept.cases.items() if record.file}
    present = {path.name for path in directory.iterdir() if not path.name.startswith(".")} - {m.NAME}
    for file in sorted(present | set(listed)):
        if file not in listed:
            yield Finding(file, f"unused: {m.NAME} does not list this file")
        elif file not in present:
            yield Finding(listed[file][0], f"missing file {file}")
        else:
            name, record = listed[file]
            sha256 = hashlib.sha256((directory / file).read_bytes()).hexdigest()
            if sha256 != record.file_sha256:
                yield Finding(name, f"edited file {file}: sha256 {sha256}, {m.NAME} says {record.file_sha256}")


def differences(directory: Path, made: Made, fresh: m.Record, kept: m.Record) -> list[Difference]:
    """What a case made, against what was kept of it."""
    found = [
        Difference(name, "missing: it was recorded, and is not made any more")
        for name in kept.tensors
        if name not in made.tensors
    ]
    if fresh.lines or kept.lines:
        found += _text_differences(directory, made, kept)
    path = directory / kept.file
    stored = m.Stored(path, kept.tensors) if kept.tensors and kept.file and path.is_file() else None
    for name, item in made.tensors.items():
        before = kept.tensors.get(name)
        if before is None:
            found.append(Difference(name, "new: it is made, and was not recorded"))
            continue
        if (before.sha256, before.shape, before.dtype) == (item.sha256(), item.value.shape, item.dtype):
            continue
        source = before.stored.removeprefix("same as ") if isinstance(before.stored, str) else name
        twin = kept.tensors.get(source, before)
        array = stored.array(source if source in kept.tensors else name) if stored else None
        digests = stored.digests(source if source in kept.tensors else name) if stored else None
        rows = twin.stored if isinstance(twin.stored, tuple) else None
        found.append(compare(name, replace(item, rows=rows), before.shape, array, digests))
    return found


def _text_differences(directory: Path, made: Made, kept: m.Record) -> Iterator[Difference]:
    path = directory / kept.file
    if not kept.file or not path.is_file():
        yield Difference("text", f"{len(made.lines)} lines, recorded {kept.lines}; a recipe stores none")
        return
    before = path.read_text(encoding="utf-8").splitlines()
    for number in range(max(len(before), len(made.lines))):
        old = before[number] if number < len(before) else "no line"
        new = made.lines[number] if number < len(made.lines) else "no line"
        if old != new:
            yield Difference(f"line {number + 1}", f"expected {old!r}, actual {new!r}")
            return


@dataclass
class Rewrite:
    """What `regen` changed: findings of the cases whose contents are new or other than they were."""

    changed: list[Finding] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    digest: str = ""


def regen(
    directory: Path,
    reason: str,
    *,
    only: str = "*",
    cases: Iterable[Case] | None = None,
    progress: Progress = lambda name: None,
) -> Rewrite:
    """Make every (chosen) case, write what changed, record why. Nothing is written when nothing changed.

    Raises `ReasonError` for an empty reason, `SizeError` when a file or all of them grew too large.
    """
    if not reason.strip():
        raise ReasonError("golden regen: needs --reason, the words under which later readers find this change")
    every = catalogue() if cases is None else list(cases)
    old = _read_or_none(directory)
    result, records_, files = Rewrite(), {}, {}
    wanted = {case.name for case in chosen(only, every)}
    with Workspace() as workspace:
        for case in every:
            before = old.cases.get(case.name) if old else None
            if case.name not in wanted and before is not None:
                records_[case.name] = before
                continue
            progress(case.name)
            made = case.build(workspace)
            fresh = m.record(case, made)
            if case.file:
                files[case.file] = m.contents(case, made, fresh)
                fresh.file_sha256, fresh.bytes = hashlib.sha256(files[case.file]).hexdigest(), len(files[case.file])
            records_[case.name] = fresh
            if before is None:
                result.changed.append(Finding(case.name, "new"))
            elif before.sha256 != fresh.sha256:
                result.changed.append(Finding(case.name, "", differences(directory, made, fresh, before)))
    history = [*old.history, old.reason] if old else []
    fresh_manifest = m.Manifest(" ".join(reason.split()), history, m.versions(), records_)
    result.digest = fresh_manifest.digest()
    text = m.text_of(fresh_manifest)
    _check_sizes(records_, len(text))
    stale = (
        {path.name for path in directory.glob("*")} - {r.file for r in records_.values()} - {m.NAME}
        if directory.is_dir()
        else set()
    )
    result.removed = sorted(stale)
    if (
        old
        and not stale
        and all(old.cases.get(name) == record for name, record in records_.items())
        and len(old.cases) == len(records_)
    ):
        return result
    directory.mkdir(exist_ok=True)
    for file, data in files.items():
        if not (directory / file).is_file() or (directory / file).read_bytes() != data:
            write_whole(directory / file, data)
            result.written.append(file)
    for file in stale:
        (directory / file).unlink()
    write_whole(directory / m.NAME, text.encode())
    return result


def _read_or_none(directory: Path) -> m.Manifest | None:
    return m.read(directory) if (directory / m.NAME).is_file() else None


def _check_sizes(records_: dict[str, m.Record], manifest_size: int) -> None:
    sizes = {record.file: record.bytes for record in records_.values() if record.file} | {m.NAME: manifest_size}
    for file, size in sizes.items():
        if size >= m.FILE_LIMIT:
            raise m.SizeError(f"{file}: {size:,} bytes, expected less than {m.FILE_LIMIT:,}; make it a recipe")
    if sum(sizes.values()) >= m.TOTAL_LIMIT:
        raise m.SizeError(f"golden files: {sum(sizes.values()):,} bytes in all, expected less than {m.TOTAL_LIMIT:,}")
