"""Fixed shapes: passes of rows of different lengths are right, programs are replayed as a device's graphs are, and kept for later calls.

There is no graph of a device here. In its place the operations of a program are written down, with the very buffers that they read
and write, and a replay runs them without the program: what Python decides is as it was at the capture, as in a graph.
"""

import copy
import gc
import threading
import weakref

import pytest
import torch
from conftest import make_model, noisy_copy, prompt
from scipy.stats import chisquare
from stand_in import Replayed
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LogitsProcessorList,
    MixtralConfig,
    OPTConfig,
    Qwen3Config,
    TemperatureLogitsWarper,
)

import specplug
from specplug import capture, fixed, launches, ragged, ragged_pass
from specplug.cache import NAME
from specplug.capture import Capture
from specplug.drafters import Request, fixed_model
from specplug.drafters.fixed_model import DraftLoop, FixedDraft
from specplug.drafters.model import ModelDrafter
from specplug.schedule import FixedSchedule

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, max_position_embeddings=64)
GEMMA = {**SMALL, "num_hidden_layers": 6, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS = [
    OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32),
    Qwen3Config(**SMALL, intermediate_size=64, num_key_value_heads=2, head_dim=8),
    GPTNeoXConfig(**SMALL, intermediate_size=64),
    MixtralConfig(**SMALL, intermediate_size=64, num_key_value_heads=2, num_local_experts=4, sliding_window=None),
    Gemma3TextConfig(**GEMMA, sliding_window=6, sliding_window_pattern=3),  # full and sliding layers
]


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """The CPU has graphs."""
    monkeypatch.setitem(fixed.GRAPHS, "cpu", Replayed)
    monkeypatch.setattr(fixed, "USES_BEFORE", 1)
    Replayed.made = Replayed.replays = 0
    with torch.no_grad():  # as in `generate`
        yield


def frozen(kind="llama", **extra):
    return make_model(kind, **extra).requires_grad_(False)


def model_of(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval().requires_grad_(False)


def passes_over(model, graph="capture", uses_before=0):
    """Of two texts of 20 and 13 tokens, the ends of which are computed over and over: logits, and what they should be."""
    texts = [prompt(20, seed=1), prompt(13, seed=2)]
    found, expected = [], []
    with torch.no_grad():
        ids = torch.cat([texts[0][:, :12], torch.nn.functional.pad(texts[1][:, :7], (5, 0))])
        mask = torch.ones_like(ids)
        mask[1, :5] = 0
        cache = DynamicCache(config=model.config)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{NAME: cache})
        passes = fixed.FixedPasses(model, Capture(graph, uses_before))
        passes.fill(cache, [0, 5])
        whole = [model(input_ids=text, use_cache=False).logits[0] for text in texts]
        for starts, width in (([12, 7], 3), ([14, 8], 5), ([12, 7], 3), ([15, 9], 4), ([17, 12], 1), ([15, 10], 3)):
            ends = [start + width for start in starts]
            new = torch.cat([text[:, a:b] for text, a, b in zip(texts, starts, ends, strict=True)])
            found.append(passes(new, starts))
            expected.append(torch.stack([row[a:b] for row, a, b in zip(whole, starts, ends, strict=True)]))
        passes.close()
    return found, expected


def agree(found, expected):
    return all(torch.allclose(a, b, atol=1e-4 * float(b.abs().max())) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [frozen, lambda: frozen("gpt2"), lambda: frozen("mistral"), *CONFIGS])
def test_rows_of_different_lengths_go_back_and_forth_in_one_cache(make, attention):
    model = make() if callable(make) else model_of(make)
    model.set_attn_implementation(attention)
    assert fixed.why_not(model, "capture") is None
    found, expected = passes_over(model, "off")
    assert agree(found, expected)
    if type(make) is not MixtralConfig:  # which decides by what it sees
        assert agree(passes_over(model)[0], expected) and Replayed.replays >= 6


