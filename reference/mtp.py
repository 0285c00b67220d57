"""Multi-token prediction (model.md section 3): the draft block, drafting, verification.

The block is stored as layer `num_hidden_layers`: a DSA mixer and a routed MoE with plain residuals; it has no mHC, no
embedding and no head of its own. Row i pairs the target's h_i, which enters lm_head, with e, the embedding of token
i + 1:

    z = eh_proj(concat(norm(e; enorm), norm(h_i; hnorm)))
    z = z + dsa(norm(z; input_layernorm));  z = z + moe(norm(z; post_attention_layernorm))
    y = norm(z; shared_head.norm);  draft logits = lm_head(y)

bf16 points: as in the text stack, and both sums. The block keeps its own state and reads nothing of the target's but
weights. Everywhere in this file a block state holds rows of real (h_i, token i + 1) pairs only; rows made from drafts
live in a copy that is dropped at the end of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Protocol

import numpy as np

from reference import nvfp4
from reference.arithmetic import softmax
from reference.checkpoint import Checkpoint
from reference.errors import InputError
from reference.layout import TEXT
from reference.model import Dsa, Moe, Tap, TextModel, reporter
from reference.ops.norm import rms_norm
from reference.state import DsaState
from reference.weights import Source, Weights


class NoMtpBlockError(InputError):
    """Drafts were asked of a checkpoint that has no MTP block."""


class PackedExperts:
    """A `Source` in which the block's BF16 experts have the values they get when an engine packs them as NVFP4.

    Each projection is encoded by itself, as `nvfp4.encode` does. Experts that are stored packed stay as they are.
    """

    def __init__(self, checkpoint: Checkpoint, experts: str) -> None:
        self.checkpoint, self._experts = checkpoint, experts

    def weight(self, name: str) -> np.ndarray:
        values = self.checkpoint.weight(name)
        if not name.startswith(self._experts) or self.checkpoint.dtype(name) != "BF16":
            return values
        return nvfp4.decode(*nvfp4.encode(values, name=name), name=name)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.weight(name)[start:stop] if name.startswith(self._experts) else self._rows(name, start, stop)

    def _rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.checkpoint.rows(name, start, stop)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.shape(name)


class Block:
    """The draft block beside a target model, in the target's arithmetic.

    `experts`: "packed" gives BF16 experts the values NVFP4 packing gives them, "stored" leaves them as they are.
    Raises `NoMtpBlockError`.
    """

    def __init__(self, target: TextModel, experts: str = "packed") -> None:
        index = target.config.mtp_layer
        if index is None:
            where = target.checkpoint.directory
            raise NoMtpBlockError(f"{where}: num_nextn_predict_layers is 0: no MTP block, no drafts")
        if experts not in ("packed", "stored"):
            raise ValueError(f"experts must be packed or stored, not {experts!r}")
        self.scope = f"{TEXT}layers.{index}."
        self.source: Source = target.checkpoint
        if experts == "packed":
            self.source = PackedExperts(target.checkpoint, f"{self.scope}mlp.experts.")
        self.target, self.config, self.ar = target, target.config, target.ar
        self.w = Weights(self.source, self.scope)
        self.attn: Any = Dsa(self.ar, self.config, self.w.at("self_attn."), target.options)
        self.ffn: Any = Moe(self.ar, self.config, self.w.at("mlp."), target.options)

    def beside(self, target: TextModel) -> Block:
        """The same block, with all that was decoded of it, for a copy of the target in another arithmetic."""
        other = copy(self)
        other.target, other.ar = target, target.ar
        other.attn = Dsa(target.ar, self.config, self.attn.w, target.options)
        other.ffn = Moe(target.ar, self.config, self.ffn.w, target.options)
        return other

    def fresh(self, batch: tuple[int, ...] = ()) -> DsaState:
        """The state before row 0."""
        return self.attn.fresh(batch)

    def z(self, hidden: np.ndarray, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """hidden [.., T, D], the tokens after them [.., T] -> mtp.z [.., T, D]. The embedding half comes first."""
        e = self._norm(self.target.embed(tokens), "enorm")
        both = np.concatenate([e, self._norm(hidden, "hnorm")], axis=-1)
        return self.ar.linear(both, self.w.linear("eh_proj.weight"), "mtp.z")

    def mixer_input(self, z: np.ndarray) -> np.ndarray:
        """mtp.z -> mtp.attn.in."""
        return self._norm(z, "input_layernorm")

    def mlp_input(self, z: np.ndarray) -> np.ndarray:
        """z after the mixer's residual -> mtp.mlp.in."""
        return self._norm(z, "post_attention_layernorm")

    def add(self, z: np.ndarray, out: np.ndarray) -> np.ndarray:
        """A plain residual, [.., T, D]."""
        return self.ar.store(z + out, "mtp.residual")

    def output(self, z: np.ndarray) -> np.ndarray:
        """z after both residuals -> y [.., T, D]: what enters lm_head, and the next draft row's hidden."""
        return self._norm(z, "shared_head.norm")

    def rows(
        self,
        hidden: np.ndarray,
        tokens: Sequence[int] | np.ndarray,
        state: DsaState,
        tap: Tap | None = None,
        selected: np.ndarray | None = None,
    ) -> np.ndarray:
        """hidden [.., T, D], tokens [.., T] -> y [.., T, D]; moves `state` on by T rows.

        `selected` [.., T, W]: attend to these rows; the indexer is not run. Taps are `mtp.*`, without logits.
        """
        report = self.reporter(tap)
        z = self.z(hidden, tokens)
        report("z", z)
        x = self.mixer_input(z)
        report("attn.in", x)
        out = self.attn(x, state, report, selected, indexed=selected is None)
        report("attn.out", out)
        z = self.add(z, out)
        x = self.mlp_input(z)
        report("mlp.in", x)
        out = self.ffn(x, report)
        report("mlp.out", out)
        return self.output(self.add(z, out))

    def logits(self, y: np.ndarray, tap: Tap | None = None) -> np.ndarray:
        """y [.., T, D] -> draft logits [.., T, V] through the target's lm_head; tap `mtp.logits`."""
        logits = self.target.logits(y)
        reporter(tap, "mtp.")("logits", logits)
        return logits

    def reporter(self, tap: Tap | None) -> Tap:
        """A tap that puts `mtp.` before the name."""
        return reporter(tap, "mtp.")

    def without_indexer(self, tap: Tap | None) -> Tap | None:
        """A tap that does not hear `mtp.indexer.*`."""
        return _without_indexer(tap)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(self.ar, x, self.w.array(f"{name}.weight"), self.config.rms_norm_eps, f"mtp.{name}")


