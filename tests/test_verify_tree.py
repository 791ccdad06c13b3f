"""The rules for drawn trees: exact laws by enumeration, and variants broken on purpose that the same tests must catch."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verify import GAMMA, V, complete, contexts, error_against_target

from specplug import tree as trees
from specplug import verify, verify_tree
from specplug.tree import Tree
from specplug.verify import Step, verify_walk
from specplug.verify_tree import Drawn, Odds, acceptance, rejected, verify_recursive, verify_traversal

LENGTH = GAMMA + 1  # of the texts that laws are about


class Undecided(Exception):
    """The rule asks for something random that was not written down for it."""


class Written:
    """Everything random that one run meets, as it was written down, in the order in which it is asked for."""

    def __init__(self, choices):
        self.left = list(choices)

    def choose(self, chances):
        if not self.left:
            raise Undecided([float(each) for each in chances])
        return self.left.pop(0)


def law_of(p_and_q, make, rule, replacement=False):
    """Exact law of the first LENGTH tokens, nothing sampled: each token of the tree, each coin and each draw has its chance.

    `make`: (written, draw_token) -> the tree. Broken on purpose with `replacement`: siblings may be equal.
    """
    law: dict[tuple[int, ...], float] = {}

    def run(written):
        text_of, tokens = {0: ()}, {}

        def draw_token(node, parent, siblings):
            """The token of a node, drawn behind its parent's path without the tokens of its siblings."""
            if node not in tokens:
                left = p_and_q[text_of[parent]][1].clone()
                if not replacement:
                    left[[tokens[each] for each in siblings]] = 0
                tokens[node] = written.choose(left / left.sum())
                text_of[node] = (*text_of[parent], tokens[node])
            return tokens[node]

        drawn = make(draw_token, text_of, p_and_q)
        steps = [*rule(drawn, lambda chance: bool(written.choose([1 - chance, chance])), written.choose)]
        return tuple(step.token for step in steps)

    def explore(choices, weight):
        try:
            text = run(Written(choices))
        except Undecided as undecided:
            for choice, chance in enumerate(undecided.args[0]):
                if chance > 0:
                    explore((*choices, choice), weight * chance)
        else:
            complete(p_and_q, law, text, weight)

    explore((), 1.0)
    return law


def static(parents, at=lambda node: node):
    """A tree of one shape, its tokens drawn when they are first looked at. `at`: the node whose q is handed out."""
    tree = Tree(parents)

    def make(draw_token, text_of, p_and_q):
        def token(node):
            parent = tree.parents[node]
            before = tree.children[parent][: tree.children[parent].index(node)]
            return draw_token(node, parent, before)

        return Drawn(
            tree.children,
            token,
            lambda node: p_and_q[text_of[node]][0],
            lambda node: p_and_q[text_of[at(node)]][1],
        )

    return make


SHAPES = {
    "chain of 3": [0, 1, 2],
    "3 siblings": [0, 0, 0],
    "2 x 2": [0, 0, 1, 1, 2, 2],
    "uneven": [0, 0, 2, 2],
}
RULES = {"recursive": verify_recursive, "traversal": verify_traversal}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_the_law_of_the_target(rule, shape):
    p_and_q = contexts(2)
    assert error_against_target(law_of(p_and_q, static(SHAPES[shape]), RULES[rule]), p_and_q) < 1e-12


def grown(draw_token, text_of, p_and_q, choose_by_token=False):
    """A tree whose second level depends on the tokens and the q of its first: nodes are given out by `trees.shares`.

    Broken on purpose with `choose_by_token`: of the siblings drawn, the likelier is put first and looked at first.
    """
    first = [draw_token(1, 0, []), draw_token(2, 0, [1])]
    q = p_and_q[()][1]
    order = [1, 2]
    if choose_by_token and q[first[1]] > q[first[0]]:
        order = [2, 1]
    behind = torch.stack([p_and_q[text_of[node]][1] for node in (1, 2)])
    counts = trees.shares(q[first], behind, 2)
    children, node = {0: order, 1: [], 2: []}, 3
    for parent, count in zip((1, 2), counts, strict=True):
        for _ in range(count):
            draw_token(node, parent, children[parent])
            children[parent].append(node)
            children[node] = []
            node += 1
    return Drawn(
        children,
        lambda node: draw_token(node, None, None),
        lambda node: p_and_q[text_of[node]][0],
        lambda node: p_and_q[text_of[node]][1],
    )


@pytest.mark.parametrize("rule", RULES)
def test_trees_that_grow_by_what_was_drawn_have_the_law_of_the_target(rule):
    p_and_q = contexts(3)
    assert error_against_target(law_of(p_and_q, grown, RULES[rule]), p_and_q) < 1e-12


def broken(name, replacement):
    """The rules with one function of theirs in the place of the right one."""

    def with_it(rule):
        def run(*arguments):
            before = getattr(verify_tree, name)
            setattr(verify_tree, name, replacement)
            try:
                yield from list(rule(*arguments))
            finally:
                setattr(verify_tree, name, before)

        return run

    return with_it


