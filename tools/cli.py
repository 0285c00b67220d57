"""`glm53`: wires the command modules together. It holds no behaviour of its own beyond exit codes.

Exit codes: 0 success; 1 a comparison or check failed (the command raises `typer.Exit(1)`); 2 bad usage or bad input,
told in one line. `--debug` before the command name lets the traceback through.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from tools.errors import input_errors
from tools.output import printable

COMMANDS: dict[str, tuple[str, str]] = {
    "make-checkpoint": ("tools.make_checkpoint", "Write a synthetic checkpoint in exactly one export's layout."),
    "quantize": ("tools.quantize", "Re-encode a BF16 or block-FP8 checkpoint into either export."),
    "inspect": ("tools.inspect", "Classify every tensor and list every departure from the known layout."),
    "trace": ("tools.trace", "Run an engine and write its trace."),
    "generate": ("tools.generate", "Continue an input, with drafts or without; tokens/s and acceptance."),
    "diff": ("tools.diff", "Compare a trace with the reference and name the first divergence."),
    "conform": ("tools.conform", "Run the whole suite against one checkpoint directory."),
    "golden": ("tools.golden", "Rewrite or check the golden files, bitwise."),
    "mutants": ("tools.mutants", "Inject every catalogued fault and report what was caught and where."),
    "plan": ("tools.plan", "Memory per rank for an export, a sharding and a machine."),
    "bench": ("tools.bench", "Measure against this machine's own ceilings."),
}
"""Command name -> (module, one-line help). A module exposes `command` (a function) or `app` (a `typer.Typer`)."""


class LazyGroup(TyperGroup):
    """Imports a command's module only when that command runs, so `glm53 --help` does not pay for torch."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module_name, help_line = COMMANDS[cmd_name]
        module = importlib.import_module(module_name)
        if hasattr(module, "app"):
            group = get_group(module.app)
            group.name, group.help = cmd_name, group.help or help_line
            return group
        single = typer.Typer(add_completion=False, rich_markup_mode="rich")
        single.command(name=cmd_name, no_args_is_help=False)(module.command)
        return get_command(single)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in COMMANDS.items()])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Conformance suite for ports of GLM-5.3-Flash (glm5_next) in NVFP4.\n\n"
    "Example: glm53 make-checkpoint tiny --export nvidia --geometry tiny && "
    "glm53 conform tiny --engine fast",
)


@app.callback()
def options(debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error.")) -> None:
    """`--debug` is read by `main` before any command runs; it is declared here so that usage shows it."""


INTERRUPTED = 130
BrokenUsage: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What typer raises for arguments it cannot use; it has no public name of its own."""


def main(argv: list[str] | None = None) -> None:
    """Entry point of the `glm53` console script."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command_at = next((i for i, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
    debug = "--debug" in arguments[:command_at]
    try:
        status = app(args=arguments, prog_name="glm53", standalone_mode=False)
    except BrokenUsage as error:
        if debug:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            sys.exit(2)
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "glm53"
        fail(f"{error.format_message()} ({command} --help shows the options)")
    except input_errors() as error:
        if debug:
            raise
        fail(str(error))
    except OSError as error:
        # What no command guards itself: a disk that fails half way, a path the system cannot take.
        if debug:
            raise
        fail(f"{error.filename or 'input or output'}: {error.strerror or error}")
    except MemoryError as error:
        if debug:
            raise
        fail(f"out of memory: {error or 'an allocation was refused'}")
    except Exception as error:
        # Engines of other people raise what they like; 1 would read as a comparison that failed.
        if debug:
            raise
        fail(f"{type(error).__name__}: {error} ({_place(error)}; glm53 --debug shows the way there)")
    if status == INTERRUPTED:
        print("glm53: interrupted", file=sys.stderr)
    if isinstance(status, int) and status:
        sys.exit(status)


def _place(error: BaseException) -> str:
    """Where an exception was raised: file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no place known"


def fail(message: str) -> NoReturn:
    """One line on stderr, exit status 2."""
    print(f"glm53: {printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
