"""Every kernel compiled for every target, without a GPU: what it spills, and that FP4 is converted by an instruction.

The compiler is NVRTC from the `test` extra, at the version that `constraints.txt` pins: another one may spill more.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fast.kernels import compile as compiler
from fast.kernels import experts, gemv, indexer, kda, mhc, mla, router, stream
from fast.kernels.compile import CONVERTING, TARGETS, Resources, Variant, build

D, I, F, E, Q = 4096, 2048, 12288, 288, 1536  # noqa: E741
"""Widths of the released model: hidden, expert, dense, number of experts, query rank."""

ROOMY = ("sm_90a", "sm_100a")
"""Targets whose blocks may have more than 160 KB of shared memory (`driver.roomy`)."""

CONVERSION = "F2FP.F16.E2M1"
"""Two FP4 values to fp16 in one instruction, as the disassembler writes it."""

SPILLS: dict[tuple[str, str], int] = {}
"""(target, kernel) -> bytes of spill stores and loads that are known and bearable; now there are none."""


def variants(target: str) -> list[Variant]:
    """What a decode step of the released model launches on a device of this target, and the general expert kernel."""
    roomy = target in ROOMY
    inputs = [gemv.variant(K, roomy=roomy) for K in (D, 64 * 128, 64 * 256, F)]
    special = [
        gemv.variant(Q, roomy=roomy),
        gemv.variant(D, roomy=roomy, experts=E),
        gemv.variant(D, roomy=roomy, argmax=True),
        kda.variant(128, fused=True),
        mhc.variant(4, roomy=roomy),
        indexer.variant(32, 128, 4),
        mla.variant(roomy=roomy),
        experts.variant(roomy=roomy, exact=True, hidden=D, width=I),
        experts.variant(roomy=roomy, exact=False),
        router.VARIANT,
        stream.VARIANT,
    ]
    return inputs + special


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def uncached(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that only these tests write to: each kernel is compiled here, and once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh))


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_spills_no_more_than_is_known(target: str) -> None:
    found: dict[str, int] = {}
    for variant in variants(target):
        for name, used in build(variant, target).kernels.items():
            assert used.registers > 0, (variant.name, name)
            if used.spill_stores + used.spill_loads:
                found[f"{variant.name}:{name}"] = used.spill_stores + used.spill_loads
    known = {name: allowed for (arch, name), allowed in SPILLS.items() if arch == target}
    over = {name: (spilled, known.get(name, 0)) for name, spilled in found.items() if spilled > known.get(name, 0)}
    assert not over, f"{target}, compiler {compiler.compiler_version()}: bytes spilled, and known: {over}"


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("target", TARGETS)
def test_fp4_is_converted_by_an_instruction_where_there_is_one(target: str, tmp_path: Path) -> None:
    """The PTX asks for it once for each instruction of the machine code; elsewhere there is none of either."""
    variant = experts.variant(roomy=target in ROOMY, exact=False)
    asked = build(variant, target, ptx=True).code.count(b"cvt.rn.f16x2.e2m1x2")
    path = tmp_path / "kernel.cubin"
    path.write_bytes(build(variant, target).code)
    listing = subprocess.run([disassembler(), "-c", str(path)], capture_output=True, text=True, check=True).stdout
    made = listing.count(CONVERSION)
    assert "HMMA" in listing, listing[:300]
    if target in CONVERTING:
        assert made > 0, f"{target}: {asked} conversions in the PTX, none in the machine code"
        assert made >= asked, (made, asked)
    else:
        assert (asked, made) == (0, 0)


def disassembler() -> str:
    """nvdisasm of the package nvidia-cuda-nvdisasm, else the one on the path."""
    for root in map(Path, sys.path):
        for path in sorted(root.glob("nvidia/*/bin/nvdisasm")):
            return str(path)
    return "nvdisasm"


def test_the_report_of_the_assembler_is_read() -> None:
    log = (
        "ptxas info    : Compiling entry function 'a' for 'sm_90a'\n"
        "ptxas info    : Function properties for a\n"
        "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 128 registers, used 1 barriers, 8576 bytes smem\n"
        "ptxas info    : Compiling entry function 'b' for 'sm_90a'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 32 registers\n"
    )
    assert compiler.parse_log(log) == {"a": Resources(128, 8, 12, 8576), "b": Resources(32, 0, 0, 0)}


def test_what_no_kernel_is_written_for_is_refused() -> None:
    with pytest.raises(compiler.KernelTargetError, match=r"capability 8\.0"):
        compiler.target(8, 0)
    with pytest.raises(compiler.KernelTargetError, match="sm_121"):
        build(stream.VARIANT, "sm_121")
