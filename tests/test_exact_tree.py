"""Trees of drafts in `generate`: greedy ids are those of plain `generate`, samples have its law, and the caches follow."""

import copy
import functools

import pytest
import torch
from conftest import EOS, make_model, noisy_copy, prompt
from scipy.stats import chisquare
from test_exact_greedy import PROCESSORS
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

import specplug
from specplug import cache as caches
from specplug.cache import NAME
from specplug.drafters import Request
from specplug.drafters.model import ModelDrafter
from specplug.schedule import AdaptiveSchedule
from specplug.tree import Dynamic, Static, Tree
from specplug.tree_pass import tree_inputs, why_not_tree

TREES = {"static": [3, 2, 1], "dynamic": Dynamic(8, 4)}
NEW = 30
_pairs: dict[str, tuple] = {}


def pair(kind: str):
    if kind not in _pairs:
        target = make_model(kind)
        _pairs[kind] = (target, noisy_copy(target, scale=0.06))
    return _pairs[kind]


def both(target, draft, ids, tree=TREES["static"], verify="block", **arguments):
    arguments = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **arguments}
    plain = target.generate(ids, **arguments)
    with specplug.attach(target, draft, tree=tree, verify=verify, engine="rounds") as plugin:
        ours = target.generate(ids, **arguments)
    return plain, ours, plugin.last


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    "kind, processors", [*(("llama", each) for each in PROCESSORS), ("gpt2", "none"), ("gpt2", "everything")]
)
def test_greedy_ids_are_those_of_plain_generate(kind, processors, tree):

    target, draft = pair(kind)
    extra = dict(PROCESSORS[processors], output_scores=True, output_logits=True)
    plain, ours, last = both(target, draft, prompt(seed=1), TREES[tree], **extra)
    assert last.engine == "rounds" and "chains" not in last.reason
    assert torch.equal(plain.sequences, ours.sequences)
    for name in ("scores", "logits"):
        wanted, found = torch.cat(getattr(plain, name)), torch.cat(getattr(ours, name))
        assert wanted.shape == found.shape
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("drafter", ["model", "lookup", "suffix", "chain", "early exit"])
@pytest.mark.parametrize("tree", TREES)
def test_every_drafter(tree, drafter):
    from specplug.drafters.early_exit import EarlyExitDrafter

    target, model = pair("llama")
    draft = {"model": model, "chain": ["suffix", model], "early exit": EarlyExitDrafter(target, 1)}.get(
        drafter, drafter
    )
    kept = nodes = 0
    for seed in range(3):
        ids = torch.cat([prompt(6, seed), prompt(5, seed + 50), prompt(6, seed), prompt(2, 9), prompt(6, seed)], dim=1)
        plain, ours, last = both(target, draft, ids, TREES[tree], max_new_tokens=40)
        assert torch.equal(plain.sequences, ours.sequences)
        kept, nodes = kept + last.num_accepted, nodes + last.num_draft_tokens
        assert max(last.drafted) <= 4 and last.num_draft_tokens <= last.num_rounds * 15
    assert nodes > 0 and (kept > 0 or drafter == "early exit")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_left_padding_and_either_attention(implementation):
    target, draft = make_model("llama", attn_implementation=implementation), pair("llama")[1]
    ids = torch.cat([torch.zeros((1, 3), dtype=torch.long), prompt()], dim=1)
    mask = torch.cat([torch.zeros((1, 3), dtype=torch.long), torch.ones((1, 7), dtype=torch.long)], dim=1)
    plain, ours, last = both(target, draft, ids, attention_mask=mask)
    assert torch.equal(plain.sequences, ours.sequences) and last.num_accepted > 0


class Chunks(BaseStreamer):
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen += value.flatten().tolist()

    def end(self):
        self.seen.append("end")


@pytest.mark.parametrize("new", [1, 2, 3, 17])
def test_ends_where_plain_generate_ends(new):
    target, draft = pair("llama")
    for eos in (EOS, [5, 9, 23, 40]):
        streams = [Chunks(), Chunks()]
        plain = target.generate(prompt(), max_new_tokens=new, do_sample=False, eos_token_id=eos, streamer=streams[0])
        with specplug.attach(target, draft, tree=[3, 2, 1]):
            ours = target.generate(prompt(), max_new_tokens=new, do_sample=False, eos_token_id=eos, streamer=streams[1])
        assert torch.equal(plain, ours) and streams[0].seen == streams[1].seen


