"""reference.mtp: the block's rows, drafting, verification and what each leaves behind."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from conformance.checkpoints.shared import shared
from conformance.taps import expected as expected_taps
from conformance.unit.fast.runs import Taps
from conformance.unit.reference.bounds import check, gamma
from reference.arithmetic import softmax
from reference.checkpoint import open_checkpoint
from reference.layout import TEXT
from reference.model import TextModel
from reference.mtp import Block, Greedy, NoMtpBlockError, Sampled, Speculation
from reference.state import DsaState

GEOMETRIES = ("tiny", "odd")
EXPORTS = ("nvidia", "libertai")
COUNT = 12


def _prompt(model: TextModel, count: int = 13, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, model.config.vocab_size, count)]


def _plain(model: TextModel, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens one at a time; the last one is not fed."""
    tokens = [int(model.prefill(prompt)[-1].argmax())]
    while len(tokens) < count:
        tokens.append(int(model.decode(tokens[-1]).argmax()))
    return tokens


def _arrays(state: DsaState) -> dict[str, np.ndarray]:
    names = ("latent", "pool_keys", "tail_k", "tail_gate")
    return {name: getattr(state, name) for name in names}


def _equal(left, right) -> None:
    left, right = dict(left), dict(right)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert np.array_equal(value, right[name]), name


def _shifted(model: TextModel, tokens: list[int]) -> DsaState:
    """The block's state after one pass over all (h_i, token i + 1) pairs of a sequence, from scratch."""
    hidden = TextModel(model.checkpoint, weights=model.weights).run(tokens[:-1])
    block = Block(model)
    state = block.fresh()
    block.rows(hidden, tokens[1:], state)
    return state


CASES = [
    ("tiny", "nvidia", 3),
    ("tiny", "libertai", 1),
    ("odd", "nvidia", 1),
    ("odd", "nvidia", 0),
    ("odd", "libertai", 4),
]


@pytest.mark.parametrize(("geometry", "export", "K"), CASES)
def test_speculation_is_plain_greedy_decoding(model, geometry, export, K):
    """Tokens, every state of the target, and a block state that knows the tokens only."""
    plain = model(geometry, export)
    prompt = _prompt(plain)
    tokens = _plain(plain, prompt, COUNT)
    target = model(geometry, export)
    run = Speculation(Block(target))
    found, rounds = run.generate(prompt, COUNT, K)
    assert found == tokens
    _equal(target.state.arrays(), plain.state.arrays())
    _equal(_arrays(run.state).items(), _arrays(_shifted(target, prompt + tokens)).items())
    assert sum(len(one.tokens) for one in rounds) == COUNT - 1
    assert all(len(one.drafts) <= K for one in rounds)


FORCED = [("tiny", 3, 1), *(("odd", K, right) for K in (1, 2, 4) for right in range(K + 1))]


