"""Everything that can be wrong with an input, one class per way.

A message names the file, tensor or key, what was found there and what was expected. All classes derive from
`InputError`, which the command line turns into exit status 2 and one line.
"""

SHOWN = 160


def show(value: object) -> str:
    """A value as it appears in a message: `repr` on one line, cut to `SHOWN` characters."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


class InputError(Exception):
    """Base of every error caused by what was read, not by a fault of the program."""


# --- config.json ----------------------------------------------------------------------------------


class ConfigError(InputError):
    """config.json (or hf_quant_config.json) cannot be used."""


class ConfigFileError(ConfigError):
    """The file is missing, unreadable, not UTF-8, not JSON, or not an object."""


class ConfigDuplicateKeyError(ConfigError):
    """A key appears twice in one JSON object."""


class ConfigMissingKeyError(ConfigError):
    """A key that has no default is absent."""


class ConfigTypeError(ConfigError):
    """A key holds a JSON value of the wrong type."""


class ConfigValueError(ConfigError):
    """A number is outside what the model can be."""


class ConfigEnumError(ConfigError):
    """A key with a known set of values holds another one."""


class ConfigLayersError(ConfigError):
    """The layer lists leave a layer without exactly one kind, or two of them disagree."""


class ConfigContradictionError(ConfigError):
    """Two keys that state the same thing state different things."""


class ConfigUnsupportedError(ConfigError):
    """A feature that this model family does not have is switched on."""


# --- one safetensors file -------------------------------------------------------------------------


class ShardError(InputError):
    """A safetensors file lies about itself."""


class ShardFileError(ShardError):
    """The file cannot be opened or is not a regular file."""


class HeaderLengthError(ShardError):
    """The 8-byte header length is impossible: below 2, above the cap, or past the end of the file."""


class HeaderEncodingError(ShardError):
    """The header is not UTF-8."""


class HeaderSyntaxError(ShardError):
    """The header is not one JSON object."""


class HeaderDuplicateKeyError(ShardError):
    """A name, or a field of an entry, is defined twice."""


class HeaderFieldError(ShardError):
    """An entry, or `__metadata__`, does not have exactly the known fields with the known types."""


class TensorNameError(ShardError):
    """A tensor name is empty or not printable text."""


class UnknownDtypeError(ShardError):
    """A dtype is not one that this reader knows the width of."""


class ShapeRangeError(ShardError):
    """A dimension is not an integer in [0, 2^63), the rank is too large, or the size overflows."""


class OffsetError(ShardError):
    """Offsets run backwards or point past the end of the data."""


class ByteLengthError(ShardError):
    """The byte range does not hold exactly the bytes of the shape."""


class OverlapError(ShardError):
    """Two tensors share bytes."""


class GapError(ShardError):
    """Bytes between two tensors belong to none."""


class FileLengthError(ShardError):
    """The file does not end where its header says it ends."""


# --- the index and the directory ------------------------------------------------------------------


class IndexFileError(InputError):
    """model.safetensors.index.json is missing, unreadable or has the wrong form."""


class IndexDuplicateKeyError(IndexFileError):
    """A tensor appears twice in the index."""


class ShardPathError(InputError):
    """The index names a shard that is not a plain file name inside the directory."""


class MissingShardError(InputError):
    """A shard named by the index is not on disk."""


class StrayShardError(InputError):
    """A model shard lies in the directory and the index does not name it."""


class UnindexedTensorError(InputError):
    """A shard holds a tensor that the index does not name."""


class AbsentTensorError(InputError):
    """The index places a tensor in a shard that does not hold it."""


class TwoShardsError(InputError):
    """Two shards hold a tensor of the same name."""


class TotalSizeError(InputError):
    """metadata.total_size is not the number of bytes of data."""


# --- the layout of an export ----------------------------------------------------------------------


class LayoutError(InputError):
    """The tensors are not those of the export."""


class ExportError(LayoutError):
    """The tensors do not tell which export this is, or it is not one that can be run."""


class UnknownTensorError(LayoutError):
    """A tensor that the export does not have."""


class MissingTensorError(LayoutError):
    """A tensor that the export has is missing."""


class MissingScaleError(MissingTensorError):
    """A packed weight is there without one of its scales."""


class TensorDtypeError(LayoutError):
    """A tensor has another dtype than the export stores."""


class TensorShapeError(LayoutError):
    """A tensor has another shape than the config implies."""


class ForeignFormatError(LayoutError):
    """Tensors of another quantisation format (compressed-tensors), whose scales divide instead of multiplying."""


class NoSuchTensorError(InputError):
    """A tensor was asked for that the checkpoint does not hold."""


# --- values ---------------------------------------------------------------------------------------


class ValueRangeError(InputError):
    """A stored value cannot be used."""


class NonFiniteWeightError(ValueRangeError):
    """A weight holds NaN or infinity."""


class BlockScaleError(ValueRangeError):
    """A block scale byte is NaN or negative."""


class TensorScaleError(ValueRangeError):
    """A tensor scale is NaN, negative, too large for any code, or zero where the codes are not."""


# --- sharding --------------------------------------------------------------------------------------


class ShardingError(InputError):
    """A model cannot be divided among ranks as asked."""


class MeshError(ShardingError):
    """Sizes and rank do not describe a mesh."""


class DivisionError(ShardingError):
    """Heads, widths or 16-column blocks do not divide among the ranks, or there are fewer experts than ranks."""


# --- writing --------------------------------------------------------------------------------------


class OutputError(InputError):
    """The place to write to cannot be used."""


class GeometryError(InputError):
    """A synthetic model was asked for that cannot exist."""


class SourceError(InputError):
    """A directory to be quantised is neither BF16 nor block FP8."""
