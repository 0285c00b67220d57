"""One rank of a sharded run, started by a launcher: `torchrun .. -m fast.worker JOB.json`.

The job says what to run and where the results go; its keys are the fields of `Job`. Each rank leaves
`rank-R.safetensors` in the job's folder: a trace (`glm53-trace/1`) of what this rank held, with `tp`, `ep` and `rank`
in its metadata; or `rank-R.error` with the one line that says what was wrong. `fast.session` starts the ranks of this
host and hands them one job after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fnmatch
import importlib.metadata
import itertools
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from fast.distributed import Ranks, load_together
from fast.errors import InputError, ShardingError
from fast.generate import Generator
from fast.layers import PREFIX
from fast.linear import ROWS
from fast.model import TextModel
from fast.mtp import Mtp
from fast.sharding import Mesh

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WIDENING = (".scores",)
STATES = (".state", ".conv_state")
IDLE = datetime.timedelta(days=30)
PATIENCE = datetime.timedelta(seconds=10)
"""For a store that is on this host, or gone."""
PULSE = 1.0
"""Seconds between two looks at whether who gives out the jobs is still there."""
ORPHANED = 3
"""Exit status of a rank that finds it is not."""
END = "end"
LAYER_OUT = re.compile(r"layers\.\d+\.out")


class JobError(InputError):
    """A job file that is none."""


class OrphanError(InputError):
    """The process that gives out the jobs is gone."""


@dataclass(frozen=True)
class Job:
    """`prefill` lengths, then the other tokens one at a time; `taps` are globs with commas, "" for none.

    With `new` above 0 the tokens are a prompt instead, continued greedily by `new` tokens with `drafts` drafts a round;
    else `drafts` above 0 runs the draft block over the text, then one round of drafts.
    """

    directory: str
    tokens: list[int]
    folder: str
    prefill: list[int] = field(default_factory=list)
    pad: int = 0
    tp: int = 1
    ep: int = 1
    vocab: str = "replicated"
    device: str = "cpu"
    arithmetic: str = "bf16"
    kda_chunk: int = 64
    mla: str = "absorbed"
    taps: str = "*"
    new: int = 0
    drafts: int = 0
    timeout: float = 300.0
    check: bool = True
    operands: list[str] = field(default_factory=list)
    """Weights whose bound parts go into the result, as `operands.NAME.PART`."""
    serve: str = ""
    """HOST:PORT of a store that holds further jobs; this one then only says what they have in common."""

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.tp, self.ep, vocab=self.vocab)


class Kind(NamedTuple):
    """What JSON may hold where `Job` has a field of some type: in Python's types, and in words."""

    types: tuple[type, ...]
    item: type | None
    words: str


KINDS = {
    "str": Kind((str,), None, "a string"),
    "int": Kind((int,), None, "an integer"),
    "float": Kind((int, float), None, "a number"),
    "bool": Kind((bool,), None, "true or false"),
    "list[int]": Kind((list,), int, "a list of integers"),
    "list[str]": Kind((list,), str, "a list of strings"),
}
LEAST = {"tp": 1, "ep": 1, "prefill": 1, "kda_chunk": 1, "timeout": 1}
"""The least value of a number, where it is not 0."""
MOST = {"drafts": ROWS - 1}
"""The most, where it is not 2^31 - 1."""
FED = ("directory", "tokens", "prefill", "pad", "taps", "folder", "new", "operands", "serve")
"""What says what is run, and not how: no options."""
CHOICES = {"arithmetic": tuple(DTYPES), "device": ("cpu", "cuda"), "mla": ("absorbed", "expanded")}


