"""The verdict at the first difference, and the costs."""

import torch
from conftest import noisy_copy, prompt

from specplug.measure import compare, timed_generate


def test_identical_tie_and_mismatch(llama):
    ids = prompt()
    plain = timed_generate(llama, ids, 0, max_new_tokens=10, do_sample=False).ids
    assert compare(llama, ids, plain, plain).kind == "identical"
    with torch.no_grad():
        order = llama(torch.cat([ids, torch.tensor([plain[:4]])], dim=1)).logits[0, -1].argsort(descending=True)
    other = [*plain[:4], int(order[1]), 9]
    verdict = compare(llama, ids, plain, other)
    assert verdict.kind == "mismatch" and verdict.position == 4 and verdict.gap > verdict.tolerance
    assert compare(llama, ids, plain, plain[:5]).kind == "mismatch", "shorter without a reason"
    assert compare(llama, ids, plain[:5], plain).kind == "mismatch"


def test_a_near_tie_is_a_tie(llama):
    """Two rows of the head made equal but for one rounding: either token is right."""
    model, ids = noisy_copy(llama, scale=0), prompt()
    plain = timed_generate(model, ids, 0, max_new_tokens=3, do_sample=False).ids
    twin = next(token for token in range(3, 64) if token not in plain)
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[plain[0]] * (1 + 1e-7)
    assert compare(model, ids, plain, [twin, *plain[1:]]).kind == "tie"


def test_equal_seeds_give_equal_samples(llama):
    first, second = (timed_generate(llama, prompt(), 3, max_new_tokens=8, do_sample=True) for _ in range(2))
    assert first.ids == second.ids and 0 < first.seconds_first <= first.seconds
