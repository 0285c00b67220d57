"""Checkpoints that lie, made by the thousand: seeded mutations of a sound directory, and what a loader may answer.

Case i of a seed is one mutation of one file: bits of the payload, a field of a header, the length field, the end of a
file, an entry of the index, a key of config.json, a scale or weight that no checkpoint may hold. `answer` loads the
result with the fast engine. It may refuse with an `InputError`; if it loads, every operand has to be exactly what a
naive reading of the mutated files gives, so a mutation that changes nothing, or only values, passes too.
"""

import json
import random
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fast.errors import InputError
from fast.loader import Weights, load
from reference import nvfp4

INDEX = "model.safetensors.index.json"
Files = dict[str, bytes]
Entry = list[Any]
"""[name, text of its header value]"""


@dataclass(frozen=True)
class Case:
    what: str
    files: Files


@dataclass
class Tally:
    """What a run of cases answered."""

    answers: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    """Processor seconds of the slowest case: what a busy machine adds to its clock is no fault of a loader."""
    slowest_case: str = ""


def read_files(directory: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """(header, payload) of a sound shard."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(entries: list[Entry], payload: bytes, length: int | None = None) -> bytes:
    """A shard from header entries that may be anything, repeated names included."""
    text = "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in entries) + "}"
    header = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(header) if length is None else length) + header + payload


def mutate(files: Files, seed: int, index: int) -> Case:
    """Case `index` of `seed`."""
    rng = random.Random(f"{seed}/{index}")
    shards = [name for name in files if name.endswith(".safetensors")]
    kind = rng.choice(list(KINDS))
    shard = rng.choice(shards)
    what, changed = KINDS[kind](rng, files, shard)
    return Case(f"{kind}: {what}", files | changed)


def _flip(rng: random.Random, files: Files, shard: str) -> tuple[str, Files]:
    name = rng.choice([shard, shard, "config.json", INDEX])
    data = bytearray(files[name])
    header = 8 + int.from_bytes(data[:8], "little") if name == shard else len(data)
    spots = [rng.randrange(header if rng.random() < 0.7 else len(data)) for _ in range(rng.choice((1, 1, 2, 8)))]
    for spot in spots:
        data[spot] ^= 1 << rng.randrange(8)
    return f"{name} bits at {spots}", {name: bytes(data)}


def _length(rng: random.Random, files: Files, shard: str) -> tuple[str, Files]:
    data = files[shard]
    true = int.from_bytes(data[:8], "little")
    near = (true + d for d in (-8, -1, 1, 8, 4096))
    value = rng.choice([0, 1, 2, *near, len(data) - 7, len(data), 100_000_001, 2**31, 2**63 - 1, 2**64 - 1])
    return f"{shard} length {value}", {shard: struct.pack("<Q", value % 2**64) + data[8:]}


def _size(rng: random.Random, files: Files, shard: str) -> tuple[str, Files]:
    name = rng.choice([shard, shard, INDEX, "config.json"])
    data = files[name]
    if rng.random() < 0.6:
        keep = rng.choice([0, 1, 7, 8, 9, len(data) - 1, max(0, len(data) - 4096), rng.randrange(len(data))])
        return f"{name} cut to {keep}", {name: data[:keep]}
    more = rng.choice([1, 8, 4096])
    return f"{name} longer by {more}", {name: data + bytes(more)}


_NUMBERS = (
    "0",
    "1",
    "-1",
    "16",
    "1.0",
    "1e3",
    "1e30",
    "true",
    "null",
    '"8"',
    str(2**31),
    str(2**62),
    str(2**63),
    "9" * 40,
)


def _header(rng: random.Random, files: Files, shard: str) -> tuple[str, Files]:
    """One change to the JSON of a header."""
    header, payload = split(files[shard])
    entries: list[Entry] = [[name, json.dumps(value)] for name, value in header.items()]
    i = rng.randrange(len(entries))
    name, value = entries[i][0], dict(header[entries[i][0]])
    change = rng.choice([*_FIELDS, "rename", "drop", "repeat", "twin", "raw", "metadata", "order"])
    if change in _FIELDS and "dtype" in value:
        key, make = _FIELDS[change]
        value[key] = make(rng, value)
        text = json.dumps(value)
        if change == "number":
            text = text.replace('"@"', rng.choice(_NUMBERS))
        entries[i][1] = text
    elif change == "drop":
        del entries[i]
    elif change == "repeat":
        entries.insert(rng.randrange(len(entries)), list(rng.choice(entries)))
    elif change == "twin":
        entries[i][1] = rng.choice(entries)[1]
    elif change == "raw":
        entries[i][1] = rng.choice(["null", "[]", "{}", "[" * 2000, '{"dtype":"BF16"}', '"x"', "1e999", "NaN", ""])
    elif change == "metadata":
        odd = ["1", "[]", '{"a":1}', '{"a":"b","a":"c"}', '{"a":{"b":"c"}}', '{"format":"pt"}']
        entries.append(["__metadata__", rng.choice(odd)])
    elif change == "order":
        rng.shuffle(entries)
    else:
        entries[i][0] = rng.choice(
            [name + "x", "", "model.layers.0.x", "\ud800", name.upper(), name.replace("0", "00")]
        )
    return f"{shard} {name} {change} {entries[min(i, len(entries) - 1)]!r:.150}", {shard: join(entries, payload)}


def _shape(rng: random.Random, value: dict[str, Any]) -> list[Any]:
    shape = list(value["shape"])
    way = rng.randrange(6)
    if way == 0:
        return shape[::-1]
    if way == 1:
        return [*shape, 1]
    if way == 2:
        return [1] * 5000
    if way == 3:
        return [n * 2 for n in shape]
    if way == 4:
        return [0, *shape]
    return [2**32, 2**32]


def _at(rng: random.Random, value: dict[str, Any], key: str) -> list[Any]:
    """The list with a hole where a number was; the hole is filled with text that JSON writers would not produce."""
    out = list(value[key]) or [0]
    out[rng.randrange(len(out))] = "@"
    return out


def _shift(rng: random.Random, value: dict[str, Any]) -> list[int]:
    by = rng.choice([-2, -1, 1, 2, 64, 2**62])
    return [n + by if rng.random() < 0.7 else n for n in value["data_offsets"]]


_FIELDS: dict[str, tuple[str, Callable[[random.Random, dict[str, Any]], Any]]] = {
    "dtype": ("dtype", lambda rng, v: rng.choice(["BF16", "F32", "U8", "F8_E4M3", "F16", "I64", "F4", "bf16", "", 7])),
    "shape": ("shape", _shape),
    "number": ("shape", lambda rng, v: _at(rng, v, "shape")),
    "offsets": ("data_offsets", _shift),
    "offset count": ("data_offsets", lambda rng, v: rng.choice([[], [0], [0, 1, 2], v["data_offsets"][::-1]])),
    "extra field": ("strides", lambda rng, v: [1]),
}


def _index(rng: random.Random, files: Files, shard: str) -> tuple[str, Files]:
    index = json.loads(files[INDEX])
    mapped = index["weight_map"]
    name = rng.choice(list(mapped))
    way = rng.choice(["file", "drop", "add", "section", "metadata", "value", "repeat", "swap"])
    if way == "file":
        odd = [
            "../" + shard,
            "/" + shard,
            "./" + shard,
            "no.safetensors",
            "",
            ".",
            "..",
            "a\\b.safetensors",
            "config.json",
        ]
        mapped[name] = rng.choice(odd)
    elif way == "drop":
        del mapped[name]
    elif way == "add":
        mapped[rng.choice([name + ".x", "weight", "\udcff", "model.language_model.layers.99.hc_attn_fn"])] = mapped[
            name
        ]
    elif way == "section":
        index[rng.choice(["weights", "weight_map2", ""])] = {}
    elif way == "metadata":
        index["metadata"] = rng.choice([{"total_size": -1}, {"total_size": "1"}, [], {"total_size": 1}, {"x": [[[]]]}])
    elif way == "value":
        mapped[name] = rng.choice([None, 3, [], {}])
    elif way == "swap":
        mapped[name] = rng.choice(list(mapped.values()))
    text = json.dumps(index)
    if way == "repeat":
        text = text.replace('"weight_map": {', '"weight_map": {' + f'"{name}": "{mapped[name]}", ', 1)
    return f"{way} {name}", {INDEX: text.encode()}


def _config(rng: random.Random, files: Files, shard: str) -> tuple[str, Files]:
    raw = json.loads(files["config.json"])
    section = rng.choice([raw["text_config"], raw["text_config"]["linear_attn_config"], raw["vision_config"], raw])
    key = rng.choice(list(section))
    way = rng.choice(["drop", "value", "value"])
    if way == "drop":
        del section[key]
    else:
        section[key] = rng.choice([0, -1, 1, 2, 3, 7, 2**40, 1e30, None, "x", [], {}, True, False, [0], [0, 1, 2, 3]])
    return f"{way} {key} {section.get(key)!r:.60}", {"config.json": json.dumps(raw).encode()}


def _value(rng: random.Random, files: Files, shard: str) -> tuple[str, Files]:
    """A value no weight or scale may have, or one that is legal but rare."""
    data = bytearray(files[shard])
    header, payload = split(files[shard])
    base = len(data) - len(payload)
    name = rng.choice([n for n in header if n != "__metadata__"])
    begin, end = header[name]["data_offsets"]
    width = {"BF16": 2, "F32": 4}.get(header[name]["dtype"], 1)
    at = base + begin + rng.randrange((end - begin) // width) * width
    odd = {
        2: [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F7F, 0x8000, 0],
        4: [0x7F800000, 0xFF800000, 0x7FC00000, 0xBF800000, 0x80000000, 0x7F7FFFFF, 0],
        1: [0x7F, 0xFF, 0x80, 0x7E, 0x01, 0x00, 0x88],
    }[width]
    value = rng.choice(odd)
    data[at : at + width] = value.to_bytes(width, "little")
    return f"{name} byte {at - base - begin} {value:#x}", {shard: bytes(data)}


KINDS: dict[str, Callable[[random.Random, Files, str], tuple[str, Files]]] = {
    "flip": _flip,
    "length": _length,
    "size": _size,
    "header": _header,
    "header again": _header,
    "index": _index,
    "config": _config,
    "value": _value,
}


def write(directory: Path, files: Files, before: Files | None = None) -> None:
    """Put the files into `directory`, touching only those that differ from `before`."""
    for name, data in files.items():
        if before is None or before.get(name) != data:
            (directory / name).write_bytes(data)


def naive(files: Files) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """{tensor: (dtype, shape, bytes)} as the plainest reader would have it."""
    out = {}
    for file, data in files.items():
        if file.endswith(".safetensors"):
            header, payload = split(data)
            for name, info in header.items():
                if name != "__metadata__":
                    begin, end = info["data_offsets"]
                    out[name] = (info["dtype"], tuple(info["shape"]), payload[begin:end])
    return out


def differences(weights: Weights, files: Files) -> list[str]:
    """Checkpoint names whose operands are not what the naive reading of `files` makes of them."""
    tensors = naive(files)
    return [name for name in weights.names() if not _same(name, weights, tensors)]


def _same(name: str, weights: Weights, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bool:
    operands = {key: value.contiguous() for key, value in weights.operands(name).items()}
    found = {key: _bytes(value) for key, value in operands.items()}
    dtype, shape, data = tensors[name]
    if "codes" not in operands:
        words = np.frombuffer(data, "<u4" if dtype == "F32" else "<u2")
        itemsize = operands["value"].element_size()
        if itemsize == 2 and dtype == "F32":
            words = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype("<u2")
        elif itemsize == 4 and dtype == "BF16":
            words = words.astype("<u4") << 16
        return tuple(operands["value"].shape) == shape and found["value"] == words.tobytes()
    if dtype == "BF16":
        wide = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
        made = nvfp4.encode(wide)
        return found == {
            "codes": made.packed.tobytes(),
            "scale": made.scale.tobytes(),
            "scale_2": np.float32(made.scale_2).tobytes(),
        }
    stem = name.removesuffix("weight")
    wanted = {"codes": data, "scale": tensors[stem + "weight_scale"][2], "scale_2": tensors[stem + "weight_scale_2"][2]}
    return found == wanted


def _bytes(tensor: Any) -> bytes:
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def answer(directory: Path, files: Files, **options: Any) -> str:
    """The class name of the refusal, or "loaded". Raises AssertionError when what was loaded is not what is there, and
    whatever the loader should not have raised."""
    try:
        weights = load(directory, progress=False, **options)
    except InputError as error:
        return type(error).__name__
    wrong = differences(weights, files)
    assert not wrong, f"loaded, but not what the files hold: {wrong[:3]}"
    return "loaded"


def peak_memory(*, reset: bool = False) -> int:
    """The most resident memory of this process, in bytes, since it was last reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def run(directory: Path, sound: Files, seed: int, cases: range, advance: Callable[[], None] = lambda: None) -> Tally:
    """Cases of a seed, one after the other, in `directory` (which holds `sound`)."""
    tally = Tally()
    before = sound
    for index in cases:
        case = mutate(sound, seed, index)
        write(directory, case.files, before)
        before = case.files
        start = time.process_time()
        try:
            got = answer(directory, case.files, mtp=index % 2 == 0, vision=index % 3 == 0)
        except BaseException as error:
            raise AssertionError(f"seed {seed}, case {index}, {case.what}: {type(error).__name__}: {error}") from error
        took = time.process_time() - start
        tally.answers[got] += 1
        tally.kinds[case.what.split(":")[0]] += 1
        if took > tally.slowest:
            tally.slowest, tally.slowest_case = took, f"seed {seed}, case {index}, {case.what}"
        advance()
    write(directory, sound, before)
    return tally