@pytest.mark.parametrize(("geometry", "K", "right"), FORCED)
def test_forced_rejection_at_every_position(model, geometry, K, right):
    """Drafts that are right up to a position and wrong from there on."""
    plain, target = model(geometry), model(geometry)
    prompt = _prompt(plain, seed=K)
    tokens = _plain(plain, prompt, K + 3)
    run = Speculation(Block(target))
    assert run.start(prompt) == tokens[0]
    drafts = tokens[1 : 1 + right] + [(token + 1) % target.config.vocab_size for token in tokens[1 + right : 1 + K]]
    one = run.step(K, drafts=drafts)
    assert one.accepted == right
    assert list(one.tokens) == tokens[1 : right + 2]
    plain.reset()
    plain.prefill(prompt + tokens[: right + 1])
    _equal(target.state.arrays(), plain.state.arrays())
    _equal(_arrays(run.state).items(), _arrays(_shifted(target, prompt + tokens[: right + 2])).items())
    rest = run.step(1)
    assert rest.tokens[0] == _plain(model(geometry), prompt, right + 3)[-1]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_verified_rows_have_the_bits_of_single_rows(model, geometry):
    one, other = model(geometry), model(geometry)
    prompt = _prompt(one)
    one.prefill(prompt)
    other.prefill(prompt)
    rows = one.prefill([5, 6, 7, 8, 9])
    for token, row in zip([5, 6, 7, 8, 9], rows, strict=True):
        assert np.array_equal(other.decode(token), row)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_drafting_leaves_every_state_as_it_was(model, geometry):
    target = model(geometry)
    run = Speculation(Block(target))
    run.start(_prompt(target))
    before = {**dict(target.state.arrays()), **_arrays(run.state)}
    before = {name: value.copy() for name, value in before.items()}
    length = run.state.length
    first, _ = run.draft(4)
    _equal({**dict(target.state.arrays()), **_arrays(run.state)}, before)
    assert run.state.length == length
    assert run.draft(4)[0] == first
    assert run.draft(2)[0] == first[:2]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_draft_rows(model, geometry, monkeypatch):
    """Hidden: y after shared_head.norm. Token: the draft. Set: that of row 0 and the rows since."""
    target = model(geometry)
    block = Block(target)
    run = Speculation(block)
    run.start(_prompt(target, 50))
    newest = run.state.length - 1
    assert run.state.selected is not None
    chosen = run.state.selected[-1]
    seen = []

    def rows(hidden, tokens, state, tap=None, selected=None):
        assert selected is not None
        y = Block.rows(block, hidden, tokens, state, tap, selected)
        seen.append((hidden, list(tokens), selected[0], y))
        return y

    monkeypatch.setattr(block, "rows", rows)
    drafts, sources = run.draft(4)
    assert len(seen) == 3
    y = run._y
    for step, (hidden, tokens, selected, after) in enumerate(seen):
        assert np.array_equal(hidden, y)
        assert tokens == [drafts[step]]
        expected = sorted({*chosen[chosen >= 0].tolist(), *range(newest + 1, newest + 2 + step)})
        assert selected[selected >= 0].tolist() == expected
        assert (selected[len(expected) :] == -1).all()
        y = after
        assert np.array_equal(block.logits(y)[0], sources[step + 1])
    assert drafts == [int(source.argmax()) for source in sources]


def test_without_sharing_every_draft_runs_the_indexer(model, monkeypatch):
    target = model("odd")
    target.config = dataclasses.replace(target.config, index_share_for_mtp_iteration=False)
    block = Block(target)
    run = Speculation(block)
    run.start(_prompt(target, 30))
    calls = []
    choose = block.attn.choose

    def counted(*args):
        calls.append(1)
        return choose(*args)

    monkeypatch.setattr(block.attn, "choose", counted)
    run.draft(4)
    assert len(calls) == 3
    target.config = block.config = dataclasses.replace(target.config, index_share_for_mtp_iteration=True)
    run.draft(4)
    assert len(calls) == 3


def test_the_embedding_half_comes_first_and_position_zero_is_not_masked(model):
    """Definition of z, row 0 included; the two halves of eh_proj are not interchangeable."""
    target = model("tiny")
    block = Block(target)
    D, eps = target.config.hidden_size, target.config.rms_norm_eps
    rng = np.random.default_rng(3)
    hidden, tokens = rng.standard_normal((4, D)), [7, 0, 511, 7]
    weight = block.w.array("eh_proj.weight")
    e = target.embed(tokens)
    unit = [x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) for x in (e, hidden)]
    first, second = (x * block.w.array(f"{name}.weight") for x, name in zip(unit, ("enorm", "hnorm"), strict=True))
    bound = gamma(3 * D + 8) * (np.abs(np.concatenate([first, second], -1)) @ np.abs(weight).T)
    check(block.z(hidden, tokens), first @ weight[:, :D].T + second @ weight[:, D:].T, bound)
    assert np.abs(first[0]).max() > 0


def test_residuals_are_plain(model):
    """y is norm(z + dsa + moe): each sublayer is added once, to one stream."""
    target = model("odd")
    block = Block(target)
    tap = Taps()
    hidden = np.random.default_rng(4).standard_normal((6, target.config.hidden_size))
    y = block.rows(hidden, [1, 2, 3, 4, 5, 6], block.fresh(), tap)
    taps = tap.arrays()
    middle = taps["mtp.z"] + taps["mtp.attn.out"]
    assert np.array_equal(block.mixer_input(taps["mtp.z"]), taps["mtp.attn.in"])
    assert np.array_equal(block.mlp_input(middle), taps["mtp.mlp.in"])
    assert np.array_equal(block.output(middle + taps["mtp.mlp.out"]), y)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("cuts", [(1, 2, 3, 8), (9,), tuple(range(1, 17))])
