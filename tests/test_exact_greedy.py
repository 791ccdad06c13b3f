"""Greedy decoding with the plugin is plain `generate`, token for token, and in everything else it returns."""

import pytest
import torch
from conftest import EOS, make_model, noisy_copy, prompt
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import specplug
from specplug.cache import NAME
from specplug.verify import Step, verify_walk

NEW = 40
MODELS = ["llama", "mistral", "gpt2"]  # mistral has a sliding window of 8, which the texts outgrow
PROCESSORS = {
    "none": {},
    "repetition penalty": {"repetition_penalty": 1.3},
    "no repeated n-gram": {"no_repeat_ngram_size": 2},
    "minimum length": {"min_new_tokens": 25},
    "bad words": {"bad_words_ids": [[5], [7, 9]]},
    "suppressed": {"suppress_tokens": [4, 8], "begin_suppress_tokens": [10]},
    "forced end": {"forced_eos_token_id": EOS},
    "sequence bias": {"sequence_bias": [[[11], 3.0], [[12, 13], -4.0]]},
    "exponential decay": {"exponential_decay_length_penalty": (10, 1.3)},
    "prefix allowed": {
        "prefix_allowed_tokens_fn": lambda _, ids: list(range(2, 40)) if len(ids) % 2 else list(range(64))
    },
    "guidance": {"guidance_scale": 1.5},  # keeps a cache of its own and wants every token once
    "everything": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 10, "suppress_tokens": [4]},
}
_models: dict[str, tuple] = {}


def pair(kind: str):
    if kind not in _models:
        target = make_model(kind)
        _models[kind] = (target, noisy_copy(target))
    return _models[kind]


def both(target, draft, ids, gamma=4, **arguments):
    """Full outputs of plain generate and of ours, and the counts."""
    arguments = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **arguments}
    plain = target.generate(ids, **arguments)
    with specplug.attach(target, draft, gamma=gamma) as plugin:
        ours = target.generate(ids, **arguments)
    return plain, ours, plugin.last


@pytest.mark.parametrize("drafter", ["model", "lookup"])
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("kind", MODELS)
def test_same_as_plain_generate(kind, processors, drafter):
    target, draft = pair(kind)
    accepted = 0
    for seed in range(3):
        ids = prompt(seed=seed)
        extra = dict(PROCESSORS[processors], output_scores=True, output_logits=True)
        plain, ours, last = both(target, draft if drafter == "model" else "lookup", ids, **extra)
        assert last.engine == "rounds", last.reason
        assert torch.equal(plain.sequences, ours.sequences)
        assert len(plain.scores) == len(ours.scores) == plain.sequences.shape[1] - ids.shape[1]
        for name in ("scores", "logits"):
            for a, b in zip(plain[name], ours[name], strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        assert plain[NAME].get_seq_length() == ours[NAME].get_seq_length()
        assert last.num_new_tokens == ours.sequences.shape[1] - ids.shape[1]
        accepted += last.num_accepted
    if drafter == "model" and processors == "none":
        assert accepted > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("gamma", [0, 1, 2, 7, 60])
def test_any_gamma(llama, llama_draft, gamma):
    plain, ours, last = both(llama, llama_draft, prompt(seed=3), gamma=gamma)
    assert torch.equal(plain.sequences, ours.sequences)
    assert max(last.drafted, default=0) <= min(gamma, NEW - 2)
    if gamma == 0:
        assert last.num_draft_tokens == 0 and last.mean_acceptance_length == 1.0


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 6, 9])
def test_length_limit_inside_a_round(llama, new):
    """A draft equal to the target is always accepted, so every limit falls inside a round."""
    plain, ours, last = both(llama, noisy_copy(llama, scale=0), prompt(seed=1), max_new_tokens=new)
    assert torch.equal(plain.sequences, ours.sequences)
    assert last.alpha in (None, 1.0)
    assert plain[NAME].get_seq_length() == ours[NAME].get_seq_length()


def test_end_of_sequence_inside_a_round(llama):
    """Each token of the answer in turn is made the end-of-sequence token; lists of them too."""
    ids = prompt(seed=2)
    answer = llama.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, ids.shape[1] :].tolist()
    for token in dict.fromkeys(answer):
        for eos in (token, [token, 3]):
            plain, ours, _ = both(llama, noisy_copy(llama, scale=0), ids, eos_token_id=eos, gamma=5)
            assert torch.equal(plain.sequences, ours.sequences)
            assert plain[NAME].get_seq_length() == ours[NAME].get_seq_length()


class StopAfter(StoppingCriteria):
    """Keeps state: stops at the n-th call, whatever the text."""

    def __init__(self, calls: int) -> None:
        self.left, self.seen = calls, []

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        self.seen.append(input_ids.shape[1])
        return torch.full((input_ids.shape[0],), self.left <= 0)


class Recorder(LogitsProcessor):
    """Keeps state: what it was shown, and a bias that depends on how often it was called."""

    def __init__(self) -> None:
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        scores[:, len(self.seen) % 64] += 2.0  # in place, as some do
        return scores


