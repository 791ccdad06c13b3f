"""What a trace says against what the engines did and counted, and against distributions computed from scratch."""

import json
from collections import Counter

import pytest
import torch
from conftest import make_model, noisy_copy, prompt
from transformers import LogitsProcessor

import specplug
from specplug.drafters.lookup import LookupDrafter
from specplug.schedule import AdaptiveSchedule
from specplug.trace import Trace, describe, pieces

WAYS = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, temperature=0.8, top_k=20),
    "penalty": dict(do_sample=True, repetition_penalty=1.3, no_repeat_ngram_size=3),
}


class Counting(LogitsProcessor):
    """Keeps state: what it does depends on how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + (self.calls % 3) * 0.1 * torch.arange(scores.shape[-1])


def traced(model, draft, seed=0, engine="auto", schedule=None, gamma=3, new=40, **arguments):
    """One traced call: the plugin, its trace, and the new tokens."""
    ids = prompt(9, seed)
    schedules = {"schedule": schedule} if schedule is not None else {"gamma": gamma}
    with specplug.attach(model, draft, engine=engine, **schedules) as plugin:
        plugin.trace = Trace()
        torch.manual_seed(seed)
        output = model.generate(ids, max_new_tokens=new, **arguments)[0, ids.shape[1] :].tolist()
        plugin.trace.finish(output)
    return plugin, plugin.trace, output


def consistent(trace, stats, output) -> bool:
    """Whether the trace tells of the same tokens and the same counts."""
    rounds, prompt_pass = trace.rounds[1:], trace.rounds[0]
    decisions = Counter(draft.decision for each in rounds for draft in each.drafts)
    rejected = sum(any(draft.decision == "rejected" for draft in each.drafts) for each in rounds)
    orderly = all(
        [draft.decision for draft in each.drafts]
        == sorted((draft.decision for draft in each.drafts), key=["accepted", "rejected", "not_looked_at"].index)
        for each in rounds
    )
    kept = Counter(sum(draft.decision == "accepted" for draft in each.drafts) for each in rounds)
    return (
        trace.tokens == output
        and not prompt_pass.drafts
        and len(rounds) == stats.num_rounds
        and decisions["accepted"] == stats.num_accepted
        and decisions["rejected"] == rejected == stats.num_tested - stats.num_accepted
        and sum(decisions.values()) == stats.num_draft_tokens
        and kept == stats.accepted
        and orderly
    )


@pytest.mark.parametrize("engine", ["rounds", "lookahead"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_the_trace_is_what_was_done_and_counted(llama, llama_draft, engine, way, drafter):
    drafted = 0
    for seed in range(3):
        draft = llama_draft if drafter == "model" else LookupDrafter(min_ngram=1)
        plugin, trace, output = traced(llama, draft, seed, engine, **WAYS[way])
        assert plugin.last.engine == engine
        assert consistent(trace, plugin.last, output)
        drafted += plugin.last.num_draft_tokens
    assert drafted > 10


def test_a_wrong_trace_is_noticed(llama, llama_draft):
    """The check above fails for each thing that a trace could say wrongly."""
    plugin, trace, output = traced(llama, llama_draft, do_sample=True)
    assert consistent(trace, plugin.last, output)
    broken = next(each for each in trace.rounds if any(draft.decision == "rejected" for draft in each.drafts))
    draft = next(draft for draft in broken.drafts if draft.decision == "rejected")
    for wrong in ("accepted", "not_looked_at"):
        draft.decision = wrong
        assert not consistent(trace, plugin.last, output)
    draft.decision = "rejected"
    assert consistent(trace, plugin.last, output)
    broken.following.token += 1
    assert not consistent(trace, plugin.last, output)


@torch.no_grad()
@pytest.mark.parametrize("engine", ["rounds", "lookahead"])
def test_probabilities_are_the_processed_ones(llama, llama_draft, engine):
    """p and q of each draft and p of each token behind them, computed from scratch on the right prefix."""
    arguments = dict(do_sample=True, temperature=0.7, repetition_penalty=1.4, top_k=0)

    def probabilities(model, prefix):
        scores = model(prefix).logits[0, -1]
        seen = prefix[0].unique()
        scores[seen] = torch.where(scores[seen] < 0, scores[seen] * 1.4, scores[seen] / 1.4)
        return (scores / 0.7).softmax(-1)

    drawn, looked_at = 0, 0
    for seed in range(4):
        _, trace, output = traced(llama, llama_draft, seed, engine, **arguments)
        ids, length = torch.cat([prompt(9, seed), torch.tensor([output])], dim=1), 9
        for each in trace.rounds:
            prefix = ids[:, :length]
            for draft in each.drafts:
                assert draft.p == pytest.approx(float(probabilities(llama, prefix)[draft.token]), abs=1e-4)
                if draft.q is not None:
                    drawn += 1
                    assert draft.q == pytest.approx(float(probabilities(llama_draft, prefix)[draft.token]), abs=1e-4)
                looked_at += draft.decision != "not_looked_at"
                prefix = torch.cat([prefix, torch.tensor([[draft.token]])], dim=1)
            kept = sum(draft.decision == "accepted" for draft in each.drafts)
            if each.following is not None and each.following.p is not None:
                p = probabilities(llama, ids[:, : length + kept])[each.following.token]
                assert each.following.p == pytest.approx(float(p), abs=1e-4)
            length += len(each.tokens)
    assert looked_at > 20 and (drawn > 20) == (engine == "rounds")  # lookahead draws no drafts


def test_processors_with_a_state_see_what_they_see_without_a_trace(llama, llama_draft):
    def call(with_trace):
        counting = Counting()
        with specplug.attach(llama, llama_draft, gamma=3, engine="rounds") as plugin:
            plugin.trace = Trace() if with_trace else None
            torch.manual_seed(1)
            output = llama.generate(prompt(9), max_new_tokens=30, do_sample=True, logits_processor=[counting])
        return output.tolist(), counting.calls, plugin

    output, calls, plugin = call(True)
    assert (output, calls) == call(False)[:2]
    drafts = [draft for each in plugin.trace.rounds for draft in each.drafts]
    assert {draft.p is None for draft in drafts if draft.decision == "not_looked_at"} == {True}
    assert {draft.p is None for draft in drafts if draft.decision != "not_looked_at"} == {False}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", ["rounds", "lookahead"])
def test_a_trace_changes_nothing(llama, llama_draft, way, engine):
    ids = prompt(9)
    with specplug.attach(llama, llama_draft, gamma=3, engine=engine) as plugin:
        torch.manual_seed(3)
        without = llama.generate(ids, max_new_tokens=30, **WAYS[way]).tolist()
        plugin.trace = Trace()
        torch.manual_seed(3)
        assert llama.generate(ids, max_new_tokens=30, **WAYS[way]).tolist() == without


def test_reasons_and_the_end_of_the_text(llama, llama_draft):
    _, trace, _ = traced(llama, llama_draft, gamma=4, new=12)
    assert trace.rounds[0].reason == "the prompt's pass" and trace.rounds[0].following.origin == "plain"
    assert trace.rounds[1].reason == "the same in every round" and trace.rounds[1].gamma == 4
    assert trace.rounds[-1].reason == "no room in the text for more"
    _, trace, _ = traced(llama, llama_draft, schedule=AdaptiveSchedule(), new=60)
    reasons = [each.reason for each in trace.rounds]
    assert reasons[1:3] == ["to see what plain decoding costs"] * 2 and reasons[3] == "a trial"
    _, trace, _ = traced(llama, "lookup", schedule=AdaptiveSchedule(), new=60)
    assert "the drafter had none" in {each.reason for each in trace.rounds}


def test_a_text_that_ends_with_a_draft_has_no_token_behind_it(llama):
    ids = prompt(9)
    plain = llama.generate(ids, max_new_tokens=12, do_sample=False)[0, 9:].tolist()
    end = plain[5]
    plugin, trace, output = traced(llama, noisy_copy(llama, 0), gamma=8, do_sample=False, eos_token_id=end)
    assert output == plain[: plain.index(end) + 1] and consistent(trace, plugin.last, output)
    assert trace.rounds[-1].following is None and trace.rounds[-1].drafts[-1].decision == "not_looked_at"


def test_plain_decoding_and_batches(llama, llama_draft):
    _, trace, output = traced(llama, llama_draft, engine="plain", do_sample=False)
    assert trace.tokens == output and {each.following.origin for each in trace.rounds} == {"plain"}
    with specplug.attach(llama, llama_draft) as plugin:
        plugin.trace = Trace()
        with pytest.raises(ValueError, match="records one sequence, and the call has 2"):
            llama.generate(prompt(9).repeat(2, 1), max_new_tokens=4)


def test_pieces_joined_are_the_text(tiny_pipeline):
    pipe, _ = tiny_pipeline
    ids = pipe.tokenizer("Mia: “kite”: 3 \n\n é 漢 🪁!", add_special_tokens=False).input_ids
    assert "".join(pieces(pipe.tokenizer, ids)) == pipe.tokenizer.decode(ids)
    assert "".join(pieces(pipe.tokenizer, ids[:-2])) == pipe.tokenizer.decode(ids[:-2])


def test_description_is_json(tiny_pipeline):
    pipe, draft = tiny_pipeline
    ids = pipe.tokenizer("Ben has 12 coins.", return_tensors="pt").input_ids
    with specplug.attach(pipe, draft) as plugin:
        plugin.trace = Trace()
        output = pipe.model.generate(ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] :].tolist()
        plugin.trace.finish(output)
    told = json.loads(json.dumps(describe(plugin.trace, pipe.tokenizer)))
    assert told["token_ids"] == output
    texts = []
    for each in told["rounds"]:
        texts += [draft["text"] for draft in each["drafts"] if draft["decision"] == "accepted"]
        texts += [each["following"]["text"]] if each["following"] else []
    assert "".join(texts) == pipe.tokenizer.decode(output)


def test_gpt2_with_padding_in_front():
    """A repetition penalty that leaves the padding out has to be asked about one row."""
    model = make_model("gpt2")
    ids = torch.cat([torch.zeros((1, 4), dtype=torch.long), prompt(6)], dim=1)
    mask = (torch.arange(10) >= 4).long()[None]
    for engine in ("rounds", "lookahead"):
        with specplug.attach(model, noisy_copy(model), gamma=3, engine=engine) as plugin:
            plugin.trace = Trace()
            arguments = dict(attention_mask=mask, max_new_tokens=20, do_sample=False, repetition_penalty=1.2)
            output = model.generate(ids, **arguments)[0, 10:].tolist()
            plugin.trace.finish(output)
            assert consistent(plugin.trace, plugin.last, output)
