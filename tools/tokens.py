"""Token ids from what the user gave: a file of integers, or a prompt."""

import re
from pathlib import Path

import numpy as np

from conformance.errors import TokensFileError
from conformance.tokenizer import tokenizer_of
from reference.errors import show
from tools.errors import UsageError


def tokens_of(tokens: Path | None, prompt: str | None, directory: Path) -> np.ndarray:
    """I64 [T] from exactly one of `--tokens FILE` and `--prompt TEXT`. Raises UsageError or TokensFileError."""
    if (tokens is None) == (prompt is None):
        raise UsageError("give either --tokens FILE or --prompt TEXT" + (", not both" if tokens else ""))
    return read_tokens(tokens) if tokens is not None else encode_prompt(prompt or "", directory)


def read_tokens(path: Path) -> np.ndarray:
    """Integers separated by white space, or a one-dimensional integer `.npy`; -> I64 [T], T >= 1."""
    try:
        if path.suffix == ".npy":
            ids = np.load(path, allow_pickle=False)
        else:
            ids = _integers(path, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TokensFileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (ValueError, EOFError, MemoryError) as error:
        raise TokensFileError(f"{path}: not a .npy array ({error})") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TokensFileError(f"{path}: {ids.dtype} {list(ids.shape)}, expected a list of integers")
    if not ids.size:
        raise TokensFileError(f"{path}: holds no token")
    if int(ids.max()) >= 2**63:
        raise TokensFileError(f"{path}: {ids.max()} does not fit 64 bits")
    return ids.astype(np.int64)


def _integers(path: Path, text: str) -> np.ndarray:
    out = []
    for line, words in enumerate(text.splitlines(), 1):
        for word in words.split():
            # int() would also take 1_000 and the digits of other scripts, which no other reader of such a file takes.
            if not re.fullmatch(r"[+-]?[0-9]+", word):
                raise TokensFileError(f"{path}: line {line}: {show(word)} is not an integer")
            if len(word) > 20 or not -(2**63) <= int(word) < 2**63:
                raise TokensFileError(f"{path}: line {line}: {show(word)} does not fit 64 bits")
            out.append(int(word))
    return np.array(out, np.int64)


def encode_prompt(prompt: str, directory: Path) -> np.ndarray:
    """The ids of the checkpoint's `tokenizer.json` where there is one, else UTF-8 bytes."""
    tokenizer = tokenizer_of(directory)
    try:
        # Bytes of the command line that are no UTF-8 arrive as lone surrogates; as bytes they are ids like others.
        encoded = prompt.encode(errors="surrogateescape" if tokenizer is None else "strict")
    except UnicodeEncodeError as error:
        raise TokensFileError(f"--prompt: not UTF-8 at character {error.start}; give --tokens FILE") from None
    ids = list(encoded) if tokenizer is None else tokenizer.encode(prompt).ids
    if not ids:
        raise TokensFileError("--prompt: gives no token")
    return np.array(ids, np.int64)
