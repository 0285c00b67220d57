"""Goldens notice everything: one bit anywhere, a file too many, too few or edited, a rewrite without a reason."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conformance.goldens import arm64, lanes, manifest, verify
from conformance.goldens.case import Case, Item, Made
from conformance.goldens.compare import elements, steps
from conformance.unit.tools.command import glm53
from reference import arithmetic

NAMES = (
    "trace-odd-nvidia-exact",
    "trace-chunked-odd-nvidia-bf16",
    "table-codec",
    "config-refusals",
)


def some_cases() -> list[Case]:
    return [case for case in verify.catalogue() if case.name in NAMES]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "golden"
    result = verify.regen(directory, "first", cases=some_cases())
    assert [finding.problem for finding in result.changed] == ["new"] * len(NAMES)
    return directory


@pytest.fixture
def golden(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "golden"))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sees only these cases."""
    cases = some_cases()
    monkeypatch.setattr(verify, "catalogue", lambda: cases)


def test_what_was_written_verifies(golden: Path) -> None:
    verdict = verify.verify(golden, cases=some_cases())
    assert verdict.sound
    assert verdict.digest == verdict.expected_digest
    assert set(verdict.digests) == set(NAMES)


def test_processes_that_share_the_catalogue_find_what_one_finds(golden: Path) -> None:
    """On a manifest that expects one other product: the goldens of the repository, and only the tables made."""
    directory = Path(shutil.copytree(lanes.ROOT / "golden", golden / "whole"))
    kept = manifest.read(directory)
    record = kept.cases["table-products"]
    record.tensors["plain"] = replace(record.tensors["plain"], sha256="0" * 64)
    record.sha256 = "0" * 64
    (directory / manifest.NAME).write_text(manifest.text_of(kept))
    found = [verify.verify(directory, only="table-*", workers=workers) for workers in (1, 2)]
    assert found[0] == found[1]
    assert [finding.case for finding in found[1].findings] == ["table-products"]
    assert [difference.tensor for difference in found[1].findings[0].differences] == ["plain"]


def test_writing_again_changes_no_byte(golden: Path) -> None:
    before = {path.name: path.read_bytes() for path in golden.iterdir()}
    result = verify.regen(golden, "again", cases=some_cases())
    assert (result.changed, result.written, result.removed) == ([], [], [])
    assert {path.name: path.read_bytes() for path in golden.iterdir()} == before


PASSES = (29, 11, 1, 1, 1, 1, 1)


def one_ulp(monkeypatch: pytest.MonkeyPatch, method: str, point: str, calls: int, token: int) -> None:
    """In `exact`, a rounding point moves the last element of one token by one float64 step.

    `calls`: how often a pass over the layers meets the point; the first of them is changed.
    """
    true, seen = getattr(arithmetic.Arithmetic, method), [0]
    number = next(n for n in range(len(PASSES)) if sum(PASSES[: n + 1]) > token)

    def changed(self: arithmetic.Arithmetic, x: np.ndarray, at: str) -> np.ndarray:
        y = true(self, x, at)
        if at == point and type(self) is arithmetic.Arithmetic:
            if seen[0] == number * calls:
                y = np.array(y)
                where = (token - sum(PASSES[:number]), *(-1 for _ in y.shape[1:]))
                y[where] = np.nextafter(y[where], np.inf)
            seen[0] += 1
        return y

    monkeypatch.setattr(arithmetic.Arithmetic, method, changed)


@pytest.mark.parametrize(
    ("method", "point", "calls", "tap", "token"),
    [
        ("store", "embed", 1, "embed", 0),
        ("single", "hc.pre", 14, "layers.0.attn_hc.pre", 28),
        ("store", "kda.silu", 4, "layers.0.attn.v", 34),
        ("single", "kda.g", 4, "layers.0.attn.g", 12),
        ("single", "indexer.weights", 2, "layers.1.indexer.weights", 33),
        ("store", "final.hidden", 1, "final.hidden", 44),
    ],
)
def test_one_ulp_is_named(
    golden: Path, monkeypatch: pytest.MonkeyPatch, method: str, point: str, calls: int, tap: str, token: int
) -> None:
    """The first difference is the tap that changed, at the token and index, with both values in hexadecimal."""
    one_ulp(monkeypatch, method, point, calls, token)
    verdict = verify.verify(golden, only="trace-odd-nvidia-exact", cases=some_cases())
    (finding,) = verdict.findings
    first = finding.differences[0]
    assert (finding.case, first.tensor, first.row, first.ulps) == ("trace-odd-nvidia-exact", tap, token, 1)
    assert first.index is not None
    assert first.index[0] == token
    expected, actual = (float.fromhex(text.split()[0]) for text in (first.expected, first.actual))
    assert np.nextafter(expected, np.inf) == actual
    line = next(finding.lines())
    assert f"{tap}, token {token}, index [{token}, " in line
    assert f"expected {expected.hex()} (0x" in line
    assert f"actual {actual.hex()} (0x" in line


