"""`glm53 generate`: continue an input, with or without drafts, and say how fast and how often drafts were right."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import torch
import typer

from conformance.engines.base import check_tokens
from conformance.engines.fast import DTYPES
from conformance.tokenizer import tokenizer_of
from fast.generate import Chooser, Generator, Statistics
from fast.linear import ROWS
from fast.loader import load
from fast.model import TextModel as FastModel
from fast.mtp import Mtp
from reference.checkpoint import open_checkpoint
from reference.model import TextModel as ReferenceModel
from reference.mtp import Block, Greedy, Sampled, Speculation
from tools.errors import UsageError, check_seed
from tools.options import Arithmetic, Device, Directory, Json, Tokens
from tools.output import check_outputs, write_json
from tools.progress import token_bar
from tools.tokens import tokens_of

ARITHMETICS = {"reference": ("exact", "bf16", "stochastic"), "fast": tuple(DTYPES)}


@dataclass(frozen=True)
class Wish:
    """What to continue with what. `arithmetic` None is the engine's own; `temperature` 0 is greedy."""

    engine: str = "fast"
    drafts: int = 0
    temperature: float = 0.0
    seed: int = 0
    arithmetic: str | None = None
    device: str | None = None
    stop: tuple[int, ...] = ()

    def check(self) -> None:
        """Raises UsageError."""
        if self.engine not in ARITHMETICS:
            raise UsageError(f"--engine {self.engine}: generates no text here, expected {' or '.join(ARITHMETICS)}")
        if self.arithmetic not in (None, *ARITHMETICS[self.engine]):
            expected = " or ".join(ARITHMETICS[self.engine])
            raise UsageError(f"--arithmetic {self.arithmetic}: expected {expected} for {self.engine}")
        check_seed(self.seed)
        if self.drafts < 0 or (self.engine == "fast" and self.drafts >= ROWS):
            expected = f"0 to {ROWS - 1}" if self.engine == "fast" else "0 or more"
            raise UsageError(f"--mtp {self.drafts}: expected {expected}")
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"--temperature {self.temperature}: expected a number from 0 up")
        if self.device is not None and self.engine == "reference":
            raise UsageError(f"--device {self.device}: the reference has no devices")
        if (self.device or "").startswith("cuda") and not torch.cuda.is_available():
            raise UsageError(f"--device {self.device}: there is no CUDA device")


class Writer(Protocol):
    """One sequence that grows."""

    statistics: Statistics

    def start(self, ids: list[int]) -> int:
        """Reads the input -> the first new token."""

    def more(self, limit: int, stop: Sequence[int]) -> list[int]:
        """The 1 to `limit` tokens of the next round."""


class FastWriter:
    """The fast engine. Raises what loading, `Mtp` and `Generator` raise."""

    def __init__(self, directory: Path, wish: Wish, quiet: bool) -> None:
        device = wish.device or "cpu"
        weights = load(directory, device=device, mtp=wish.drafts > 0, progress=not quiet)
        model = FastModel(weights, device=device, dtype=DTYPES[wish.arithmetic or "bf16"])
        mtp = Mtp(model) if wish.drafts else None
        chooser = Chooser(wish.temperature, wish.seed)
        self._generator = Generator(model, mtp=mtp, drafts=wish.drafts, chooser=chooser)
        self.statistics = self._generator.statistics

    def start(self, ids: list[int]) -> int:
        return self._generator.prefill(ids)

    def more(self, limit: int, stop: Sequence[int]) -> list[int]:
        return self._generator.round(limit, stop)


class ReferenceWriter:
    """The oracle. Raises what reading the checkpoint and `Block` raise."""

    def __init__(self, directory: Path, wish: Wish, quiet: bool) -> None:
        model = ReferenceModel(open_checkpoint(directory), wish.arithmetic or "exact", seed=wish.seed)
        self._policy = Sampled(wish.seed, wish.temperature) if wish.temperature else Greedy()
        self._model, self._drafts, self.statistics = model, wish.drafts, Statistics()
        self._run = Speculation(Block(model), self._policy) if wish.drafts else None

    def start(self, ids: list[int]) -> int:
        if self._run is not None:
            return self._run.start(ids)
        hidden = self._model.run(ids)
        return self._pick(hidden)

    def more(self, limit: int, stop: Sequence[int]) -> list[int]:
        if self._run is None:
            self.statistics.count(0, 0)
            return [self._pick(self._model.run([self._last]))]
        one = self._run.step(min(self._drafts, limit - 1), stop)
        self.statistics.count(len(one.drafts), one.accepted)
        return list(one.tokens)

    def _pick(self, hidden: np.ndarray) -> int:
        self._last = self._policy.pick(self._model.logits(hidden[-1:])[0])
        return self._last


WRITERS: dict[str, Callable[[Path, Wish, bool], Writer]] = {"fast": FastWriter, "reference": ReferenceWriter}


