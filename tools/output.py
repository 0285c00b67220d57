"""Files that a command writes: checked before the work that fills them, and never left half written."""

import errno
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from conformance.files import write_whole
from tools.errors import UsageError


def printable(text: str) -> str:
    """What was read from a file, for a terminal: control characters, which could steer it, are spelt out."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def check_outputs(
    files: dict[str, Path | None], reads: Iterable[Path | None] = (), keeps: Iterable[Path | None] = ()
) -> None:
    """Refuse, before hours of work, outputs that could not be written at its end. `files`: option -> where it writes.

    Raises UsageError for a file in a folder that does not exist or may not be written, for a folder where a file is to
    be, and for two options that write one file or one that would overwrite a file this command reads: one of `reads`,
    or anything in a checkpoint directory of `keeps`.
    """
    kept = {os.path.realpath(folder): folder for folder in keeps if folder is not None and folder.is_dir()}
    taken = {os.path.realpath(path): f"{path} is an input" for path in reads if path is not None}
    for option, path in files.items():
        if path is None:
            continue
        try:
            _check_place(path)
        except OSError as error:
            raise _unwritable(option, path, error) from None
        where = os.path.realpath(path)
        if where in taken and path.is_file() | (not path.exists()):
            raise UsageError(f"{option} {path}: {taken[where]}")
        if path.exists() and (folder := kept.get(os.path.realpath(path.parent))) is not None:
            raise UsageError(f"{option} {path}: would overwrite a file of the checkpoint {folder}")
        taken[where] = f"{option} and another option write the same file"


def _check_place(path: Path) -> None:
    found: int | None = None
    if path.is_dir():
        found = errno.EISDIR
    elif path.exists():
        found = None if os.access(path, os.W_OK) else errno.EACCES
    elif not path.parent.exists():
        found = errno.ENOENT
    elif not path.parent.is_dir():
        found = errno.ENOTDIR
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        found = errno.EACCES
    if found is not None:
        raise OSError(found, os.strerror(found))


def check_folder(option: str, path: Path) -> None:
    """Refuse, before the work, a folder that is not there and cannot be made, or may not be written. Raises UsageError.

    Folders above it are not made for it.
    """
    try:
        _check_place(path / "x" if path.is_dir() else path)
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        raise _unwritable(option, path, error) from None


def guarded(option: str, path: Path, write: Callable[[], Any]) -> None:
    """Run `write`; an OSError becomes the UsageError that names the option and the file."""
    try:
        write()
    except OSError as error:
        raise _unwritable(option, path, error) from None


def _unwritable(option: str, path: Path, error: OSError) -> UsageError:
    return UsageError(f"{option} {path}: cannot be written: {error.strerror or error}")


def write_json(path: Path | None, value: Any, option: str = "--json") -> None:
    """Write `value` where `--json FILE` says, if given. Raises `UsageError` for a file that cannot be written."""
    if path is not None:
        text = json.dumps(value, indent=2) + "\n"
        guarded(option, path, lambda: write_whole(path, text.encode()))
