"""`glm53 inspect`: what a checkpoint directory holds, and everything about it that is not as it should be."""

import fnmatch
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from reference import errors as e
from reference import layout
from reference.checkpoint import Checkpoint, Scan, departures, right_shape, scan
from tools.options import Directory, Json, Quiet
from tools.output import check_outputs, printable, write_json
from tools.progress import byte_bar

LISTED = 40


def inspect(directory: Path, *, read_values: bool = True, quiet: bool = False) -> dict[str, Any]:
    """Everything `--json` shows. Only a directory that does not exist raises; all else is listed under `problems`.

    Two kinds of departures fail nothing: `departures`, tensors that are not as the export stores them but as the layout
    lets them vary, and `unread_keys`, config keys, with their values, that neither layout nor mathematics here know.
    An input_scale that is missing is a problem, although no computation here reads it.
    """
    if not directory.is_dir():
        raise e.IndexFileError(f"{directory}: not a directory")
    found = scan(directory)
    departed = departures(found)
    problems = [*found.problems, *(d for d in departed if isinstance(d, e.MissingTensorError))]
    entries = found.files.entries
    data_bytes = sum(entry.end - entry.begin for entry in entries.values())
    if found.files.total_size not in (None, data_bytes):
        problems.append(
            e.TotalSizeError(
                f"{directory}: the index says total_size {found.files.total_size}, the shards hold {data_bytes} bytes"
            )
        )
    if read_values:
        with byte_bar(f"reading {directory.name}", data_bytes, quiet) as advance:
            problems += _value_problems(found, advance)
    return {
        "directory": str(directory),
        "export": found.export,
        "config_sha256": found.config.sha256 if found.config else None,
        "gate_rank": found.gate_rank,
        "shards": len({shard.header.path for shard in found.files.shards.values()}),
        "tensors": len(entries),
        "bytes": data_bytes,
        "families": _families(found),
        "roles": _roles(found),
        "problems": _listed(problems),
        "departures": _listed(d for d in departed if not isinstance(d, e.MissingTensorError)),
        "unread_keys": [key._asdict() for key in found.config.unread] if found.config else [],
        "notes": _notes(found),
        "values_read": read_values,
    }


def _listed(errors: Iterable[e.InputError]) -> list[dict[str, str]]:
    return [{"kind": type(error).__name__, "message": str(error)} for error in errors]


def _value_problems(found: Scan, advance: Callable[[str, int], None]) -> list[e.InputError]:
    """What is wrong with the values of those tensors whose dtype and shape are right."""
    if found.config is None or found.export is None or found.gate_rank is None:
        return []
    checkpoint = Checkpoint(found)
    sound = {name for name, spec in found.specs.items() if _sound(found, name, spec)}
    problems: list[e.InputError] = []
    for name in found.specs:
        spec = found.specs[name]
        if name in sound and (spec.packed != name or f"{name}_scale_2" in sound):
            advance(name, spec.nbytes)
            try:
                checkpoint.check_values(name)
            except e.InputError as error:
                # A bad weight_scale_2 is reported once, under its own name.
                if not (spec.packed == name and "weight_scale_2" in str(error) and "codes" not in str(error)):
                    problems.append(error)
    return problems


def _sound(found: Scan, name: str, spec: layout.TensorSpec) -> bool:
    entry = found.files.entries.get(name)
    return entry is not None and entry.dtype == spec.dtype and right_shape(entry, spec)


def _families(found: Scan) -> dict[str, dict[str, Any]]:
    """family -> tensors and bytes as stored; what the layout does not know is under "unknown"."""
    families: dict[str, dict[str, Any]] = {}
    for name, entry in found.files.entries.items():
        spec = found.specs.get(name)
        family = families.setdefault(spec.family if spec else "unknown", {"tensors": 0, "bytes": 0})
        family["tensors"] += 1
        family["bytes"] += entry.end - entry.begin
    order = {family: position for position, family in enumerate(layout.FAMILIES)}
    return dict(sorted(families.items(), key=lambda item: order.get(item[0], len(order))))