def test_rows_in_pieces_are_rows_at_once(model, geometry, cuts):
    target = model(geometry)
    block = Block(target)
    tokens = _prompt(target, 17)
    hidden = np.random.default_rng(5).standard_normal((17, target.config.hidden_size))
    states, taps, outputs = (block.fresh(), block.fresh()), (Taps(), Taps()), []
    outputs.append(block.logits(block.rows(hidden, tokens, states[0], taps[0]), taps[0]))
    pieces = zip(np.split(hidden, cuts), np.split(np.array(tokens), cuts), strict=True)
    outputs.append(np.concatenate([block.logits(block.rows(h, t, states[1], taps[1]), taps[1]) for h, t in pieces]))
    assert np.array_equal(outputs[0], outputs[1])
    _equal(taps[0].arrays().items(), taps[1].arrays().items())
    _equal(_arrays(states[0]).items(), _arrays(states[1]).items())
    table = {name for name in expected_taps(target.checkpoint.config, 17) if name.startswith("mtp.")}
    assert set(taps[0].arrays()) == table


def test_bf16_experts_get_the_values_of_packed_ones():
    """Both exports hold one source model: nvidia's BF16 experts, packed, are libertai's."""
    blocks = {export: Block(TextModel(open_checkpoint(shared(export)))) for export in EXPORTS}
    stored = Block(blocks["nvidia"].target, experts="stored")
    index = blocks["nvidia"].config.mtp_layer
    assert blocks["nvidia"].target.checkpoint.dtype(f"{TEXT}layers.{index}.mlp.experts.0.up_proj.weight") == "BF16"
    for expert, name in itertools.product((0, 7), ("gate_proj", "up_proj", "down_proj")):
        leaf = f"mlp.experts.{expert}.{name}.weight"
        packed = [block.w.array(leaf) for block in blocks.values()]
        assert np.array_equal(packed[0], packed[1])
        assert not np.array_equal(stored.w.array(leaf), packed[0])
    other = "mlp.shared_experts.up_proj.weight"
    assert np.array_equal(stored.w.array(other), blocks["nvidia"].w.array(other))
    with pytest.raises(ValueError, match="experts"):
        Block(stored.target, experts="fp8")


def test_a_checkpoint_without_a_block_gives_no_drafts(model):
    target = model("tiny")
    target.config = dataclasses.replace(target.config, num_nextn_predict_layers=0)
    with pytest.raises(NoMtpBlockError, match="num_nextn_predict_layers is 0"):
        Block(target)


@pytest.mark.parametrize("K", [0, 1, 3])
def test_a_stop_token_ends_everything_where_plain_decoding_would(model, K):
    plain = model("odd")
    prompt = _prompt(plain)
    tokens = _plain(plain, prompt, 9)
    stop = tokens[5]
    expected = tokens[: tokens.index(stop) + 1]
    target = model("odd")
    run = Speculation(Block(target))
    assert run.generate(prompt, 9, K, stop=[stop])[0] == expected
    plain.reset()
    _plain(plain, prompt, len(expected))
    _equal(target.state.arrays(), plain.state.arrays())


@pytest.mark.parametrize("place", [1, 2, 3])
def test_nothing_is_accepted_after_a_stop_token_among_the_drafts(model, place):
    plain, target = model("odd"), model("odd")
    prompt = _prompt(plain, seed=8)
    tokens = _plain(plain, prompt, 6)
    assert len(set(tokens[1:4])) == 3
    run = Speculation(Block(target))
    run.start(prompt)
    one = run.step(3, stop=[tokens[place]], drafts=tokens[1:4])
    assert list(one.tokens) == tokens[1 : place + 1]
    assert one.accepted == place
    assert target.state.length == len(prompt) + place