@pytest.mark.parametrize("new", [9, 10, 11, 12])
def test_the_cache_is_the_one_of_plain_generate(new):
    """However the last round ends; and so it is the one that chains leave."""
    target, draft = pair("llama")
    for tree in TREES.values():
        plain, ours, _ = both(target, draft, prompt(), tree, max_new_tokens=new)
        for one, other in zip(plain[NAME].layers, ours[NAME].layers, strict=True):
            torch.testing.assert_close(one.keys, other.keys, atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(one.values, other.values, atol=1e-4, rtol=1e-3)


def test_after_a_pass_the_path_alone_is_kept():
    target, _ = pair("llama")
    ids = prompt(6)
    drafts = [20, 30, 40, 41, 50]
    tree = Tree([0, 0, 2, 2, 4])  # 30 -> 41 -> 50 is a path
    cache, chain = DynamicCache(config=target.config), DynamicCache(config=target.config)
    with torch.no_grad():
        for each in (cache, chain):
            target(ids[:, :-1], use_cache=True, **{NAME: each})
        given = {"input_ids": torch.cat([ids[:, -1:], torch.tensor([drafts])], dim=1), "use_cache": True, NAME: cache}
        in_tree = target(**tree_inputs(given, tree, target.dtype)).logits
        path = torch.cat([ids[:, -1:], torch.tensor([[30, 41, 50]])], dim=1)
        one_by_one = target(path, use_cache=True, **{NAME: chain}).logits
    torch.testing.assert_close(in_tree[:, [0, 2, 4, 5]], one_by_one, atol=1e-4, rtol=1e-3)
    caches.keep(cache, 6, [0, 2, 4])
    caches.crop(chain, 1)
    for one, other in zip(cache.layers, chain.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(one.values, other.values, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("shape", [Static((2, 2, 2)), Dynamic(6, 3)])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_drafts_own_cache_follows(shape, sampled):
    """Whatever was kept of a proposal, the next one is that of a session that has only seen the text."""
    _, draft = pair("llama")
    request = Request(sampled, LogitsProcessorList(), 64, tree=True)
    session, text = ModelDrafter(draft).start(request), prompt(6)
    for number in range(5):
        fresh = ModelDrafter(draft).start(request)
        proposals = []
        for each in (session, fresh):
            torch.manual_seed(number)
            proposals.append(each.propose_tree(text, shape))
        assert torch.equal(proposals[0].tokens, proposals[1].tokens)
        assert proposals[0].tree.parents == proposals[1].tree.parents
        if sampled:
            torch.testing.assert_close(proposals[0].probs, proposals[1].probs, atol=1e-5, rtol=1e-4)
        tree, tokens = proposals[0].tree, proposals[0].tokens[0].tolist()
        leaf = [node for node in range(len(tokens) + 1) if not tree.children[node]][number % 3]
        path = tree.path(leaf)[: number % 4]
        session.observe_path(path)
        text = torch.cat([text, torch.tensor([[*(tokens[node - 1] for node in path), 33]])], dim=1)


def test_drafts_are_the_likeliest_paths():
    """A dynamic tree against all paths of its depth, by the draft's own probabilities, where no bound on breadth matters."""
    _, draft = pair("llama")
    text, shape = prompt(6), Dynamic(3, 2)
    proposal = ModelDrafter(draft).start(Request(False, LogitsProcessorList(), 64, tree=True)).propose_tree(text, shape)
    with torch.no_grad():
        first = draft(text).logits[0, -1].softmax(-1)
        likely = first.topk(2).indices.tolist()
        behind = {
            one: draft(torch.cat([text, torch.tensor([[one]])], dim=1)).logits[0, -1].softmax(-1) for one in likely
        }
    paths = {(one,): first[one].item() for one in likely}
    paths |= {(one, two): first[one].item() * behind[one][two].item() for one in likely for two in range(64)}
    wanted = sorted(paths, key=paths.__getitem__, reverse=True)[:3]
    tokens = proposal.tokens[0].tolist()
    found = [tuple(tokens[node - 1] for node in proposal.tree.path(each)) for each in (1, 2, 3)]
    assert found == wanted


@pytest.fixture(scope="module")
def small():
    """A target of 8 tokens, a prompt, and the exact law of the second and third token behind it."""
    target, ids = make_model("llama", vocab_size=8, seed=3), torch.tensor([[3, 4, 5, 3, 4, 6, 3, 4, 7, 5, 3, 4]])
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.1), TemperatureLogitsWarper(1.5)])
    texts, weights = ids, torch.ones(1)
    with torch.no_grad():
        for _ in range(3):
            probs = processors(texts, target(texts).logits[:, -1]).softmax(-1)  # (N, 8)
            weights = (weights[:, None] * probs).flatten()
            texts = torch.cat([texts.repeat_interleave(8, 0), torch.arange(8).repeat(len(texts))[:, None]], dim=1)
    return target, ids, weights.reshape(8, 64).sum(0)


