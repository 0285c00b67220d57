"""`glm53 quantize`: re-encode a BF16 or block-FP8 checkpoint directory into either export, one weight at a time."""

from pathlib import Path
from typing import Annotated, Any

import typer

from conformance.checkpoints.directory import DirectorySource
from conformance.checkpoints.export import write_export
from reference.layout import tensors, totals
from tools.make_checkpoint import Export
from tools.options import Json, Made, Quiet
from tools.output import check_outputs, write_json
from tools.progress import byte_bar


def quantize(source: Path, directory: Path, export: str, *, quiet: bool = False) -> dict[str, Any]:
    """Write `directory` from the checkpoint `source`; returns what `--json` shows. Raises an `InputError`."""
    read = DirectorySource(source)
    families = totals(tensors(read.config, export, read.gate_rank))
    size = sum(bytes_ for _, bytes_ in families.values())
    with byte_bar(f"writing {directory.name}", size, quiet) as advance:
        write_export(read, read.raw, directory, export, advance, companions=read.companions())
    return {
        "source": str(source),
        "source_layout": read.layout,
        "directory": str(directory),
        "export": export,
        "shards": len(list(directory.glob("*.safetensors"))),
        "tensors": sum(count for count, _ in families.values()),
        "bytes": size,
    }


def command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A BF16 or block-FP8 checkpoint directory.")],
    directory: Made,
    export: Annotated[Export, typer.Option(help="Whose layout to write.")],
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Re-encode a checkpoint as NVFP4 by ModelOpt's rule. Nothing is calibrated: nvidia's input_scale becomes 1.

    Example: glm53 quantize GLM-5.3-Flash-BF16 GLM-5.3-Flash-NVFP4 --export libertai
    """
    check_outputs({"--json": json_file}, keeps=[source])
    summary = quantize(source, directory, export.value, quiet=quiet)
    write_json(json_file, summary)
    if not quiet:
        typer.echo(
            f"{directory}: {summary['export']} from {summary['source_layout']}: {summary['tensors']:,} tensors, "
            f"{summary['bytes']:,} bytes in {summary['shards']} shards"
        )