@pytest.mark.parametrize("wrong", ["late", "early", "elsewhere"])
def test_wrong_masks_and_places_are_told_apart(wrong, monkeypatch):
    """Negative control of the test above, and of what is tried out on a model that is new."""
    model, original = frozen(), ragged.RaggedCache.masks
    if wrong == "elsewhere":
        update = ragged.RaggedLayer.update

        def misplaced(self, keys, values, *args, **kwargs):
            self.places.positions = self.places.positions - 1
            return update(self, keys, values, *args)

        monkeypatch.setattr(ragged.RaggedLayer, "update", misplaced)
    else:
        shift = 1 if wrong == "late" else -1
        monkeypatch.setattr(ragged.RaggedCache, "masks", lambda self, positions: original(self, positions + shift))
    assert not agree(*passes_over(model, "off"))
    assert "heed" in fixed.why_not(model, "capture")


class Foreign(torch.nn.Module):
    """What somebody else wrote."""


CALLS = [dict(do_sample=False, max_new_tokens=18), dict(do_sample=False, max_new_tokens=18, repetition_penalty=1.3)]


def padded(lengths):
    width = max(lengths)
    rows = [torch.nn.functional.pad(prompt(length, seed=length), (width - length, 0)) for length in lengths]
    mask = [[0] * (width - length) + [1] * length for length in lengths]
    return dict(input_ids=torch.cat(rows), attention_mask=torch.tensor(mask))


