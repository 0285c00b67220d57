"""`--tp` and `--ep` of the commands: rank traces written, joined and judged; refusals; ranks on two hosts."""

import json
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest

from conformance.checkpoints.shared import shared
from conformance.trace import Trace
from conformance.unit.tools.command import glm53

TEXT = "Sea moderate, wind from the west."
WORLD = 2
FEW = ("--samples", 4)


@pytest.fixture(scope="module")
def directory():
    return shared("libertai", "odd")


@pytest.fixture(scope="module")
def made(directory, tmp_path_factory):
    """(joined trace, folder of rank traces) of the reference on two ranks."""
    place = tmp_path_factory.mktemp("ranks")
    out, folder = place / "whole.trace", place / "ranks"
    options = ("--engine", "reference", "--arithmetic", "bf16", "--tp", WORLD, "--ep", WORLD, "--decode", 3, "--quiet")
    assert glm53("trace", directory, *options, "--prompt", TEXT, "--out", out, "--ranks", folder) == 0
    return out, folder


@pytest.fixture
def folder(made, tmp_path):
    """A copy of the rank traces that may be changed."""
    return shutil.copytree(made[1], tmp_path / "ranks")


def change(path, name, value=None, **described):
    """Rewrites a trace with another tap (None: without it) and other metadata."""
    trace = Trace.load(path)
    taps = {key: np.array(tap) for key, tap in trace.taps.items() if key != name or value is not None}
    if value is not None:
        value(taps[name])
    Trace(trace.metadata | described, taps).save(path)


def test_rank_traces_join_to_the_trace(made, directory):
    whole, ranks = Trace.load(made[0]), [Trace.load(made[1] / f"rank-{rank}.trace") for rank in range(WORLD)]
    for rank, trace in enumerate(ranks):
        assert {key: trace.metadata[key] for key in ("tp", "ep", "rank")} == {"tp": "2", "ep": "2", "rank": str(rank)}
        assert trace.metadata["schedule"] == whole.metadata["schedule"]
    assert "rank" not in whole.metadata
    assert ranks[0].taps["layers.0.attn.q"].shape[1] * WORLD == whole.taps["layers.0.attn.q"].shape[1]
    assert glm53("diff", made[0], "--checkpoint", directory, "--quiet", *FEW) == 0


def test_a_folder_is_judged_like_the_trace(made, directory, tmp_path):
    assert glm53("diff", made[1], "--checkpoint", directory, "--quiet", *FEW, "--json", tmp_path / "a.json") == 0
    assert glm53("diff", made[0], "--checkpoint", directory, "--quiet", *FEW, "--json", tmp_path / "b.json") == 0
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    assert glm53("diff", "--check", made[1], "--checkpoint", directory, "--quiet") == 0


def flip(array):
    array.reshape(-1).view(np.uint8)[0] ^= 1


@pytest.mark.parametrize(
    ("tap", "words"),
    [
        ("layers.1.attn.out", "first divergence: TAP layers.1.attn.out (layers.1.attn.out as stored): ranks 0 and 1"),
        ("layers.4.indexer.selected", "first divergence: TAP layers.4.indexer.selected (layers.4"),
        ("logits", "first divergence: TAP logits (logits as stored): ranks 0 and 1 differ at [0, 0]"),
    ],
)
def test_ranks_that_differ_are_named(folder, directory, capsys, tap, words):
    """One bit of one rank: the tap and the ranks are in the first line, whatever the numbers say."""
    change(folder / "rank-1.trace", tap, flip)
    assert glm53("diff", folder, "--checkpoint", directory, *FEW) == 1
    told = capsys.readouterr().out
    assert words in told, told[:400]
    assert "ranks 0 and 1 differ at" in told


def test_a_head_of_the_wrong_rank_is_an_error_of_its_tap(folder, directory, capsys):
    """What is divided is not compared between ranks: the reference says which heads are wrong."""
    change(folder / "rank-1.trace", "layers.0.attn.k", lambda tap: tap.__setitem__(..., tap[:, ::-1].copy()))
    assert glm53("diff", folder, "--checkpoint", directory, *FEW) == 1
    assert "first divergence: TAP layers.0.attn.k (attn.in -> attn.k)" in capsys.readouterr().out


