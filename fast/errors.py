"""One exception class per way an input can be wrong.

Every message names the file, tensor or key, what was found and what was expected. `InputError` is the only base the
command line has to catch; the groups below it exist for readers, not for dispatch.
"""

from __future__ import annotations


class InputError(Exception):
    """The caller's data is wrong, not the program."""


# --- config.json and hf_quant_config.json ------------------------------------------------------------------------


class ConfigError(InputError):
    """config.json cannot be used."""


class ConfigSyntaxError(ConfigError):
    """Not JSON, not UTF-8, nested too deeply, or a number JSON does not have."""


class ConfigTooLargeError(ConfigError):
    """The file is larger than any config can be."""


class ConfigDuplicateKeyError(ConfigError):
    """One object holds a key twice."""


class ConfigMissingKeyError(ConfigError):
    """A key that is never defaulted is absent."""


class ConfigTypeError(ConfigError):
    """A key holds a value of the wrong JSON type."""


class ConfigValueError(ConfigError):
    """A value is outside its range, or not one this model family knows."""


class ConfigContradictionError(ConfigError):
    """Two keys say different things."""


class LayerListError(ConfigError):
    """The lists of layers do not name every layer exactly once."""


# --- files of a checkpoint directory -----------------------------------------------------------------------------


class CheckpointError(InputError):
    """The files on disk cannot be used."""


class MissingFileError(CheckpointError):
    """A file that must exist does not."""


class NotRegularFileError(CheckpointError):
    """A directory, pipe, socket or device stands where a file must be."""


class PathEscapeError(CheckpointError):
    """An index names something that is not a plain file inside the directory."""


class FileChangedError(CheckpointError):
    """A shard changed its size after its header was checked."""


class IndexSyntaxError(CheckpointError):
    """The index is not the JSON an index is."""


class IndexTooLargeError(CheckpointError):
    """The index is larger than the cap on headers."""


class IndexDuplicateKeyError(CheckpointError):
    """The index maps one tensor twice."""


class IndexMissingShardError(CheckpointError):
    """The index names a shard that is not on disk."""


class IndexMissingTensorError(CheckpointError):
    """The index places a tensor in a shard that does not hold it."""


class UnindexedTensorError(CheckpointError):
    """A shard holds a tensor that no index names."""


class UnindexedShardError(CheckpointError):
    """A shard lies beside the index without being named by it."""


class TensorClaimedTwiceError(CheckpointError):
    """Two shards hold the same tensor."""


# --- header of one shard -----------------------------------------------------------------------------------------


class HeaderError(CheckpointError):
    """The header of a safetensors file lies or is damaged."""


class HeaderLengthError(HeaderError):
    """The 8-byte length is below 2, above the cap or past the end of the file."""


class HeaderTruncatedError(HeaderError):
    """The file ends before its length field or header does."""


class HeaderEncodingError(HeaderError):
    """The header is not UTF-8, or a name holds a lone surrogate."""


class HeaderSyntaxError(HeaderError):
    """The header is not the JSON object a safetensors header is."""


class HeaderDuplicateKeyError(HeaderError):
    """A tensor, or a field of a tensor, is given twice."""


class HeaderFieldError(HeaderError):
    """A tensor's entry lacks a field or has one that does not exist."""


class HeaderMetadataError(HeaderError):
    """`__metadata__` is not a map from strings to strings."""


class UnknownDtypeError(HeaderError):
    """A dtype outside the format."""


class BadDimensionError(HeaderError):
    """A dimension is not a whole number in 0 .. 2^63 - 1."""


class RankError(HeaderError):
    """More dimensions than any weight has."""


class ShapeOverflowError(HeaderError):
    """The product of a shape, or its byte count, does not fit 63 bits."""


class OffsetOrderError(HeaderError):
    """A byte range ends before it begins, or an offset is negative or beyond 63 bits."""


class OffsetRangeError(HeaderError):
    """A byte range leaves the file."""


class OffsetGapError(HeaderError):
    """Bytes between two tensors belong to nobody."""


class OffsetOverlapError(HeaderError):
    """Two tensors share bytes."""


class TrailingDataError(HeaderError):
    """The file goes on after its last tensor."""


class ByteLengthError(HeaderError):
    """A byte range is not shape times width."""


# --- what the tensors are ----------------------------------------------------------------------------------------


class LayoutError(InputError):
    """The tensors are not those of this model."""


class UnknownTensorError(LayoutError):
    """A tensor the config has no place for."""


class MissingTensorError(LayoutError):
    """A tensor the config asks for is absent."""


class MissingScaleError(LayoutError):
    """A packed weight lacks weight_scale or weight_scale_2, or a scale lacks its weight."""


class ForeignFormatError(LayoutError):
    """A name of another quantisation format (compressed-tensors, block FP8)."""


class WrongDtypeError(LayoutError):
    """A tensor's dtype is not one its role may have."""


class WrongShapeError(LayoutError):
    """A tensor's shape is not the one the config implies."""


class EmptyTensorError(LayoutError):
    """A tensor of the model has no elements."""


# --- what the tensors hold ---------------------------------------------------------------------------------------


class ValueRefusedError(InputError):
    """A weight or scale holds a value no weight can have."""


class NonFiniteWeightError(ValueRefusedError):
    """NaN or infinity in a weight."""


class ScaleNaNError(ValueRefusedError):
    """A block scale byte is E4M3's NaN."""


class ScaleNegativeError(ValueRefusedError):
    """A block scale byte has its sign bit set."""


class TensorScaleError(ValueRefusedError):
    """A weight_scale_2 is NaN, negative, too large for any code, or zero above codes that are not."""


# --- the machine -------------------------------------------------------------------------------------------------


class ShardingError(InputError):
    """A model cannot be cut this way."""


class RankRangeError(ShardingError):
    """A rank outside 0 .. world - 1, or sizes below one."""


class MeshError(ShardingError):
    """TP and EP sizes of which neither divides the other."""


class IndivisibleError(ShardingError):
    """Heads, a width or blocks that do not divide."""


class TooManyRanksError(ShardingError):
    """More expert ranks than experts."""


class HardwareError(InputError):
    """A hardware description that cannot be read, or a device that is not there."""


class DoesNotFitError(InputError):
    """The plan needs more memory than the hardware has."""
