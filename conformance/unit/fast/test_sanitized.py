"""What a sanitizer is given to watch: which calls are made, in a process without a GPU."""

from types import SimpleNamespace

import pytest
import torch

from conformance import sanitized


class Model:
    """Counts tokens and notes calls; `steps` appear as row counts are met, as those of the kernels do."""

    def __init__(self, directory, device):
        assert (directory, device) == ("DIR", "cuda")
        self.config = SimpleNamespace(text=SimpleNamespace(vocab_size=50))
        self.calls: list[tuple[object, object]] = []
        self.state = SimpleNamespace(length=0, commit=lambda kept: self.calls.append(("commit", kept)))
        self.kernels, self.without_kernels = SimpleNamespace(steps={}), None
        made.append(self)

    def prefill(self, ids, tap=None):
        assert all(0 <= i < 50 for i in ids)
        self.calls.append((len(ids), tap is not None))
        self.state.length += len(ids)
        self.kernels.steps.setdefault(len(ids), SimpleNamespace(run=self.head, buffers=SimpleNamespace()))
        return torch.zeros(len(ids), 50)

    def ids(self, tokens):
        return tokens

    def verify(self, ids):
        self.calls.append(("verify", len(ids)))
        return torch.zeros(len(ids), 50), None

    def head(self, pdl):
        self.calls.append(("head", pdl))
        self.kernels.steps[1].buffers.logits = torch.zeros(1, 50)


made: list[Model] = []


@pytest.mark.parametrize("single", [False, True])
def test_each_way_to_make_a_call_is_watched(single, monkeypatch, capsys):
    monkeypatch.setattr(sanitized, "TextModel", Model)
    sanitized.main("DIR", single=single)
    ways = [True] if single else [True, False, False, False]
    calls = [(count, way) for count in sanitized.COUNTS for way in ways]
    rest = [] if single else [("verify", 3), ("commit", 1)]
    assert made.pop().calls == [(sanitized.PROMPT, False), *calls, *rest, ("head", False)]
    assert "kinds of steps" in capsys.readouterr().out
