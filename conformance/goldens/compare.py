"""Where two versions of a tensor part, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from conformance.goldens.case import Item


@dataclass(frozen=True)
class Difference:
    """The first differing element of one tensor, or what else differs (`what`).

    `row` is the first row that differs, `index` and the two values those of the first differing element among the
    stored rows; `count` of `size` compared elements differ, the farthest by `ulps` steps of the stored dtype.
    """

    tensor: str
    what: str = ""
    row: int | None = None
    index: tuple[int, ...] | None = None
    expected: str = ""
    actual: str = ""
    count: int = 0
    size: int = 0
    ulps: int | None = None

    def place(self) -> str:
        """Tensor, row and index, in words: rows of most taps are tokens."""
        return self.tensor + ("" if self.row is None else f", {row_word(self.tensor)} {self.row}")

    def __str__(self) -> str:
        if self.what:
            return f"{self.place()}: {self.what}"
        where = self.place() if self.index is None else f"{self.place()}, index {list(self.index)}"
        steps = "" if self.ulps is None else f"; {self.count} of {self.size} differ, by at most {self.ulps} ulp"
        return f"{where}: expected {self.expected}, actual {self.actual}{steps}"


def row_word(tensor: str) -> str:
    """What axis 0 of a tap counts."""
    if tensor.endswith(".state"):
        return "head"
    if tensor.endswith(".conv_state"):
        return "token back"
    return "pool" if tensor.endswith(".pool_keys") else "token"


def hexed(value: np.generic) -> str:
    """A float in hexadecimal with its bits, an integer in decimal and hexadecimal."""
    raw = np.asarray(value)
    bits = int.from_bytes(raw.tobytes(), "little")
    width = 2 * raw.dtype.itemsize
    text = str(int(raw)) if raw.dtype.kind in "iu" else float(raw).hex()
    return f"{text} (0x{bits:0{width}x})"


def steps(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """How many representable values apart, elementwise, as uint64; both zeros are one value, integers subtract."""
    ranks = [_rank(x) for x in (expected, actual)]
    return np.where(ranks[0] > ranks[1], ranks[0] - ranks[1], ranks[1] - ranks[0])


def _rank(x: np.ndarray) -> np.ndarray:
    """uint64 that grows with the value by one per step."""
    middle = np.uint64(1 << 63)
    if x.dtype.kind in "iu":
        return x.astype(np.int64).view(np.uint64) + middle
    raw = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(np.uint64)
    sign = np.uint64(1 << (8 * x.dtype.itemsize - 1))
    return np.where(raw & sign, middle - (raw & ~sign), middle + raw)


def elements(name: str, expected: np.ndarray, actual: np.ndarray, rows: tuple[int, ...] | None) -> Difference | None:
    """Compare two arrays of one shape bit by bit; `rows` are the numbers of their rows in the whole tensor."""
    wider = max(expected.dtype.itemsize, actual.dtype.itemsize)
    if expected.dtype != actual.dtype:  # narrowest dtypes differ: compare in the wider of the two
        common = expected.dtype if expected.dtype.itemsize == wider else actual.dtype
        expected, actual = expected.astype(common), actual.astype(common)
    bits = np.dtype(f"u{wider}")
    differ = np.ascontiguousarray(expected).view(bits) != np.ascontiguousarray(actual).view(bits)
    if not differ.any():
        return None
    at = tuple(int(i) for i in np.argwhere(differ)[0])
    row = at[0] if rows is None else rows[at[0]]
    apart = steps(expected[differ], actual[differ])
    return Difference(
        name,
        row=row,
        index=(row, *at[1:]),
        expected=hexed(expected[at]),
        actual=hexed(actual[at]),
        count=int(differ.sum()),
        size=differ.size,
        ulps=max(int(n) for n in apart),
    )


def compare(
    name: str, actual: Item, shape: tuple[int, ...], stored: np.ndarray | None, digests: np.ndarray | None
) -> Difference:
    """What differs in a tensor whose hash does: `stored` holds its rows `actual.rows`, `digests` a hash of each row."""
    if actual.value.shape != shape:
        return Difference(name, f"shape {list(actual.value.shape)}, expected {list(shape)}")
    first_row = None
    if digests is not None:
        now = actual.row_digests()
        rows = np.flatnonzero((now != digests).any(axis=1))
        first_row = int(rows[0]) if len(rows) else None
    if stored is not None:
        value = actual.value if actual.rows is None else actual.value[list(actual.rows)]
        found = elements(name, stored, value, actual.rows)
        if found is not None:
            return found
    if first_row is not None and digests is not None:
        expected, got = digests[first_row].tobytes().hex(), now[first_row].tobytes().hex()
        return Difference(
            name, f"row hash {got}, expected {expected}; values of this row are not stored", row=first_row
        )
    return Difference(name, "its hash differs; a recipe stores no values")
