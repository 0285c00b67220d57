"""The checkpoint's own tokenizer, for prompts and for the suite's text."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from conformance.errors import TokensFileError

FILE = "tokenizer.json"


def tokenizer_of(directory: Path) -> Tokenizer | None:
    """What `tokenizer.json` describes, or None where the directory has none. Raises TokensFileError for a bad one."""
    path = directory / FILE
    if not path.exists():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise TokensFileError(f"{path}: not a tokenizer ({error})") from None
