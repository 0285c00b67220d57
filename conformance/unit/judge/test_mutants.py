"""The catalogue of faults: sound records, patches that leave nothing behind, and a few that have to be caught."""

import re
from dataclasses import replace as altered
from pathlib import Path

import pytest
import torch

from conformance.checkpoints import make
from conformance.mutants import catalogue, page, runner
from conformance.mutants.bench import CASES, Bench, run_name
from conformance.mutants.probes import PROBES, Verdict, same
from conformance.mutants.record import Patch, argument, around, output, replace, resolve

CLASSES = {
    "codec", "loader", "dtype", "KDA", "DSA-indexer", "MLA", "mHC", "norm", "MoE-routing", "MoE-compute", "cache",
    "chunking", "numerics", "config", "quantiser",
}  # fmt: skip
FIELD_BUGS = {
    int(number)
    for path in (Path(__file__).parents[2] / "field_bugs").glob("test_*.py")
    for number in re.findall(r"def test_fb(\d+)_", path.read_text(encoding="utf-8"))
}


def outcome(**changes):
    sound = runner.Outcome("a", "KDA", "FB65", "m:f", ("x",), None, True, True, True, "x", "TAP x", "", 0.1)
    return altered(sound, **changes)


def test_there_are_a_hundred_and_each_has_a_name_of_its_own():
    names = [mutant.name for mutant in catalogue.mutants()]
    assert len(names) >= 100
    assert len(set(names)) == len(names)
    assert {mutant.fault for mutant in catalogue.mutants()} >= CLASSES


@pytest.mark.parametrize("mutant", catalogue.mutants(), ids=lambda mutant: mutant.name)
def test_a_record_holds_and_its_patch_is_taken_back(mutant):
    assert mutant.first_tap
    assert "*" not in mutant.first_tap
    assert mutant.probe in PROBES
    assert mutant.case in CASES
    assert mutant.patch.swaps or mutant.patch.edits
    if mutant.source.startswith("FB"):
        assert int(mutant.source[2:]) in FIELD_BUGS, f"{mutant.source} has no test in conformance/field_bugs"
    resolve(mutant.where)
    places = [resolve(target) for target, _ in mutant.patch.swaps]
    before = [vars(owner)[name] for owner, name in places]
    with mutant.patch.applied():
        after = [vars(owner)[name] for owner, name in places]
        assert all(new is not old for new, old in zip(after, before, strict=True))
    assert all(vars(owner)[name] is old for (owner, name), old in zip(places, before, strict=True))


def test_a_patch_is_taken_back_when_the_engine_raises():
    import fast.ops.kda

    before = fast.ops.kda.unit
    with pytest.raises(ZeroDivisionError), replace("fast.ops.kda:unit", lambda x: 1 / 0).applied():
        fast.ops.kda.unit(torch.ones(1))
    assert fast.ops.kda.unit is before


def test_two_patches_of_one_place_are_taken_back_in_turn():
    import fast.ops.kda

    before = fast.ops.kda.unit
    with (output("fast.ops.kda:unit", lambda x: x) + argument("fast.ops.kda:unit", 0, lambda x: x)).applied():
        pass
    assert fast.ops.kda.unit is before


def test_a_target_that_is_gone_is_an_error():
    with pytest.raises(AttributeError, match="no_such"), replace("fast.ops.kda:no_such", None).applied():
        pass


PLACES = ("layers.0.attn.g", "layers.1.attn.g", "logits", "layers.0.self_attn.A_log", "lm_head.weight")


@pytest.mark.parametrize(
    ("first_tap", "operand", "first", "differing", "right"),
    [
        ("layers.*.attn.g", "", "layers.0.attn.g", "", True),
        ("layers.*.attn.g", "", "layers.1.attn.g", "", False),
        ("layers.1.attn.g", "", "layers.1.attn.g", "", True),
        ("logits layers.*.attn.g", "", "layers.0.attn.g", "", True),
        ("logits", "", "layers.0.attn.g", "", False),
        ("layers.*.attn.v", "", "layers.0.attn.g", "", False),
        ("layers.*.attn.g", "*.A_log", "layers.0.attn.g", "layers.0.self_attn.A_log", True),
        ("layers.*.attn.g", "*.A_log", "layers.0.attn.g", "lm_head.weight", False),
        ("layers.*.attn.g", "*.A_log", "layers.0.attn.g", "", False),
        ("*.A_log", "*.A_log", "layers.0.self_attn.A_log", "layers.0.self_attn.A_log", True),
    ],
)
def test_a_fault_is_localised_at_the_first_place_its_record_names(first_tap, operand, first, differing, right):
    mutant = altered(catalogue.mutants()[0], first_tap=tuple(first_tap.split()), operand=operand)
    assert Verdict(False, True, first, differing, "", PLACES).at(mutant) is right
    assert not Verdict(True, True, first, differing, "", PLACES).at(mutant)