def _roles(found: Scan) -> list[dict[str, Any]]:
    """One line per name pattern and dtype."""
    roles: dict[tuple[str, str, str], list[int]] = {}
    for name, entry in found.files.entries.items():
        spec = found.specs.get(name)
        family, role = (spec.family, spec.role) if spec else ("unknown", layout.classify(name)[0])
        key = (family, role, entry.dtype)
        count = roles.setdefault(key, [0, 0])
        count[0] += 1
        count[1] += entry.end - entry.begin
    return [
        {"family": family, "role": role, "dtype": dtype, "tensors": count, "bytes": size}
        for (family, role, dtype), (count, size) in roles.items()
    ]


def _notes(found: Scan) -> list[str]:
    """Oddities that change nothing here and that other loaders trip over."""
    if found.config is None:
        return []
    quantization = found.config.quantization
    if quantization is None:
        return ["config.json has no quantization_config"]
    ignored = re.compile("|".join(fnmatch.translate(pattern) for pattern in quantization.ignore) or r"(?!)")
    unlisted, listed = [], []
    for name, entry in found.files.entries.items():
        if not name.endswith(".weight") or len(entry.shape) != 2 or name.endswith("embed_tokens.weight"):
            continue
        module = name.removesuffix(".weight")
        if entry.dtype == "U8" and ignored.match(module):
            listed.append(module)
        if entry.dtype != "U8" and not ignored.match(module):
            unlisted.append(module)
    notes = []
    if unlisted:
        notes.append(
            f"{len(unlisted)} linear layers are not packed, and the ignore list does not say so (first: {unlisted[0]})"
        )
    if listed:
        notes.append(f"{len(listed)} packed linear layers are in the ignore list (first: {listed[0]})")
    return notes


def show(result: dict[str, Any], console: Console) -> None:
    """The report for a terminal."""
    console.print(
        f"{result['directory']}: export {result['export'] or 'unknown'}, {result['tensors']:,} tensors, "
        f"{result['bytes']:,} bytes in {result['shards']} shards",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("role")
    table.add_column("tensors", justify="right")
    table.add_column("bytes", justify="right")
    for family, total in result["families"].items():
        table.add_row(family, f"{total['tensors']:,}", f"{total['bytes']:,}")
    console.print(table)
    for departure in result["departures"][:LISTED]:
        console.print(f"departure: {printable(departure['message'])}", highlight=False, markup=False, soft_wrap=True)
    if len(result["departures"]) > LISTED:
        console.print(f"... and {len(result['departures']) - LISTED:,} more; --json FILE holds all", highlight=False)
    for unread in result["unread_keys"]:
        line = f"departure: config.json: {unread['key']} is {e.show(unread['value'])}; no one here reads this key"
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)
    for note in result["notes"]:
        console.print(f"note: {printable(note)}", highlight=False, markup=False, soft_wrap=True)
    problems = result["problems"]
    for problem in problems[:LISTED]:
        console.print(
            f"{problem['kind']}: {printable(problem['message'])}", highlight=False, markup=False, soft_wrap=True
        )
    if len(problems) > LISTED:
        console.print(f"... and {len(problems) - LISTED:,} more; --json FILE holds all", highlight=False)
    departed = len(result["departures"])
    verdict = f"{departed:,} tensors stored otherwise, as may be" if departed else "as the export stores it"
    if problems:
        verdict = f"{len(problems):,} problems"
    if result["unread_keys"]:
        verdict += f"; {len(result['unread_keys'])} config keys that no one here reads"
    console.print(verdict, highlight=False)


def command(
    directory: Directory,
    json_file: Json = None,
    headers_only: Annotated[bool, typer.Option("--headers-only", help="Do not read the values.")] = False,
    quiet: Quiet = False,
) -> None:
    """Classify every tensor and list every departure from the known layout; exit 1 where one is missing, unknown or
    malformed.

    Tensors stored as the other export does, and config keys that nothing here reads, are listed and fail nothing.

    Example: glm53 inspect GLM-5.3-Flash-NVFP4 --headers-only --json layout.json
    """
    check_outputs({"--json": json_file}, keeps=[directory])
    result = inspect(directory, read_values=not headers_only, quiet=quiet)
    write_json(json_file, result)
    if not quiet:
        show(result, Console())
    if result["problems"]:
        raise typer.Exit(1)
