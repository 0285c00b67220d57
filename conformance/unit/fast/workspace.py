"""How many bytes of tensors are alive at once."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Counts the storages that operations create inside the block; `bytes` is the most that lived together."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self._alive = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (key := x.untyped_storage()._cdata) not in known | set(self._seen):
                self._seen[key] = x.untyped_storage().nbytes()
                self._alive += self._seen[key]
                self.bytes = max(self.bytes, self._alive)
                weakref.finalize(x.untyped_storage(), self._drop, key)
        return result

    def _drop(self, key: int) -> None:
        self._alive -= self._seen.pop(key, 0)
