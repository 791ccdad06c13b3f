"""The shortcut for end-of-sequence and length says what the criteria themselves say; all others are asked."""

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from specplug.round import Text
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
            assert stopping.should_stop(Text(ids), int(ids[0, -1]), None) == expected


def test_others_are_asked_once_per_token_even_at_the_end():
    criterion = After(6)
    stopping = Stopping(StoppingCriteriaList([criterion, EosTokenCriteria(eos_token_id=3)]))
    assert stopping.should_stop(Text(torch.tensor([[1, 3]])), 3, None)
    assert criterion.calls == 1


def test_room():
    stopping = Stopping(StoppingCriteriaList([MaxLengthCriteria(max_length=9)]))
    assert [stopping.room(length) for length in (5, 9, 11)] == [4, 0, 0]
    assert Stopping(StoppingCriteriaList()).room(5) is None
    for length in (8.5, 9.0):  # as `max_new_tokens=4.0` comes to
        criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=length)])
        room = Stopping(criteria).room(5)
        assert isinstance(room, int) and room == 4
        assert not criteria(torch.zeros(1, 8), None) and criteria(torch.zeros(1, 9), None)


def test_text_keeps_what_it_handed_out():
    """Tokens are written when the ids are asked for; ids that were handed out before stay as they were."""
    given = torch.tensor([[5, 6, 7]])
    text = Text(given)
    seen = [text.ids]
    for token in range(200):
        text.commit(token)
        if token % 3:
            seen.append(text.ids)
        assert len(text) == 4 + token
    assert given.tolist() == [[5, 6, 7]]
    whole = [5, 6, 7, *range(200)]
    assert text.ids.tolist() == [whole]
    assert all(ids.tolist() == [whole[: ids.shape[1]]] for ids in seen) and len({ids.shape[1] for ids in seen}) > 100