def test_a_bench_learns_from_another_ones_file(benches, tmp_path):
    mutant = catalogue.by_name()["kda-decay-softplus"]
    bench = benches["nvidia", "tiny"]
    sound = bench.sound(mutant)
    bench.keep(mutant, tmp_path)
    other = Bench("nvidia", "tiny", bench.directory)
    other.take(mutant, tmp_path)
    assert same(other.sound(mutant), sound)
    assert other.judge.memory == bench.judge.memory != {}


def test_an_engine_that_fails_without_a_fault_is_told_with_every_mutant(benches, tmp_path):
    mutant = catalogue.by_name()["kda-decay-softplus"]
    bench = Bench("nvidia", "tiny", benches["nvidia", "tiny"].directory)
    bench.clean[run_name(mutant)] = "first divergence: TAP x"
    bench.keep(mutant, tmp_path)
    other = Bench("nvidia", "tiny", bench.directory)
    other.take(mutant, tmp_path)
    found = runner.run_one(mutant, {("nvidia", "tiny"): other})
    assert "first divergence: TAP x" in found.error
    assert not found.good


@pytest.fixture(scope="module")
def benches(tmp_path_factory):
    """A bench of one layer stands in for the whole `tiny`."""
    directory = make(tmp_path_factory.mktemp("mutants") / "tiny", "nvidia", "tiny", layers=(0,))
    return {("nvidia", "tiny"): Bench("nvidia", "tiny", directory)}


SHOWN = ("mhc-post-not-doubled", "kda-decay-softplus", "quantiser-ties-away", "config-bound-defaulted")


@pytest.mark.parametrize("name", SHOWN)
def test_a_fault_is_caught_and_named(name, benches):
    found = runner.run_one(catalogue.by_name()[name], benches)
    assert found.good, page.finding(found)
    assert found.localised, page.finding(found)


def test_the_engine_without_a_fault_is_not_caught(benches):
    sound = altered(catalogue.by_name()["mhc-comb-not-transposed"], patch=Patch())
    found = runner.run_one(sound, benches)
    assert not found.caught
    assert not found.changed
    assert not found.error
    assert not found.good, "a fault that changes nothing is no success"


def test_an_engine_that_falls_over_is_not_a_success(benches):
    broken = altered(
        catalogue.by_name()["mhc-comb-not-transposed"],
        patch=output("fast.ops.mhc:mix", lambda mix: mix.nothing),
    )
    found = runner.run_one(broken, benches)
    assert "nothing" in found.error
    assert not found.good


def test_one_miss_fails_the_run():
    caught = [outcome(name=str(i)) for i in range(100)]
    assert runner.passed(caught)
    assert not runner.passed([*caught, outcome(caught=False, localised=False)])
    assert not runner.passed([])
    assert not runner.passed([*caught, outcome(equivalent="proof")])
    assert runner.passed([*caught, outcome(caught=False, localised=False, equivalent="proof")])
    assert not runner.passed([*caught, outcome(error="ValueError: x")])


def test_the_wrong_place_counts():
    def share(elsewhere):
        return [outcome(name=str(i), localised=i >= elsewhere) for i in range(100)]

    assert runner.passed(share(5))
    assert not runner.passed(share(6))


def test_the_page_says_what_was_missed():
    text = page.render([outcome(), outcome(name="lost", caught=False, localised=False)])
    assert "FAIL" in text
    assert "lost" in text
    assert "missed" in text
    assert "http" not in text


def test_a_wrapper_that_takes_less_than_the_function_is_refused():
    """A parameter that the engine gained is told here, not as an error of the mutant in a long run."""
    for wrapper in (lambda original: None, lambda original, x, y: None):
        with (
            pytest.raises(TypeError, match=r"fast\.ops\.kda:unit: the wrapper"),
            around("fast.ops.kda:unit", wrapper).applied(),
        ):
            pass