@pytest.mark.parametrize("draft", ["model", "lookup", "early"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_ids_are_those_of_plain_decoding(kind, call, draft):
    model = frozen(kind, layers=3)
    drafter = noisy_copy(model, 0.02).requires_grad_(False) if draft == "model" else "lookup"
    if draft == "early":
        drafter = specplug.load("draft=early_exit", "draft.num_layers=2").draft
    for given in (padded([9]), padded([3, 11, 7, 4, 5])):
        expected = model.generate(**given, **call)
        with specplug.attach(model, drafter, gamma=4, engine="rounds"):
            for _ in range(2):  # buffers and graphs of the first call serve the second
                assert torch.equal(model.generate(**given, **call), expected)
    assert Replayed.made >= 2 and Replayed.replays > 2 * Replayed.made


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("padding", [0, 3, 9])
def test_the_cache_that_is_handed_back_is_that_of_plain_decoding(kind, padding):
    model = frozen(kind)
    given = dict(
        input_ids=torch.nn.functional.pad(prompt(9), (padding, 0)),
        attention_mask=torch.tensor([[0] * padding + [1] * 9]),
        do_sample=False,
        return_dict_in_generate=True,
        max_new_tokens=20,
    )
    expected = model.generate(**given)
    with specplug.attach(model, "lookup", gamma=3, engine="rounds"):
        found = model.generate(**given)
    assert Replayed.replays and torch.equal(found.sequences, expected.sequences)
    for mine, theirs in zip(found[NAME].layers, expected[NAME].layers, strict=True):
        assert type(mine) is type(theirs) and mine.get_seq_length() == theirs.get_seq_length()
        held = theirs.keys.shape[2]
        start = max(held - theirs.get_seq_length() + padding, 0)  # what stands in the padding's place means nothing
        assert mine.keys.shape[2] == held
        assert torch.allclose(mine.keys[:, :, start:], theirs.keys[:, :, start:], atol=1e-4)


def drafting(model, do_sample=True, temperature=0.8, gamma=3, text=None):
    """A loop of drafts behind a text, captured, and the session that it belongs to."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    spent = capture.Capture("capture", 0)
    session = FixedDraft(ModelDrafter(model), Request(do_sample, warpers, 64, capture=spent), 1)
    text = prompt(9) if text is None else text
    with torch.no_grad():
        session.propose([text], gamma, [0])
        proposal = session.propose([text], gamma, [0])
    programs = [each for each in session.fixed._buffers.programs.values() if isinstance(each.function, DraftLoop)]
    assert len(programs) == 1 and programs[0].graph is not None
    return session, programs[0], proposal


def test_a_verdict_without_a_token_is_nothing_to_draft_behind(overlapping):
    """Of probabilities that are nan; the host raises when it reads it."""
    session, program, (_, _, _, _) = drafting(frozen(layers=1))
    session.begin(torch.tensor([1]), torch.tensor([-1]))
    assert session.begun is not None and program.function.first[0, 1] == 0


def test_each_draft_of_a_replayed_loop_was_drawn_from_what_is_stated():
    """600 drafts by chi-square: a false alarm once in a million. The same graph each time."""
    model = frozen(layers=1)
    session, program, _ = drafting(model)
    loop, counts, stated = program.function, torch.zeros(64), None
    for _ in range(600):
        with torch.inference_mode():
            session.fixed.run(program)
        counts[loop.tokens[0, 0]] += 1
        stated = loop.probs[0, 0].clone()
    with torch.no_grad():
        logits = model(input_ids=prompt(9), use_cache=False).logits[0, -1]
    assert torch.allclose(stated, torch.softmax(logits / 0.8, -1), atol=1e-4)
    common = stated > 5 / 600
    rest = (~common).any()
    seen = torch.cat([counts[common], counts[~common].sum()[None]]) if rest else counts[common]
    law = torch.cat([stated[common], stated[~common].sum()[None]]) if rest else stated[common]
    keep = law * 600 > 1
    assert (
        chisquare(seen[keep].double(), law[keep].double() / law[keep].double().sum() * seen[keep].sum()).pvalue > 1e-6
    )
    # Later places stand behind the drafts that were drawn.
    with torch.no_grad():
        for place in (1, 2):
            text = torch.cat([prompt(9), loop.tokens[:, :place]], dim=1)
            logits = model(input_ids=text, use_cache=False).logits[0, -1]
            assert torch.allclose(loop.probs[0, place], torch.softmax(logits / 0.8, -1), atol=1e-4)


def test_the_sampled_law_is_the_targets():
    """Second new tokens of 500 calls, from their first round of drafts: chi-square, a false alarm once in a million."""
    model = frozen(layers=1)
    drafter = noisy_copy(model, 0.1).requires_grad_(False)
    given = dict(input_ids=prompt(5), do_sample=True, top_k=6, max_new_tokens=3, pad_token_id=0)
    first = model.generate(prompt(5), do_sample=False, max_new_tokens=1)
    with torch.no_grad():
        logits = model(input_ids=first, use_cache=False).logits[0, -1]
    law = torch.zeros(64).scatter(0, logits.topk(6).indices, torch.softmax(logits.topk(6).values, -1))
    torch.manual_seed(3)
    counts = torch.zeros(64)
    given["input_ids"] = first[:, :-1]
    with specplug.attach(model, drafter, gamma=2, engine="rounds"):
        for _ in range(500):
            ids = model.generate(**given)
            if ids[0, first.shape[1] - 1] == first[0, -1]:  # the second token's law is known behind this first one
                counts[ids[0, first.shape[1]]] += 1
    keep = law * counts.sum() > 1
    assert counts[law == 0].sum() == 0 and counts.sum() > 100
    assert (
        chisquare(counts[keep].double(), law[keep].double() / law[keep].double().sum() * counts[keep].sum()).pvalue
        > 1e-6
    )


def test_a_graph_that_froze_its_random_numbers_is_found(monkeypatch):
    """Negative control of the replay: a capture that holds the numbers drawn while it was made gives the same drafts for ever."""
    model = frozen()
    session, program, _ = drafting(model)

    def drawn():
        found = []
        for _ in range(30):
            with torch.inference_mode():
                session.fixed.run(program)
            found.append(tuple(program.function.tokens[0].tolist()))
        return len(set(found))

    assert drawn() > 5
    rand = torch.rand
    held = rand((1, 1), dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: held.clone())
    with torch.inference_mode():
        program.graph = Replayed(program.function, None, {})
    monkeypatch.setattr(torch, "rand", rand)
    assert drawn() == 1


def test_buffers_are_taken_by_one_call_at_a_time_kept_within_bounds_and_gone_with_the_model():
    model = frozen()
    with specplug.attach(model, "lookup", gamma=2, engine="rounds") as plugin:
        for rows in (1, 2, 3, 4, 5, 6, 7):
            model.generate(**padded([5 + n for n in range(rows)]), do_sample=False, max_new_tokens=4)
        assert 1 <= len(fixed._IDLE[model]) <= fixed.KEPT
        plugin.detach(release=False)
        assert fixed._IDLE[model]
        plugin.attach(model)
    assert model not in fixed._IDLE  # detached, it keeps no memory
    passes = [fixed.FixedPasses(model, Capture("off")) for _ in range(2)]
    for each in passes:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=prompt(4), use_cache=True, **{NAME: cache})
        each.fill(cache, [0])
    assert passes[0].cache is not passes[1].cache
    passes[0].close()
    again = fixed.FixedPasses(model, Capture("off"))
    again.fill(cache, [0])
    assert again.cache is not passes[1].cache
    gone = weakref.ref(model)
    del model, passes, again, each, plugin
    gc.collect()
    assert gone() is None


def test_buffers_that_are_dropped_are_gone_at_once():
    """With their graphs, and not when garbage is collected: a device's memory may be needed before."""
    model = frozen()
    drafter = noisy_copy(model, 0.02).requires_grad_(False)
    gc.collect()
    gc.disable()
    try:
        with specplug.attach(model, drafter, gamma=3, engine="rounds") as plugin:
            model.generate(prompt(9), do_sample=False, max_new_tokens=30)
            kept = [weakref.ref(each) for owner in (model, drafter) for each in fixed._IDLE[owner]]
            assert len(kept) == 2 and all(any(each.graph for each in ref().programs.values()) for ref in kept)
            plugin.detach()
        assert [each() for each in kept] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("padding", [[2, 2, 2], [2, 0, 3]])
def test_each_row_takes_over_its_own(padding):
    model, held = frozen(), DynamicCache()
    model(torch.cat([prompt(9, seed=seed) for seed in range(3)]), use_cache=True, **{NAME: held})
    passes = capture.Capture("capture").fixed(model)
    passes.fill(held, padding)
    for mine, theirs in zip(passes.cache.layers, held.layers, strict=True):
        for b, left in enumerate(padding):
            assert torch.equal(mine.keys[b, :, : 9 - left], theirs.keys[b, :, left:])
            assert torch.equal(mine.values[b, :, : 9 - left], theirs.values[b, :, left:])


def test_what_a_broken_call_left_does_not_come_out_of_later_ones():
    """A nan behind the text is masked, and would be a nan in the sum all the same."""
    model = frozen()
    expected = model.generate(prompt(9), do_sample=False, max_new_tokens=20)
    with specplug.attach(model, noisy_copy(model, 0.02).requires_grad_(False), gamma=3, engine="rounds") as plugin:
        for _ in range(2):
            assert torch.equal(model.generate(prompt(9), do_sample=False, max_new_tokens=20), expected)
            for each in (model, plugin.drafter.model):
                for kept in fixed._IDLE[each]:
                    for tensor in kept.cache.tensors:
                        tensor.fill_(float("nan"))


def test_a_model_whose_weights_were_replaced_is_captured_anew():
    model, given = frozen(), dict(input_ids=prompt(9), do_sample=False, max_new_tokens=20)
    with specplug.attach(model, "lookup", gamma=2, engine="rounds"):
        model.generate(**given)
        made = Replayed.made
        model.generate(**given)
        assert Replayed.made == made
        model.lm_head.weight.data = model.lm_head.weight.data.flip(0).clone()
        found = model.generate(**given)
    assert Replayed.made > made and torch.equal(found, model.generate(**given))


def change_number(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 3.0


def change_config(model):
    model.config.num_hidden_layers = 1


@pytest.mark.parametrize("change", [change_number, change_config])
def test_a_model_of_which_a_number_was_changed_is_captured_anew(change):
    model, given = frozen(), dict(input_ids=prompt(9), do_sample=False, max_new_tokens=20)
    with specplug.attach(model, "lookup", gamma=2, engine="rounds"):
        before = model.generate(**given)
        made = Replayed.made
        change(model)
        found = model.generate(**given)
    expected = model.generate(**given)
    assert Replayed.made > made and torch.equal(found, expected) and not torch.equal(found, before)


def test_packed_attention_and_transformers_own_have_graphs_of_their_own():
    model, given = frozen(), dict(input_ids=prompt(9), do_sample=False, max_new_tokens=20)
    with specplug.attach(model, "lookup", gamma=2, engine="rounds") as plugin:
        model.generate(**given)
        made = Replayed.made
        plugin.kernel = "torch"
        model.generate(**given)
        assert Replayed.made > made


def test_a_streamer_that_raises_at_once_leaves_the_prompt_in_the_cache():
    model, cache = frozen(), DynamicCache(config=frozen().config)

    class Raises:
        def put(self, ids):
            if ids.numel() == 1:
                raise RuntimeError

    with specplug.attach(model, "lookup", gamma=2, engine="rounds"), pytest.raises(RuntimeError):
        model.generate(prompt(9), do_sample=False, max_new_tokens=9, streamer=Raises(), **{NAME: cache})
    assert cache.get_seq_length() == 9


def test_a_call_under_autocast_has_no_graphs():
    model = frozen()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in fixed.why_not(model, "capture")


def test_two_threads_decode_with_one_model():
    model = frozen()
    drafter = noisy_copy(model, 0.02).requires_grad_(False)
    prompts = [prompt(6 + n, seed=n) for n in range(4)]
    expected = [model.generate(ids, do_sample=False, max_new_tokens=25) for ids in prompts]
    found = {}

    def call(n):
        for _ in range(3):
            found[n] = model.generate(prompts[n], do_sample=False, max_new_tokens=25)

    with specplug.attach(model, drafter, gamma=3, engine="rounds"):
        threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert all(torch.equal(found[n], expected[n]) for n in range(4))


def test_what_cannot_be_captured_is_run_as_it_is_and_named_once(monkeypatch, caplog):
    def refuses(program, device, shared):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setitem(fixed.GRAPHS, "cpu", refuses)
    model, given = frozen(), dict(input_ids=prompt(9), do_sample=False, max_new_tokens=20)
    expected = model.generate(**given)
    with specplug.attach(model, noisy_copy(model, 0.02).requires_grad_(False), gamma=3, engine="rounds"):
        for _ in range(2):
            assert torch.equal(model.generate(**given), expected)
    said = [each.getMessage() for each in caplog.records if "without graphs" in each.getMessage()]
    assert len(said) == 2 and all("LlamaForCausalLM" in each for each in said)  # target and draft


def test_a_text_that_grows_beyond_its_buffers_moves_to_larger_ones(monkeypatch):
    monkeypatch.setattr(fixed, "MIN_ROOM", 8)
    model, given = frozen(), dict(input_ids=prompt(6), do_sample=False, max_new_tokens=60)
    expected = model.generate(**given)
    with specplug.attach(model, noisy_copy(model, 0.02).requires_grad_(False), gamma=3, engine="rounds"):
        assert torch.equal(model.generate(**given), expected)
        assert fixed._IDLE[model][-1].cache.room == 128


def test_a_text_at_the_end_of_the_positions_that_the_model_has(monkeypatch):
    model = model_of(OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, eos_token_id=None))
    given = dict(input_ids=prompt(9), do_sample=False, max_new_tokens=55)
    expected = model.generate(**given)
    with specplug.attach(model, "lookup", gamma=4, engine="rounds"):
        assert torch.equal(model.generate(**given), expected)
    assert Replayed.replays


def test_graph_compile_compiles_the_passes_and_nothing_else_does(monkeypatch):
    compiled, original = [], torch.compile

    def eager(function, **given):
        compiled.append(given)
        return original(function, backend="eager", **given)

    monkeypatch.setattr(torch, "compile", eager)
    model, given = frozen(), dict(input_ids=prompt(9), do_sample=False, max_new_tokens=12)
    expected = model.generate(**given)
    for graph, number in (("capture", 0), ("off", 0), ("compile", 1)):
        with specplug.attach(model, "lookup", gamma=1, engine="rounds", graph=graph):
            assert torch.equal(model.generate(**given), expected)
        assert len(compiled) == number
    assert compiled == [{"dynamic": False}]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: setattr(model.config, "layer_types", ["chunked_attention"] * 2), "neither full nor sliding"),
        (lambda model: setattr(model.config, "_attn_implementation", "flash_attention_2"), "takes no mask"),
        (lambda model: setattr(model.config, "_attn_implementation", "flex_attention"), "takes no mask"),
        (lambda model: model.model.norm.register_forward_hook(lambda *args: None), "hooks"),
        (lambda model: setattr(model.model.norm, "forward", model.model.norm.forward), "forward of its own"),
        (lambda model: model.train(), "in training"),
        (lambda model: setattr(model.model, "norm", Foreign()), "none of the modules"),
    ],
)
def test_what_is_not_served_is_named(change, reason):
    model = frozen()
    assert fixed.why_not(model, "off") == "graph=off on cpu"
    change(model)
    assert reason in fixed.why_not(model, "capture")


