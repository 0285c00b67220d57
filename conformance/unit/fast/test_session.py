"""fast.session and fast.worker: many jobs for ranks that start once, and every way in which all of them end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from conformance.unit.fast.runs import tokens
from conformance.unit.fast.together import on_hosts
from fast.distributed import DeviceCountError
from fast.errors import HardwareError, IndivisibleError, MeshError, MissingFileError
from fast.session import RunFailedError, Session, environment, explain
from fast.worker import Job, JobError, read

IDS = tokens(3, 24, 512).tolist()
WEIGHT = "model.language_model.layers.3.self_attn.kv_b_proj.weight"


@pytest.fixture
def job(checkpoint, tmp_path):
    return Job(str(checkpoint("tiny", "nvidia")), IDS, str(tmp_path / "ranks"), prefill=[18, 3], tp=2, timeout=30)


# --- many jobs -------------------------------------------------------------------------------------------------------


def test_ranks_start_once_and_forget_between_jobs(checkpoint):
    layers: list[int] = []
    with Session(Job(str(checkpoint("tiny", "libertai")), [], "", tp=2)) as session:
        processes = session.processes()
        first = session.ask(layers.append, tokens=IDS, prefill=[18, 3])
        other = session.ask(tokens=IDS[:9], prefill=[9], taps="*.mlp.out")
        again = session.ask(tokens=IDS, prefill=[18, 3])
        parts = [found[f"operands.{WEIGHT}.value"] for found in session.ask(operands=[WEIGHT, "no.such.weight"])]
        assert session.processes() == processes
    for rank, found in enumerate(first):
        assert found.keys() == again[rank].keys()
        assert all(torch.equal(value, again[rank][name]) for name, value in found.items())
        assert set(other[rank]) == {"tokens", "logits", *(f"layers.{i}.mlp.out" for i in range(9))}
    assert [len(part) for part in parts] == [128, 128], "8 heads of 16 + 16 rows"
    assert 0 < sum(layers) <= 9 * (1 + 3 + 3), "three rows at once and three alone go through the layers row by row"
    assert all(gone(process) for process in processes)
    with pytest.raises(RunFailedError, match="a job for ranks that have ended"):
        session.ask(tokens=IDS, prefill=[24])


def gone(process: int) -> bool:
    """Whether a process has ended, waiting a while for the system to notice."""
    for _ in range(1000):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


# --- refused before anything starts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("geometry", "tp", "ep", "error", "words"),
    [
        (
            "odd",
            4,
            1,
            IndivisibleError,
            r"layers\.0\.self_attn\.q_proj\.weight: 6 KDA heads do not divide among 4 ",
        ),
        ("odd", 2, 1, IndivisibleError, r"down_proj\.weight: 80 columns among 2 ranks are 40 each"),
        ("tiny", 3, 1, IndivisibleError, "8 KDA heads do not divide among 3 ranks"),
        ("tiny", 2, 3, MeshError, "tp 2 and ep 3: neither divides the other"),
    ],
)
def test_what_does_not_divide_starts_no_process(checkpoint, monkeypatch, geometry, tp, ep, error, words):
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(error, match=words):
        Session(Job(str(checkpoint(geometry, "nvidia")), [], "", tp=tp, ep=ep))


def test_more_ranks_than_gpus_start_no_process(checkpoint, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(DeviceCountError, match="device cuda: 2 ranks on a host with 1 GPUs, expected one for each"):
        Session(Job(str(checkpoint("tiny", "nvidia")), [], "", ep=2, device="cuda"))


def test_a_directory_that_is_none_starts_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(MissingFileError, match=r"config\.json"):
        Session(Job(str(tmp_path), [], "", tp=2))


WRONG: list[tuple[dict[str, object], str]] = [
    ({"tokens": 5}, "tokens is 5, expected a list of integers"),
    ({"tokens": [True]}, "tokens is .true., expected a list of integers"),
    ({"tokens": [1, -1]}, "tokens is .1, -1., expected 0 to 2147483647"),
    ({"prefill": "x"}, "prefill is .x., expected a list of integers"),
    ({"prefill": [0, 2]}, "prefill is .0, 2., expected 1 to"),
    ({"prefill": [2, 1]}, "prefill feeds 3 tokens, tokens holds 2"),
    ({"tp": "2"}, "tp is .2., expected an integer"),
    ({"tp": 0}, "tp is 0, expected 1 to"),
    ({"tp": 2, "ep": 3}, "tp 2 and ep 3: neither divides the other"),
    ({"vocab": "half"}, "vocab .half.: expected replicated, head or split"),
    ({"check": 1}, "check is 1, expected true or false"),
    ({"timeout": "soon"}, "timeout is .soon., expected a number"),
    ({"timeout": 0}, "timeout is 0, expected 1 to"),
    ({"timeout": float("nan")}, "timeout is NaN, expected 1 to"),
    ({"timeout": float("inf")}, "timeout is Infinity, expected 1 to"),
    ({"taps": 5}, "taps is 5, expected a string"),
    ({"directory": None}, "directory is null, expected a string"),
    ({"arithmetic": "fp9"}, "arithmetic is 'fp9', expected bf16 or fp32"),
    ({"device": "cuda:1"}, "device is 'cuda:1', expected cpu or cuda"),
    ({"drafts": 8}, "drafts is 8, expected 0 to 7"),
    ({"mla": "both"}, "mla is 'both', expected absorbed or expanded"),
]
"""(keys of a job file, how they are refused)"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read as a job"),
        pytest.param("[" * 100_000, "cannot be read as a job", id="deep"),
        ("[]", "a list, expected an object"),
        ('{"directory": "d", "tokens": [1], "folder": "f", "gpu": 1}', "unknown key 'gpu'"),
        ('{"directory": "d", "tokens": [1]}', "key folder is missing"),
        ('{"directory": "d", "tokens": ["1"], "folder": "f"}', "tokens is ..1.., expected a list of integers"),
        *(
            (json.dumps({"directory": "d", "tokens": [1, 2], "folder": "f", **change}), words)
            for change, words in WRONG
        ),
    ],
)
def test_a_job_file_that_is_none_is_refused(tmp_path, text, words):
    path = tmp_path / "job.json"
    path.write_text(text)
    with pytest.raises(JobError, match=words) as raised:
        read(path)
    assert str(path) in str(raised.value)


