"""What each drafter proposes, and that its state follows what the target kept."""

import pytest
import torch
from conftest import make_model, noisy_copy, prompt
from transformers import LogitsProcessorList

from specplug.drafters import Request
from specplug.drafters.lookup import LookupDrafter
from specplug.drafters.model import ModelDrafter
from specplug.drafters.suffix import SuffixDrafter
from specplug.tree import Dynamic, Static

GREEDY = Request(do_sample=False, processors=LogitsProcessorList(), vocab_size=64)
SAMPLED = Request(do_sample=True, processors=LogitsProcessorList(), vocab_size=64)


def looked_up(text: list[int], gamma: int = 4, request: Request = GREEDY, **options) -> list[int]:
    proposal = LookupDrafter(**options).start(request).propose(torch.tensor([text]), gamma)
    assert proposal.probs is None
    return proposal.tokens[0].tolist()


def test_lookup_continues_the_match():
    assert looked_up([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5, 9]
    assert looked_up([1, 2, 3, 4, 5, 9, 1, 2], gamma=1) == [3]


def test_lookup_prefers_the_longest_then_the_most_recent():
    assert looked_up([7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2], gamma=1) == [50], "three tokens match there, two here"
    assert looked_up([9, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2], gamma=1) == [60]


def test_lookup_without_a_match_proposes_nothing():
    assert looked_up([1, 2, 3, 4]) == []
    assert looked_up([1, 2, 3, 1], min_ngram=2) == []
    assert looked_up([1]) == []
    assert looked_up([1, 2, 3, 1], min_ngram=1, gamma=2) == [2, 3]


def test_lookup_goes_on_in_a_circle():
    assert looked_up([1, 2, 3, 1, 2, 3], gamma=7) == [1, 2, 3, 1, 2, 3, 1]


def test_lookup_stays_below_the_vocabulary():
    request = Request(False, LogitsProcessorList(), vocab_size=10)
    assert looked_up([1, 2, 3, 99, 4, 1, 2], request=request) == [3]


def test_lookup_sees_what_was_generated_since():
    session = LookupDrafter().start(GREEDY)
    assert session.propose(torch.tensor([[1, 2, 3]]), 3).tokens.shape == (1, 0)
    assert session.propose(torch.tensor([[1, 2, 3, 4, 1, 2]]), 3).tokens.tolist() == [[3, 4, 1]]
    assert session.propose(torch.tensor([[1, 2, 3, 4, 1, 2, 7, 8, 2, 7]]), 1).tokens.tolist() == [[8]]


@pytest.mark.parametrize("sizes", [(0, 3), (4, 3)])
def test_lookup_sizes(sizes):
    with pytest.raises(ValueError, match="min_ngram"):
        LookupDrafter(*sizes)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_model_state_follows_what_was_kept(kind):
    """Whatever was kept of each proposal, the next one is what a fresh session proposes for the same text."""
    drafter = ModelDrafter(make_model(kind))
    session, text = drafter.start(GREEDY), prompt(6)
    for kept in (0, 3, 4, 1, 2, 0, 4):
        proposal = session.propose(text, 4)
        assert torch.equal(proposal.tokens, drafter.start(GREEDY).propose(text, 4).tokens)
        session.observe(kept)
        following = torch.randint(3, 64, (1, 1), generator=torch.Generator().manual_seed(kept))
        text = torch.cat([text, proposal.tokens[:, :kept], following], dim=1)
    assert session.num_steps == 7 * 4, "one pass a draft token: catching up costs none"


def test_model_states_what_it_drew_from():
    """The stated distribution of each position is the draft's own softmax on that prefix."""
    model = make_model()
    text = prompt(6)
    proposal = ModelDrafter(model).start(SAMPLED).propose(text, 3)
    with torch.no_grad():
        logits = model(torch.cat([text, proposal.tokens], dim=1)).logits[:, 5:8]
    torch.testing.assert_close(proposal.probs, logits.softmax(-1), atol=1e-5, rtol=1e-4)


def test_padded_vocabularies():
    text = prompt(6, vocab_size=60)
    for size in (60, 72):
        draft = ModelDrafter(make_model(vocab_size=size))
        proposal = draft.start(SAMPLED).propose(text, 3)
        assert proposal.probs.shape == (1, 3, 64)
        torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(1, 3))
        assert proposal.probs[..., 60:].sum() == 0 or size == 72


def test_model_stops_at_its_context():
    session = ModelDrafter(make_model()).start(GREEDY)  # 256 positions
    assert session.propose(torch.full((1, 254), 5), 4).tokens.shape == (1, 2)
    session.observe(2)
    assert session.propose(torch.full((1, 257), 5), 4).tokens.shape == (1, 0)


def test_noisy_copy_is_not_the_model(llama):
    assert not torch.equal(noisy_copy(llama).lm_head.weight, llama.lm_head.weight)


def grown(drafter, text: list[int], shape) -> tuple[list[list[int]], int]:
    """The paths of a proposal down to its leaves, in the tokens' own words, and its number of drafts."""
    proposal = drafter.start(GREEDY).propose_tree(torch.tensor([text]), shape)
    tokens, tree = proposal.tokens[0].tolist(), proposal.tree
    leaves = [node for node, children in enumerate(tree.children) if node and not children]
    return [[tokens[node - 1] for node in tree.path(leaf)] for leaf in leaves], len(tokens)


TWICE = [1, 2, 30, 31, 32, 9, 1, 2, 40, 41, 9, 1, 2, 30, 33, 8, 1, 2]  # 1 2 was followed by 30 31, 40 41 and 30 33


def test_a_lookup_tree_has_what_followed_each_match():
    paths, _ = grown(LookupDrafter(), TWICE, Dynamic(16, 2))
    assert sorted(paths) == [[30, 31], [30, 33], [40, 41]]
    assert grown(LookupDrafter(), TWICE, Dynamic(2, 2)) == ([[30, 33]], 2), "the latest has the first claim"
    assert grown(LookupDrafter(), TWICE, Static((1, 2))) == ([[30, 33], [30, 31]], 3)
    assert grown(LookupDrafter(), [1, 2, 3], Dynamic(4, 4)) == ([], 0)


def test_a_suffix_tree_has_what_followed_most_often():
    drafter = SuffixDrafter(min_probability=0.1)
    assert grown(drafter, TWICE, Dynamic(2, 2)) == ([[30], [40]], 2), (
        "two of three, one of three; 30 31 has a third, too"
    )
    paths, _ = grown(drafter, TWICE, Dynamic(16, 2))
    assert sorted(paths) == [[30, 31], [30, 33], [40, 41]]
    assert grown(drafter, TWICE, Static((1, 1)))[1] == 2
    assert grown(SuffixDrafter(min_probability=0.5), TWICE, Dynamic(16, 2))[0] == [[30]]
