"""The shortcut for end-of-sequence and length says what the criteria themselves say; all others are asked."""

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from specplug.stopping import Stopping


class After(StoppingCriteria):
    def __init__(self, token):
        self.token, self.calls = token, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return input_ids[:, -1] == self.token


def test_same_as_the_criteria():
    generator = torch.Generator().manual_seed(0)
    lists = (
        [MaxLengthCriteria(max_length=9)],
        [MaxLengthCriteria(max_length=9), EosTokenCriteria(eos_token_id=3)],
        [EosTokenCriteria(eos_token_id=[3, 5]), MaxLengthCriteria(max_length=12), MaxLengthCriteria(max_length=7)],
        [EosTokenCriteria(eos_token_id=torch.tensor([3])), After(6)],
        [],
    )
    for criteria in lists:
        stopping = Stopping(StoppingCriteriaList(criteria))
        for _ in range(50):
            length = int(torch.randint(2, 14, (1,), generator=generator))
            ids = torch.randint(0, 8, (1, length), generator=generator)
            expected = bool(StoppingCriteriaList(criteria)(ids, None).all()) if criteria else False
            assert stopping.should_stop(ids, int(ids[0, -1]), None) == expected


def test_others_are_asked_once_per_token_even_at_the_end():
    criterion = After(6)
    stopping = Stopping(StoppingCriteriaList([criterion, EosTokenCriteria(eos_token_id=3)]))
    assert stopping.should_stop(torch.tensor([[1, 3]]), 3, None)
    assert criterion.calls == 1


def test_room():
    stopping = Stopping(StoppingCriteriaList([MaxLengthCriteria(max_length=9)]))
    assert [stopping.room(length) for length in (5, 9, 11)] == [4, 0, 0]
    assert Stopping(StoppingCriteriaList()).room(5) is None