def read(path: str | os.PathLike[str]) -> Job:
    """Raises JobError naming the file and the key."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise JobError(f"{path}: cannot be read as a job: {getattr(e, 'strerror', None) or e}") from None
    if not isinstance(found, dict):
        raise JobError(f"{path}: a {type(found).__name__}, expected an object")
    return checked(found, str(path))


def checked(found: dict[str, Any], path: str) -> Job:
    """The job of an object of JSON. Raises JobError naming `path` and the key."""
    known = {item.name: item for item in dataclasses.fields(Job)}
    for key in found:
        if key not in known:
            raise JobError(f"{path}: unknown key {key!r}, expected some of {', '.join(known)}")
    for key in ("directory", "tokens", "folder"):
        if key not in found:
            raise JobError(f"{path}: key {key} is missing")
    for key, value in found.items():
        kind, least, most = KINDS[str(known[key].type)], LEAST.get(key, 0), MOST.get(key, 2**31 - 1)
        items = value if isinstance(value, list) else [value]
        if type(value) not in kind.types or any(type(item) is not kind.item for item in items if kind.item):
            raise JobError(f"{path}: {key} is {json.dumps(value)[:60]}, expected {kind.words}")
        if any(isinstance(item, int | float) and not least <= item <= most for item in items):
            raise JobError(f"{path}: {key} is {json.dumps(value)[:60]}, expected {least} to {most}")
    job = Job(**found)
    for key, choices in CHOICES.items():
        if getattr(job, key) not in choices:
            raise JobError(f"{path}: {key} is {getattr(job, key)!r}, expected {' or '.join(choices)}")
    try:
        _ = job.mesh
    except ShardingError as e:
        raise JobError(f"{path}: {e}") from None
    if not job.new and sum(job.prefill) > len(job.tokens):
        raise JobError(f"{path}: prefill feeds {sum(job.prefill)} tokens, tokens holds {len(job.tokens)}")
    return job


def work(job: Job) -> None:
    """Runs this process's rank. Raises an InputError for anything wrong with the input or with another rank."""
    store = watched_store(job.serve) if job.serve else None
    ranks = Ranks(job.tp, job.ep, device=job.device, vocab=job.vocab, timeout=job.timeout, check=job.check)
    settings = dataclasses.asdict(job)
    ranks.agree("job", {key: settings[key] for key in settings if key not in ("directory", "folder")})
    weights = load_together(job.directory, ranks, mtp=job.drafts > 0)
    model = TextModel(
        weights,
        device=ranks.device,
        dtype=DTYPES[job.arithmetic],
        kda_chunk=job.kda_chunk,
        mla=job.mla,
        communicator=ranks,
    )
    if store is not None:
        serve(model, job, ranks, store)
    else:
        save(answer(model, job, ranks), metadata(model, job), Path(job.folder) / f"rank-{ranks.mesh.rank}.safetensors")
        ranks.agree("end", None)
    ranks.close()


def watched_store(address: str) -> dist.TCPStore:
    """The store at HOST:PORT. From now on this process ends within seconds of it, whatever it is at: ranks that nobody
    asks any more would keep their memory and their device for as long as they load or compute.

    Raises OrphanError.
    """

    def connect() -> dist.TCPStore:
        return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=PATIENCE)

    def watch() -> None:
        while True:
            try:
                pulse.check(["pulse"])
            except RuntimeError:
                os._exit(ORPHANED)
            time.sleep(PULSE)

    host, _, port = address.rpartition(":")
    try:
        store, pulse = connect(), connect()
    except RuntimeError as e:
        raise OrphanError(f"who gives out the jobs is gone from {address} ({str(e).splitlines()[0]})") from None
    for one in (store, pulse):
        one.set_timeout(IDLE)
    threading.Thread(target=watch, daemon=True).start()
    return store


def serve(model: TextModel, job: Job, ranks: Ranks, store: dist.TCPStore) -> None:
    """One job after the other from the store, until it says END or is gone. No answer counts before all ranks have
    written theirs."""
    rank = ranks.mesh.rank
    store.set(f"process {rank}", str(os.getpid()))
    for number in itertools.count():
        text = store.get(f"job {number}")
        if text.decode() == END:
            return
        asked = dataclasses.replace(job, **json.loads(text))

        def watch(name: str, key: str = f"layers {number}") -> None:
            if LAYER_OUT.fullmatch(name):
                store.add(key, 1)

        found = answer(model, asked, ranks, watch if rank == 0 else None)
        save(found, metadata(model, asked), Path(job.folder) / f"answer-{number}-{rank}.safetensors")
        ranks.agree("end", number)
        store.set(f"answer {number} {rank}", "")


def answer(model: TextModel, job: Job, ranks: Ranks, watch: Callable[[str], object] | None = None) -> dict[str, Tensor]:
    """What one job asks for. `watch` is called with the name of every tap as it is computed."""
    model.reset(0 if job.new else len(job.tokens))
    result: dict[str, Tensor] = {}
    if job.new:
        mtp = Mtp(model) if job.drafts else None
        tokens = list(Generator(model, mtp=mtp, drafts=job.drafts).tokens(job.tokens, job.new))
        ranks.agree("generated tokens", tokens)
        states = model.state.snapshot() | (mtp.state.snapshot() if mtp is not None else {})
        result |= {f"state.{name}": x.cpu() for name, x in states.items()}
        result["tokens"] = torch.tensor(tokens, dtype=torch.int32)
    elif job.tokens:
        result |= run(model, job, watch)
    held = set(model.weights.names())
    for name in job.operands:
        if name in held:
            result |= {f"operands.{name}.{part}": x.cpu() for part, x in model.operands(name).items()}
    return result