class _Draws:
    """Stands in for random.Random: gives the values it was made with."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def random(self) -> float:
        return self.values.pop(0)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_rejection_rule_leaves_the_targets_distribution(temperature):
    """Over a grid of N x N draws and every draft, weighted by its probability: within a few cells of p.

    Each of at most V + 2 thresholds along either axis of the grid is off by less than one cell of size 1/N.
    """
    N, V = 60, 4
    rng = np.random.default_rng(9)
    target, drafted = rng.standard_normal(V), rng.standard_normal(V)
    p, q = softmax(target / temperature), softmax(drafted / temperature)
    policy = Sampled(0, temperature)
    mass = np.zeros(V)
    for draft, i, j in itertools.product(range(V), range(N), range(N)):
        policy._random = _Draws((i + 0.5) / N, (j + 0.5) / N)  # type: ignore[assignment]
        mass[policy.judge(draft, target, drafted)] += q[draft] / N**2
    check(mass, p, 2 * (V + 2) / N)
    assert np.abs(q - p).max() > 2 * (V + 2) / N


def test_a_rejected_draft_is_never_sampled_again_and_an_equal_one_never_rejected():
    target, drafted = np.array([0.0, 3.0]), np.array([3.0, 0.0])
    policy = Sampled(0)
    for value in (0.0, 0.5, 1 - 2**-53):
        policy._random = _Draws(1 - 2**-53, value)  # type: ignore[assignment]
        assert policy.judge(0, target, drafted) == 1
        policy._random = _Draws(1 - 2**-53)  # type: ignore[assignment]
        assert policy.judge(0, target, target) == 0


@pytest.mark.parametrize("temperature", [1e-300, 1e-308, 5e-324])
def test_no_temperature_is_too_low(temperature):
    assert Sampled(0, temperature).pick(np.array([-30.0, 20.0, 1e-3, 19.0])) == 1


def test_a_rejection_that_leaves_no_mass_samples_the_target(monkeypatch):
    """Probabilities that differ by their last bit only: p is below q at the draft and nowhere above it."""
    policy = Sampled(0)
    policy._random = _Draws(1 - 2**-53, 0.75)  # type: ignore[assignment]
    shares = iter((np.array([0.5 - 2**-52, 0.5]), np.array([0.5, 0.5])))
    monkeypatch.setattr(policy, "_shares", lambda logits: next(shares))
    assert policy.judge(0, np.zeros(2), np.zeros(2)) == 1


def test_sampling_follows_its_seed_and_its_distribution(model):
    target = model("odd")
    prompt = _prompt(target)
    runs = [Speculation(Block(target), Sampled(seed)).generate(prompt, 6, 2)[0] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    policy, logits = Sampled(0), np.array([0.0, np.log(3.0), -np.inf])
    for value, expected in ((0.0, 0), (0.2499, 0), (0.2501, 1), (1 - 2**-53, 1)):
        policy._random = _Draws(value)  # type: ignore[assignment]
        assert policy.pick(logits) == expected
    with pytest.raises(ValueError, match="temperature"):
        Sampled(0, 0.0)


def test_greedy_takes_the_lowest_of_equal_logits():
    assert Greedy().pick(np.array([1.0, 2.0, 2.0])) == 1


def decided(scores, budget):
    """Rows [T] whose choice of pools is no tie: the public classes leave open which of equal scores they take."""
    ranked = -np.sort(-scores, axis=-1)
    if ranked.shape[-1] <= budget:
        return np.ones(len(scores), bool)
    last, next_one = ranked[:, budget - 1], ranked[:, budget]
    return (last > next_one) | (next_one == -np.inf)


@pytest.mark.transformers
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_the_block_is_that_of_the_public_classes(geometry, export, seed):
    """Within 2e-5 relative L2, the project's limit for exact arithmetic against float32, on rows that choose pools."""
    from conformance.public_mtp import PublicBlock

    target = TextModel(open_checkpoint(shared(export, geometry, seed)))
    block, public = Block(target, experts="stored"), PublicBlock(target.checkpoint)
    tokens = np.array(_prompt(target, 3 * target.config.index_topk, seed))
    hidden = target.run(tokens)[:-1]
    taps = Taps()
    y = block.rows(hidden, tokens[1:], block.fresh(), taps)
    block.logits(y, taps)
    budget = target.config.index_topk // target.config.index_kpool
    rows = decided(taps.arrays()["mtp.indexer.scores"], budget)
    choosing = np.arange(1, len(rows) + 1) // target.config.index_kpool > budget
    assert (rows & choosing).sum() > choosing.sum() / 2
    for name, expected in public.rows(hidden, tokens[1:]).items():
        found = taps.arrays()[f"mtp.{name}"]
        assert found.shape == expected.shape
        found, expected = found[rows], expected[rows]
        assert np.linalg.norm(found - expected) <= 2e-5 * np.linalg.norm(expected), name
