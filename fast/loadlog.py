"""What loading did and how long it took, and the bar that shows it."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from fast.ledger import Ledger

PATIENCE = 2.0
"""Seconds before a bar appears."""


@dataclass(frozen=True, slots=True)
class SectionLog:
    """One section: bytes read from disk; seconds of reading, and of binding mixers, MLPs and the rest beyond it."""

    name: str
    nbytes: int
    read: float
    mixer: float
    mlp: float
    other: float


@dataclass(slots=True)
class LoadLog:
    rank: int = 0
    sections: list[SectionLog] = field(default_factory=list)
    seconds: float = 0.0
    bytes_read: int = 0
    pruned: int = 0
    resident: int = 0
    peak: int = 0
    peak_host: int = 0
    roles: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, nbytes: int, *, read: float, mixer: float, mlp: float, other: float) -> None:
        self.sections.append(SectionLog(name, nbytes, read, mixer, mlp, other))

    def finish(self, seconds: float, bytes_read: int, ledger: Ledger) -> None:
        self.seconds, self.bytes_read = seconds, bytes_read
        self.roles = ledger.by_role("weights")
        self.resident = sum(self.roles.values())
        self.peak, self.peak_host = ledger.peak(), ledger.peak("host")

    @property
    def rate(self) -> float:
        """GB read per second, over everything the loader did."""
        return self.bytes_read / max(self.seconds, 1e-9) / 1e9

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"gb_per_s": self.rate}

    def lines(self) -> list[str]:
        """A table for a terminal or a log file."""
        out = [f"{'section':<12}{'MB read':>12}{'read s':>10}{'mixer s':>10}{'MLP s':>10}{'other s':>10}"]
        for s in self.sections:
            out.append(
                f"{s.name:<12}{s.nbytes / 1e6:>12.2f}{s.read:>10.3f}{s.mixer:>10.3f}{s.mlp:>10.3f}{s.other:>10.3f}"
            )
        out.append(f"rank {self.rank}: {self.bytes_read:,} bytes read in {self.seconds:.2f} s, {self.rate:.2f} GB/s")
        out.append(f"resident {self.resident:,} bytes, peak {self.peak:,} (host part {self.peak_host:,})")
        out.extend(f"  {role:<24}{n:>18,}" for role, n in sorted(self.roles.items()))
        return out


class Progress:
    """A bar over bytes on stderr: only on a terminal, only for work that lasts."""

    def __init__(self, what: str, total: int, *, enabled: bool = True) -> None:
        self.what, self.total = what, total
        self.enabled = enabled and sys.stderr.isatty()
        self.start = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def update(self, done: int) -> None:
        if not self.enabled:
            return
        if self._bar is None and time.monotonic() - self.start > PATIENCE:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=self.total)
        if self._bar is not None:
            self._bar.update(self._task, completed=min(done, self.total))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