def test_a_tap_that_one_rank_lacks_is_named(folder, directory, capsys):
    change(folder / "rank-1.trace", "layers.0.attn.g")
    assert glm53("diff", folder, "--checkpoint", directory, *FEW) == 1
    assert "layers.0.attn.g as stored): ranks do not join: absent on rank 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "rank-1.trace").unlink(), "ranks [0], expected 0 to 1 of tp 2, ep 2"),
        (lambda folder: shutil.copy(folder / "rank-0.trace", folder / "rank-2.trace"), "rank 0, as rank-0.trace is"),
        (lambda folder: change(folder / "rank-0.trace", "", rank="x"), "metadata rank is 'x', expected the number"),
        (lambda folder: change(folder / "rank-1.trace", "", rank="7"), "ranks [0, 7], expected 0 to 1"),
        (
            lambda folder: change(folder / "rank-1.trace", "", arithmetic="fp32"),
            "metadata arithmetic is 'fp32'",
        ),
        (lambda folder: [path.unlink() for path in folder.iterdir()], "holds no rank trace"),
        (
            lambda folder: [change(path, "", tp="2", ep="3") for path in folder.iterdir()],
            "tp 2, ep 3: both must be at least 1, and one must divide the other",
        ),
    ],
    ids=["missing", "twice", "no-number", "other-number", "other-run", "empty", "no-mesh"],
)
def test_a_folder_that_is_no_run_is_refused(folder, directory, capsys, damage, words):
    damage(folder)
    assert glm53("diff", folder, "--checkpoint", directory, *FEW) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize(
    ("tp", "ep", "words"),
    [(4, 1, "heads do not divide among 4 ranks"), (1, 11, "10 routed experts"), (2, 3, "tp 2"), (0, 1, "tp 0")],
)
def test_what_does_not_divide_is_refused_with_the_numbers(tmp_path, capsys, engine, tp, ep, words):
    options = ("--engine", engine, "--prompt", TEXT, "--tp", tp, "--ep", ep, "--out", tmp_path / "a.trace")
    assert glm53("trace", shared("nvidia", "odd"), *options) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
    assert not (tmp_path / "a.trace").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ranks", "r", "--out", "a.trace"), "--ranks r: the run has one rank"),
        (("--ranks", "r", "--tp", "2"), "--out FILE is missing"),
        (("--job", "a.json", "--engine", "reference"), "--job a.json: engine reference has no ranks"),
        (("--job", "a.json", "--seed", "1"), "--job: ranks have no option seed"),
        (("--job", "a.json", "--option", "pad=3"), "--job: ranks have no option pad"),
        (("--job", "a.json", "--option", "serve=x"), "--job: ranks have no option serve"),
        (("--job", "a.json", "--option", "timeout=soon"), '--job: timeout is "soon", expected a number'),
        (("--job", "a.json", "--arithmetic", "exact"), "--job: arithmetic is 'exact', expected bf16 or fp32"),
        (("--job", "a.json", "--tp", "2", "--ep", "3"), "--job: tp 2 and ep 3: neither divides the other"),
        (("--job", "a.json", "--tp", "4"), "6 KDA heads do not divide among 4 ranks"),
        (("--job", "a.json", "--device", "cuda:1"), "--job: device is 'cuda:1', expected cpu or cuda"),
        (("--job", "a.json", "--mtp", "8"), "--job: drafts is 8, expected 0 to 7"),
    ],
)
def test_options_that_say_nothing_are_refused(tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    assert glm53("trace", shared("nvidia", "odd"), "--prompt", TEXT, *options) == 2
    assert words in capsys.readouterr().err


def test_a_job_is_for_gpus_of_other_hosts(tmp_path):
    options = ("--prompt", TEXT, "--ep", WORLD, "--device", "cuda", "--job", tmp_path / "job.json")
    assert glm53("trace", shared("nvidia", "tiny"), *options) == 0
    assert json.loads((tmp_path / "job.json").read_text())["device"] == "cuda"


@pytest.mark.parametrize(
    ("folder", "out", "words"),
    [
        ("file", "a.trace", "--ranks file: cannot be written: Not a directory"),
        ("file/ranks", "a.trace", "--ranks file: cannot be written: Not a directory"),
        ("checkpoint", "a.trace", "--ranks checkpoint: is the checkpoint, expected a folder for rank traces alone"),
        ("ranks", "ranks/rank-0.trace", "--out ranks/rank-0.trace: lies in the folder of --ranks"),
    ],
)
def test_a_folder_that_cannot_hold_ranks_is_refused_before_the_run(
    directory, tmp_path, monkeypatch, capsys, folder, out, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("conformance.engines.registry.create", None)
    (tmp_path / "file").touch()
    (tmp_path / "ranks").mkdir()
    (tmp_path / "checkpoint").symlink_to(directory)
    options = ("--prompt", TEXT, "--tp", WORLD, "--ranks", folder, "--out", out)
    assert glm53("trace", "checkpoint", *options) == 2
    assert words in capsys.readouterr().err


def test_ranks_on_two_hosts(tmp_path, monkeypatch):
    """The documented command lines, both hosts being this one: a job, a launcher each, two folders put together."""
    monkeypatch.chdir(tmp_path)
    directory = shared("nvidia", "tiny")
    options = ("--prompt", TEXT, "--decode", 3, "--tp", WORLD, "--ep", WORLD, "--ranks", "ranks")
    assert glm53("trace", directory, *options, "--job", "job.json") == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    hosts = []
    for host in range(WORLD):
        job = json.loads((tmp_path / "job.json").read_text()) | {"folder": f"ranks-of-host-{host}", "timeout": 60}
        (tmp_path / f"job-{host}.json").write_text(json.dumps(job))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", WORLD, "--node-rank", host]
        launcher += ["--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "glm53"]
        command = [*map(str, launcher), "-m", "fast.worker", f"job-{host}.json"]
        hosts.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    for launched in hosts:
        _, told = launched.communicate(timeout=300)
        assert launched.returncode == 0, told[-2000:]
    together = tmp_path / "together"
    together.mkdir()
    for path in tmp_path.glob("ranks-of-host-*/rank-*.safetensors"):
        shutil.copy(path, together)
    assert len(list(together.iterdir())) == WORLD
    assert glm53("diff", together, "--checkpoint", directory, "--quiet", *FEW) == 0