# --- ranks that do not belong together -------------------------------------------------------------------------------


def test_ranks_with_job_files_of_their_own_leave_traces(job, tmp_path):
    jobs = [job, replace(job, folder=str(tmp_path / "elsewhere"))]
    assert on_hosts(tmp_path, jobs) == [(0, ""), (0, "")]
    found = [load_file(f"{one.folder}/rank-{rank}.safetensors") for rank, one in enumerate(jobs)]
    assert torch.equal(found[0]["logits"], found[1]["logits"])
    assert found[0]["tokens"].tolist() == IDS


def other_config(job, checkpoint, tmp_path):
    directory = shutil.copytree(job.directory, tmp_path / "tiny-nvidia-0")
    (directory / "config.json").write_text((directory / "config.json").read_text() + "\n")
    return replace(job, directory=str(directory))


def other_bytes(job, checkpoint, tmp_path):
    return replace(job, directory=str(checkpoint("tiny", "nvidia", 1)))


def one_shard_less(job, checkpoint, tmp_path):
    directory = shutil.copytree(job.directory, tmp_path / "tiny-nvidia-0")
    next(directory.glob("*.safetensors")).unlink()
    return replace(job, directory=str(directory))


def other_token(job, checkpoint, tmp_path):
    return replace(job, tokens=[*IDS[:20], (IDS[20] + 1) % 512, *IDS[21:]])


APART = {
    "config": (other_config, "RankMismatchError", r"config\.json \(sha256\): rank 0 has '\w{64}', rank 1 has '\w{64}'"),
    "weights": (other_bytes, "RankMismatchError", r"checkpoint \(sha256 of 64 bytes of every tensor\): rank 0 has '\w"),
    "tokens": (other_token, "RankMismatchError", rf"job, tokens at position 20: rank 0 has {IDS[20]}, rank 1 has"),
    "length": (
        lambda job, *_: replace(job, tokens=IDS[:-1]),
        "RankMismatchError",
        "job, tokens: rank 0 has 24, rank 1 has 23",
    ),
    "chunks": (
        lambda job, *_: replace(job, prefill=[17, 4]),
        "RankMismatchError",
        r"job, prefill: rank 0 has \[18, 3\], rank 1 has \[17, 4\]",
    ),
    "mesh": (lambda job, *_: replace(job, tp=1, ep=2), "RankMismatchError", "mesh, tp: rank 0 has 2, rank 1 has 1"),
    "file": (one_shard_less, "RankFailedError", r"loading: rank 1 failed: \w+Error: .*\.safetensors"),
}


