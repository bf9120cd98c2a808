"""A drawn token is a function of its own request, and of the right distribution."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

import tests.engine.conftest  # noqa: F401  prepares the import of SGLang
from pat.engine import draw
from pat.engine.cpu import environment
from pat.seam import SeamError

ALL = 1 << 30  # SGLang's top_k for the whole vocabulary
PLAIN = {"top_k": ALL, "top_p": 1.0, "min_p": 0.0}


def batch(rows, device="cpu"):
    """As much of SGLang's SamplingBatchInfo as a draw looks at, for rows of {top_k, top_p, min_p}."""
    rows = [PLAIN | row for row in rows]
    sampled = [row for row in rows if row["top_k"] > 1]
    return SimpleNamespace(
        top_ks=torch.tensor([row["top_k"] for row in rows], dtype=torch.int32, device=device),
        top_ps=torch.tensor([row["top_p"] for row in rows], dtype=torch.float, device=device),
        min_ps=torch.tensor([row["min_p"] for row in rows], dtype=torch.float, device=device),
        is_any_greedy=len(sampled) < len(rows),
        is_all_greedy=not sampled,
        need_top_k_sampling=any(row["top_k"] != ALL for row in sampled),
        need_top_p_sampling=any(row["top_p"] != 1 for row in sampled),
        need_min_p_sampling=any(row["min_p"] > 0 for row in sampled),
        sampling_mask_batch_indices=None,
    )


def tokens(logits, rows, seeds, positions):
    """What SGLang's sampler does with logits [requests, vocab] on the way to ours."""
    info = batch(rows, logits.device)
    if info.is_all_greedy:
        return logits.argmax(-1).tolist()
    best = logits.argmax(-1) if info.is_any_greedy else None
    probs = logits.softmax(-1)
    seeds, positions = (torch.tensor(numbers, device=logits.device) for numbers in (seeds, positions))
    return draw.draw(probs, seeds, positions, draw.candidates(probs, info, best)).tolist()


LOGITS = st.lists(st.sampled_from([-40.0, -2.0, -0.5, 0.0, 0.25, 1.0, 1.0000001, 2.0]), min_size=11, max_size=11)
ROW = st.fixed_dictionaries(
    {
        "top_k": st.sampled_from([1, 2, 5, 11, 40, ALL, ALL]),
        "top_p": st.sampled_from([1e-6, 0.3, 0.6, 0.95, 1.0, 1.0]),
        "min_p": st.sampled_from([0.0, 0.0, 0.1, 0.7, 1.0]),
    }
)
REQUEST = st.tuples(LOGITS, ROW, st.integers(-(2**63), 2**63 - 1), st.integers(0, 1 << 20))


@settings(deadline=None, max_examples=300)
@given(st.lists(REQUEST, min_size=1, max_size=6))
def test_a_row_draws_the_same_token_alone_as_in_any_batch(requests):
    logits, rows, seeds, positions = zip(*requests, strict=True)
    together = tokens(torch.tensor(logits), rows, seeds, positions)
    alone = [tokens(torch.tensor([a]), [b], [c], [d])[0] for a, b, c, d in requests]
    assert together == alone


def test_rows_of_a_real_vocabulary_do_not_depend_on_their_batch():
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(12, 49153, generator=rng) * 3
    rows = [{}, {"top_k": 1}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.95}] * 2
    seeds, positions = list(range(12)), list(range(100, 112))
    together = tokens(logits, rows, seeds, positions)
    assert together == [tokens(logits[i : i + 1], rows[i : i + 1], [i], [100 + i])[0] for i in range(12)]


GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not environment.has_accelerator(), reason="needs a GPU")]
)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_seed_means_the_same_on_every_device_and_tomorrow(device):
    logits = (torch.arange(8 * 50) * 37 % 101 / 25).view(8, 50).to(device)
    rows = [{}, {"top_k": 9}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 1}, {"top_k": 20, "top_p": 0.8}, {}, {}]
    seeds, positions = [0, 1, -1, 2**62, 5, 6, 7, 7], [0, 9, 100, 131072, 5, 6, 7, 8]
    drawn = tokens(logits, rows, seeds, positions)
    assert drawn == [22, 48, 31, 30, 32, 12, 34, 18]
    assert drawn == [
        tokens(logits[i : i + 1], rows[i : i + 1], seeds[i : i + 1], positions[i : i + 1])[0] for i in range(8)
    ]


def expected_candidates(probs, top_k, top_p, min_p):
    """The tokens that one row keeps, in Python."""
    kept, before = set(), 0.0
    for rank, token in enumerate(sorted(range(len(probs)), key=lambda t: (-probs[t], t))):
        threshold = np.float32(max(probs)) * np.float32(min_p)
        if rank < top_k and (top_p == 1 or before <= np.float32(top_p)) and np.float32(probs[token]) >= threshold:
            kept.add(token)
        before += probs[token]
    return kept


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(LOGITS, ROW), min_size=1, max_size=4))
def test_filters_keep_what_they_say_and_ties_go_to_the_first(requests):
    logits, rows = torch.tensor([a for a, _ in requests]), [b for _, b in requests]
    probs, best = logits.softmax(-1), logits.argmax(-1)
    keep = draw.candidates(probs, batch(rows), best)
    for number, row in enumerate(rows):
        if row["top_k"] == 1:
            wanted = {int(best[number])}
        else:
            wanted = expected_candidates(probs[number].tolist(), row["top_k"], row["top_p"], row["min_p"])
        assert set(keep[number].nonzero().flatten().tolist()) == wanted


def test_nobody_who_filters_leaves_nothing_to_sort():
    probs = torch.ones(2, 8)
    assert draw.candidates(probs, batch([{}, {}])) is None
    greedy = batch([{"top_k": 1, "top_p": 0.5}, {}])
    assert not (greedy.need_top_k_sampling or greedy.need_top_p_sampling)
    keep = draw.candidates(probs, greedy, torch.tensor([3, 0]))
    assert keep.tolist() == [[i == 3 for i in range(8)], [True] * 8]


def test_a_greedy_row_among_others_takes_the_first_of_the_largest_logits():
    # Logits that differ by less than a probability can show, and equal ones.
    close = torch.tensor([[0.0, 1e-9, 2e-9, 2e-9], [5.0, 5.0, 0.0, 5.0], [0.0, 0.0, 0.0, 0.0]])
    assert close.softmax(-1)[0].unique().numel() == 1
    for neighbour in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}):
        drawn = tokens(close, [{"top_k": 1}, {"top_k": 1}, neighbour], [7, 8, 9], [0, 1, 2])
        assert drawn[:2] == close.argmax(-1).tolist()[:2] == [2, 0]


def test_without_filters_the_tokens_are_sglangs():
    from sglang.srt.layers.sampler import multinomial_with_seed

    rng = torch.Generator().manual_seed(2)
    logits = torch.randn(500, 1000, generator=rng) * 2
    seeds, positions = torch.randint(2**62, (500,), generator=rng), torch.randint(1 << 15, (500,), generator=rng)
    theirs = multinomial_with_seed(logits.double().log_softmax(-1), seeds, positions).flatten()
    assert draw.draw(logits.softmax(-1), seeds, positions).tolist() == theirs.tolist()


@pytest.mark.parametrize("row", [{}, {"top_k": 40}, {"top_p": 0.95}, {"min_p": 0.02}], ids=str)
def test_rounding_of_the_logits_changes_hardly_a_token(row):
    rng = torch.Generator().manual_seed(3)
    logits = (torch.randn(2000, 400, generator=rng) * 2).mul(256).round().div(256)  # many nearly equal, some equal
    noisy = logits + 1e-6 * torch.randn(logits.shape, generator=rng)
    seeds, positions = list(range(2000)), [i % 97 for i in range(2000)]
    before, after = (tokens(x, [row] * 2000, seeds, positions) for x in (logits, noisy))
    assert sum(a != b for a, b in zip(before, after, strict=True)) <= 1


