"""The books: every byte an engine holds, by role, owner and place, and the highest sum there ever was.

A place is "device" or "host"; on a CPU both are the same memory and on a machine with unified memory their sum is what
counts, so `peak()` without a place is the peak of the sum. An owner is who may free the bytes:

    store      bytes as on disk that nobody has bound yet
    weights    operands of the model
    staging    a conversion in progress
    state      recurrent state and caches          workspace  scratch shared by the layers
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

PLACES = ("device", "host")


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    role: str
    owner: str
    nbytes: int
    place: str = "device"


class Ledger:
    """Charges and releases; sums are exact integers."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._next = 0
        self._current: Counter[str] = Counter()
        self._peak: Counter[str] = Counter()
        self._sum_peak = 0
        self._roles: Counter[tuple[str, str]] = Counter()
        self.peak_roles: dict[str, int] = {}
        """Bytes by "role (owner)" at the moment of the highest sum."""

    def charge(self, name: str, role: str, owner: str, nbytes: int, place: str = "device") -> int:
        """Enter `nbytes`; returns the ticket that `release` and `move` take."""
        if nbytes < 0 or place not in PLACES:
            raise ValueError(f"{name}: {nbytes} bytes on {place!r}")
        self._next += 1
        self._entries[self._next] = Entry(name, role, owner, nbytes, place)
        self._current[place] += nbytes
        self._roles[role, owner] += nbytes
        self._peak[place] = max(self._peak[place], self._current[place])
        if self.current() > self._sum_peak:
            self._sum_peak = self.current()
            self.peak_roles = {f"{role} ({owner})": n for (role, owner), n in self._roles.items() if n}
        return self._next

    def release(self, *tickets: int) -> None:
        for ticket in tickets:
            entry = self._entries.pop(ticket)
            self._current[entry.place] -= entry.nbytes
            self._roles[entry.role, entry.owner] -= entry.nbytes

    def split(self, ticket: int, name: str, role: str, owner: str, nbytes: int) -> int:
        """Give `nbytes` of an entry to a new one; no sum over a place changes. Returns the new ticket."""
        entry = self._entries[ticket]
        if not 0 <= nbytes <= entry.nbytes:
            raise ValueError(f"{name}: {nbytes} bytes out of the {entry.nbytes} of {entry.name}")
        self._entries[ticket] = replace(entry, nbytes=entry.nbytes - nbytes)
        self._roles[entry.role, entry.owner] -= nbytes
        self._roles[role, owner] += nbytes
        self._next += 1
        self._entries[self._next] = Entry(name, role, owner, nbytes, entry.place)
        return self._next

    def move(self, ticket: int, owner: str) -> None:
        """The same bytes change hands; nothing is copied and no sum changes."""
        entry = self._entries[ticket]
        self._roles[entry.role, entry.owner] -= entry.nbytes
        self._roles[entry.role, owner] += entry.nbytes
        self._entries[ticket] = replace(entry, owner=owner)

    def current(self, place: str | None = None) -> int:
        return sum(self._current.values()) if place is None else self._current[place]

    def peak(self, place: str | None = None) -> int:
        return self._sum_peak if place is None else self._peak[place]

    def by_role(self, owner: str | None = None) -> dict[str, int]:
        out: Counter[str] = Counter()
        for (role, held_by), n in self._roles.items():
            if owner in (None, held_by):
                out[role] += n
        return {role: n for role, n in out.items() if n}

    def by_owner(self) -> dict[str, int]:
        out: Counter[str] = Counter()
        for (_, owner), n in self._roles.items():
            out[owner] += n
        return {owner: n for owner, n in out.items() if n}

    def entries(self) -> list[Entry]:
        return list(self._entries.values())
