"""CUDA sources to machine code, without a GPU: NVRTC where its library is found, else the `nvcc` on the path.

A kernel is compiled for one architecture-specific target, `sm_90a`, `sm_100a`, `sm_120a` or `sm_121a`: the `a` is what
makes the FP4 conversion instruction available, and what the plain number silently replaces by forty instructions. The
sources include no CUDA header, so nothing but the compiler is needed. Results are kept on disk under a digest of
sources, options and compiler version.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from fast.errors import InputError

SOURCES = Path(__file__).parent
TARGETS = ("sm_90a", "sm_100a", "sm_120a", "sm_121a")
CONVERTING = TARGETS[1:]
"""Targets with the FP4 conversion instruction."""
OPTIONS = ("--std=c++17", f"-I{SOURCES}")


class KernelTargetError(InputError):
    """A device or target that no kernel is written for."""


class KernelCompilerError(InputError):
    """No CUDA compiler can be found."""


class KernelCompileError(InputError):
    """A source that the compiler refused; the message carries its log."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One source with its compile-time constants, e.g. ("gemv", (("CW", 8),))."""

    source: str
    defines: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        return "-".join([self.source, *(f"{key}{value}" for key, value in self.defines)])


@dataclass(frozen=True, slots=True)
class Resources:
    """What the assembler reports of one kernel, registers a thread and bytes."""

    registers: int
    spill_stores: int
    spill_loads: int
    shared: int


@dataclass(frozen=True, slots=True)
class Binary:
    """Machine code (or PTX text) of one variant and the resources of each of its kernels."""

    code: bytes
    kernels: dict[str, Resources]


def target(major: int, minor: int) -> str:
    """Compute capability -> target string. Raises KernelTargetError for a device without a target here."""
    name = f"sm_{major}{minor}a"
    if name not in TARGETS:
        raise KernelTargetError(f"device of compute capability {major}.{minor}: found no target, expected {TARGETS}")
    return name


def build(variant: Variant, arch: str, *, ptx: bool = False) -> Binary:
    """Compile `variant` for `arch`, or take it from the cache. With `ptx` the code is PTX text.

    Raises KernelTargetError, KernelCompilerError or KernelCompileError.
    """
    if arch not in TARGETS:
        raise KernelTargetError(f"target: found {arch!r}, expected one of {TARGETS}")
    flags = [*OPTIONS, f"-DFP4_CVT={int(arch in CONVERTING)}", *(f"-D{key}={value}" for key, value in variant.defines)]
    path = _cache_directory() / f"{_digest(variant, arch, ptx)}.{'ptx' if ptx else 'cubin'}"
    notes = path.with_suffix(".json")
    if path.exists() and notes.exists():
        kernels = {name: Resources(**found) for name, found in json.loads(notes.read_text()).items()}
        return Binary(path.read_bytes(), kernels)
    compiler = _nvrtc() or _nvcc()
    if compiler is None:
        raise KernelCompilerError("kernels: no libnvrtc (package nvidia-cuda-nvrtc) and no nvcc on PATH; one is needed")
    code, log = compiler.compile(variant, arch, flags, ptx)
    binary = Binary(code, parse_log(log))
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, code)
    _write(notes, json.dumps({name: asdict(found) for name, found in binary.kernels.items()}).encode())
    return binary


def parse_log(log: str) -> dict[str, Resources]:
    """The assembler's verbose log -> resources by kernel name."""
    found: dict[str, Resources] = {}
    for part in log.split("Compiling entry function '")[1:]:
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        assert spills is not None, part
        assert used is not None, part
        stores, loads = (int(x) for x in spills.groups())
        found[part.split("'", 1)[0]] = Resources(int(used[1]), stores, loads, int(shared[1]) if shared else 0)
    return found


def _digest(variant: Variant, arch: str, ptx: bool) -> str:
    h = hashlib.sha256(repr((variant, arch, ptx, compiler_version(), OPTIONS[0], arch in CONVERTING)).encode())
    for path in sorted([SOURCES / f"{variant.source}.cu", *SOURCES.glob("*.cuh")]):
        h.update(path.name.encode() + path.read_bytes())
    return h.hexdigest()[:32]


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "glm53" / "kernels"


def _write(path: Path, data: bytes) -> None:
    """Readers see either nothing or the whole file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(temporary, path)


@cache
def compiler_version() -> str:
    """Version of the compiler in use, e.g. "13.0"; "none" without one."""
    compiler = _nvrtc() or _nvcc()
    return "none" if compiler is None else compiler.version()


class _Nvrtc:
    def __init__(self, api: ctypes.CDLL) -> None:
        self.api = api

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.api.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, variant: Variant, arch: str, flags: list[str], ptx: bool) -> tuple[bytes, str]:
        source = (SOURCES / f"{variant.source}.cu").read_bytes()
        gpu = arch.replace("sm_", "compute_") if ptx else arch
        options = [f.encode() for f in (*flags, f"--gpu-architecture={gpu}", *(() if ptx else ("--ptxas-options=-v",)))]
        program = ctypes.c_void_p()
        name = f"{variant.source}.cu".encode()
        self.api.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None)
        try:
            array = (ctypes.c_char_p * len(options))(*options)
            status = self.api.nvrtcCompileProgram(program, len(options), array)
            log = self._text(program, "ProgramLog").decode(errors="replace")
            if status:
                raise KernelCompileError(f"{variant.name} for {arch}: NVRTC status {status}\n{log}")
            code = self._text(program, "PTX" if ptx else "CUBIN")
        finally:
            self.api.nvrtcDestroyProgram(ctypes.byref(program))
        return code, log

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self.api, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self.api, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw


class _Nvcc:
    def __init__(self, path: str) -> None:
        self.path = path

    def version(self) -> str:
        text = subprocess.run([self.path, "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"release (\d+\.\d+)", text)
        return found[1] if found else "unknown"

    def compile(self, variant: Variant, arch: str, flags: list[str], ptx: bool) -> tuple[bytes, str]:
        gpu = arch.replace("sm_", "compute_") if ptx else arch
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "code"
            command = [
                self.path,
                "-ptx" if ptx else "-cubin",
                f"-arch={gpu}",
                *(() if ptx else ("-Xptxas", "-v")),
                *flags,
            ]
            done = subprocess.run(
                [*command, "-o", str(out), str(SOURCES / f"{variant.source}.cu")], capture_output=True, text=True
            )
            if done.returncode:
                raise KernelCompileError(f"{variant.name} for {arch}: nvcc status {done.returncode}\n{done.stderr}")
            return out.read_bytes(), done.stderr


@cache
def _nvrtc() -> _Nvrtc | None:
    """NVRTC from an installed `nvidia-cuda-nvrtc` package, else from the system."""
    for root in map(Path, sys.path):
        for path in sorted(root.glob("nvidia/*/lib/libnvrtc.so.1[3-9]")):
            try:
                for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
                return _Nvrtc(ctypes.CDLL(str(path)))
            except OSError:
                continue
    for name in ("libnvrtc.so.13", "libnvrtc.so"):
        try:
            return _Nvrtc(ctypes.CDLL(name))
        except OSError:
            continue
    return None


@cache
def _nvcc() -> _Nvcc | None:
    path = shutil.which("nvcc")
    return None if path is None else _Nvcc(path)
