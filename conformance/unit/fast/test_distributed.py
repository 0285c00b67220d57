"""fast.distributed and fast.worker: real processes. Their sums are those of ranks as threads, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from conformance.engines.threads import Thread, on_ranks
from conformance.unit.fast.runs import tokens
from fast.distributed import NotLaunchedError, RankLostError, Ranks
from fast.errors import HardwareError
from fast.generate import generate
from fast.loader import load
from fast.model import TextModel
from fast.session import launch
from fast.worker import Job, run

LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory, checkpoint):
    """What each rank saw, by scenario."""
    folder = tmp_path_factory.mktemp("scenarios")
    directories = [str(checkpoint("tiny", "nvidia", seed)) for seed in (0, 1)]
    command = [*LAUNCHER, "-m", "conformance.unit.fast.rank_scenarios", str(folder), *directories]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    seen = [json.loads((folder / f"scenarios-{rank}.json").read_text()) for rank in (0, 1)]
    return [{line["scenario"]: line for line in lines} for lines in seen]


def test_ranks_meet_and_part(scenarios):
    first, second = scenarios
    for seen in (first, second):
        assert seen["reduce"]["result"] == str([1.0, 0.0]), "2^-24 is lost beside 1 whatever the order; 2^30 cancels"
        assert seen["gather"]["result"] == "[0, 1]"
        assert seen["agree"]["error"] == "RankMismatchError"
        assert seen["agree"]["message"] == "tokens: rank 0 has [1, 2, 3], rank 1 has [1, 2, 4]"
        assert seen["agree again"]["result"] == seen["same"]["result"] == "None"
        assert seen["swapped"]["error"] == "RankMismatchError"
        assert seen["swapped"]["message"].startswith("layers.3.indexer.selected: ranks ")
        assert seen["other weights"]["error"] == "RankMismatchError"
        assert seen["other weights"]["message"].startswith(
            "checkpoint (sha256 of 64 bytes of every tensor): rank 0 has "
        )
    assert [seen["load"]["result"] for seen in (first, second)] == ["0", "1"]
    assert first["fail"]["error"] == "RankFailedError"
    assert first["fail"]["message"] == "reading: rank 1 failed: MissingFileError: tokens.txt: not there"
    assert second["fail"]["error"] == "MissingFileError"
    endings = ("silent for 3 s at layers.2.attn", "gone or out of reach at layers.3.mlp")
    for ending, words in zip(("silent", "lost"), endings, strict=True):
        assert first[ending]["error"] == "RankLostError"
        assert first[ending]["message"].startswith(f"rank 0: another rank is {words} (")


def test_processes_are_the_threads_bit_for_bit(checkpoint):
    directory = checkpoint("tiny", "nvidia")
    job = Job(str(directory), tokens(3, 30, 512).tolist(), "", prefill=[21, 5], tp=2, ep=2)

    def alone(ranks: Thread) -> dict[str, torch.Tensor]:
        mesh = ranks.mesh
        weights = load(directory, tp=2, ep=2, rank=mesh.rank, progress=False)
        return run(TextModel(weights, communicator=ranks), job)

    for found, expected in zip(launch(job), on_ranks(2, 2, alone), strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_generated_text_is_that_of_one_rank(checkpoint):
    """In fp32, where no rounding of partial sums can tip a choice; drafts on, states returned, operands shown."""
    directory, prompt = checkpoint("tiny", "libertai"), tokens(4, 20, 512).tolist()
    name = "model.language_model.layers.0.self_attn.o_proj.weight"
    job = Job(str(directory), prompt, "", tp=2, ep=2, arithmetic="fp32", new=8, drafts=2, taps="", operands=[name])
    found = launch(job)
    expected, _ = generate(TextModel(directory, dtype=torch.float32), prompt, 8)
    assert [ranks["tokens"].tolist() for ranks in found] == [expected, expected]
    assert all("state.mtp.latent" in ranks for ranks in found)
    whole = load(directory, progress=False).tensor(name)
    parts = [ranks[f"operands.{name}.value"] for ranks in found]
    assert np.array_equal(torch.cat(parts, dim=1).view(torch.int16).numpy(), whole.view(torch.int16).numpy())


def test_ranks_need_a_launcher(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(NotLaunchedError, match="RANK is not set"):
        Ranks(tp=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(NotLaunchedError, match="tp 2, ep 1 need 2 processes, the launcher started 3"):
        Ranks(tp=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "none")
    with pytest.raises(NotLaunchedError, match="MASTER_PORT is 'none', expected a number"):
        Ranks(tp=2)
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RankLostError, match=r"out of reach at start .*MASTER_ADDR expected, but not set"):
        Ranks(tp=2)
    with pytest.raises(HardwareError, match="device cuda:0: expected cpu or cuda"):
        Ranks(tp=2, device="cuda:0")