def target_unchanged(at, token):
    return rejected(at, token)._replace(target=at.target)


def no_clamp(at, token):
    left = (at.weight * at.target - at.draft).abs()
    return rejected(at, token)._replace(target=left / left.sum())


def draft_unchanged(at, token):
    return rejected(at, token)._replace(draft=at.draft)


def weight_unchanged(at, token):
    return rejected(at, token)._replace(weight=at.weight)


def left_by_the_whole_target(at, token):
    """As if the path were kept for certain: the residual of the token rule."""
    return rejected(at, token)._replace(target=rejected(Odds(torch.ones_like(at.weight), *at[1:]), token).target)


def without_clamp_at_one(at, token):
    return (
        at.weight * at.target[token] / at.draft[token] if at.target[token] * at.weight < at.draft[token] else at.weight
    )


BROKEN = {
    "residual is p": broken("rejected", target_unchanged),
    "residual without clamping": broken("rejected", no_clamp),
    "q of a sibling that was drawn without the one before": broken("rejected", draft_unchanged),
}
BROKEN_TRAVERSAL = {
    "weight as it was": broken("rejected", weight_unchanged),
    "residual of the token rule": broken("rejected", left_by_the_whole_target),
    "a child has its parent's weight at most": broken("acceptance", without_clamp_at_one),
}
TREE = [0, 0, 1]  # two siblings, and a child of the first


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("rule", RULES)
def test_broken_rules_are_caught(rule, name):
    p_and_q = contexts(0)
    assert error_against_target(law_of(p_and_q, static(TREE), BROKEN[name](RULES[rule])), p_and_q) > 1e-4


@pytest.mark.parametrize("name", BROKEN_TRAVERSAL)
def test_broken_weights_are_caught(name):
    p_and_q = contexts(0)
    law = law_of(p_and_q, static(TREE), BROKEN_TRAVERSAL[name](verify_traversal))
    assert error_against_target(law, p_and_q) > 1e-4


def first_failure(tree, coin, draw):
    """A path is given up where its first node fails, and not judged as a whole."""

    def visit(node, weight):
        at = Odds(weight, tree.target(node), tree.draft(node) if tree.children[node] else tree.target(node))
        for child in tree.children[node]:
            inside = acceptance(at, tree.token(child))
            if coin(inside):
                return [Step(node, tree.token(child), True), *visit(child, inside)]
            at = rejected(at, tree.token(child))
        return [Step(node, draw(at.target), False)]

    return visit(0, torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("rule", RULES)
def test_trees_that_are_not_what_they_say_are_caught(rule):
    p_and_q = contexts(0)
    with_replacement = law_of(p_and_q, static(TREE), RULES[rule], replacement=True)
    assert error_against_target(with_replacement, p_and_q) > 1e-4, "siblings drawn with replacement"
    of_the_parent = law_of(p_and_q, static(TREE, at=lambda node: 0), RULES[rule])
    assert error_against_target(of_the_parent, p_and_q) > 1e-4, "q of the wrong node"
    likelier_first = law_of(p_and_q, functools.partial(grown, choose_by_token=True), RULES[rule])
    assert error_against_target(likelier_first, p_and_q) > 1e-4, "siblings in an order of their own"


def test_stopping_at_the_first_failure_is_caught():
    p_and_q = contexts(0)
    assert error_against_target(law_of(p_and_q, static(TREE), first_failure), p_and_q) > 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_walk_has_the_law_of_the_target_on_likeliest_tokens(seed):
    """Trees that were not drawn: the two likeliest tokens at each place."""
    p_and_q = contexts(seed)
    law: dict[tuple[int, ...], float] = {}
    parents = SHAPES["2 x 2"]
    texts, tokens = {0: ()}, []
    for node, parent in enumerate(parents, start=1):
        place = Tree(parents).children[parent].index(node)
        tokens.append(int(p_and_q[texts[parent]][1].topk(2).indices[place]))
        texts[node] = (*texts[parent], tokens[-1])
    children = Tree(parents).by_token(tokens)

    def explore(choices, weight):
        written = Written(choices)
        try:
            text = tuple(
                step.token for step in verify_walk(children, lambda node: written.choose(p_and_q[texts[node]][0]))
            )
        except Undecided as undecided:
            for choice, chance in enumerate(undecided.args[0]):
                if chance > 0:
                    explore((*choices, choice), weight * chance)
        else:
            complete(p_and_q, law, text, weight)

    explore((), 1.0)
    assert error_against_target(law, p_and_q) < 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_traversal_of_a_chain_is_the_block_rule(seed):
    """All chances and weights are those of `block_acceptance`, and so is what is drawn in the end."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, 4, 5, generator=generator, dtype=torch.float64) ** 3
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    if seed == 0:
        p[0] = q[0]
    tokens = torch.randint(0, 5, (1, 3), generator=generator)
    chance, weight = (each[0] for each in verify.block_acceptance(tokens, q[None, :3], p[None]))
    for kept in range(4):  # the coins of 3, 2, ... fail until that of `kept`
        asked, last = [], []

        def coin(probability, asked=asked, kept=kept):
            asked.append(probability.item())
            return len(asked) == 4 - kept

        def draw(probs, last=last):
            last.append(probs)
            return 0

        chain = Drawn(Tree([0, 1, 2]).children, lambda node: int(tokens[0, node - 1]), p.__getitem__, q.__getitem__)
        steps = verify_traversal(chain, coin, draw)
        assert len(steps) == kept + 1
        assert asked == pytest.approx(chance.flip(0)[: len(asked)].tolist(), abs=1e-12)
        left = p[3] if kept == 3 else (weight[kept] * p[kept] - q[kept]).clamp(min=0)
        wanted = left / left.sum() if left.sum() > 1e-15 else p[kept]
        torch.testing.assert_close(last[0], wanted)


def mean_kept(p, q, parents, rule):
    """Expected drafts kept, p and q the same everywhere; by enumeration."""
    total = 0.0

    def explore(choices, weight):
        nonlocal total
        written = Written(choices)
        tree, tokens = Tree(parents), {}

        def token(node):
            if node not in tokens:
                siblings = tree.children[tree.parents[node]]
                left = q.clone()
                left[[tokens[each] for each in siblings[: siblings.index(node)]]] = 0
                tokens[node] = written.choose(left / left.sum())
            return tokens[node]

        try:
            drawn = Drawn(tree.children, token, lambda _: p, lambda _: q)
            steps = [*rule(drawn, lambda chance: bool(written.choose([1 - chance, chance])), lambda _: 0)]
        except Undecided as undecided:
            for choice, chance in enumerate(undecided.args[0]):
                if chance > 0:
                    explore((*choices, choice), weight * chance)
        else:
            total += weight * (len(steps) - 1)

    explore((), 1.0)
    return total


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_keeps_more_than_a_chain_and_traversal_more_than_recursion(seed):
    """No theorem for all trees: these four, and the known gain of the paper's example on a chain."""
    p, q = torch.rand(2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 2 + 1e-3
    p, q = p / p.sum(), q / q.sum()
    chain, tree = mean_kept(p, q, [0, 1], verify_traversal), mean_kept(p, q, TREE, verify_traversal)
    assert tree > chain
    assert tree >= mean_kept(p, q, TREE, verify_recursive) - 1e-12
    p, q = torch.tensor([[1 / 3, 2 / 3], [2 / 3, 1 / 3]], dtype=torch.float64)
    assert mean_kept(p, q, [0, 1], verify_traversal) == pytest.approx(11 / 9, abs=1e-12)
    assert mean_kept(p, q, [0, 1], verify_recursive) == pytest.approx(10 / 9, abs=1e-12)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(RULES)), st.sampled_from([torch.float32, torch.float64]))
