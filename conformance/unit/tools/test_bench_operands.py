"""What the decode benchmarks launch, without a GPU: operands that are counted are not still in a cache, caches have the
room that the timed steps need, and peers are compared with what they do."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fast.kernels import driver
from tools import bench_decode, bench_kernels, bench_model, bench_timing
from tools.errors import UsageError

CPU = torch.device("cpu")
FETCHED = 1 << 25
"""Bytes to walk through here: the sizes themselves are those of the released model."""


class Noted:
    """A kernel that does nothing but keep its parameters."""

    launches: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012 (of the fixture)

    def __init__(self, variant: Any, name: str, device: int | None) -> None:
        self.name = name

    def __call__(self, grid: Any, threads: int, parameters: ctypes.Structure, **options: Any) -> None:
        fields = parameters._fields_  # type: ignore[misc]
        self.launches.append((self.name, {field[0]: getattr(parameters, field[0]) for field in fields}))


def replayed(launch: Callable[[], Any], repeats: int = 20) -> float:
    launch()
    return 1.0


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> bench_kernels.Kernels:
    words = torch.zeros(64, dtype=torch.int32)
    for name, value in {
        "kernel": Noted,
        "processors": lambda device: 132,
        "shared_limit": lambda device: 227 * 1024,
        "scratch": lambda device: words,
    }.items():
        monkeypatch.setattr(driver, name, value)
    monkeypatch.setattr(bench_model, "DEVICE", CPU)
    monkeypatch.setattr(
        bench_model.Maker,
        "normal",
        lambda self, *shape, scale=1.0, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype),
    )
    for name, value in {"device": lambda: CPU, "replayed": replayed, "FETCHED": FETCHED}.items():
        monkeypatch.setattr(bench_timing, name, value)
    monkeypatch.setattr(Noted, "launches", [])
    return bench_kernels.Kernels(1, 1e3)


def distinct(kernel: str, field: str) -> int:
    return len({parameters[field] for name, parameters in Noted.launches if name == kernel})


def test_no_operand_of_a_site_is_read_again_soon(kernels: bench_kernels.Kernels) -> None:
    kernels.site()
    t = kernels.text
    assert distinct("hc_site", "fn") * 2 * t.hc_rows * t.hc_mult * t.hidden_size >= FETCHED


def test_no_operand_of_a_kda_step_is_read_again_soon(kernels: bench_kernels.Kernels) -> None:
    kernels.kda(1)
    launches = sum(name == "kda" for name, _ in Noted.launches)
    assert launches >= 3
    for field in ("state", "f_b", "g_b", "q_past", "q_conv"):
        assert distinct("kda", field) == launches, field


def test_no_operand_of_the_attention_is_read_again_soon(kernels: bench_kernels.Kernels) -> None:
    context, t = 4096, kernels.text
    found = {row["kernel"].split(",")[0]: row for row in kernels.attention(context)}
    assert list(found) == ["indexer score", "indexer select", "mla"]
    assert distinct("indexer_score", "pools") * 2 * context // t.index_kpool * t.index_head_dim >= FETCHED
    assert distinct("indexer_select", "scores") == distinct("indexer_score", "pools")
    heads, widths = t.num_attention_heads, t.qk_nope_head_dim + t.v_head_dim
    for kernel in ("mla_absorb", "mla_merge"):
        assert distinct(kernel, "kv_b") * 2 * heads * widths * t.kv_lora_rank >= FETCHED
        assert distinct(kernel, "kv_b") == distinct("mla_partial", "selected") == distinct("mla_partial", "count")


@pytest.mark.parametrize("repeats", [3, 20, 2000])
def test_caches_have_room_for_every_step_that_is_timed(repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run on the host as they would on a device: each adds a token to what its sequence holds."""

    class Step:
        def __init__(self, model: Any, *, sequences: int, capacity: int) -> None:
            self.rows, self.capacity, self.held = sequences, capacity, 0

        def capture(self) -> None:
            self.replay()

        def replay(self) -> None:
            assert self.held < self.capacity, (self.held, self.capacity)
            self.held += 1

    def milliseconds(run: Callable[[], Any], repeats: int, warm: int) -> float:
        for _ in range(warm + repeats):
            run()
        return 1.0

    monkeypatch.setattr(bench_decode, "DecodeStep", Step)
    monkeypatch.setattr(bench_decode, "filled", lambda step, context, seed: setattr(step, "held", context))
    monkeypatch.setattr(bench_decode, "distinct_experts", lambda step: step.replay() or [])
    monkeypatch.setattr(bench_decode, "step_bytes", lambda step, chosen, context: 1)
    monkeypatch.setattr(bench_timing, "milliseconds", milliseconds)
    assert bench_decode.measure(None, 2, 2048, 1e3, repeats)["ms"] == 1.0


def test_a_peer_of_one_sequence_is_compared_with_one_sequence() -> None:
    steps = [
        {"rows": rows, "context": context, "ms": ms}
        for rows, context, ms in ((4, 2048, 9.0), (1, 2048, 6.0), (1, 4096, 7.0), (4, 8192, 8.0))
    ]
    result: dict[str, Any] = {"layers": 3, "steps": steps}
    assert bench_decode.of_one_row(result, 2048) == 2.0
    assert bench_decode.of_one_row(result, 8192) is None


@pytest.mark.parametrize(("limit", "most"), [(227, 8), (99, 4)])
def test_rows_are_those_that_a_step_can_have(limit: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`limit`: KiB of shared memory that a block may have."""
    monkeypatch.setattr(driver, "shared_limit", lambda device: limit * 1024)
    monkeypatch.setattr(bench_timing, "device", lambda: CPU)
    assert bench_decode.row_counts(None, "1-8") == list(range(1, most + 1))
    assert bench_decode.row_counts(None, "1,4,8") == [rows for rows in (1, 4, 8) if rows <= most]
    assert bench_decode.row_counts(str(most), "1-8") == [most]
    with pytest.raises(UsageError, match=f"--rows {most + 1}: expected 1 to {most}"):
        bench_decode.row_counts(str(most + 1), "1-8")
