"""(d) The same verification on aarch64, emulated: Debian's Python unpacked into a folder, run by qemu-user.

Nothing is installed into the system and no root is needed: apt works on lists, caches and package states of its own
inside the work directory, with the Debian mirror that the machine already uses.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

from conformance.goldens.lanes import ROOT, Outcome, Progress, run

RELEASE = "bookworm"
PYTHON = "3.11"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PACKAGES = (f"python{PYTHON}", "libstdc++6")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")
CPUS = ("max", "cortex-a57")


class SetupError(Exception):
    """The emulated machine cannot be set up; the message says what is missing."""


def arm64(directory: Path, workdir: Path, progress: Progress = lambda label: None) -> Iterator[Outcome]:
    """One run per emulated CPU: with everything qemu has (SVE included), and a plain ARMv8.0."""
    home = workdir / "arm64"
    try:
        progress("arm64: fetching packages")
        qemu, root, site = _qemu(home), _root(home), _site(home)
    except (SetupError, OSError) as error:
        yield Outcome("arm64", problem=str(error))
        return
    for cpu in CPUS:
        label = f"arm64: qemu {cpu}"
        progress(label)
        python = [str(qemu), "-cpu", cpu, "-L", str(root), str(root / "usr/bin" / f"python{PYTHON}")]
        outcome = run(label, python, directory, {"PYTHONPATH": f"{ROOT}:{site}"})
        if not outcome.problem and outcome.environment["machine"] != "aarch64":
            outcome.problem = f"ran on {outcome.environment['machine']}"
        yield outcome


def _call(command: list[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        raise SetupError(f"{what} failed: {lines[-1]}")
    return done.stdout


def _apt(home: Path, architecture: str, *arguments: str) -> str:
    """apt-get for one architecture, in a world of its own under `home`."""
    world = home / f"apt-{architecture}"
    for folder in ("lists/partial", "archives/partial", "etc"):
        (world / folder).mkdir(parents=True, exist_ok=True)
    (world / "status").touch()
    sources = world / "etc" / "sources.list"
    signed = f" signed-by={KEYRING}" if KEYRING.exists() else ""
    sources.write_text(f"deb [arch={architecture}{signed}] {_mirror()} {RELEASE} main\n")
    options = {
        "Dir::State": world,
        "Dir::State::lists": world / "lists",
        "Dir::State::status": world / "status",
        "Dir::Cache": world,
        "Dir::Cache::archives": world / "archives",
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "-",
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "1",
    }
    flags = [f"-o{key}={value}" for key, value in options.items()]
    return _call(["apt-get", "-y", "-q", *flags, *arguments], f"apt-get {arguments[0]} for {architecture}")


def _mirror() -> str:
    """The Debian mirror among the machine's own sources."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise SetupError(
            "this lane unpacks Debian packages, and there is no apt-get and dpkg-deb here; run it on Debian"
        )
    listed = _call(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"], "apt-get indextargets"
    )
    for uri in listed.split():
        if urlparse(uri).path.rstrip("/").endswith("/debian"):
            return uri
    raise SetupError("no Debian mirror among apt's sources; this lane needs one for python" + PYTHON)


def _unpack(world: Path, into: Path) -> None:
    for package in sorted((world / "archives").glob("*.deb")):
        _call(["dpkg-deb", "-x", str(package), str(into)], f"unpacking {package.name}")


def _root(home: Path) -> Path:
    """A folder with the arm64 Python and everything it links to."""
    root = home / "root"
    if not (root / "usr/bin" / f"python{PYTHON}").exists():
        _apt(home, "arm64", "update")
        _apt(home, "arm64", "--no-install-recommends", "--download-only", "install", *PACKAGES)
        _unpack(home / "apt-arm64", root)
    return root


def _qemu(home: Path) -> Path:
    """The emulator: the machine's own, or Debian's static one."""
    for name in ("qemu-aarch64-static", "qemu-aarch64"):
        if found := shutil.which(name):
            return Path(found)
    binary = home / "qemu/usr/bin/qemu-aarch64-static"
    if not binary.exists():
        architecture = _call(["dpkg", "--print-architecture"], "dpkg").strip()
        _apt(home, architecture, "update")
        _apt(home, architecture, "--no-install-recommends", "--download-only", "install", "qemu-user-static")
        _unpack(home / f"apt-{architecture}", home / "qemu")
    return binary


def _site(home: Path) -> Path:
    """NumPy and ml_dtypes for aarch64, from the package index."""
    site = home / "site"
    if not (site / "numpy").exists():
        platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary=:all:", "--target", str(site)]
        version = ["--python-version", PYTHON, "--implementation", "cp", "--abi", "cp" + PYTHON.replace(".", "")]
        _call([*command, *platforms, *version, "numpy", "ml_dtypes"], "installing aarch64 wheels")
    return site
