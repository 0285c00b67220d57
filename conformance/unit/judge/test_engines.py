"""The engines: found by name, strict about options and tokens, and all of them hand out the same kind of trace."""

import importlib.metadata
import json
import sys
import tomllib
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from conformance import errors as e
from conformance import pairwise
from conformance.cases.runs import SCHEDULES, TEXT, random_tokens, text_tokens
from conformance.checkpoints.shared import shared
from conformance.engines import registry
from conformance.engines.base import Engine, as_numpy, check_tokens
from conformance.trace import Schedule, Trace, validate

COMPUTING = ("reference", "fast")
COUNT = 21


def opened(name, export="nvidia", geometry="odd", **options):
    engine = registry.create(name)
    engine.open(shared(export, geometry), **options)
    return engine


@pytest.fixture(scope="module")
def tokens():
    return random_tokens(5, 257, COUNT)


# --- finding ---------------------------------------------------------------------------------------------------------


def test_the_shipped_engines_are_found_by_name():
    assert {"reference", "fast", "transformers", "file"} <= set(registry.names())
    for name in (*COMPUTING, "file"):
        engine = registry.create(name)
        assert isinstance(engine, Engine)
        assert engine.name == name


def test_the_distribution_announces_what_it_ships():
    """Entry points and the table of shipped engines may not drift apart."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"][registry.GROUP] == registry.SHIPPED


def test_an_engine_is_found_by_its_import_path(monkeypatch):
    module = types.ModuleType("some_engines")
    verbs = dict.fromkeys(("open", "run", "operands"), lambda self: None)
    module.__dict__["Mine"] = type("Mine", (), verbs | {"name": "mine", "version": "1"})
    monkeypatch.setitem(sys.modules, "some_engines", module)
    assert registry.create("some_engines:Mine").name == "mine"


def test_an_installed_entry_point_is_found(monkeypatch):
    point = importlib.metadata.EntryPoint("other", "conformance.engines.file:FileEngine", registry.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] if group == registry.GROUP else [])
    assert registry.create("other").name == "file"
    assert "other" in registry.names()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "engine nope: unknown; there are .*fast.*reference"),
        ("no_such_module:Engine", "cannot import no_such_module"),
        ("conformance.engines.file:Nope", "conformance.engines.file has no Nope"),
        ("conformance.engines.registry:GROUP", "is not a class"),
        ("json:loads", "loads.* cannot be made without arguments .*TypeError"),
        ("conformance.trace:Recorder", "Recorder lacks name, version, open, run, operands"),
    ],
)
def test_an_engine_that_cannot_be_used_is_refused(name, message):
    with pytest.raises(e.EngineNotFoundError, match=message):
        registry.create(name)


# --- running ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPUTING)
def test_running_before_opening_is_refused(name, tokens):
    with pytest.raises(e.EngineClosedError, match=f"engine {name}: run before open"):
        registry.create(name).run(tokens, Schedule.of(COUNT))


@pytest.mark.parametrize("name", [*COMPUTING, "file"])
def test_an_unknown_option_is_refused(name):
    with pytest.raises(e.EngineOptionError, match=f"engine {name}: option wings=2 is not offered; it has"):
        opened(name, wings=2)


@pytest.mark.parametrize(("bad", "at"), [(257, 20), (-1, 0), (2**40, 3)])
@pytest.mark.parametrize("name", COMPUTING)
def test_a_token_outside_the_vocabulary_is_refused_before_anything_runs(name, tokens, bad, at):
    ids = tokens.astype(np.int64)
    ids[at] = bad
    with pytest.raises(e.TokenRangeError, match=f"id {bad} at position {at}, expected 0 to 256"):
        opened(name).run(ids, Schedule.of(COUNT))


@pytest.mark.parametrize("bad", [np.zeros((2, 2), int), np.zeros(0, int), np.zeros(3), [0.5]])
def test_tokens_that_are_no_list_of_integers_are_refused(bad):
    with pytest.raises(e.TokenRangeError, match="expected a non-empty list of integers"):
        check_tokens(bad, 257)


def test_a_schedule_for_other_tokens_is_refused(tokens):
    with pytest.raises(e.EngineOptionError, match="schedule feeds 20 tokens, the input has 21"):
        opened("reference").run(tokens, Schedule.of(20))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("geometry", "export"), [("tiny", "nvidia"), ("odd", "libertai")])
@pytest.mark.parametrize("name", COMPUTING)
def test_every_trace_is_complete_and_sound(name, geometry, export, schedule, tokens, tmp_path):
    """Every tap of the text stack, at the shapes and dtypes of the format, and the file comes back the same."""
    engine = opened(name, export, geometry)
    made = engine.run(tokens, SCHEDULES[schedule](COUNT))
    found = validate(made, engine.config)
    assert found.unknown == ()
    assert [tap for tap in found.missing if not tap.startswith(("mtp.", "vision."))] == []
    assert made.schedule == SCHEDULES[schedule](COUNT)
    assert (made.tokens == tokens).all()
    assert made.metadata["export"] == export
    assert made.metadata["checkpoint"] == shared(export, geometry).name
    assert made.metadata["config_sha256"] == engine.config.sha256
    made.save(tmp_path / "a.trace")
    back = Trace.load(tmp_path / "a.trace")
    assert all(back.taps[tap].tobytes() == array.tobytes() for tap, array in made.taps.items())


@pytest.mark.parametrize("name", COMPUTING)
def test_a_run_starts_from_an_empty_state(name, tokens):
    engine = opened(name)
    first = engine.run(tokens, Schedule.of(COUNT, decode=3))
    second = engine.run(tokens, Schedule.of(COUNT, decode=3))
    assert all(first.taps[tap].tobytes() == array.tobytes() for tap, array in second.taps.items())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_reference_does_not_depend_on_how_tokens_are_fed(schedule, tokens):
    """Chunks, single tokens and left padding change no bit of any tap."""
    engine = opened("reference")
    whole = engine.run(tokens, Schedule.of(COUNT))
    parts = engine.run(tokens, SCHEDULES[schedule](COUNT))
    assert set(whole.taps) == set(parts.taps)
    assert [tap for tap in whole.taps if whole.taps[tap].tobytes() != parts.taps[tap].tobytes()] == []


def test_a_tap_filter_keeps_only_what_it_names(tokens):
    made = opened("reference").run(tokens, Schedule.of(COUNT), "layers.1.indexer.*,final.*")
    names = {name for name in made.taps if name not in ("tokens", "logits")}
    assert names == {"final.hidden", "final.norm"} | {
        f"layers.1.indexer.{leaf}" for leaf in ("q", "k", "gate", "weights", "pool_keys", "scores", "selected")
    }


def test_progress_sees_every_tap(tokens):
    engine, seen = opened("reference"), list[str]()
    engine.watch = seen.append
    engine.run(tokens, Schedule.of(COUNT, decode=2), "embed")
    assert seen.count("layers.3.out") == 3


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reference", {"arithmetic": "exact"}),
        ("reference", {"arithmetic": "stochastic", "seed": 4, "kda": "chunked", "kda_chunk": 8, "mla": "absorbed"}),
        ("fast", {"arithmetic": "fp32", "mla": "expanded", "kda_chunk": 16}),
    ],
)
def test_the_metadata_say_how_the_trace_was_made(name, options, tokens):
    made = opened(name, **options).run(tokens, Schedule.of(COUNT), "embed")
    assert {key: made.metadata[key] for key in options} == {key: str(value) for key, value in options.items()}


def test_another_seed_is_another_stochastic_run(tokens):
    runs = [
        opened("reference", arithmetic="stochastic", seed=seed).run(tokens, Schedule.of(COUNT)).logits.tobytes()
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_an_unknown_arithmetic_of_the_fast_engine_is_refused():
    with pytest.raises(e.EngineOptionError, match="arithmetic 'fp8', expected bf16 or fp32"):
        opened("fast", arithmetic="fp8")


@pytest.mark.parametrize("geometry", ["tiny", "odd"])
def test_the_fast_engine_in_float32_is_the_reference_up_to_float32(geometry, tokens):
    """The same mathematics from two sources that share no code."""
    truth = opened("reference", geometry=geometry).run(tokens, Schedule.of(COUNT))
    pairs = pairwise.compare(
        truth, opened("fast", geometry=geometry, arithmetic="fp32").run(tokens, Schedule.of(COUNT))
    )
    assert len(pairs) == len(truth.taps)
    assert [pair for pair in pairs if pair.fault or not pair.relative_l2 <= pairwise.PROMISED] == []


# --- operands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("export", ["nvidia", "libertai"])
def test_operands_of_the_reference_are_the_decoded_weights(export):
    engine = opened("reference", export)
    for name in ("lm_head.weight", "model.language_model.layers.3.mlp.experts.4.up_proj.weight"):
        assert (engine.operands(name)["value"] == engine.checkpoint.weight(name)).all()


@pytest.mark.parametrize("export", ["nvidia", "libertai"])
def test_operands_of_the_fast_engine_are_the_bytes_of_the_file(export):
    engine, compared = opened("fast", export), set()
    checkpoint = opened("reference", export).checkpoint
    for name in checkpoint.names():
        parts = engine.operands(name)
        if parts is None:
            continue
        compared |= set(parts)
        dtype, _shape, raw = checkpoint.raw(name)
        if "codes" in parts:
            assert parts["codes"].tobytes() == bytes(raw)
            assert parts["scale"].tobytes() == bytes(checkpoint.raw(f"{name}_scale")[2])
            assert parts["scale_2"].tobytes() == bytes(checkpoint.raw(f"{name}_scale_2")[2])
        elif dtype == "BF16" and parts["value"].dtype == ml_dtypes.bfloat16:
            assert parts["value"].tobytes() == bytes(raw), name
    assert compared == {"codes", "scale", "scale_2", "value"}
    assert engine.operands("model.language_model.layers.3.mlp.experts.4.up_proj.weight_scale") is None


def test_operands_of_an_engine_that_computes_nothing():
    assert registry.create("file").operands("lm_head.weight") is None


# --- the file engine -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory, tokens):
    path = tmp_path_factory.mktemp("traces") / "a.trace"
    opened("reference").run(tokens, Schedule.of(COUNT, decode=2)).save(path)
    return path


def test_the_file_engine_hands_out_the_trace_as_it_is(stored, tokens):
    made = opened("file", trace=stored).run(tokens, Schedule.of(COUNT, decode=2))
    kept = Trace.load(stored)
    assert made.metadata == kept.metadata
    assert list(made.taps) == list(kept.taps)
    few = opened("file", trace=stored).run(tokens, Schedule.of(COUNT, decode=2), "embed")
    assert set(few.taps) == {"tokens", "logits", "embed"}


def test_the_file_engine_needs_a_file():
    with pytest.raises(e.EngineOptionError, match="option trace is missing"):
        opened("file")
    with pytest.raises(e.EngineClosedError, match="run before open"):
        registry.create("file").run([1], Schedule.of(1))


def test_the_file_engine_refuses_another_input(stored, tokens):
    engine = opened("file", trace=stored)
    with pytest.raises(e.TraceMismatchError, match="tap tokens is not the input asked for"):
        engine.run(tokens[::-1].copy(), Schedule.of(COUNT, decode=2))
    with pytest.raises(e.TraceMismatchError, match=r"schedule .*19.*asked for .*21"):
        engine.run(tokens, Schedule.of(COUNT))


@pytest.mark.parametrize(
    ("export", "geometry", "key"), [("nvidia", "tiny", "config_sha256"), ("libertai", "odd", "config_sha256")]
)
def test_the_file_engine_refuses_a_trace_of_another_checkpoint(stored, export, geometry, key):
    with pytest.raises(e.TraceMismatchError, match=rf"a\.trace: metadata {key} is \w+, the checkpoint has"):
        opened("file", export, geometry, trace=stored)


def test_the_file_engine_refuses_another_export(stored, tmp_path):
    lying = Trace.load(stored)
    Trace(lying.metadata | {"export": "libertai"}, lying.taps).save(tmp_path / "b.trace")
    with pytest.raises(e.TraceMismatchError, match="metadata export is libertai, the checkpoint has nvidia"):
        opened("file", trace=tmp_path / "b.trace")


# --- helpers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8, torch.bool])
def test_torch_tensors_become_arrays_bit_for_bit(dtype):
    values = torch.arange(24).reshape(4, 6).to(dtype)[:, ::2]
    array = as_numpy(values.requires_grad_() if dtype.is_floating_point else values)
    assert array.shape == (4, 3)
    assert array.astype(float).tolist() == values.detach().double().tolist()
    assert array.itemsize == values.element_size()


def test_the_text_and_its_schedules():
    tokens = text_tokens()
    assert len(tokens) >= 216
    assert tokens.max() >= 0xC3, "the text holds bytes outside ASCII"
    assert bytes(tokens.astype(np.uint8)).decode() == TEXT
    for make in SCHEDULES.values():
        assert make(len(tokens)).tokens == len(tokens)
        assert json.loads(make(len(tokens)).json())
    chunks = SCHEDULES["odd-chunks+decode"](len(tokens)).prefill
    assert any(size % 4 for size in chunks)
    assert max(chunks) > 64


def test_pairs_of_traces(tokens):
    made = opened("reference").run(tokens, Schedule.of(COUNT))
    assert all(pair.relative_l2 == 0 and pair.rows == 0 and not pair.fault for pair in pairwise.compare(made, made))

    def changed(name, change):
        taps = dict(made.taps)
        taps[name] = change(np.array(taps[name]))
        return {pair.tap: pair for pair in pairwise.compare(made, Trace(made.metadata, taps))}[name]

    def bump(array):
        array[7, 1, 3] += 0.25
        return array

    pair = changed("layers.2.in", bump)
    assert (pair.worst, pair.rows) == ((7, 1, 3), 1)
    assert pair.max_error == pytest.approx(0.25)
    assert pair.relative_l2 == pytest.approx(0.25 / np.linalg.norm(made.taps["layers.2.in"]))
    assert changed("layers.2.router.indices", lambda a: a[:, ::-1]).rows == 0, "a set has no order"
    assert changed("layers.2.router.indices", lambda a: (a + 1) % 10).rows > 0
    assert changed("embed", lambda a: a[:, :-1]).fault == "[21, 112] against [21, 111]"
    assert "infinities" in changed("layers.1.indexer.scores", lambda a: np.where(np.isinf(a), 0, a)).fault
    assert "infinities" in changed("embed", lambda a: a * np.nan).fault
    with pytest.raises(e.TraceMismatchError):
        pairwise.compare(made, Trace(made.metadata, made.taps | {"tokens": made.tokens + 1}))
