"""Output files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: str | os.PathLike[str], parts: bytes | Iterable[bytes]) -> None:
    """Write under a temporary name beside `path`, then rename: nobody reads half of it, and a failure leaves nothing.

    A link is followed. What is no regular file (a pipe, `/dev/stdout`) is written into, since a rename would put a
    file in its place. Raises OSError, also for a file that is write-protected, which a rename would not mind.
    """
    path = Path(path)
    pieces = [parts] if isinstance(parts, bytes) else parts
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    if path.exists() and not path.is_file():
        with open(path, "wb", buffering=0) as file:
            _write(file.fileno(), pieces)
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name[:40]}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            _write(file.fileno(), pieces)
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _write(descriptor: int, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        view = memoryview(piece)
        while len(view):
            view = view[os.write(descriptor, view) :]