LAWS = [
    ("model", "token", [2, 2]),
    ("model", "block", [2, 2]),
    ("model", "block", Dynamic(5, 2)),
    ("model", "walk", Dynamic(5, 2)),
    ("lookup", "block", [2, 2]),
]


@pytest.mark.parametrize("drafter, verify, tree", LAWS)
def test_sampled_tokens_have_the_law_of_the_target(small, drafter, verify, tree):
    """Second and third token, which come from the same tree when the first of them is kept; 200 samples. False alarm: 1e-5 a
    test."""
    target, ids, law = small
    draft = noisy_copy(target, scale=0.15) if drafter == "model" else "lookup"
    counts = torch.zeros(64)
    torch.manual_seed(5)
    arguments = dict(
        do_sample=True, temperature=1.5, top_k=0, repetition_penalty=1.1, eos_token_id=None, pad_token_id=0
    )
    with specplug.attach(target, draft, tree=tree, verify=verify, engine="rounds") as plugin:
        for _ in range(200):
            tokens = target.generate(ids, max_new_tokens=4, **arguments)[0, -3:].tolist()
            counts[8 * tokens[0] + tokens[1]] += 1
    assert plugin.stats.num_accepted > 0
    often = law * 200 >= 5
    seen = torch.cat([counts[often], counts[~often].sum()[None]])
    wanted = torch.cat([law[often], law[~often].sum()[None]]) * 200
    assert chisquare(seen, wanted / wanted.sum() * 200).pvalue > 1e-5


@pytest.mark.parametrize("drafter", ["model", "lookup"])
@pytest.mark.parametrize("tree", TREES)
def test_walk_gives_the_ids_of_plain_sampling(tree, drafter):
    target, draft = pair("llama")
    kept = 0
    for seed in range(4):
        ids = torch.cat([prompt(6, seed), prompt(2, 9), prompt(6, seed)], dim=1)
        arguments = dict(max_new_tokens=25, do_sample=True, temperature=0.8, repetition_penalty=1.1)
        torch.manual_seed(seed)
        plain = target.generate(ids, **arguments)
        torch.manual_seed(seed)
        with specplug.attach(
            target, draft if drafter == "model" else "lookup", tree=TREES[tree], verify="walk"
        ) as plugin:
            ours = target.generate(ids, **arguments)
            seeded = target.generate(ids, specplug={"seed": 4}, **arguments)
            assert plugin.last.engine == "rounds"
        with specplug.attach(target, "lookup", gamma=0):
            assert torch.equal(target.generate(ids, specplug={"seed": 4}, **arguments), seeded)
        assert torch.equal(plain, ours)
        kept += plugin.stats.num_accepted
    assert kept > 0 or drafter == "lookup"


def test_a_processor_with_a_state_is_asked_once_a_token_when_sampling():
    """Traversal looks ahead, so such a call goes by recursive rejection; here the mask leaves one token, known ahead."""
    target, draft = pair("llama")
    forced = dict(prefix_allowed_tokens_fn=lambda _, ids: [3 + len(ids) % 5], do_sample=True, max_new_tokens=12)
    with specplug.attach(target, draft, tree=[2, 1], engine="rounds"):
        ours = target.generate(prompt(), **forced)
    assert torch.equal(ours, target.generate(prompt(), **forced))


def test_calls_that_cannot_have_trees_draft_chains_and_say_so(caplog):
    target, draft = pair("llama")
    ids = torch.cat([prompt(seed=0), prompt(seed=1)])
    with specplug.attach(target, draft, tree=[3, 2, 1]) as plugin:
        ours = target.generate(ids, max_new_tokens=12, do_sample=False)
        assert "chains, not trees: a batch" in plugin.last.reason and max(plugin.last.drafted) == 3
        target.generate(ids, max_new_tokens=2, do_sample=False)
        assert caplog.text.count("drafting chains, not trees") == 1
    assert torch.equal(ours, target.generate(ids, max_new_tokens=12, do_sample=False))
    with (
        specplug.attach(target, draft, tree=[2], engine="rounds"),
        pytest.raises(ValueError, match="cannot draft trees"),
    ):
        target.generate(ids, max_new_tokens=2)


