"""One rank of a sharded run, started by a launcher: `torchrun .. -m fast.worker JOB.json`.

The job says what to run and where the results go; `launch` writes it, starts the ranks on this host and waits. Each
rank leaves `rank-R.safetensors` (its taps, and the logits that all ranks share) in the job's folder, or
`rank-R.error` with the one line that says what was wrong.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fast.distributed import Ranks, load_together
from fast.errors import InputError
from fast.generate import Generator
from fast.model import TextModel
from fast.mtp import Mtp
from fast.sharding import Mesh

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WIDENING = (".scores",)
STATES = (".state", ".conv_state")


class RunFailedError(InputError):
    """A sharded run that ended on some rank."""


@dataclass(frozen=True)
class Job:
    """`prefill` lengths, then the other tokens one at a time; `taps` is a glob, "" for none.

    With `new` above 0 the tokens are a prompt instead, continued greedily by `new` tokens with `drafts` drafts a round.
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


def work(job: Job) -> None:
    """Runs this process's rank. Raises an InputError for anything wrong with the input or with another rank."""
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
    result: dict[str, Tensor] = {}
    if job.new:
        mtp = Mtp(model) if job.drafts else None
        tokens = list(Generator(model, mtp=mtp, drafts=job.drafts).tokens(job.tokens, job.new))
        ranks.agree("generated tokens", tokens)
        states = model.state.snapshot() | (mtp.state.snapshot() if mtp is not None else {})
        result |= {f"state.{name}": x.cpu() for name, x in states.items()}
        result["tokens"] = torch.tensor(tokens, dtype=torch.int32)
    else:
        result |= run(model, job)
    for name in job.operands:
        if name in weights.names():
            result |= {f"operands.{name}.{part}": x.cpu() for part, x in model.operands(name).items()}
    save_file(
        {name: x.contiguous() for name, x in result.items()}, Path(job.folder) / f"rank-{ranks.mesh.rank}.safetensors"
    )
    ranks.agree("end", None)
    ranks.close()


def run(model: TextModel, job: Job) -> dict[str, Tensor]:
    """Feeds the tokens -> taps and logits, all positions stacked."""
    heard: dict[str, list[Tensor]] = {}

    def tap(name: str, value: Tensor) -> None:
        if name != "logits" and fnmatch.fnmatchcase(name, job.taps):
            heard.setdefault(name, []).append(value.cpu())

    callback = tap if job.taps else None
    logits, start = [], 0
    for index, length in enumerate(job.prefill):
        pad = job.pad if index == 0 else 0
        part = [0] * pad + job.tokens[start : start + length]
        logits.append(model.prefill(part, callback, pad=pad).cpu())
        start += length
    logits += [model.decode(token, callback)[None].cpu() for token in job.tokens[start:]]
    return {name: stack(name, parts) for name, parts in heard.items()} | {"logits": torch.cat(logits)}


def stack(name: str, parts: list[Tensor]) -> Tensor:
    """The pieces of one tap: states keep the last, scores are widened with -inf, all else is stacked along axis 0."""
    if name.endswith(STATES):
        return parts[-1].clone()
    if name.endswith(WIDENING):
        width = max(part.shape[1] for part in parts)
        pad = torch.nn.functional.pad
        parts = [pad(part, (0, width - part.shape[1]), value=float("-inf")) for part in parts]
    return torch.cat(parts)


def launch(job: Job) -> list[dict[str, Tensor]]:
    """Runs `job` on this host, one process per rank -> what each rank left, in rank order.

    `folder` may be "" for a temporary one. Raises RunFailedError with the first rank's message that explains the end,
    and what `Mesh` raises.
    """
    world = Mesh(job.tp, job.ep).world
    with tempfile.TemporaryDirectory(prefix="glm53-ranks-") as temporary:
        folder = Path(job.folder or temporary)
        job = dataclasses.replace(job, folder=str(folder))
        path = folder / "job.json"
        path.write_text(json.dumps(dataclasses.asdict(job)))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        started = subprocess.Popen(
            [*command, "-m", "fast.worker", str(path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
        try:
            _, stderr = started.communicate()
        except BaseException:
            os.killpg(started.pid, signal.SIGTERM)
            started.wait()
            raise
        if started.returncode:
            raise RunFailedError(_explain(folder, world, stderr))
        return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(world)]


def _explain(folder: Path, world: int, stderr: str) -> str:
    """The first error that is not about another rank; else any; else the end of what the launcher wrote."""
    errors = []
    for rank in range(world):
        path = folder / f"rank-{rank}.error"
        if path.exists():
            kind, message = path.read_text().split(": ", 1)
            errors.append((kind in ("RankLostError", "RankFailedError"), rank, message))
    if errors:
        _, rank, message = min(errors)
        return message if message.startswith("rank ") else f"rank {rank}: {message}"
    return f"{world} ranks ended without a message: {stderr.strip().splitlines()[-1:]}"


def main(path: str) -> int:
    """Exit status 0; 2 after an InputError, with one line on stderr. Leaves at once: others must not wait for it."""
    job = Job(**json.loads(Path(path).read_text()))
    rank = os.environ.get("RANK", "?")
    try:
        work(job)
    except Exception as e:
        (Path(job.folder) / f"rank-{rank}.error").write_text(f"{type(e).__name__}: {e}")
        if not isinstance(e, InputError):
            traceback.print_exc()
        print(f"rank {rank}: {e}", file=sys.stderr, flush=True)
        os._exit(2 if isinstance(e, InputError) else 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