@pytest.mark.parametrize(
    "row",
    [{}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.12}, {"top_k": 8, "top_p": 0.85}, {"top_k": 9, "min_p": 0.08},
     {"top_k": 7, "top_p": 0.9, "min_p": 0.05}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("varied", ["seed", "position"])
def test_tokens_are_of_the_filtered_distribution(row, varied):
    draws = 40_000
    row, probs = PLAIN | row, (torch.arange(16) * 5 % 16 / 4.0).softmax(-1)
    kept = expected_candidates(probs.tolist(), **row)
    assert row == PLAIN or 2 <= len(kept) < 16
    numbers = torch.arange(draws)
    seeds, positions = (numbers, torch.tensor(17)) if varied == "seed" else (torch.tensor(123456789), numbers)
    many = probs.repeat(draws, 1)
    keep = draw.candidates(many, batch([row] * draws))
    drawn = draw.draw(many, seeds.expand(draws), positions.expand(draws), keep)
    counts = drawn.bincount(minlength=16).numpy()
    assert set(np.flatnonzero(counts)) == kept
    inside = sorted(kept)
    wanted = probs[inside].double().numpy()
    assert chisquare(counts[inside], wanted / wanted.sum() * draws).pvalue > 1e-3


def test_noise_of_neighbouring_seeds_positions_and_tokens_is_independent():
    """Pairs of tokens of two uniform draws are uniform on the square."""
    draws, sides = 40_000, 6
    even, numbers = torch.ones(draws, sides) / sides, torch.arange(draws)
    here = draw.draw(even, numbers, numbers % 50)
    for seeds, positions in ((numbers + 1, numbers % 50), (numbers, numbers % 50 + 1)):
        pairs = here * sides + draw.draw(even, seeds, positions)
        assert chisquare(pairs.bincount(minlength=sides * sides).numpy()).pvalue > 1e-3


def test_the_noise_is_finite_and_uniform_at_both_ends(monkeypatch):
    ends = torch.tensor([[0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]], dtype=torch.int64).to(torch.uint32)
    monkeypatch.setattr(draw.sg, "murmur_hash32", lambda *_: ends.clone(), raising=False)
    noise = draw.log_uniform(torch.tensor([1]), torch.tensor([0]), 6).double()
    assert torch.isfinite(noise).all() and (noise < 0).all() and (noise.diff() >= 0).all()
    middles = (ends.double() + 0.5) / 2**32
    assert torch.allclose(noise[0, 2:], middles[0, 2:].log(), rtol=1e-6)


def test_a_sampling_mask_shows_the_tokens_that_could_be_drawn():
    sampler = draw.sampler_class()
    probs = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]])
    info = batch([{"top_k": 2}, {"top_k": 1}, {}])
    info.sampling_seed, info.sampling_mask_batch_indices = torch.arange(3), torch.tensor([0, 1])
    own = SimpleNamespace(best=torch.tensor([3, 2, 0]))
    drawn, capture = sampler._sample_from_probs(own, probs, info, torch.arange(3), False)
    assert (capture.weights > 0).tolist() == [[False, False, True, True], [False, False, True, False]]
    assert capture.batch_rows.tolist() == [0, 1]
    assert drawn[1] == 2


def test_repetition_penalties_are_scaled_as_sglang_does_it():
    logits, penalties = torch.tensor([[2.0, -2.0, 0.0, 3.0]]), torch.tensor([[2.0, 2.0, 2.0, 1.0]])
    draw.scale(logits, penalties)
    assert logits.tolist() == [[1.0, -4.0, 0.0, 3.0]]


def test_a_sampler_that_is_not_in_place_is_noticed_at_start():
    with pytest.raises(SeamError, match="PAT's sampler is not in place of SimpleNamespace"):
        draw.warm_up(SimpleNamespace(), "cpu", 8)
    draw.warm_up(SimpleNamespace(best=None), "cpu", 8)