@pytest.mark.parametrize("kind", APART)
def test_ranks_that_do_not_belong_together_all_end(job, checkpoint, tmp_path, kind):
    change, error, words = APART[kind]
    found = on_hosts(tmp_path, [job, change(job, checkpoint, tmp_path)])
    assert [status for status, _ in found] == [2, 2]
    for rank, (_, message) in enumerate(found):
        if kind != "file" or rank == 0:
            assert message.startswith(f"{error}: "), message
            assert re.search(words, message), message


# --- ranks that die --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_the_run(checkpoint, victim):
    session = Session(Job(str(checkpoint("tiny", "nvidia")), [], "", ep=2, timeout=20))
    processes = session.processes()
    os.kill(processes[victim], signal.SIGKILL)
    with pytest.raises(RunFailedError, match=rf"^rank {victim}: ended by SIGKILL$"):
        session.ask(tokens=IDS, prefill=[24])
    assert all(gone(process) for process in processes)


def test_what_explains_an_end(tmp_path):
    """A rank's own error goes before a silence, that before a death, and all before what others say about a lost rank.

    Whom torchrun ends after a silence has not died of itself.
    """
    log = "Failures:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)\n  rank      : 2 (local_rank: 2)\n"
    log += "  exitcode  : -15 (pid: 8)\nthe end"
    assert explain(tmp_path, 3, "the end\n====\n", 1) == (
        "3 ranks ended without a message, torchrun ended with status 1: the end"
    )
    assert explain(tmp_path, 3, "", -9) == "3 ranks ended without a message, torchrun ended by SIGKILL"
    (tmp_path / "rank-0.error").write_text("RankLostError: rank 0: another rank is gone")
    assert explain(tmp_path, 3, "") == "rank 0: another rank is gone"
    assert explain(tmp_path, 3, log) == "rank 1: ended by SIGKILL"
    (tmp_path / "rank-1.error").write_text("RankLostError: rank 1: another rank is silent for 8 s at layers.5.mlp")
    assert explain(tmp_path, 3, log) == "rank 1: another rank is silent for 8 s at layers.5.mlp"
    (tmp_path / "rank-2.error").write_text("TokenError: tokens: id 9")
    assert explain(tmp_path, 3, log) == "rank 2: tokens: id 9"


@pytest.mark.parametrize(
    ("code", "words"), [(-15, "ended by SIGTERM"), (-40, "ended by signal 40"), (3, "ended with status 3")]
)
def test_the_first_to_fail_is_named_though_it_left_no_word(tmp_path, code, words):
    log = "  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 7)\nRoot Cause\n  rank      : 2 (local_rank: 2)\n"
    assert explain(tmp_path, 3, f"{log}  exitcode  : {code} (pid: 8)\n=====\n", 1) == f"rank 2: {words}"


def test_what_ranks_inherit(monkeypatch):
    """Neither a cluster's words to another torchrun nor the working directory get in; what is imported here does."""
    for name in ("PET_NNODES", "PET_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "LOGLEVEL"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "enp1s0f0np0")
    monkeypatch.setattr("sys.path", ["", "/somewhere"])
    found = environment()
    assert not [name for name in found if name.startswith(("PET_", "TORCHELASTIC_", "LOGLEVEL"))]
    assert found["NCCL_SOCKET_IFNAME"] == "enp1s0f0np0"
    assert (found["PYTHONSAFEPATH"], found["PYTHONPATH"]) == ("1", f"{os.getcwd()}:/somewhere")


def test_a_device_of_one_rank_starts_no_process(checkpoint, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(HardwareError, match="device cuda:1: expected cpu or cuda, where there are several ranks"):
        Session(Job(str(checkpoint("tiny", "nvidia")), [], "", ep=2, device="cuda:1"))


def test_a_job_that_ranks_refuse(checkpoint):
    """A token outside the vocabulary: all ranks say the same, one of them is heard."""
    with Session(Job(str(checkpoint("tiny", "nvidia")), [], "", ep=2)) as session:
        with pytest.raises(RunFailedError, match=r"^rank \d: tokens: id 512 at position 1, expected 0 to 511$"):
            session.ask(tokens=[1, 512], prefill=[2])
        with pytest.raises(RunFailedError, match="a job for ranks that have ended"):
            session.ask(tokens=[1], prefill=[1])
