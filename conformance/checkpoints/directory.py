"""A checkpoint directory as a source: the BF16 twin or the block-FP8 original, read a few rows at a time."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from conformance.checkpoints.source import round_bf16
from reference import config, layout, values
from reference import errors as e
from reference.checkpoint import find_gate_rank, read_files

# A reader that drops their FP32 part changes the model; no source may have done so.
ALWAYS_F32 = ("A_log", "dt_bias", "e_score_correction_bias")
COPIED = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "chat_template*", "*processor_config.json")
UNCALIBRATED = np.float32(1.0)


class DirectorySource:
    """`Source` over a directory of BF16 or FP32 values, or of E4M3 with one `weight_scale_inv` per 128 x 128.

    A weight in FP8 is the BF16 rounding of code * scale, which is what its BF16 twin holds. Nothing tells how large
    activations are, so `input_scale` is 1: an FP4 activation block then spans 2^-9 * 6 to 2688.
    Raises an `InputError` for a directory that is neither, or whose tensors are not those of its config.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        raw, _ = config.read_json(self.directory / "config.json")
        raw.pop("quantization_config", None)
        self.raw: dict[str, Any] = raw
        self.config = config.parse(raw, where=str(self.directory / "config.json"))
        self._files = read_files(self.directory)
        if self._files.problems:
            raise self._files.problems[0]
        self.gate_rank = find_gate_rank(self._files.entries, self.config)
        self.layout = self._detect()
        self._check()

    def _detect(self) -> str:
        dtypes = {entry.dtype for entry in self._files.entries.values()}
        if "U8" in dtypes:
            raise e.SourceError(f"{self.directory}: holds packed (U8) tensors; it is an export already, not a source")
        if dtypes - {"BF16", "F32", "F8_E4M3"}:
            raise e.SourceError(f"{self.directory}: dtypes {sorted(dtypes)}; a source has BF16, F32 and F8_E4M3 only")
        return "fp8" if "F8_E4M3" in dtypes else "bf16"

    def _check(self) -> None:
        files, expected = self._files, set()
        for spec in layout.tensors(self.config, self.layout, self.gate_rank):
            expected.add(spec.name)
            entry = files.entries.get(spec.name)
            if entry is None:
                raise e.MissingTensorError(
                    f"{self.directory}: tensor {spec.name} is missing from the {self.layout} source"
                )
            allowed = {"BF16", "F32"} if spec.dtype in ("BF16", "F32") else {spec.dtype}
            if spec.name.endswith((*ALWAYS_F32, "weight_scale_inv")):
                allowed = {"F32"}
            if entry.dtype not in allowed:
                raise e.TensorDtypeError(
                    f"{self._where(spec.name)}: {entry.dtype}, expected {' or '.join(sorted(allowed))}"
                )
            if entry.shape != spec.shape:
                raise e.TensorShapeError(
                    f"{self._where(spec.name)}: shape {list(entry.shape)}, expected {list(spec.shape)} from the config"
                )
        for name in files.entries:
            if name not in expected:
                raise e.UnknownTensorError(f"{self._where(name)} is not part of the {self.layout} layout")

    def rows(self, spec: layout.TensorSpec, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor of the `bf16` layout, float32."""
        entry = self._files.entries[spec.name]
        data = self._files.data(spec.name)
        width = len(data) // spec.shape[0]
        shape = (stop - start, *spec.shape[1:])
        part = data[start * width : stop * width]
        if entry.dtype != "F8_E4M3":
            return values.decode(self._where(spec.name), entry.dtype, shape, part, start)
        codes = np.frombuffer(part, ml_dtypes.float8_e4m3fn).reshape(shape).astype(np.float32)
        if not np.isfinite(codes).all():
            row, column = (int(n) for n in np.argwhere(~np.isfinite(codes))[0])
            raise e.NonFiniteWeightError(f"{self._where(spec.name)} at [{start + row}, {column}]: NaN")
        return round_bf16(codes * self._block_scales(spec, start, stop))

    def _block_scales(self, spec: layout.TensorSpec, start: int, stop: int) -> np.ndarray:
        name, block = f"{spec.name}_scale_inv", layout.FP8_BLOCK
        shape = self._files.entries[name].shape
        scales = values.decode(self._where(name), "F32", shape, self._files.data(name))
        if (scales < 0).any():
            raise e.TensorScaleError(f"{self._where(name)}: negative scale")
        by_row = scales[np.arange(start, stop) // block]
        return np.repeat(by_row, block, axis=1)[:, : spec.shape[1]]

    def input_scale(self, layer: int, projection: str) -> np.float32:
        return UNCALIBRATED

    def companions(self) -> list[Path]:
        """Tokenizer and processor files that belong beside the weights."""
        return sorted({path for pattern in COPIED for path in self.directory.glob(pattern) if path.is_file()})

    def _where(self, name: str) -> str:
        return f"{self._files.shards[name].header.path}: tensor {name}"
