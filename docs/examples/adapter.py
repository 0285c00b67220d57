"""An engine for `glm53`: put this file on the Python path and say `--engine adapter:Adapter`.

The model it adapts is the fast engine's own; replace the marked lines by calls of yours.
"""

import importlib.metadata

import numpy as np

from conformance.engines.base import as_numpy
from conformance.errors import EngineOptionError
from conformance.trace import Recorder, Trace, metadata
from fast.model import TextModel  # <- your model
from reference.checkpoint import open_checkpoint


class Adapter:
    name = "adapter"
    version = importlib.metadata.version("glm53-conformance")

    def open(self, directory, **options):
        if options:
            raise EngineOptionError(f"engine adapter: option {next(iter(options))} is not offered; it has none")
        checkpoint = open_checkpoint(directory)  # reads names, shapes and config; no weights yet
        self.about = {
            "checkpoint": checkpoint.directory.name,
            "config_sha256": checkpoint.config.sha256,
            "export": checkpoint.export,
        }
        self.model = TextModel(directory)  # <- load your model

    def run(self, tokens, schedule, taps="*"):
        record = Recorder(taps, convert=as_numpy)  # joins chunks, copies, turns torch tensors into arrays
        ids = np.asarray(tokens, np.int32)
        self.model.reset()  # <- forget every token
        start = 0
        for length in schedule.prefill:
            self.model.prefill(ids[start : start + length], tap=record)  # <- calls record(name, array)
            start += length
        for token in ids[start:]:
            self.model.decode(int(token), tap=record)  # <- one token
        about = metadata(engine=self.name, engine_version=self.version, schedule=schedule, **self.about)
        return Trace(about, record.taps() | {"tokens": ids})

    def operands(self, name):
        try:
            bound = self.model.operands(name)  # <- what you bound for this checkpoint weight, or return None
        except KeyError:
            return None
        return {part: as_numpy(value) for part, value in bound.items()}