def test_no_nan_and_no_impossible_token(seed, rule, dtype):
    """Logits of bf16 with masks of -inf, ties and single tokens; three siblings of which there may be fewer."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(2, 13, 6, generator=generator) * 30).bfloat16().to(dtype)
    logits[0].masked_fill_(torch.rand(13, 6, generator=generator) < 0.5, float("-inf"))
    logits[1].masked_fill_(torch.rand(13, 6, generator=generator) < 0.4, float("-inf"))
    logits[..., 0] = 0.0
    if seed % 3 == 0:
        logits[0] = logits[1]
    p, q = logits.softmax(-1)
    parents, tokens = [], []
    for node in (0, 1, 2):  # two levels
        if node > len(parents):
            break
        race = q[node] / torch.empty(6, dtype=dtype).exponential_(generator=generator)
        for token in trees.best(race[None], [3])[0]:
            parents.append(node)
            tokens.append(token)
    tree = Tree(parents)
    drawn = Drawn(tree.children, lambda node: tokens[node - 1], p.__getitem__, q.__getitem__)

    def coin(chance):
        assert 0 <= chance <= 1
        return bool(torch.rand((), generator=generator) < chance)

    def draw(probs):
        assert torch.isfinite(probs).all()
        return int(verify.sample(probs[None], generator))

    steps = [*RULES[rule](drawn, coin, draw)]
    assert steps and not steps[-1].kept
    assert all(p[step.node, step.token] > 0 for step in steps)


def test_equal_distributions_keep_the_first_path():
    p = torch.rand(7, V, generator=torch.Generator().manual_seed(0)).softmax(-1)
    tree, tokens = Tree(SHAPES["2 x 2"]), [1, 2, 0, 1, 2, 3]
    for rule in RULES.values():
        for _ in range(30):
            drawn = Drawn(tree.children, lambda node: tokens[node - 1], p.__getitem__, p.__getitem__)
            steps = [*rule(drawn, lambda chance: bool(torch.rand(()) < chance), lambda _: 0)]
            assert [step.node for step in steps] == [0, 1, 3]