def test_a_row_that_is_not_stored_is_named_by_its_hash(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_ulp(monkeypatch, "store", "embed", 1, 17)
    (finding,) = verify.verify(golden, only="trace-odd-nvidia-exact", cases=some_cases()).findings
    first = finding.differences[0]
    assert (first.tensor, first.row, first.index) == ("embed", 17, None)
    assert "row hash" in str(first)
    assert any("expected 0x" in line or "expected -0x" in line for line in finding.lines())


def test_a_recipe_names_the_tap(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = arithmetic.Bf16.store

    def changed(self: arithmetic.Bf16, x: np.ndarray, point: str) -> np.ndarray:
        return true(self, x, point) * (2.0 if point == "final.hidden" else 1.0)

    monkeypatch.setattr(arithmetic.Bf16, "store", changed)
    (finding,) = verify.verify(golden, only="trace-chunked-odd-nvidia-bf16", cases=some_cases()).findings
    assert finding.differences[0].tensor == "final.hidden"
    assert "its hash differs" in str(finding.differences[0])


def test_regen_shows_what_changed_and_keeps_why(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_ulp(monkeypatch, "store", "final.hidden", 1, 44)
    result = verify.regen(golden, "a good  reason\n", cases=some_cases())
    assert [finding.case for finding in result.changed] == ["trace-odd-nvidia-exact"]
    assert result.changed[0].differences[0].ulps == 1
    assert result.written == ["trace-odd-nvidia-exact.safetensors"]
    kept = manifest.read(golden)
    assert (kept.reason, kept.history) == ("a good reason", ["first"])
    monkeypatch.undo()
    assert not verify.verify(golden, only="trace-odd-nvidia-exact", cases=some_cases()).sound


def test_only_what_numpy_has_no_part_in_is_left_out_of_a_lane(golden: Path) -> None:
    """Every plan and refusal is integers and text; the rest is made again, and a change in it is found."""
    assert {case.name.partition("-")[0] for case in verify.catalogue() if not case.computed} == {"plan", "config"}
    assert all(case.computed for case in verify.catalogue() if case.name.startswith(("table", "trace", "checkpoint")))
    kept = manifest.read(golden)
    verdict = verify.verify(golden, computed=True, cases=some_cases())
    assert (verdict.findings, verdict.digest) == ([], kept.digest())
    assert set(verdict.digests) == set(NAMES) - {"config-refusals"}


def test_without_a_reason_nothing_is_written(golden: Path, few: None, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in golden.iterdir()}
    for extra in ([], ["--reason", "  "]):
        assert glm53("golden", "regen", "--directory", golden, *extra) == 2
        assert "--reason" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in golden.iterdir()} == before


def problems(golden: Path) -> list[str]:
    return [
        line
        for finding in verify.verify(golden, only="table-codec", cases=some_cases()).findings
        for line in finding.lines()
    ]


def test_a_missing_file_fails(golden: Path) -> None:
    (golden / "config-refusals.txt").unlink()
    assert problems(golden) == ["config-refusals: missing file config-refusals.txt"]


def test_an_unused_file_fails(golden: Path) -> None:
    (golden / "notes.txt").write_text("hello")
    assert problems(golden) == ["notes.txt: unused: manifest.json does not list this file"]


@pytest.mark.parametrize("at", [9, -1], ids=["header", "data"])
def test_an_edited_file_fails(golden: Path, at: int) -> None:
    path = golden / "trace-odd-nvidia-exact.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))
    (line,) = problems(golden)
    assert line.startswith("trace-odd-nvidia-exact: edited file trace-odd-nvidia-exact.safetensors: sha256 ")


@pytest.mark.parametrize("key", ["reason", "sha256", "shape", "brace", "deep"])
def test_an_edited_manifest_fails(golden: Path, key: str) -> None:
    path = golden / manifest.NAME
    text = path.read_text()
    edits = {
        "reason": text.replace('"first"', '"second"', 1),
        "sha256": text.replace(json.loads(text)["cases"]["table-codec"]["sha256"], "0" * 64),
        "shape": text.replace("[127, 16]", "[127, 15]", 1),
        "brace": text[:-3],
        "deep": "[" * 100_000,
    }
    path.write_text(edits[key])
    assert edits[key] != text
    with pytest.raises(manifest.ManifestError, match=r"manifest\.json"):
        verify.verify(golden, cases=some_cases())


def test_no_manifest_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(manifest.ManifestError, match="missing"):
        verify.verify(tmp_path, cases=some_cases())


def test_the_catalogue_and_the_manifest_must_agree(golden: Path) -> None:
    cases = some_cases()
    other = Case("table-other", cases[0].build, ".safetensors")
    findings = verify.verify(golden, only="table-codec", cases=[*cases[1:], other, cases[0]]).findings
    assert [finding.case for finding in findings] == ["table-other"]
    fewer = [case for case in cases if case.name != "config-refusals"]
    findings = verify.verify(golden, only="table-codec", cases=fewer).findings
    assert [(finding.case, "unused" in finding.problem) for finding in findings] == [("config-refusals", True)]


def test_changed_text_is_shown(golden: Path) -> None:
    lines = (golden / "config-refusals.txt").read_text().splitlines()
    lines[3] = lines[3].upper()
    cases = [
        Case("config-refusals", lambda workspace: Made(lines=tuple(lines)), ".txt", 0, case.settings)
        if case.name == "config-refusals"
        else case
        for case in some_cases()
    ]
    (finding,) = verify.verify(golden, only="config-refusals", cases=cases).findings
    assert str(finding.differences[0]).startswith("line 4: expected 'nvidia: ")


def test_command_verifies(golden: Path, few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["golden", "verify", "--directory", str(golden), "--only", "table-codec", "--quiet"]
    assert glm53(*arguments, "--json", tmp_path / "out.json") == 0
    assert json.loads((tmp_path / "out.json").read_text())["findings"] == []
    (golden / "notes.txt").write_text("hello")
    assert glm53(*arguments) == 1
    assert "notes.txt: unused" in capsys.readouterr().out
    assert glm53(*arguments[:-2], "nothing-*") == 2


def test_sizes_are_kept_in_bounds(tmp_path: Path) -> None:
    large = Case("large", lambda workspace: Made({"x": Item(np.zeros(130_000))}), ".safetensors")
    with pytest.raises(manifest.SizeError, match=r"large\.safetensors.*1,000,000"):
        verify.regen(tmp_path / "golden", "too much", cases=[large])
    assert not (tmp_path / "golden").exists()


def test_repository_goldens_fit() -> None:
    files = [path for path in (lanes.ROOT / "golden").iterdir() if not path.name.startswith(".")]
    assert len(files) > 10
    assert max(path.stat().st_size for path in files) < manifest.FILE_LIMIT
    assert sum(path.stat().st_size for path in files) < manifest.TOTAL_LIMIT


def test_steps_cross_zero_and_binades() -> None:
    x = np.array([5e-324, 1.0, -1.0, np.inf], np.float64)
    y = np.array([-5e-324, np.nextafter(1.0, 2.0), np.nextafter(-1.0, 0.0), np.finfo(np.float64).max])
    assert steps(x, y).tolist() == [2, 1, 1, 1]
    found = elements("t", np.array([[0.0, 1.0]]), np.array([[-0.0, 1.0]]), (7,))
    assert found is not None
    assert (found.row, found.index, found.count) == (7, (7, 0), 1)


def test_verification_needs_no_torch() -> None:
    code = (
        "import conformance.goldens.verify, conformance.goldens.arm64, sys; "
        "print(sorted({'torch', 'safetensors', 'rich', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=lanes.ROOT)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_a_lane_without_effect_fails(monkeypatch: pytest.MonkeyPatch, golden: Path) -> None:
    environment = {"numpy": "2", "simd": ["A", "B"], "core": "Haswell", "threads": 1}
    monkeypatch.setattr(lanes, "environment", lambda: environment)
    monkeypatch.setattr(lanes, "run", lambda label, *rest: lanes.Outcome(label, "d" * 64, "", dict(environment)))
    assert ["did not take effect" in outcome.problem for outcome in lanes.features(golden)] == [True, True]
    assert "only ever ran ['Haswell']" in list(lanes.blas(golden))[-1].problem
    monkeypatch.setattr(lanes, "environment", lambda: environment | {"simd": []})
    assert [bool(outcome.problem) for outcome in lanes.features(golden)] == [True]


def test_every_blas_kernel_runs_and_every_thread_count() -> None:
    for cores in (lanes.X86_CORES, lanes.ARM_CORES):
        runs = lanes.blas_runs(cores)
        assert {core for core, _ in runs} == set(cores)
        assert {threads for core, threads in runs if core == cores[0]} == set(lanes.THREADS)
        assert len({threads for core, threads in runs if core != cores[0]}) == len(lanes.THREADS)
        assert len(set(runs)) == len(runs)


def test_a_lane_reports_a_difference(golden: Path) -> None:
    """A real process, on goldens of which most of the catalogue is missing."""
    outcome = lanes.run("lane", [sys.executable], golden / "nowhere", {})
    assert "without a report" in outcome.problem


def test_oldest_versions_come_from_the_project() -> None:
    assert lanes.oldest_numpy() == {"numpy": "2.0.0", "ml_dtypes": "0.5.0"}


def test_emulation_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, golden: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(arm64.shutil, "which", lambda name: None)
    (outcome,) = arm64.arm64(golden, tmp_path)
    assert "no apt-get" in outcome.problem
    monkeypatch.setattr(arm64.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(arm64, "_call", lambda command, what: "mirror://elsewhere/ubuntu/\n")
    (outcome,) = arm64.arm64(golden, tmp_path)
    assert "no Debian mirror" in outcome.problem
