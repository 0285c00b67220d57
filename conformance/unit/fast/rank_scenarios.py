"""What happens to two ranks that disagree, fail or vanish; run by a launcher, one line of JSON per rank and scenario.

torchrun --standalone --nproc-per-node 2 -m conformance.unit.fast.rank_scenarios FOLDER DIRECTORY OTHER_DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fast.distributed import Ranks, load_together
from fast.errors import InputError, MissingFileError

SILENCE = 3.0


def main(folder: str, directory: str, other: str) -> None:
    ranks = Ranks(tp=2, timeout=SILENCE)
    me = ranks.mesh.rank
    lines: list[dict[str, str]] = []

    def scenario(name: str, act: Callable[[], object]) -> None:
        try:
            lines.append({"scenario": name, "result": str(act())})
        except InputError as e:
            lines.append({"scenario": name, "error": type(e).__name__, "message": str(e)})
        Path(folder, f"scenarios-{me}.json").write_text(json.dumps(lines))

    def reduce() -> list[float]:
        parts = torch.tensor([[1.0, 2.0**30], [2.0**-24, -(2.0**30)]])
        return ranks.all_reduce(parts[me : me + 1], "site", everyone=True)[0].tolist()

    def fail() -> None:
        with ranks.together("reading"):
            if me == 1:
                raise MissingFileError("tokens.txt: not there")

    def lose() -> None:
        if me == 1:
            os._exit(0)
        ranks.all_reduce(torch.zeros(1, 4), "layers.3.mlp", everyone=True)

    def wait() -> None:
        if me == 1:
            time.sleep(SILENCE * 2)
        ranks.all_reduce(torch.zeros(1, 4), "layers.2.attn", everyone=False)

    scenario("reduce", reduce)
    scenario("gather", lambda: [x.item() for x in ranks.all_gather(torch.tensor([me]), "logits")])
    scenario("agree", lambda: ranks.agree("tokens", [1, 2, 3 + me]))
    scenario("agree again", lambda: ranks.agree("tokens", [1, 2, 3]))
    scenario("same", lambda: ranks.same(torch.tensor([[1, 2, -1]]), "layers.3.indexer.selected"))
    scenario("swapped", lambda: ranks.same(torch.tensor([[1 + me, 2 - me, -1]]), "layers.3.indexer.selected"))
    scenario("fail", fail)
    scenario("load", lambda: load_together(directory, ranks).mesh.rank)
    scenario("other weights", lambda: load_together(other if me else directory, ranks))
    scenario("silent", wait)
    scenario("lost", lose)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
