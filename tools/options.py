"""Options that several commands have, each with one name and one text."""

from pathlib import Path
from typing import Annotated

import typer

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint directory.")]
Made = Annotated[Path, typer.Argument(metavar="DIR", help="Directory to make; must not exist or be empty.")]
Tokens = Annotated[Path | None, typer.Option(metavar="FILE", help="Token ids: text or .npy.")]
Arithmetic = Annotated[
    str | None, typer.Option(help="exact, bf16 or stochastic (reference); bf16 or fp32 (other engines).")
]
Tp = Annotated[int | None, typer.Option(metavar="N", help="Tensor-parallel ranks.")]
Ep = Annotated[int | None, typer.Option(metavar="N", help="Expert-parallel ranks; max(tp, ep) ranks in all.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.")]
Further = Annotated[
    list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="Further option of the engine; repeatable.")
]
Samples = Annotated[int, typer.Option(metavar="N", min=3, help="Samples per bound.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the report as a page.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar; nothing on the terminal but errors.")]