@pytest.fixture
def overlapping(monkeypatch):
    """The host is told to wait for this device as it waits for others."""
    monkeypatch.setattr(fixed_model, "OVERLAPPING", {"cpu"})
    begun, propose = [], FixedDraft.propose

    def counted(self, texts, gamma, active):
        begun.append(self.begun == (gamma, texts[0].shape[1]))
        return propose(self, texts, gamma, active)

    monkeypatch.setattr(FixedDraft, "propose", counted)
    return begun


def test_the_next_drafts_begin_before_the_verdict_is_read_and_are_the_same(overlapping, monkeypatch):
    model = frozen()
    drafter, given = noisy_copy(model, 0.02).requires_grad_(False), dict(do_sample=False, max_new_tokens=40)
    expected = model.generate(prompt(9), **given)
    kept = []
    for places in ({"cpu"}, set()):
        monkeypatch.setattr(fixed_model, "OVERLAPPING", places)
        with specplug.attach(model, drafter, gamma=3, engine="rounds") as plugin:
            for _ in range(2):
                assert torch.equal(model.generate(prompt(9), **given), expected)
                kept.append((plugin.last.num_accepted, plugin.last.num_rounds))
            rounds = plugin.last.num_rounds
    assert len(set(kept)) == 1 and 0 < kept[0][0] < 3 * kept[0][1]
    first, second = overlapping[: 2 * rounds], overlapping[2 * rounds :]
    assert sum(first) >= 2 * rounds - 10 and not any(
        second
    )  # not the first round of a call, nor the last ones, which ask for fewer


