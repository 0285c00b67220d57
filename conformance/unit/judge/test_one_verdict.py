"""A checkpoint that the engine takes can be judged, and one that the oracle refuses is not run: one verdict of both.

Every key of config.json in turn is taken away or given another value, and so are those of hf_quant_config.json; whole
directories are damaged by `lying_files`. The words differ, the verdict must not.
"""

import copy
import json
from typing import Any

import pytest

from conformance import lying_files
from conformance.checkpoints import edit, make
from conformance.checkpoints.shared import copy_of, shared
from fast import config as fast_config
from fast import errors as fast_errors
from fast.loader import load
from reference import config
from reference.checkpoint import open_checkpoint, scan
from reference.errors import InputError

EXPORTS = pytest.mark.parametrize("export", ["nvidia", "libertai"])
VALUES: tuple[Any, ...] = (
    None,
    0,
    -1,
    1,
    2,
    3,
    300,
    2**31,
    0.5,
    1.0,
    -0.0,
    1e30,
    "x",
    "silu",
    [],
    [0],
    [0, 1, 2, 3],
    {},
    True,
    False,
)


def refusal(kind, act, *args):
    try:
        act(*args)
    except kind as error:
        return str(error)
    return None


def changes(raw):
    """(what, the object with one key gone or changed), for every key at any depth."""
    for path in paths(raw):
        for value in ("gone", *VALUES):
            changed = copy.deepcopy(raw)
            section = changed
            for key in path[:-1]:
                section = section[key]
            if value == "gone":
                del section[path[-1]]
            else:
                section[path[-1]] = value
            yield f"{'.'.join(path)} {value!r}", changed


def paths(value, above=()):
    for key, below in value.items():
        yield (*above, key)
        if isinstance(below, dict):
            yield from paths(below, (*above, key))


@EXPORTS
def test_every_key_of_a_config(export):
    raw = json.loads((shared(export, "odd") / "config.json").read_text())
    taken = refused = 0
    apart = []
    for what, changed in changes(raw):
        ours = refusal(fast_errors.InputError, fast_config.parse, changed)
        theirs = refusal(InputError, config.parse, changed)
        taken, refused = taken + (ours is theirs is None), refused + (None not in (ours, theirs))
        if (ours is None) != (theirs is None):
            apart.append(f"{what}: engine {ours}, oracle {theirs}")
    assert apart == []
    assert min(taken, refused) > 100


def test_every_key_of_hf_quant_config(tmp_path):
    directory = copy_of(tmp_path, "nvidia", "odd")
    raw = edit.read_json(directory / "hf_quant_config.json")
    quantization = edit.read_json(directory / "config.json")["quantization_config"]
    apart = []
    for given in (quantization, quantization | {"kv_cache_scheme": None}, None):
        whole = edit.read_json(shared("nvidia", "odd") / "config.json") | {"quantization_config": given}
        edit.write_json(directory / "config.json", whole)
        for what, changed in changes(raw):
            edit.write_json(directory / "hf_quant_config.json", changed)
            ours = refusal(fast_errors.InputError, fast_config.load, directory)
            theirs = next((str(p) for p in scan_quantization(directory)), None)
            if (ours is None) != (theirs is None):
                apart.append(f"{what}: engine {ours}, oracle {theirs}")
    assert apart == []


def scan_quantization(directory):
    try:
        config.check_hf_quant_config(directory / "hf_quant_config.json", config.load(directory))
    except InputError as error:
        yield error


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """export -> (working directory, its sound files): one dense KDA and one routed DSA layer."""
    root = tmp_path_factory.mktemp("small")
    made = {export: make(root / export, export, "odd", layers=(0, 4), vocab=32) for export in ("nvidia", "libertai")}
    return {export: (directory, lying_files.read_files(directory)) for export, directory in made.items()}


def read_all(directory):
    """What the engine reads of a checkpoint, the oracle reads too: everything but `input_scale`."""
    opened = open_checkpoint(directory)
    for name in opened.names():
        if not name.endswith("input_scale"):
            opened.check_values(name)


@pytest.mark.parametrize("seed", range(2))
@EXPORTS
def test_damaged_directories(small, export, seed):
    directory, sound = small[export]
    before = sound
    apart = []
    for index in range(60):
        case = lying_files.mutate(sound, seed, index)
        lying_files.write(directory, case.files, before)
        before = case.files
        ours = refusal(fast_errors.InputError, lambda: load(directory, mtp=True, vision=True, progress=False))
        theirs = refusal(InputError, read_all, directory)
        if (ours is None) != (theirs is None):
            apart.append(f"case {index}, {case.what}: engine {ours}, oracle {theirs}")
    lying_files.write(directory, sound, before)
    assert apart == []


BIG = b"\xff\xff\x7f\x7f"
"""The largest float32, which no BF16 number is near."""


@pytest.mark.parametrize("index", ['{"weight_map": {}}', "metadata", "section", "null", "list", "negative"])
def test_damaged_indexes(tmp_path, index):
    directory = copy_of(tmp_path, "nvidia", "odd")
    raw = edit.read_json(directory / edit.INDEX)
    broken = {
        "metadata": raw | {"metadata": []},
        "section": raw | {"weights": {}},
        "null": raw | {"metadata": {"total_size": None}},
        "list": raw | {"metadata": {"total_size": [1]}},
        "negative": raw | {"metadata": {"total_size": -1}},
    }
    edit.write_json(directory / edit.INDEX, broken.get(index, {"weight_map": {}}))
    assert refusal(fast_errors.InputError, lambda: load(directory, progress=False)) is not None
    assert [type(problem).__name__ for problem in scan(directory).problems] == ["IndexFileError"]


def test_a_convolution_that_bf16_cannot_hold_is_refused_by_both(tmp_path):
    directory = copy_of(tmp_path, "nvidia", "odd")
    name = "model.language_model.layers.0.self_attn.k_conv1d.weight"
    tensor = edit.read_tensors(directory)[name]
    edit.change_tensors(directory, **{name: edit.replace(tensor, data=BIG + tensor.data[4:])})
    for kind, read in ((fast_errors.NonFiniteWeightError, load), (InputError, read_all)):
        with pytest.raises(kind, match=rf"{name}.*\[0, 0, 0\]"):
            read(directory)
