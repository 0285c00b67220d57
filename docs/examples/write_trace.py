"""Write a `glm53-trace/1` file with nothing but Python and NumPy.

Copy `TraceWriter` into your engine's test code, call `add` wherever a value of the format is at hand, then `save`.
Run as a program it turns arrays that an engine dumped into a trace:

    python write_trace.py CHECKPOINT_DIR EXPORT ARRAYS.npz OUT.trace

where ARRAYS.npz holds one array per tap, named as in the format, and `prefill`: the lengths of the prefill chunks.
"""

import hashlib
import json
import struct
import sys
from pathlib import Path

import numpy as np

NAMES = {"f8": "F64", "f4": "F32", "f2": "F16", "i4": "I32"}


class TraceWriter:
    def __init__(self, checkpoint, export, engine, version):
        config = (Path(checkpoint) / "config.json").read_bytes()
        self.metadata = {
            "format": "glm53-trace/1",
            "engine": engine,
            "engine_version": version,
            "checkpoint": Path(checkpoint).resolve().name,
            "config_sha256": hashlib.sha256(config).hexdigest(),
            "export": export,  # "nvidia" or "libertai"
            "arithmetic": "bf16",
            "tp": "1",
            "ep": "1",
        }
        self.pieces = {}

    def add(self, name, array, bf16=False):
        """One more piece of a tap: pieces are joined along axis 0, a state keeps its last one.

        bf16=True: `array` holds the 16-bit patterns (uint16), or float32 values that are bf16 values already.
        """
        array = np.ascontiguousarray(array)
        if bf16 and array.dtype != np.uint16:
            array = (array.astype("<f4").view("<u4") >> 16).astype("<u2")
        code = "BF16" if bf16 else NAMES[array.dtype.newbyteorder("<").str[1:]]
        pieces = [] if name.endswith("state") else self.pieces.get(name, (code, []))[1]
        self.pieces[name] = (code, [*pieces, array])

    def save(self, path, prefill, decode=0):
        """`prefill`: lengths of the prefill chunks; `decode`: how many tokens were then fed one at a time."""
        schedule = json.dumps({"prefill": [int(n) for n in prefill], "decode": decode})
        header, data = {"__metadata__": {**self.metadata, "schedule": schedule}}, []
        offset = 0
        for name, (code, pieces) in self.pieces.items():
            if name.endswith(".scores"):  # a pool that did not exist yet was no candidate
                width = max(piece.shape[1] for piece in pieces)
                pieces = [
                    np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=0xFF80 if code == "BF16" else -np.inf)
                    for p in pieces
                ]
            array = np.concatenate(pieces)
            header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [offset, offset + array.nbytes]}
            data.append(array.tobytes())
            offset += array.nbytes
        text = json.dumps(header).encode()
        Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def main(checkpoint, export, arrays, out):
    dumped = dict(np.load(arrays))
    prefill = dumped.pop("prefill")
    writer = TraceWriter(checkpoint, export, engine="my-engine", version="0.1")
    for name, array in dumped.items():
        writer.add(name, array)
    writer.save(out, prefill, decode=len(dumped["tokens"]) - int(prefill.sum()))


if __name__ == "__main__":
    main(*sys.argv[1:])