def run(model: TextModel, job: Job, watch: Callable[[str], object] | None = None) -> dict[str, Tensor]:
    """Feeds the tokens -> taps, tokens and logits, all positions stacked.

    Padding is the last id of the vocabulary, whose embedding is not zero.
    """
    heard: dict[str, list[Tensor]] = {}
    globs = [glob for glob in job.taps.split(",") if glob]

    def tap(name: str, value: Tensor) -> None:
        if watch is not None:
            watch(name)
        if name not in ("tokens", "logits") and any(fnmatch.fnmatchcase(name, glob) for glob in globs):
            heard.setdefault(name, []).append(value.cpu())

    hidden: list[Tensor] = []

    def listen(name: str, value: Tensor) -> None:
        if name == "final.norm":
            hidden.append(value)
        tap(name, value)

    callback = listen if globs or watch is not None or job.drafts else None
    logits, start = [], 0
    for index, length in enumerate(job.prefill):
        pad = job.pad if index == 0 else 0
        part = [model.config.text.vocab_size - 1] * pad + job.tokens[start : start + length]
        logits.append(model.prefill(part, callback, pad=pad).cpu())
        start += length
    logits += [model.decode(token, callback)[None].cpu() for token in job.tokens[start:]]
    if job.drafts:
        cuts = [*job.prefill, *[1] * (len(job.tokens) - start)]
        generator = Generator(model, mtp=Mtp(model), drafts=job.drafts)
        generator.observe(torch.cat(hidden), torch.tensor(job.tokens), cuts, tap)
    taps = {name: stack(name, parts) for name, parts in heard.items()}
    return taps | {"tokens": torch.tensor(job.tokens, dtype=torch.int32), "logits": torch.cat(logits)}


def stack(name: str, parts: list[Tensor]) -> Tensor:
    """The pieces of one tap: states keep the last, scores are widened with -inf, all else is stacked along axis 0."""
    if name.endswith(STATES):
        return parts[-1].clone()
    if name.endswith(WIDENING):
        width = max(part.shape[1] for part in parts)
        pad = torch.nn.functional.pad
        parts = [pad(part, (0, width - part.shape[1]), value=float("-inf")) for part in parts]
    return torch.cat(parts)


def metadata(model: TextModel, job: Job) -> dict[str, str]:
    """What `glm53-trace/1` asks for, and this rank. The two exports store the mHC base in different dtypes."""
    mesh, stored = model.weights.mesh, model.weights.store.directory.tensors
    base = stored[f"{PREFIX}.layers.0.hc_attn_base"].dtype
    schedule = {"prefill": job.prefill, "decode": len(job.tokens) - sum(job.prefill), "pad": job.pad}
    return {
        "format": "glm53-trace/1",
        "engine": "fast",
        "engine_version": importlib.metadata.version("glm53-conformance"),
        "checkpoint": Path(job.directory).resolve().name,
        "config_sha256": model.config.sha256,
        "export": "nvidia" if base == "BF16" else "libertai",
        "arithmetic": job.arithmetic,
        "tp": str(mesh.tp),
        "ep": str(mesh.ep),
        "rank": str(mesh.rank),
        "schedule": json.dumps({key: value for key, value in schedule.items() if key != "pad" or value}),
        **{key: str(getattr(job, key)) for key in ("device", "kda_chunk", "mla", "vocab")},
    }


def save(result: dict[str, Tensor], described: dict[str, str], path: Path) -> None:
    """Under a temporary name first, so that nobody reads half a file."""
    temporary = path.with_suffix(".tmp")
    save_file({name: x.contiguous() for name, x in result.items()}, temporary, metadata=described)
    os.replace(temporary, path)


def usable(name: str, rank: str) -> Path:
    """The folder for results, without this rank's of an earlier run: what lies there is of one run, or not at all.

    Raises JobError.
    """
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix in ("safetensors", "error"):
            (folder / f"rank-{rank}.{suffix}").unlink(missing_ok=True)
    except OSError as e:
        raise JobError(f"{folder}: cannot hold results: {e.strerror or e}") from None
    return folder


def main(path: str) -> int:
    """Exit status 0; 2 after an InputError, with one line on stderr. Leaves at once: others must not wait for it."""
    rank, folder = os.environ.get("RANK", "?"), Path(path).parent
    try:
        job = read(path)
        folder = usable(job.folder, rank)
        work(job)
    except Exception as e:
        report = folder / f"rank-{rank}.error"
        with contextlib.suppress(OSError):
            report.with_suffix(".tmp").write_text(f"{type(e).__name__}: {e}")
            os.replace(report.with_suffix(".tmp"), report)
        if not isinstance(e, InputError):
            traceback.print_exc()
        print(f"rank {rank}: {str(e).removeprefix(f'rank {rank}: ')}", file=sys.stderr, flush=True)
        os._exit(2 if isinstance(e, InputError) else 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
