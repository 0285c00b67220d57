"""A checkpoint that has a tokenizer: word w<i> is id i."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from conformance.checkpoints.shared import shared

VOCAB = 257


def copy_with_tokenizer(place: Path) -> Path:
    """The `odd` checkpoint beside a `tokenizer.json` of its whole vocabulary."""
    directory = place / "with-tokenizer"
    shutil.copytree(shared("nvidia", "odd"), directory)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