@dataclass
class Continuation:
    """New tokens, and the seconds until the first of them and after it."""

    tokens: list[int] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    prefill_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first token; None where there is no other."""
        return (len(self.tokens) - 1) / self.seconds if len(self.tokens) > 1 and self.seconds else None

    def json(self) -> dict[str, Any]:
        drafts = self.statistics
        return {
            "tokens": self.tokens,
            "prefill_seconds": round(self.prefill_seconds, 6),
            "seconds": round(self.seconds, 6),
            "tokens_per_second": self.rate,
            "rounds": drafts.rounds,
            "drafts_tried": drafts.tried,
            "drafts_accepted": drafts.kept,
            "acceptance": drafts.acceptance,
        }

    def line(self) -> str:
        """For people."""
        made = f"{len(self.tokens)} tokens, the first after {self.prefill_seconds:.2f} s"
        if self.rate is not None:
            made += f", then {self.rate:.2f} tokens/s"
        if self.statistics.tried:
            shares = ", ".join(
                f"{position}: {share:.0%}" for position, share in enumerate(self.statistics.acceptance, 1)
            )
            made += f"; {self.statistics.rounds} rounds, accepted at position {shares}"
        return made


def generate(directory: Path, ids: np.ndarray, count: int, wish: Wish, *, quiet: bool = False) -> Continuation:
    """Up to `count` tokens after `ids`, ending with the first of `wish.stop`.

    Raises UsageError, TokenRangeError and what the engine raises; all of it before the first token is made.
    """
    wish.check()
    if count < 1:
        raise UsageError(f"--max-new {count}: expected at least 1")
    text = open_checkpoint(directory).config.text
    prompt = check_tokens(ids, text.vocab_size).tolist()
    for token in wish.stop:
        if not 0 <= token < text.vocab_size:
            raise UsageError(f"--stop {token}: expected 0 to {text.vocab_size - 1}")
    if len(prompt) + count > text.max_position_embeddings:
        most = f"the model has {text.max_position_embeddings} positions, the input takes {len(prompt)}"
        raise UsageError(f"--max-new {count}: {most}")
    writer = WRITERS[wish.engine](directory, wish, quiet)
    made = Continuation(statistics=writer.statistics)
    with token_bar(f"{wish.engine} on {directory.name}", count, quiet) as advance:
        for tokens in _rounds(writer, prompt, count, wish.stop, made):
            made.tokens += tokens
            advance(len(tokens), made.statistics.acceptance)
    return made


def _rounds(writer: Writer, ids: list[int], count: int, stop: Sequence[int], made: Continuation) -> Iterator[list[int]]:
    started = time.perf_counter()
    last = [writer.start(ids)]
    made.prefill_seconds = time.perf_counter() - started
    started = time.perf_counter()
    yield last
    while (left := count - len(made.tokens)) > 0 and last[-1] not in stop:
        last = writer.more(left, stop)
        made.seconds = time.perf_counter() - started
        yield last


def text_of(tokens: Sequence[int], directory: Path) -> str | None:
    """None where the checkpoint has no tokenizer."""
    tokenizer = tokenizer_of(directory)
    return None if tokenizer is None else tokenizer.decode(list(tokens))


def command(
    directory: Directory,
    max_new: Annotated[int, typer.Option("--max-new", metavar="N", help="New tokens, at most.")],
    tokens: Tokens = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to continue instead of --tokens.")] = None,
    engine: Annotated[str, typer.Option(help="fast or reference.")] = "fast",
    mtp: Annotated[int, typer.Option(metavar="K", help="Drafts a round; 0 decodes plainly.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy; above it tokens are sampled.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling, and of stochastic arithmetic.")] = 0,
    arithmetic: Arithmetic = None,
    device: Device = None,
    stop: Annotated[list[int] | None, typer.Option(metavar="ID", help="Token to end with; repeatable.")] = None,
    json_file: Json = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar; only the new text or token ids.")] = False,
) -> None:
    """Continue an input: the new text where the checkpoint has a tokenizer, else the new token ids.

    Greedy text with drafts is, token for token, the text without them.

    Example: glm53 generate tiny --prompt "Hello, world." --max-new 32 --mtp 3
    """
    wish = Wish(engine, mtp, temperature, seed, arithmetic, device, tuple(stop or ()))
    check_outputs({"--json": json_file}, reads=[tokens], keeps=[directory])
    ids = tokens_of(tokens, prompt, directory)
    made = generate(directory, ids, max_new, wish, quiet=quiet)
    text = text_of(made.tokens, directory)
    asked = {"checkpoint": directory.resolve().name, "engine": engine, "prompt_tokens": len(ids), "mtp": mtp}
    sampling = {"temperature": temperature, "seed": seed}
    write_json(json_file, asked | sampling | made.json() | ({} if text is None else {"text": text}))
    typer.echo(" ".join(map(str, made.tokens)) if text is None else text)
    if not quiet:
        typer.echo(made.line(), err=True)
