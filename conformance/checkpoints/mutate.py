"""Seeded damage to safetensors files, for fuzzing readers: structured faults in the header and flipped bytes."""

import copy
import random
from typing import Any

from conformance.checkpoints.edit import join

NUMBERS: tuple[Any, ...] = (0, 1, -1, 7, 2**31, 2**32, 2**62, 2**63, 2**64, 1.5, 1e300, None, "1", True, [])
DTYPES = ("F64", "I4", "", 3, None, "BOOL", "f32", ["F32"])
NAMES = ("", "e", "\x00", "z" * 2000, "__metadata__", "a.weight_packed")
WIDTHS = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}


def good_file(rng: random.Random) -> tuple[dict[str, Any], bytes]:
    """Header and data of one to four small tensors, zero-sized ones among them."""
    header: dict[str, Any] = {}
    offset = 0
    for name in "abcd"[: rng.randint(1, 4)]:
        dtype = rng.choice(list(WIDTHS))
        shape = [rng.randint(0, 4) for _ in range(rng.randint(0, 3))]
        size = WIDTHS[dtype]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    return header, rng.randbytes(offset)


def mutated_file(rng: random.Random) -> bytes:
    """A good file with up to three structured faults, then up to four bytes replaced; often none of either."""
    header, data = good_file(rng)
    entries = list(header)
    for _ in range(rng.randint(0, 3)):
        one = header[rng.choice(entries)]
        fault = rng.randrange(8)
        if fault == 0:
            one["dtype"] = rng.choice(DTYPES)
        elif fault == 1:
            one["shape"] = rng.choice([[rng.choice(NUMBERS) for _ in range(rng.randint(0, 9))], None, "x", {}])
        elif fault == 2:
            one["data_offsets"] = [rng.choice(NUMBERS) for _ in range(rng.randint(1, 3))]
        elif fault == 3:
            one["data_offsets"] = [rng.randint(0, 40), rng.randint(0, 40)]
        elif fault == 4:
            one.pop(rng.choice(["dtype", "shape", "data_offsets"]), None)
        elif fault == 5:
            header[rng.choice(NAMES)] = rng.choice([copy.deepcopy(one), 1, "x", {"k": 1}, {"k": "v"}])
        elif fault == 6:
            data = data[: rng.randint(0, len(data))]
        else:
            data += bytes(rng.randint(1, 9))
    length = rng.choice([None] * 20 + [rng.getrandbits(64), rng.randint(0, 99)])
    content = bytearray(join(header, data, length))
    for _ in range(rng.choice([0, 0, 0, 0, 0, 1, 4])):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)