def test_drafts_that_were_begun_for_nothing_are_not_used(overlapping):
    """The number of drafts changes each round, so none fits."""

    class Restless(FixedSchedule):
        def next_gamma(self):
            self.gamma = 5 - self.gamma
            return self.gamma

    model = frozen()
    drafter = noisy_copy(model, 0.02).requires_grad_(False)
    expected = model.generate(prompt(9), do_sample=False, max_new_tokens=40)
    with specplug.attach(model, drafter, schedule=Restless(2), engine="rounds"):
        assert torch.equal(model.generate(prompt(9), do_sample=False, max_new_tokens=40), expected)
    assert len(overlapping) > 5 and not any(overlapping[:-1])


@pytest.mark.parametrize("call", [dict(do_sample=False), dict(do_sample=True, top_k=20, top_p=0.9)])
@pytest.mark.parametrize("draft", ["model", "lookup"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_host_reads_once_a_round(call, draft, num_rows):
    model = frozen()
    model.generation_config.eos_token_id = None
    drafter = noisy_copy(model, 0.02).requires_grad_(False) if draft == "model" else "lookup"
    given = padded([9, 4, 6][:num_rows])
    schedule = FixedSchedule(3)
    with specplug.attach(model, drafter, schedule=schedule, engine="rounds"):
        model.generate(**given, **call, max_new_tokens=30)
        counts = launches.count(lambda: model.generate(**given, **call, max_new_tokens=30), schedule, "cpu")
    per_round = 1 if draft == "model" else 1 + num_rows  # a lookup looks at each text
    assert counts.num_rounds >= 5 and counts.host_reads <= per_round * counts.num_rounds


def test_a_read_in_between_would_be_counted():
    """Negative control of the test above."""
    model = frozen()
    model.generation_config.eos_token_id = None

    class Reads(FixedSchedule):
        def next_gamma(self):
            torch.ones(1).item()
            return self.gamma

    schedule = Reads(3)
    with specplug.attach(model, noisy_copy(model, 0.02).requires_grad_(False), schedule=schedule, engine="rounds"):
        counts = launches.count(lambda: model.generate(prompt(9), do_sample=False, max_new_tokens=30), schedule, "cpu")
    assert counts.host_reads > counts.num_rounds


@pytest.fixture
def no_graphs(monkeypatch):
    """The CPU has none, as is the case: there passes over several rows are recorded."""
    monkeypatch.delitem(fixed.GRAPHS, "cpu")
    monkeypatch.setattr(ragged_pass, "USES_BEFORE", 0)


def ready(model):
    """Numbers of rows and widths whose recordings are used."""
    return {shape for key, each in capture._KNOWN[model][1].items() if key[0] == "ragged" for shape in each.ready}


@pytest.mark.parametrize("draft", ["model", "lookup"])
@pytest.mark.parametrize("call", [*CALLS, dict(do_sample=False, max_new_tokens=18, min_new_tokens=18)])
@pytest.mark.parametrize("make", [frozen, lambda: frozen("mistral"), lambda: frozen("gpt2"), CONFIGS[3], CONFIGS[4]])
def test_batches_are_recorded_and_their_ids_are_those_of_plain_decoding(make, call, draft, no_graphs):
    model = make() if callable(make) else model_of(make)
    drafter = noisy_copy(model, 0.02) if draft == "model" else "lookup"
    given = padded([3, 11, 7, 4, 5])
    expected = model.generate(**given, **call)
    with specplug.attach(model, drafter, gamma=3, engine="rounds"):
        for _ in range(2):
            assert torch.equal(model.generate(**given, **call), expected)
    assert not Replayed.made
    if type(make) is not MixtralConfig:
        assert {width for _, width in ready(model)} >= ({1} if draft == "lookup" else {4})
        if draft == "model":
            assert any(width == 1 for _, width in ready(drafter))


def test_a_replay_of_a_batch_that_differs_is_not_used(no_graphs, monkeypatch):
    original = ragged_pass.record

    def wrong(model, cache, inputs):
        recorded = original(model, cache, inputs)
        return lambda *inputs: recorded(*inputs) + 1e-3

    monkeypatch.setattr(ragged_pass, "record", wrong)
    model, given = frozen(), padded([3, 11, 7])
    expected = model.generate(**given, do_sample=False, max_new_tokens=18)
    with specplug.attach(model, "lookup", gamma=3, engine="rounds"):
        assert torch.equal(model.generate(**given, do_sample=False, max_new_tokens=18), expected)
    assert not ready(model)


def test_a_batch_of_a_model_that_changes_is_recorded_anew(no_graphs):
    model, given = frozen(), padded([3, 11, 7])
    with specplug.attach(model, "lookup", gamma=3, engine="rounds") as plugin:
        before = model.generate(**given, do_sample=False, max_new_tokens=18)
        assert ready(model)
        with torch.no_grad():
            model.model.norm.weight.mul_(torch.linspace(-1, 1, 32))
        found = model.generate(**given, do_sample=False, max_new_tokens=18)
        plugin.detach()
    assert torch.equal(found, model.generate(**given, do_sample=False, max_new_tokens=18))
    assert not torch.equal(found, before)


def test_many_lists_of_processors_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(fixed, "PROGRAMS", 5)
    model = frozen()
    drafter = noisy_copy(model, 0.02).requires_grad_(False)
    with specplug.attach(model, drafter, gamma=2, engine="rounds"):
        for number in range(12):
            model.generate(prompt(9), do_sample=True, temperature=0.5 + 0.1 * number, max_new_tokens=8)
        kept = fixed._IDLE[drafter]
        assert len(kept) == 1 and 2 <= len(kept[0].programs) <= 5


@pytest.mark.parametrize("num_rows", [1, 3])
def test_rounds_before_the_capture_have_no_price(num_rows, monkeypatch):
    """Without graphs they take several times as long, and a schedule would go by that for hundreds of rounds."""
    monkeypatch.setattr(fixed, "USES_BEFORE", 4)
    model = frozen()
    model.generation_config.eos_token_id = None
    prices = []

    class Sees(FixedSchedule):
        def observe(self, rounds, num_tokens, seconds):
            prices.append(seconds)

    given = dict(padded([9, 4, 6][:num_rows]), do_sample=False, max_new_tokens=30)
    with specplug.attach(model, noisy_copy(model, 0.02).requires_grad_(False), schedule=Sees(2), engine="rounds"):
        model.generate(**given)
        assert prices[:4] == [None] * 4 and all(price > 0 for price in prices[4:8])
        prices.clear()
        model.generate(**given)
        assert None not in prices[:6]


def test_where_compiling_fails_passes_are_run_as_they_are(monkeypatch, caplog):
    def fails(function, **given):
        def run(**inputs):
            raise RuntimeError("Failed to find C compiler")

        return run

    monkeypatch.setattr(torch, "compile", fails)
    model, given = frozen(), dict(input_ids=prompt(9), do_sample=False, max_new_tokens=12)
    expected = model.generate(**given)
    with specplug.attach(model, "lookup", gamma=1, engine="rounds", graph="compile"):
        assert torch.equal(model.generate(**given), expected)
    assert sum("without torch.compile" in each.getMessage() for each in caplog.records) == 1
