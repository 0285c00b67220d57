"""`glm53 make-checkpoint`: write a synthetic checkpoint in exactly one export's layout."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from conformance import checkpoints
from reference.config import parse
from reference.layout import tensors, totals
from tools.errors import check_seed
from tools.options import Json, Made, Quiet
from tools.output import check_outputs, write_json
from tools.progress import byte_bar


class Export(StrEnum):
    nvidia = "nvidia"
    libertai = "libertai"


class GeometryName(StrEnum):
    tiny = "tiny"
    odd = "odd"
    one_layer = "one-layer"
    full = "full"


def make_checkpoint(
    directory: Path,
    export: str,
    geometry: str,
    *,
    seed: int = 0,
    layers: tuple[int, ...] | None = None,
    experts: int | None = None,
    vocab: int | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Write the checkpoint; returns what was written, as `--json` shows it. Raises an `InputError`."""
    chosen = checkpoints.geometry(geometry, layers=layers, experts=experts, vocab=vocab)
    families = totals(tensors(parse(chosen.config), export, chosen.gate_rank))
    size = sum(bytes_ for _, bytes_ in families.values())
    with byte_bar(f"writing {directory.name}", size, quiet) as advance:
        checkpoints.make(directory, export, chosen, seed, progress=advance)
    return {
        "directory": str(directory),
        "export": export,
        "geometry": geometry,
        "seed": seed,
        "layers": list(layers) if layers is not None else None,
        "experts": chosen.config["text_config"]["n_routed_experts"],
        "vocab": chosen.config["text_config"]["vocab_size"],
        "shards": len(list(directory.glob("*.safetensors"))),
        "tensors": sum(count for count, _ in families.values()),
        "bytes": size,
    }


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """ "0,3" -> (0, 3). Raises `typer.BadParameter`."""
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of layer numbers such as 0,3,4") from None


def command(
    directory: Made,
    export: Annotated[Export, typer.Option(help="Whose layout to write.")],
    geometry: Annotated[GeometryName, typer.Option(help="Shape of the model.")] = GeometryName.tiny,
    seed: Annotated[int, typer.Option(help="Same seed, same weights, in both exports.")] = 0,
    layers: Annotated[str | None, typer.Option(metavar="A,B", help="Only these layers, e.g. 0,3,4.")] = None,
    experts: Annotated[int | None, typer.Option(metavar="N", help="Only the first N routed experts.")] = None,
    vocab: Annotated[int | None, typer.Option(metavar="N", help="Only the first N vocabulary rows.")] = None,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Write a synthetic checkpoint: bit-identical on every machine, the same source weights in both exports.

    Example: glm53 make-checkpoint one-layer --export nvidia --geometry one-layer --experts 16 --vocab 4096
    """
    check_outputs({"--json": json_file})
    check_seed(seed)
    summary = make_checkpoint(
        directory,
        export.value,
        geometry.value,
        seed=seed,
        layers=parse_layers(layers),
        experts=experts,
        vocab=vocab,
        quiet=quiet,
    )
    write_json(json_file, summary)
    if not quiet:
        typer.echo(
            f"{directory}: {summary['export']} {summary['geometry']}, seed {seed}: {summary['tensors']:,} tensors, "
            f"{summary['bytes']:,} bytes in {summary['shards']} shards"
        )