@pytest.mark.parametrize("calls", [1, 2, 4, 11])
def test_stateful_criteria_are_asked_once_per_token(llama, llama_draft, calls):
    ids, seen, outputs = prompt(seed=4), [], []
    for draft in (None, llama_draft):
        criterion = StopAfter(calls)
        if draft is not None:
            specplug.attach(llama, draft, gamma=4)
        outputs.append(llama.generate(ids, max_new_tokens=NEW, do_sample=False, stopping_criteria=[criterion]))
        specplug.detach(llama)
        seen.append(criterion.seen)
    assert torch.equal(*outputs) and seen[0] == seen[1]


def test_stateful_processors_see_what_plain_decoding_shows_them(llama, llama_draft):
    ids, seen, outputs = prompt(seed=5), [], []
    for draft in (None, llama_draft):
        recorder = Recorder()
        if draft is not None:
            specplug.attach(llama, draft, gamma=4)
        outputs.append(llama.generate(ids, max_new_tokens=NEW, do_sample=False, logits_processor=[recorder]))
        specplug.detach(llama)
        seen.append(recorder.seen)
    assert torch.equal(*outputs) and seen[0] == seen[1]


class Collect(BaseStreamer):
    def __init__(self) -> None:
        self.chunks, self.ended = [], 0

    def put(self, value):
        self.chunks.append(value.tolist())

    def end(self):
        self.ended += 1


def test_streamer_gets_the_same_chunks(llama, llama_draft):
    ids, streamers = prompt(seed=6), (Collect(), Collect())
    llama.generate(ids, max_new_tokens=NEW, do_sample=False, streamer=streamers[0])
    with specplug.attach(llama, llama_draft, gamma=4):
        llama.generate(ids, max_new_tokens=NEW, do_sample=False, streamer=streamers[1])
    assert streamers[0].chunks == streamers[1].chunks
    assert streamers[1].ended == 1


def test_left_padding_chunked_prefill_and_inference_mode(llama, llama_draft):
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt(12, seed=7)], dim=1)
    mask = (torch.arange(16) >= 4).long()[None]
    plain, ours, last = both(llama, llama_draft, ids, attention_mask=mask, prefill_chunk_size=5)
    assert torch.equal(plain.sequences, ours.sequences) and last.engine == "rounds"
    with torch.inference_mode():
        again = both(llama, llama_draft, ids, attention_mask=mask)[1]
    assert torch.equal(again.sequences, ours.sequences)


def test_second_turn_on_a_reused_cache(llama, llama_draft):
    """The cache of a first call goes into a second: the incumbent's assisted modes feed the text twice (silently wrong)."""
    sequences = []
    for draft in (None, llama_draft):
        if draft is not None:
            specplug.attach(llama, draft, gamma=4)
        first = llama.generate(prompt(seed=8), max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
        turn = torch.cat([first.sequences, prompt(5, seed=9)], dim=1)
        second = llama.generate(
            turn, max_new_tokens=20, do_sample=False, return_dict_in_generate=True, **{NAME: first[NAME]}
        )
        sequences.append(second.sequences)
        assert second[NAME].get_seq_length() == second.sequences.shape[1] - 1
        specplug.detach(llama)
    assert torch.equal(*sequences)


def test_a_wrong_rule_is_caught(llama, llama_draft, monkeypatch):
    """Negative control: one draft too many is kept now and then, and the comparison above fails."""
    import specplug.round

    def one_too_many(children, draw):
        *steps, last = verify_walk(children, draw)
        yield from steps
        for token, child in children[last.node].items():  # the draft that the target did not choose
            yield Step(last.node, token, True)
            last = Step(child, draw(child), False)
        yield last

    monkeypatch.setattr(specplug.round, "verify_walk", one_too_many)
    assert any(
        not torch.equal(plain.sequences, ours.sequences)
        for plain, ours, _ in (both(llama, llama_draft, prompt(seed=seed)) for seed in range(4))
    )


@pytest.mark.parametrize("types", [[0, 0, 1, 1, 0, 1, 0], [0, 1, 0, 1, 1, 0, 1]])
def test_token_types(types):
    """Plain decoding gives each new token the type of the last one; as many as are new, in their order, would be others."""
    model = make_model("gpt2")
    with torch.no_grad():
        model.transformer.wte.weight[:2] *= 20  # which it takes for types: now they matter
    given = {"token_type_ids": torch.tensor([types]), "max_new_tokens": 24, "do_sample": False}
    ids = prompt(len(types))
    plain = model.generate(ids, **given)
    others = model.generate(ids, **(given | {"token_type_ids": torch.tensor([[*types[:-1], 1 - types[-1]]])}))
    assert not torch.equal(plain, others)
    with specplug.attach(model, noisy_copy(model, scale=0.01), gamma=3) as plugin:
        assert torch.equal(plain, model.generate(ids, **given))
    assert plugin.stats.num_accepted