def test_targets_and_drafts_without_trees():
    mistral, _ = pair("mistral")
    llama, draft = pair("llama")
    assert "do not attend to all of the text" in why_not_tree(mistral)
    assert why_not_tree(llama) is None
    with specplug.attach(mistral, draft, tree=[2, 1]) as plugin:
        ours = mistral.generate(prompt(), max_new_tokens=12, do_sample=False)
        assert "sliding window" in plugin.last.reason
    assert torch.equal(ours, mistral.generate(prompt(), max_new_tokens=12, do_sample=False))
    with pytest.raises(ValueError, match="the draft cannot draft trees"):
        specplug.attach(llama, mistral, tree=[2, 1])

    class Phrases:
        name, costs_nothing = "phrases", True

        def start(self, request):
            raise AssertionError

    with pytest.raises(ValueError, match="phrases drafts no trees"):
        specplug.attach(llama, Phrases(), tree=[2, 1])


def test_a_model_that_does_not_heed_its_mask_is_found_out(monkeypatch):
    target = make_model("llama", seed=7)
    forward = type(target).forward

    def deaf(self, *args, attention_mask=None, position_ids=None, **kwargs):
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(target), "forward", deaf)
    assert "does not heed" in why_not_tree(target)

    def refuses(self, *args, attention_mask=None, position_ids=None, **kwargs):
        if attention_mask is not None:
            raise RuntimeError("no mask, please")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(target), "forward", refuses)
    assert "no mask, please" in why_not_tree(make_model("llama", seed=7))


def test_values_that_contradict_each_other():
    llama, draft = pair("llama")
    with pytest.raises(ValueError, match="gamma and tree both"):
        specplug.attach(llama, draft, gamma=2, tree=[2])
    with pytest.raises(ValueError, match="engine=lookahead drafts no trees"):
        specplug.attach(llama, draft, tree=[2], engine="lookahead")
    with pytest.raises(ValueError, match="tree="):
        specplug.attach(llama, draft, tree=[0])


def test_the_adaptive_schedule_chooses_sizes():
    target, draft = pair("llama")
    schedule = AdaptiveSchedule(max_gamma=12, tree_depth=4)
    with specplug.attach(target, draft, schedule=schedule, engine="rounds") as plugin:
        ours = target.generate(prompt(), max_new_tokens=60, do_sample=False)
    assert torch.equal(ours, target.generate(prompt(), max_new_tokens=60, do_sample=False))
    assert max(plugin.last.drafted) <= 4 and plugin.last.num_draft_tokens > 0


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_traced_call_shows_the_path(do_sample):
    target, draft = pair("llama")
    for tree in TREES.values():
        with specplug.attach(target, draft, tree=tree) as plugin:
            plugin.trace = specplug.trace.Trace()
            output = target.generate(
                prompt(), max_new_tokens=25, do_sample=do_sample, temperature=1.2 if do_sample else None
            )
            plugin.trace.finish(output[0, 7:].tolist())
        assert plugin.trace.tokens == output[0, 7:].tolist()
        drafts = [each for one in plugin.trace.rounds for each in one.drafts]
        assert sum(each.decision == "accepted" for each in drafts) == plugin.last.num_accepted
        assert all(each.p is not None for each in drafts)


def test_a_draft_with_a_shorter_context_stops_in_time():
    target = pair("llama")[0]
    draft = copy.deepcopy(target)
    draft.config.max_position_embeddings = 16
    for tree in TREES.values():
        plain, ours, last = both(target, draft, prompt(), tree)
        assert torch.equal(plain.sequences, ours.sequences)
        assert last.drafted[0] > 0 and max(last.drafted) > 1


def test_a_draft_that_fails_is_done_without(caplog, monkeypatch):
    target, draft = pair("llama")
    right, calls = type(draft).forward, []

    @functools.wraps(right)
    def fails(self, *args, **kwargs):
        calls.append(self)
        if self is draft and sum(each is draft for each in calls) == 8:
            raise RuntimeError("out of memory")
        return right(self, *args, **kwargs)

    why_not_tree(draft), why_not_tree(target)  # tried out before
    monkeypatch.setattr(type(draft), "forward", fails)
    plain, ours, last = both(target, draft, prompt())
    assert torch.equal(plain.sequences, ours.sequences)
    assert "going on without it: out of memory" in caplog.text and last.drafted[0] > 0
