"""Several sequences in `rounds`: each row is plain generate's row, and the prompt alone; sampled rows have the law."""

import pytest
import torch
from conftest import EOS, PAD, noisy_copy, prompt
from laws import PROMPT, SETTINGS, TOKENS, V, arguments, counted, exact_law, has_the_law
from scipy.stats import chisquare
from test_exact_greedy import MODELS, PROCESSORS, pair
from transformers import DynamicCache, GenerationMixin

import specplug
from specplug.cache import NAME
from specplug.drafters import Proposal
from specplug.drafters.model import ModelDrafter

NEW = 30
ROWWISE = [name for name in PROCESSORS if name not in ("prefix allowed", "guidance")]


def padded(lengths, seed=0):
    texts = [prompt(length=n, seed=seed + n) for n in lengths]
    longest = max(lengths)
    ids = torch.cat([torch.nn.functional.pad(t, (longest - t.shape[1], 0), value=PAD) for t in texts])
    mask = torch.cat([torch.tensor([[0] * (longest - n) + [1] * n]) for n in lengths])
    return texts, {"input_ids": ids, "attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}


@pytest.mark.parametrize("drafter", ["model", "lookup"])
@pytest.mark.parametrize("processors", ROWWISE)
@pytest.mark.parametrize("kind", MODELS)
def test_rows_are_those_of_plain_generate(kind, processors, drafter):
    goal, draft = pair(kind)
    _, call = padded([3, 11, 7, 5])
    call |= PROCESSORS[processors]
    plain = goal.generate(**call)
    with specplug.attach(goal, draft if drafter == "model" else "lookup", engine="rounds", gamma=4) as plugin:
        assert torch.equal(goal.generate(**call), plain)
    assert plugin.last.engine == "rounds"
    if drafter == "model" and processors == "none":
        assert plugin.last.num_accepted > 20


@pytest.mark.parametrize("graph", ["capture", "off"])
def test_positions_and_types_of_the_callers_own(graph):
    """Rows at their own pace are given positions that count from 0, and no types: with others they advance together."""
    goal, draft = pair("gpt2")
    _, call = padded([7, 3, 6])
    usual = (call["attention_mask"].cumsum(1) - 1).clamp(min=0)
    own = {
        "positions": {"position_ids": usual + torch.tensor([[5], [0], [2]])},
        "types": {"token_type_ids": torch.arange(21).view(3, 7) % 13 + 5},
    }
    with specplug.attach(goal, draft, gamma=4, graph=graph) as plugin:
        for given in own.values():
            plain = goal.generate(**call, **given, specplug={"engine": "plain"})
            assert torch.equal(goal.generate(**call, **given), plain)
            assert plugin.last.engine == "lookahead" and "the batch has" in plugin.last.reason
        assert torch.equal(
            goal.generate(**call, position_ids=usual), goal.generate(**call, specplug={"engine": "plain"})
        )
    assert not torch.equal(goal.generate(**call, **own["positions"]), goal.generate(**call))


@pytest.mark.parametrize("graph", ["capture", "off"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_conversation_goes_on_from_the_callers_cache(kind, graph):
    """Rows leave the cache of a batch when they are finished, and a caller's has all of them."""
    goal, draft = pair(kind)
    _, call = padded([9, 9, 9])
    call["suppress_tokens"] = [PAD]  # which then tells what is behind the end of a row
    call["eos_token_id"] = goal.generate(**call, eos_token_id=None)[:2, 14].tolist()
    made = []
    for attached in (False, True):
        cache = DynamicCache(config=goal.config)
        with specplug.attach(goal, draft, gamma=4, graph=graph) as plugin:
            first = goal.generate(**call, **{NAME: cache}, specplug={"engine": "auto" if attached else "plain"})
            assert plugin.last.engine == ("rounds" if attached else "plain")
        mask = torch.nn.functional.pad((first[:, 9:] != PAD).long(), (9, 3), value=1)
        more = {"input_ids": torch.cat([first, prompt(3).repeat(3, 1)], dim=1), "attention_mask": mask}
        made.append(goal.generate(**(call | more), **{NAME: cache}))
    assert torch.equal(*made)


@pytest.mark.parametrize("kind", MODELS)
def test_a_row_is_the_prompt_alone(kind):
    goal, draft = pair(kind)
    texts, call = padded([4, 9, 6])
    with specplug.attach(goal, draft, engine="rounds", gamma=4):
        together = goal.generate(**call)
        longest = call["input_ids"].shape[1]
        for row, text in zip(together, texts, strict=True):
            alone = goal.generate(text, max_new_tokens=NEW, do_sample=False)[0, text.shape[1] :]
            new = row[longest : longest + len(alone)]
            assert torch.equal(new, alone) and (row[longest + len(alone) :] == PAD).all()


def test_each_row_has_its_own_pace_and_leaves_when_finished():
    """With a draft that is always right but for one row, that row alone needs a pass a token."""
    goal, _ = pair("llama")
    _, call = padded([5, 8])
    call |= {"eos_token_id": None}
    with specplug.attach(goal, noisy_copy(goal, scale=0), gamma=5, engine="rounds") as plugin:
        goal.generate(**call)
        assert plugin.last.alpha == 1.0 and plugin.last.num_rounds == 2 * 5
    with specplug.attach(goal, noisy_copy(goal, scale=0), gamma=0, engine="rounds") as plugin:
        goal.generate(**call)
        assert plugin.last.num_rounds == 2 * (NEW - 1)


def test_a_batch_sees_fewer_passes_than_its_slowest_row_alone_would_not():
    """The pass count of a batch is that of its slowest row, not that of the least acceptance in each round."""
    goal, draft = pair("llama")
    texts, call = padded([7, 7])
    call |= {"eos_token_id": None}
    alone = []
    with specplug.attach(goal, draft, engine="rounds", gamma=4) as plugin:
        for text in texts:
            goal.generate(text, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
            alone.append(plugin.last.num_rounds)
        passes = []
        forward = goal.forward
        goal.forward = lambda *a, **k: passes.append(1) or forward(*a, **k)
        try:
            goal.generate(**call)
        finally:
            del goal.forward
    assert len(passes) - 1 == max(alone)


def test_stop_strings_and_end_of_sequence_lists(tiny_pipeline):
    pipe, draft = tiny_pipeline
    texts = ["Ben has 12 coins. Ben finds 5 more coins.", "Mia lives near the mill."]
    arguments = {"max_new_tokens": 40, "do_sample": False, "batch_size": 2, "stop_sequence": "and"}
    pipe.tokenizer.padding_side = "left"
    plain = pipe(texts, **arguments)
    with specplug.attach(pipe, draft, gamma=4) as plugin:
        assert pipe(texts, **arguments) == plain
        assert plugin.last.engine == "rounds" and plugin.last.num_calls == 1


def test_a_wrong_alignment_is_caught(monkeypatch):
    goal, draft = pair("llama")
    _, call = padded([3, 11, 7])
    plain = goal.generate(**call)
    align = specplug.batch.caches.align
    monkeypatch.setattr(specplug.batch.caches, "align", lambda c, remove, n: align(c, torch.zeros_like(remove), n))
    with specplug.attach(goal, draft, engine="rounds", gamma=4, graph="off"):
        assert not torch.equal(goal.generate(**call), plain)


class DrawnInSomeRows(ModelDrafter):
    """A chain's lookup finds something for one sequence, and its model drafts for the others: here for the first and by turns."""

    start_rows = None

    def start(self, request):
        session = super().start(request)
        propose = session.propose

        def sometimes(ids, gamma):
            proposal = propose(ids, gamma)
            if (request.row + ids.shape[1]) % 2:
                return proposal
            return Proposal(torch.full_like(proposal.tokens, V - 1 - request.row), None)

        session.propose = sometimes
        return session


@pytest.mark.parametrize("rule", ["block", "token"])
def test_rows_with_drafts_that_were_drawn_and_others_have_the_law(six_tokens, rule):
    draft = DrawnInSomeRows(noisy_copy(six_tokens, scale=0.1))

    def count(samples, seed):
        torch.manual_seed(seed)
        with specplug.attach(six_tokens, draft, gamma=2, engine="rounds", verify=rule):
            rows = PROMPT.repeat(3, 1)
            texts = [six_tokens.generate(rows, **arguments({}))[:, -TOKENS:] for _ in range(-(-samples // 3))]
        return counted(torch.cat(texts))

    assert has_the_law(count, exact_law(six_tokens, {}))


@pytest.mark.parametrize("settings", ["plain", "temperature 1.5, top-k", "repetition penalty"])
def test_sampled_rows_have_the_law_of_the_target(six_tokens, settings):
    """Ten answers a call; false alarms as in test_exact_sampling."""
    draft, call = noisy_copy(six_tokens, scale=0.1), arguments(SETTINGS[settings]) | {"num_return_sequences": 10}

    def count(samples, seed):
        torch.manual_seed(seed)
        with specplug.attach(six_tokens, draft, gamma=2, engine="rounds") as plugin:
            texts = [six_tokens.generate(PROMPT, **call)[:, -TOKENS:] for _ in range(samples // 10)]
        assert 0.02 < plugin.stats.alpha < 1
        return counted(torch.cat(texts))

    assert has_the_law(count, exact_law(six_tokens, SETTINGS[settings]))


def test_rows_are_independent_of_each_other(six_tokens):
    """800 pairs of answers of one call: their last tokens' joint counts are the product of the margins (chi-square, 1e-6)."""
    torch.manual_seed(2)
    joint = torch.zeros(V, V, dtype=torch.float64)
    with specplug.attach(six_tokens, noisy_copy(six_tokens, scale=0.1), gamma=2, engine="rounds"):
        for _ in range(160):
            call = dict(num_return_sequences=10, do_sample=True, max_new_tokens=2)
            for a, b in six_tokens.generate(torch.tensor([[3, 4, 5]]), **call)[:, -1].view(5, 2):
                joint[a, b] += 1
    expected = joint.sum(1, keepdim=True) * joint.sum(0) / joint.sum()
    enough = expected > 5
    seen = torch.cat([joint[enough], joint[~enough].sum()[None]])
    wanted = torch.cat([expected[enough], expected[~enough].sum()[None]])
    assert chisquare(seen[wanted > 0], wanted[wanted > 0], ddof=2 * (V - 1)).pvalue > 1e-6


def test_rounds_serves_it_and_not_the_loop_of_transformers(monkeypatch):
    goal, draft = pair("llama")
    _, call = padded([3, 6])

    def refuses(*args, **kwargs):
        raise AssertionError("transformers' loop was run")

    monkeypatch.setattr(GenerationMixin, "_sample", refuses)
    with specplug.attach(goal, draft, engine="rounds", gamma=4):
        assert goal.generate(**call, eos_token_id=EOS).shape[0] == 2
