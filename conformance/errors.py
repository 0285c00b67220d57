"""Everything that can be wrong with what the judge is given, one class per way.

All of them descend from `reference.errors.InputError`, so the command line turns each into exit status 2 and one line
that names the file, the tap or the key, what was found and what was expected.
"""

from reference.errors import InputError


class TraceError(InputError):
    """A trace file or a recorded tap is not what the format `glm53-trace/1` says."""


class TraceUnreadableError(TraceError):
    """The file is missing, is a directory, or may not be read."""


class TraceTruncatedError(TraceError):
    """The file ends before the bytes its own header announces, or goes on after them."""


class TraceHeaderError(TraceError):
    """The safetensors header is not valid: not JSON, a name twice, an unknown dtype, ranges that do not tile."""


class TraceFormatError(TraceError):
    """The metadata names no format, or another one than `glm53-trace/1`."""


class TraceMetadataError(TraceError):
    """A metadata key is missing, is not a string, or holds a value outside its domain."""


class TraceScheduleError(TraceError):
    """The schedule cannot be read, or feeds another number of tokens than the trace holds."""


class TapMissingError(TraceError):
    """`tokens` or `logits`, without which nothing can be judged, is absent."""


class TapShapeError(TraceError):
    """A tap has other axes than its name promises for this checkpoint and this number of tokens."""


class TapDtypeError(TraceError):
    """A tap is stored in a dtype its name does not allow."""


class TapChunkError(TraceError):
    """Two calls handed the recorder pieces of one tap that cannot be joined along axis 0."""


class RankTraceError(TraceError):
    """Traces of single ranks do not make one run: a rank missing or there twice, or metadata that differ."""


class TokenRangeError(InputError):
    """A token id lies outside the vocabulary."""


class TokensFileError(InputError):
    """A tokens file or prompt yields no usable list of token ids."""


class EngineNotFoundError(InputError):
    """No engine has the name asked for, or the class a path names cannot be imported."""


class EngineOptionError(InputError):
    """An engine was asked for something it does not offer."""


class EngineClosedError(InputError):
    """An engine was asked to run before a checkpoint was opened."""


class TraceMismatchError(InputError):
    """Two things that are to be compared do not belong together: another config, export or token list."""
