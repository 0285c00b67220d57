"""`glm53 bench`: measurements against this machine's own ceilings. One module per subject; this one joins them.

Example: glm53 bench load DIR --repeats 3
"""

import typer

from tools import bench_decode, bench_kernels, bench_load, bench_reference

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure against this machine's own ceilings.\n\nExample: glm53 bench load DIR --repeats 3",
)
for part in (bench_decode.app, bench_kernels.app, bench_load.app, bench_reference.app):
    app.registered_commands.extend(part.registered_commands)