class Policy(Protocol):
    """How tokens are picked from logits [V], and how a draft is judged."""

    def pick(self, logits: np.ndarray) -> int:
        """A token."""

    def judge(self, draft: int, target: np.ndarray, drafted_from: np.ndarray) -> int:
        """The draft itself if it is accepted, else the token that takes its place."""


class Greedy:
    """The largest logit, the lowest id of equal ones; a draft must be it."""

    def pick(self, logits: np.ndarray) -> int:
        return int(logits.argmax())

    def judge(self, draft: int, target: np.ndarray, drafted_from: np.ndarray) -> int:
        return self.pick(target)


class Sampled:
    """Sampling at a temperature; drafts go through the rejection rule, which leaves the target's distribution exact.

    A draft x is accepted with probability min(1, p(x) / q(x)), else replaced by a sample of max(p - q, 0), normalised
    (p the target's probabilities, q those the draft was sampled from). Draws come from `random.Random(seed)`.
    """

    def __init__(self, seed: int, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, not {temperature}")
        self.temperature = temperature
        self._random = Random(seed)

    def pick(self, logits: np.ndarray) -> int:
        return self._sample(self._shares(logits))

    def judge(self, draft: int, target: np.ndarray, drafted_from: np.ndarray) -> int:
        p, q = self._shares(target), self._shares(drafted_from)
        if self._random.random() * q[draft] < p[draft]:
            return draft
        rest = np.maximum(p - q, 0.0)
        return self._sample(rest if rest.any() else p)

    def _shares(self, logits: np.ndarray) -> np.ndarray:
        """Probabilities [V]. The largest logit is taken off first: any temperature leaves it 0, others at most -inf."""
        with np.errstate(over="ignore"):
            return softmax((logits - logits.max()) / self.temperature)

    def _sample(self, mass: np.ndarray) -> int:
        """An index with probability proportional to `mass`; sums in index order."""
        steps = np.cumsum(mass)
        place = int(np.searchsorted(steps, self._random.random() * steps[-1], side="right"))
        return min(place, int(np.nonzero(mass)[0][-1]))


@dataclass(frozen=True)
class Round:
    """One verification: what was drafted, how many were accepted, and the tokens that became certain."""

    drafts: tuple[int, ...]
    accepted: int
    tokens: tuple[int, ...]


@dataclass
class Speculation:
    """A sequence that grows by drafting and verifying. All of its tokens but the last have been fed to the target.

    After each call every state (the target's, the block's) is, bit for bit, a function of the tokens alone, provided
    that the target computes KDA in its recurrent form and does not round at random.
    """

    block: Block
    policy: Policy = field(default_factory=Greedy)
    tokens: list[int] = field(default_factory=list)

    def start(self, prompt: Sequence[int], tap: Tap | None = None) -> int:
        """Feeds the prompt to the target and, shifted by one, to the block; returns the first new token."""
        self.block.target.reset()
        self.state = self.block.fresh()
        self.tokens = [int(token) for token in prompt]
        hidden = self.block.target.run(prompt, tap)
        logits = self.block.target.logits(hidden[-1:])
        self._commit(hidden, [self.policy.pick(logits[0])], tap)
        return self.tokens[-1]

    def observe(
        self, hidden: np.ndarray, tokens: Sequence[int] | np.ndarray, cuts: Sequence[int], K: int, tap: Tap
    ) -> list[int]:
        """The block beside a text that the target has just read: `mtp.*` taps, and K drafts.

        hidden [T, D] is what entered lm_head at tokens [T]; the block sees them in pieces of `cuts` rows. The last
        real row pairs with the token that the target gives after the text; the rows of later drafts follow.
        """
        first = self.policy.pick(self.block.target.logits(hidden[-1:])[0])
        after = [int(token) for token in tokens[1:]] + [first]
        self.state, self.tokens = self.block.fresh(), [int(tokens[0])]
        ends = np.cumsum(cuts)
        for start, end in zip([0, *ends], ends, strict=False):
            self._commit(hidden[start:end], after[start:end], tap)
        return self.draft(K, tap)[0]

    def draft(self, K: int, tap: Tap | None = None) -> tuple[list[int], list[np.ndarray]]:
        """K tokens after the last one and the logits they were picked from. Leaves every state as it is.

        Draft row 0 is the block's newest real row. Each further one takes y of the row before as its hidden and the
        drafted token's embedding; with `index_share_for_mtp_iteration` it attends to row 0's set and the rows since,
        and has no `mtp.indexer.*` taps. Taps: those of the further rows.
        """
        state, y, chosen = replace(self.state), self._y, self.state.selected
        assert chosen is not None
        chosen, drafts, sources = chosen[-1:], list[int](), list[np.ndarray]()
        share = self.block.config.index_share_for_mtp_iteration
        listen = self.block.without_indexer(tap) if share else tap
        for step in range(K):
            if step:
                chosen = np.concatenate([chosen, np.full((1, 1), state.length, np.int32)], axis=-1)
                selected = np.sort(chosen.view(np.uint32), axis=-1).view(np.int32)  # -1 stays behind the rows
                y = self.block.rows(y, drafts[-1:], state, listen, selected if share else None)
            sources.append(self.block.logits(y, listen if step else None)[0])
            drafts.append(self.policy.pick(sources[-1]))
        return drafts, sources

    def step(self, K: int, stop: Sequence[int] = (), drafts: Sequence[int] | None = None) -> Round:
        """Drafts K tokens, verifies them in one pass of K + 1 rows, commits what was accepted and one token more.

        `drafts`: verify these instead (greedily). A token of `stop` ends the round: what follows it is not accepted.
        """
        drafted, sources = self.draft(K) if drafts is None else (list(drafts), [])
        target = self.block.target
        before = target.snapshot()
        hidden = target.run([self.tokens[-1], *drafted])
        logits = target.logits(hidden)
        new: list[int] = []
        for row, draft in enumerate(drafted):
            source = sources[row] if sources else logits[row]
            new.append(self.policy.judge(draft, logits[row], source))
            if new[-1] != draft or draft in stop:
                break
        else:
            new.append(self.policy.pick(logits[len(drafted)]))
        accepted = sum(1 for token, draft in zip(new, drafted, strict=False) if token == draft)
        if len(new) < len(drafted) + 1:
            target.restore(before)
            hidden = target.run([self.tokens[-1], *new[:-1]])
        self._commit(hidden, new)
        return Round(tuple(drafted), accepted, tuple(new))

    def generate(
        self, prompt: Sequence[int], count: int, K: int, stop: Sequence[int] = ()
    ) -> tuple[list[int], list[Round]]:
        """Up to `count` new tokens, ending with the first of `stop`, K drafts a round; and the rounds."""
        rounds: list[Round] = []
        self.start(prompt)
        while (made := len(self.tokens) - len(prompt)) < count and self.tokens[-1] not in stop:
            rounds.append(self.step(min(K, count - made - 1), stop))
        return self.tokens[len(prompt) :], rounds

    def _commit(self, hidden: np.ndarray, new: Sequence[int], tap: Tap | None = None) -> None:
        """The target has consumed all tokens so far and all of `new` but the last, giving `hidden`; pairs the rows."""
        self.tokens += new
        following = self.tokens[len(self.tokens) - len(hidden) :]
        y = self.block.rows(hidden, following, self.state, tap)
        if tap is not None:
            self.block.logits(y, tap)
        self._y = y[-1:]


def _without_indexer(tap: Tap | None) -> Tap | None:
    if tap is None:
        return None
    return lambda name, value: None if name.startswith("mtp.indexer.") else tap(name, value)
