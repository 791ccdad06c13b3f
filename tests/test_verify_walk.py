"""The walk rule: its exact law by enumeration, and variants broken on purpose that the same test must catch."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verify import GAMMA, V, complete, contexts, error_against_target

from specplug import verify
from specplug.verify import Step, chain, verify_walk


def apart(p, q):
    """Joint law (V, V) of the target's draw and the draft: as if neither knew of the other."""
    return p[:, None] * q


def shared(p, q):
    """The same where both look up one uniform number in their cumulative distributions: each step of the draft's
    randomness is one of the target's."""
    joint = torch.zeros(V, V, dtype=torch.float64)
    bounds_p = torch.cat([torch.zeros(1, dtype=torch.float64), p.cumsum(0)])
    bounds_q = torch.cat([torch.zeros(1, dtype=torch.float64), q.cumsum(0)])
    for x in range(V):
        for y in range(V):
            overlap = torch.minimum(bounds_p[x + 1], bounds_q[y + 1]) - torch.maximum(bounds_p[x], bounds_q[y])
            joint[x, y] = overlap.clamp(min=0)
    return joint


def turned(p, q):
    """The same with the draft's tokens in the opposite order: also tied to the target's draw, in another way."""
    return shared(p, q.flip(0)).flip(1)


COUPLINGS = {"apart": apart, "shared": shared, "turned": turned}


class AsksAgain(Exception):
    """The rule draws once more than was written down for it."""


def law_of_walk(p_and_q, coupling, rule=verify_walk):
    """Exact law of the first GAMMA + 1 tokens; nothing is sampled. What a round leaves open is filled from p.

    Every draft sequence has its probability, and every draw of the target its probability given the draft at its place.
    """
    law: dict[tuple[int, ...], float] = {}

    def chances(drafts, node):
        """Of each token, for a draw at this node."""
        p, q = p_and_q[drafts[:node]]
        if node == GAMMA:
            return p.tolist()
        return (coupling(p, q)[:, drafts[node]] / q[drafts[node]]).tolist()

    def explore(drafts, written, weight):
        """Run the rule with these draws; if it asks for one more, with each that may come."""
        left = list(written)

        def draw(node):
            if not left:
                raise AsksAgain(node)
            return left.pop(0)

        try:
            text = tuple(step.token for step in rule(chain(drafts), draw))
        except AsksAgain as more:
            for token, chance in enumerate(chances(drafts, more.args[0])):
                if chance:
                    explore(drafts, (*written, token), weight * chance)
        else:
            complete(p_and_q, law, text, weight)

    for drafts in itertools.product(range(V), repeat=GAMMA):
        drawn = 1.0
        for i, token in enumerate(drafts):
            drawn *= p_and_q[drafts[:i]][1][token].item()
        if drawn:
            explore(drafts, (), drawn)
    return law


@pytest.mark.parametrize("name", COUPLINGS)
@pytest.mark.parametrize("seed", range(3))
def test_walk_rule_has_the_law_of_the_target(seed, name):
    p_and_q = contexts(seed)
    assert error_against_target(law_of_walk(p_and_q, COUPLINGS[name]), p_and_q) < 1e-12


def test_the_couplings_are_what_they_say():
    for p, q in contexts(0).values():
        for coupling in COUPLINGS.values():
            joint = coupling(p, q)
            torch.testing.assert_close(joint.sum(1), p)
            torch.testing.assert_close(joint.sum(0), q)


def says_the_draft(children, draw):
    """Tests the draft against a draw, and then says the draft all the same."""
    for node, token, kept in verify_walk(children, draw):
        yield Step(node, next(iter(children[node]), token), kept)


def draws_again(children, draw):
    """At a miss, a second draw, as the residual is one for other rules."""
    for node, token, kept in verify_walk(children, draw):
        yield Step(node, token if kept or not children[node] else draw(node), kept)


def one_place_late(children, draw):
    """Each token is drawn where the one before it was."""
    yield from verify_walk(children, lambda node: draw(max(node - 1, 0)))


def goes_on_after_a_miss(children, draw):
    """Later tokens are drawn behind the draft, and not behind what was said."""
    for node in range(len(children)):
        token = draw(node)
        yield Step(node, token, token in children[node])


def two_tries(children, draw):
    """The draft is kept if either of two draws is it."""
    node = 0
    while node is not None:
        first, second = draw(node), draw(node)
        token = second if second in children[node] else first
        yield Step(node, token, token in children[node])
        node = children[node].get(token)


BROKEN = [says_the_draft, draws_again, one_place_late, goes_on_after_a_miss, two_tries]


@pytest.mark.parametrize("rule", BROKEN)
def test_broken_rules_are_caught(rule):
    p_and_q = contexts(0)
    assert error_against_target(law_of_walk(p_and_q, apart, rule), p_and_q) > 1e-4


def test_nothing_is_drawn_before_it_is_asked_for():
    """A call that stops at an accepted token has used no random number for the next one."""
    asked = []

    def draw(node):
        asked.append(node)
        return 7

    walk = verify_walk(chain([7, 7, 3]), draw)
    assert asked == []
    assert next(walk) == Step(0, 7, True) and asked == [0]
    assert [*walk] == [Step(1, 7, True), Step(2, 7, False)] and asked == [0, 1, 2]
    assert [*verify_walk(chain([]), draw)] == [Step(0, 7, False)]


def test_a_walk_goes_down_whatever_branches():
    """Two drafts for one place, each with one of its own behind it."""
    children = [{5: 1, 6: 2}, {5: 3}, {8: 4}, {}, {}]
    assert [*verify_walk(children, [6, 0, 8, 0, 2].__getitem__)] == [
        Step(0, 6, True),
        Step(2, 8, True),
        Step(4, 2, False),
    ]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_races_with_the_same_noise_agree_as_often_as_the_theory_says(seed):
    """Daliri et al. 2024, section 3: sum over i of 1 / sum over k of max(p_k / p_i, q_k / q_i); 20,000 races, 6 sigma.

    False alarm: below 2e-9 an example.
    """
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.rand(2, 5, generator=generator, dtype=torch.float64) ** 2 + 1e-3).unbind()
    p, q = p / p.sum(), q / q.sum()
    agree = sum(1 / torch.maximum(p / p[i], q / q[i]).sum() for i in range(5)).item()
    distance = (p - q).abs().sum().item() / 2
    assert (1 - distance) / (1 + distance) - 1e-12 <= agree <= 1 - distance + 1e-12
    noise = torch.empty(20_000, 5, dtype=torch.float64).exponential_(generator=generator)
    seen = (verify.race(p.expand(20_000, 5), noise) == verify.race(q.expand(20_000, 5), noise)).double().mean().item()
    assert abs(seen - agree) < 6 * (agree * (1 - agree) / 20_000) ** 0.5 + 1e-9


def test_a_race_refuses_what_is_no_distribution():
    """As torch.multinomial does: the argmax of a nan would be a token."""
    noise = torch.ones(1, 3)
    assert verify.sample_by(torch.tensor([[0.2, 0.8, 0.0]]), noise).tolist() == [1]
    for wrong in ([[0.5, float("nan"), 0.5]], [[0.0, 0.0, 0.0]]):
        with pytest.raises(RuntimeError, match="probability tensor"):
            verify.sample_by(torch.tensor(wrong), noise)
        with pytest.raises(RuntimeError):
            torch.multinomial(torch.tensor(wrong), 1)
