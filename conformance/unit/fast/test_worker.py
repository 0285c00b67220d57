"""fast.worker without its ranks: whom it serves, and what it leaves in its folder."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fast import worker
from fast.worker import Job, OrphanError


def test_ranks_end_with_whoever_asks_them(monkeypatch):
    """While they load or compute as well: they look for themselves."""
    ended = threading.Event()

    def end(status):
        ended.set()
        threading.Event().wait()

    monkeypatch.setattr(worker, "PULSE", 0.01)
    monkeypatch.setattr(worker.os, "_exit", end)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = worker.watched_store(f"127.0.0.1:{server.port}")
    store.set("process 0", "7")
    assert server.get("process 0") == b"7"
    assert not ended.wait(0.1), "it is still there"
    del server
    assert ended.wait(20)


def test_ranks_that_start_too_late_end(monkeypatch):
    monkeypatch.setattr(worker, "PATIENCE", timedelta(seconds=1))
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{server.port}"
    del server
    with pytest.raises(OrphanError, match=f"gone from {address}"):
        worker.watched_store(address)


def test_an_answer_counts_when_all_ranks_have_theirs(monkeypatch, tmp_path):
    """One that stays silent after its last sum would be waited for without end."""
    events = []
    texts = {"job 0": b"{}", "job 1": b"end"}
    store: Any = SimpleNamespace(get=texts.get, set=lambda key, value: events.append(key))
    model: Any = None
    ranks: Any = SimpleNamespace(mesh=SimpleNamespace(rank=1), agree=lambda what, value: events.append((what, value)))
    monkeypatch.setattr(worker, "answer", lambda *asked: {})
    monkeypatch.setattr(worker, "metadata", lambda *asked: {})
    monkeypatch.setattr(worker, "save", lambda found, described, path: events.append(path.name))
    worker.serve(model, Job("d", [], str(tmp_path)), ranks, store)
    assert events == ["process 1", "answer-0-1.safetensors", ("end", 0), "answer 0 1"]


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """Runs a job that fails at once, for `folder` -> exit status."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(worker.os, "_exit", sys.exit)
    path = tmp_path / "job.json"

    def run(folder):
        path.write_text(json.dumps(asdict(Job(str(tmp_path), [1], str(folder), tp=2))))
        with pytest.raises(SystemExit) as ended:
            worker.main(str(path))
        return ended.value.code

    return run


def test_results_of_an_earlier_run_do_not_stay(refused, tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    for name in ("rank-1.safetensors", "rank-1.error", "rank-0.safetensors"):
        (folder / name).write_text("of yesterday")
    assert refused(folder) == 2
    assert sorted(os.listdir(folder)) == ["rank-0.safetensors", "rank-1.error"], "its own go, another's stay"
    assert (folder / "rank-1.error").read_text().startswith("NotLaunchedError: WORLD_SIZE is not set")


def test_a_folder_that_is_none_is_told_beside_the_job(refused, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert refused(tmp_path / "file" / "ranks") == 2
    words = f"{tmp_path / 'file' / 'ranks'}: cannot hold results: Not a directory"
    assert capsys.readouterr().err == f"rank 1: {words}\n"
    assert (tmp_path / "rank-1.error").read_text() == f"JobError: {words}"
