"""Drafts with another tokenizer: same ids when greedy, the target's law when sampling, and texts read in other tokens.

Statistical tests fail by chance with probability below 1e-6, see laws.py.
"""

import logging
import random
from functools import partial

import pytest
import torch
from conftest import letters, make_model, noisy_copy, prompt
from laws import SETTINGS, WRONG, V, exact_law, has_the_law, pvalue, sampled_counts
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

import specplug
from specplug import capture, corpus, training
from specplug.config import ConfigError, CrossVocab, Draft
from specplug.config import Drafter as Kind
from specplug.drafters.build import build_drafter
from specplug.drafters.cross_vocab import CrossVocabDrafter
from specplug.drafters.translate import TAIL, Reading, Translation, Vocabulary

TEXTS = [row["prompt"] + " " + row["reference"] for row in corpus.generate(0, 200)]


def sentencepiece() -> PreTrainedTokenizerFast:
    """Spaces as U+2581, and bytes for what it does not know, as in Llama 2."""
    pieces = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("\u2581", "\u2581the", "t", "h", "e", "\u2581t", "he", "k", "i", "\u2581kite"):
        pieces[piece] = len(pieces)
    merges = [("t", "h"), ("h", "e"), ("\u2581", "t"), ("\u2581t", "he")]
    tokenizer = Tokenizer(
        models.BPE(vocab=pieces | {"th": len(pieces)}, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def tokenizers():
    """Of target and draft: trained alike on other texts, so that they have some tokens in common and cut words otherwise."""
    return training.train_tokenizer(TEXTS[:100], 500), training.train_tokenizer(TEXTS[100:], 350)


@pytest.fixture(scope="module")
def pair(tokenizers):
    """A target, and a draft that is right now and then: the target with its rows in the draft's order."""
    target_tokenizer, draft_tokenizer = tokenizers
    target = make_model("llama", vocab_size=len(target_tokenizer), seed=5)
    target.generation_config.eos_token_id = None
    draft = make_model("llama", vocab_size=len(draft_tokenizer), seed=5)
    draft.load_state_dict(
        {k: v for k, v in target.state_dict().items() if v.shape[0] != len(target_tokenizer)}, strict=False
    )
    shared = Translation(target_tokenizer, draft_tokenizer, len(draft_tokenizer)).shared(len(target_tokenizer))
    with torch.no_grad():
        for of in ("get_input_embeddings", "get_output_embeddings"):
            getattr(draft, of)().weight[shared[0]] = getattr(target, of)().weight[shared[1]]
    return target, draft


def test_tokens_that_stand_for_the_same(tokenizers):
    target, draft = tokenizers
    translation = Translation(target, draft, len(draft))
    drafted, shared = translation.shared(len(target))
    assert 300 < len(shared) < len(draft) < len(target)
    for one, other in zip(drafted.tolist(), shared.tolist(), strict=True):
        assert draft.decode([one]) == target.decode([other])
    assert len(set(shared.tolist())) == len(set(drafted.tolist())) == len(shared)
    assert translation.to_draft[target.eos_token_id] == draft.eos_token_id
    few = Translation(target, draft, 300)
    assert few.shared(280)[0].max() < 300 and few.shared(280)[1].max() < 280


def test_sentencepiece_and_byte_level_tokens_are_one():
    target = training.train_tokenizer(["the kite the kite the the kite"] * 3, 300)
    draft = sentencepiece()
    translation = Translation(target, draft, len(draft))
    assert translation.to_draft[target.convert_tokens_to_ids("\u0120the")] == draft.convert_tokens_to_ids("\u2581the")
    assert translation.to_draft[target.convert_tokens_to_ids("\u0100")] == draft.convert_tokens_to_ids("<0x00>")
    assert translation.to_draft[target.eos_token_id] == draft.eos_token_id  # written otherwise, but they end a text
    for text in ("the kite", "r\u00e4t \u2713 the", "the  the"):
        ids = target.encode(text)
        assert Vocabulary(draft).spell(translation.into_draft(ids)) == text
        assert target.decode(translation.continuation(ids, draft.encode(" the kit\u00e9"))) == " the kit\u00e9"


def test_a_text_is_read_as_the_drafts_tokenizer_cuts_it(tokenizers):
    target, draft = tokenizers
    translation = Translation(target, draft, len(draft))
    text = "<|user|>" + TEXTS[3] + "<|end|><|assistant|>" + TEXTS[5]
    assert translation.into_draft(target.encode(text)) == draft.encode(text)
    reading, ids = Reading(translation), target.encode(" ".join(TEXTS[:20]))
    chooser = random.Random(0)
    length = 1
    while length < len(ids):
        read = reading.read(ids[:length])
        assert draft.decode(read) == target.decode(ids[:length])
        length += chooser.randint(1, 9)
    assert len(reading.settled) > 5 * TAIL
    unbroken = Reading(translation)
    unbroken.read([target.encode("a")[0]] * 1000)  # no word begins in it
    assert unbroken.num_settled > 800


def test_a_continuation_goes_on_within_a_word(tokenizers):
    target, draft = tokenizers
    translation = Translation(target, draft, len(draft))
    whole = target.encode(TEXTS[7])
    for cut in range(5, len(whole) - 8):
        said = draft.encode(target.decode(whole[cut:]))
        if target.encode(target.decode(whole[:cut])) == whole[:cut]:
            assert translation.continuation(whole[:cut], said) == whole[cut:]
    assert translation.continuation(whole, [*draft.encode(" and"), draft.eos_token_id, 5])[-1] == target.eos_token_id


@pytest.mark.parametrize("method", ["auto", "intersection", "string"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_greedy_ids_are_the_targets(pair, tokenizers, method, num_rows):
    target, draft = pair
    weights = {name: each.clone() for name, each in draft.state_dict().items()}
    target_tokenizer, draft_tokenizer = tokenizers
    encoded = target_tokenizer(
        [text[: 60 + 9 * i] for i, text in enumerate(TEXTS[:num_rows])],
        padding=True,
        padding_side="left",
        return_tensors="pt",
    )
    call = {"max_new_tokens": 40, "do_sample": False, **{k: encoded[k] for k in ("input_ids", "attention_mask")}}
    plain = target.generate(**call)
    drafter = CrossVocabDrafter(draft, draft_tokenizer, target_tokenizer, method)
    with specplug.attach(target, drafter, gamma=3, engine="rounds") as plugin:
        plugin.record_after = 0
        torch.testing.assert_close(target.generate(**call), plain)
    assert plugin.stats.num_accepted > 0, "nothing was tested"
    if num_rows == 1:  # its passes are recorded and replayed as those of any other draft
        assert all(each.ready for each in capture._KNOWN[draft][1].values())
    assert all(torch.equal(weights[name], each) for name, each in draft.state_dict().items())


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_what_a_draft_said_by_string_is_taken_back(kind, caplog):
    """Further than a window holds, too."""
    target, alphabet = make_model(), [chr(ord("0") + number) for number in range(64)]
    target.generation_config.eos_token_id = None
    call = dict(max_new_tokens=40, do_sample=False)
    plain = target.generate(prompt(20), **call)
    drafter = CrossVocabDrafter(make_model(kind, seed=5), letters(alphabet[::-1]), letters(alphabet), "string")
    with specplug.attach(target, drafter, gamma=4, engine="rounds") as plugin:
        assert torch.equal(target.generate(prompt(20), **call), plain)
    assert plugin.last.num_draft_tokens > plugin.last.num_accepted and not caplog.records


TARGET_LETTERS, DRAFT_LETTERS = "abcdef", "xcaydbe"


@pytest.fixture(scope="module")
def lettered(six_tokens):
    return six_tokens, make_model(vocab_size=len(DRAFT_LETTERS), seed=7)


def drafter_of(lettered, method, kind=CrossVocabDrafter):
    return kind(lettered[1], letters(DRAFT_LETTERS), letters(TARGET_LETTERS), method)


@pytest.mark.parametrize("method", ["intersection", "string"])
@pytest.mark.parametrize("settings", ["plain", "temperature 1.5, top-k"])
def test_samples_have_the_law_of_the_target(lettered, method, settings):
    law = exact_law(lettered[0], SETTINGS[settings])
    assert has_the_law(partial(sampled_counts, lettered[0], drafter_of(lettered, method), SETTINGS[settings]), law)


def test_samples_have_the_law_by_the_token_rule(lettered):
    count = partial(sampled_counts, lettered[0], drafter_of(lettered, "intersection"), {}, rule="token")
    assert has_the_law(count, exact_law(lettered[0], {}))


class ColumnsInAnotherOrder(CrossVocabDrafter):
    """Negative control: probabilities are stated for other tokens than they belong to, as in transformers' translator."""

    def start(self, request):
        session = super().start(request)
        session.rows.shared = session.rows.shared._replace(target=session.rows.shared.target.flip(0))
        return session


class NotRenormalised(CrossVocabDrafter):
    """Negative control: draws from the tokens in common, and states what the draft would have said without that limit."""

    def start(self, request):
        session = super().start(request)
        as_tokens = session.rows._as_tokens

        def stated(drafts, like):
            made = as_tokens(drafts, like)
            return made if made.probs is None else made._replace(probs=made.probs * 0.6)

        session.rows._as_tokens = stated
        return session


@pytest.mark.parametrize("broken", [ColumnsInAnotherOrder, NotRenormalised])
def test_wrong_probabilities_are_caught(lettered, broken):
    counts = sampled_counts(lettered[0], drafter_of(lettered, "intersection", broken), {})
    assert pvalue(counts, exact_law(lettered[0], {})) < WRONG


def test_the_stated_distribution_is_the_one_drawn_from(lettered):
    """Chi-square of 2,000 first drafts; a false alarm below 1e-6."""
    from scipy.stats import chisquare
    from transformers import LogitsProcessorList

    from specplug.drafters import Request

    torch.manual_seed(0)
    request, counts = Request(True, LogitsProcessorList(), V), torch.zeros(V, dtype=torch.float64)
    drafter = drafter_of(lettered, "intersection")
    for _ in range(2000):
        proposal = drafter.start(request).propose(torch.tensor([[3, 4, 5]]), 1)
        counts[proposal.tokens[0, 0]] += 1
    probs = proposal.probs[0, 0].double()
    assert probs.sum().item() == pytest.approx(1) and probs[5] == 0 == counts[5]  # the draft has no f
    assert chisquare(counts[:5], probs[:5] / probs[:5].sum() * 2000).pvalue > 1e-6


def test_by_name_it_is_found_that_the_tokenizers_differ(pair, tokenizers, tmp_path, caplog):
    target, draft = pair
    draft.save_pretrained(tmp_path)
    tokenizers[1].save_pretrained(tmp_path)
    named = Draft(name_or_path=str(tmp_path), device="cpu")
    with caplog.at_level(logging.INFO):
        drafter = build_drafter(named, target, tokenizers[0])
    assert drafter.name == "cross_vocab" and "different tokenizers" in caplog.text
    assert build_drafter(named, noisy_copy(draft), tokenizers[1]).name == "model"
    named.drafter = Kind.cross_vocab
    named.cross_vocab = CrossVocab.string
    assert build_drafter(named, target, tokenizers[0]).method == "string"
    with pytest.raises(ConfigError, match="attach the pipeline"):
        build_drafter(named, target)


def test_what_cannot_be_drafted_is_one_line(lettered):
    with pytest.raises(ValueError, match="no token in common"):
        CrossVocabDrafter(lettered[1], letters("ghijklm"), letters(TARGET_LETTERS))
    with pytest.raises(ValueError, match="intersection, string"):
        drafter_of(lettered, "words")
    assert CrossVocabDrafter(lettered[1], letters("ghijklm"), letters(TARGET_LETTERS), "string").method == "string"
