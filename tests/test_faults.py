"""Faults of the incumbent, transformers' own assisted generation, that we must not share.

Each test shows that ours is plain `generate`, and then that the incumbent of the pinned version is not: that keeps the
test honest. With another version of transformers the second half is left out, since the fault may be mended there.
"""

import copy

import pytest
import torch
import transformers
from conftest import PAD, make_model, noisy_copy, prompt
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria, TextIteratorStreamer

import specplug
from specplug.cache import NAME
from specplug.schedule import FixedSchedule

PINNED = transformers.__version__ == "5.24.0"
GREEDY = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture(scope="module")
def target():
    return make_model(seed=2)


@pytest.fixture(scope="module")
def draft(target):
    return noisy_copy(target, scale=0.01)


def incumbent(call):
    """What the incumbent makes of it: its result, or its error."""
    try:
        return call()
    except Exception as error:
        return error


def differs(plain, theirs) -> bool:
    return isinstance(theirs, Exception) or not torch.equal(plain, theirs)


def test_a_reused_cache(target, draft):
    """The incumbent feeds the whole text again on top of the filled cache."""
    ids = prompt(length=9)

    def second_turn(**extra):
        cache = DynamicCache(config=target.config)
        with torch.no_grad():
            target(input_ids=ids[:, :-1], use_cache=True, **{NAME: cache})
        result = target.generate(ids, return_dict_in_generate=True, **{NAME: cache}, **GREEDY, **extra)
        return torch.cat([result.sequences, torch.tensor([[result[NAME].get_seq_length()]])], dim=1)

    plain = second_turn()
    for engine in ("rounds", "lookahead"):
        with specplug.attach(target, draft, engine=engine, gamma=4) as plugin:
            assert torch.equal(second_turn(), plain) and plugin.last.num_accepted > 0
    if PINNED:
        assert differs(plain, incumbent(lambda: second_turn(assistant_model=copy.deepcopy(draft))))


def test_lookup_drafts_under_a_repetition_penalty(tiny_pipeline):
    """The incumbent tests lookup drafts on made-up logits, where a repetition penalty and top-k take them all out.

    With the default settings of Qwen2.5-Instruct it drafts nothing at all.
    """
    pipe, _ = tiny_pipeline
    text = "In the morning, Mia plays with a red kite. On Monday, Mia meets a fox. They like to eat plums together."
    chat = [{"role": "user", "content": f"Write the text again with Tom instead of Mia.\nText: {text}"}]
    ids = pipe.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    call = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    call |= {"max_new_tokens": 40, "min_new_tokens": 40}
    torch.manual_seed(0)
    with specplug.attach(pipe, "lookup", gamma=4) as plugin:
        pipe.model.generate(ids, **call)
        assert plugin.last.num_draft_tokens > 20 and plugin.last.num_accepted > 5
    if PINNED:
        passes = []
        forward = pipe.model.forward
        pipe.model.forward = lambda *a, **k: passes.append(1) or forward(*a, **k)
        pipe.model.generate(ids, prompt_lookup_num_tokens=4, **call)
        del pipe.model.forward
        assert len(passes) == 40


def test_lookup_is_capped_to_the_room_left(target):
    """The incumbent drafts past the limit."""

    class Counts(specplug.drafters.lookup.LookupDrafter):
        def start(self, request):
            session = super().start(request)
            propose = session.propose
            session.propose = lambda ids, gamma: asked.append((ids.shape[1], gamma)) or propose(ids, gamma)
            return session

    asked: list[tuple[int, int]] = []
    with specplug.attach(target, Counts(), gamma=8):
        out = target.generate(prompt(), **GREEDY)
    assert asked and all(length + gamma + 1 <= 7 + 24 for length, gamma in asked) and out.shape[1] <= 7 + 24


class StopOnToken(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


def test_a_criterion_that_is_met_inside_a_round(target, draft):
    """The incumbent asks once a round, and runs on."""
    ids = prompt(seed=6)
    token = target.generate(ids, **GREEDY)[0, ids.shape[1] + 2].item()
    call = {"stopping_criteria": [StopOnToken(token)], **GREEDY}
    plain = target.generate(ids, **call)
    for engine in ("rounds", "lookahead"):
        with specplug.attach(target, noisy_copy(target, scale=0), engine=engine, gamma=4):
            assert torch.equal(target.generate(ids, **call), plain)
    if PINNED:
        assert differs(plain, incumbent(lambda: target.generate(ids, assistant_model=noisy_copy(target, 0), **call)))


def test_stop_strings(tiny_pipeline):
    """The incumbent raises with an assistant."""
    pipe, draft = tiny_pipeline
    arguments = {"max_new_tokens": 40, "do_sample": False, "stop_sequence": "has"}
    text = "Ben has 12 coins. Ben finds 5 more coins."
    plain = pipe(text, **arguments)
    for engine in ("rounds", "lookahead"):
        with specplug.attach(pipe, draft, engine=engine, gamma=4):
            assert pipe(text, **arguments) == plain
    if PINNED:
        assert isinstance(incumbent(lambda: pipe(text, assistant_model=copy.deepcopy(draft), **arguments)), ValueError)


def test_classifier_free_guidance(target, draft):
    """Its processor keeps a cache of its own; the incumbent calls it for drafts that are rejected later."""
    call = {"guidance_scale": 1.8, "negative_prompt_ids": prompt(seed=3), **GREEDY}
    plain = target.generate(prompt(), **call)
    for engine in ("rounds", "lookahead"):
        with specplug.attach(target, draft, engine=engine, gamma=4):
            assert torch.equal(target.generate(prompt(), **call), plain)
    if PINNED:
        assert differs(plain, incumbent(lambda: target.generate(prompt(), assistant_model=draft, **call)))


class Grammar(LogitsProcessor):
    """As grammar engines do: accepts the tokens it is shown one by one, and fails if the text does not grow by one."""

    def __init__(self):
        self.state, self.length = 0, None

    def __call__(self, input_ids, scores):
        if self.length is not None:
            assert input_ids.shape[1] == self.length + 1, "the text did not grow by one token"
            self.state = (self.state * 3 + int(input_ids[0, -1])) % 5
        self.length = input_ids.shape[1]
        allowed = torch.arange(scores.shape[1]) % 5 != self.state
        return scores.masked_fill(~allowed, float("-inf"))


def test_a_grammar(target, draft):
    """The incumbent shows it positions that are rejected later."""
    plain = target.generate(prompt(), logits_processor=[Grammar()], **GREEDY)
    for engine in ("rounds", "lookahead"):
        with specplug.attach(target, draft, engine=engine, gamma=4) as plugin:
            assert torch.equal(target.generate(prompt(), logits_processor=[Grammar()], **GREEDY), plain)
            assert plugin.last.num_accepted > 0
    if PINNED:
        theirs = incumbent(
            lambda: target.generate(prompt(), assistant_model=draft, logits_processor=[Grammar()], **GREEDY)
        )
        assert differs(plain, theirs)


def test_batches(target, draft):
    """The incumbent serves one sequence only."""
    ids = torch.cat([prompt(), prompt(seed=1)])
    plain = target.generate(ids, **GREEDY)
    with specplug.attach(target, draft, gamma=4):
        assert torch.equal(target.generate(ids, **GREEDY), plain)
    if PINNED:
        assert isinstance(incumbent(lambda: target.generate(ids, assistant_model=draft, **GREEDY)), ValueError)


def test_custom_generate_keeps_streamer_and_stop_strings(tiny_pipeline):
    """`generate` drops both when it is given a callable; a streaming reader then waits forever."""
    pipe, draft = tiny_pipeline
    ids = pipe.tokenizer("Ben has 12 coins. Ben finds 5 more coins.", return_tensors="pt").input_ids
    call = {"max_new_tokens": 40, "do_sample": False, "stop_strings": ["has"], "tokenizer": pipe.tokenizer}

    def text_of(**extra):
        streamer = TextIteratorStreamer(pipe.tokenizer, skip_prompt=True, timeout=5)
        result = pipe.model.generate(ids, streamer=streamer, **call, **extra)
        return result, "".join(streamer)

    plain, plain_text = text_of()
    for engine in ("rounds", "lookahead"):
        plugin = specplug.SpeculativeProcessor(draft, engine=engine, schedule=FixedSchedule(4))
        ours, text = text_of(custom_generate=plugin)
        assert torch.equal(ours, plain) and text == plain_text and plugin.last.engine == engine
    if PINNED:

        def custom(model, input_ids, **kwargs):
            return type(model)._sample(model, input_ids, **kwargs)

        assert isinstance(incumbent(lambda: text_of(custom_generate=custom)), ValueError)


def test_a_pair_whose_special_tokens_differ(tiny_pipeline):
    """An instruct model and its base have different end-of-sequence tokens; the incumbent's pipeline has no way through."""
    pipe, draft = tiny_pipeline
    base = copy.deepcopy(draft)
    base.config.eos_token_id = base.generation_config.eos_token_id = 2
    base.config.pad_token_id = base.generation_config.pad_token_id = 3
    plain = pipe("Ben has 12 coins.", max_new_tokens=20, do_sample=False)
    with specplug.attach(pipe, base, gamma=4) as plugin:
        assert pipe("Ben has 12 coins.", max_new_tokens=20, do_sample=False) == plain
        assert plugin.last.num_accepted > 0


def test_two_distributions_that_differ_by_one_rounding():
    """The incumbent's residual is then 0 / 0, and sampling from it raises."""
    from specplug.verify import verify_token

    target = torch.tensor([[[0.25, 0.25, 0.5], [1.0, 0.0, 0.0]]])
    drafted = target[:, :1] * (1 + torch.finfo(torch.float32).eps)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        verified = verify_token(torch.tensor([[2]]), drafted, target, generator)
        assert verified.next_token.item() in (0, 1, 2)


def test_a_token_the_target_cannot_say_is_never_kept():
    """The incumbent compares with `<=`, and a coin of exactly 0 lets it pass."""
    from specplug.verify import verify_token

    target = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    zeros = torch.rand
    try:
        torch.rand = lambda shape, **kwargs: torch.zeros(shape, dtype=kwargs["dtype"])
        assert verify_token(torch.tensor([[0]]), torch.tensor([[[1.0, 0.0]]]), target).num_accepted.item() == 0
    finally:
        torch.rand = zeros


def test_padding_is_left_out_of_the_repetition_penalty(target, draft):
    ids = torch.cat([torch.full((1, 3), PAD), prompt()], dim=1)
    call = {"attention_mask": (ids != PAD).long(), "repetition_penalty": 1.4, **GREEDY}
    plain = target.generate(ids, **call)
    with specplug.attach(target, draft, gamma=4) as plugin:
        assert torch.equal(target.generate(ids, **call), plain) and plugin.last.engine == "rounds"


ROPE = {
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 40),
    "longrope": (
        {"rope_type": "longrope", "factor": 4.0, "long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
        | {"original_max_position_embeddings": 40},
        160,
    ),
}


@pytest.mark.parametrize("kind", ROPE)
@pytest.mark.parametrize("engine", ["rounds", "lookahead"])
def test_positions_that_depend_on_the_length(kind, engine):
    """Their embeddings are chosen by the furthest position of a pass, which drafts move. The incumbent drafts all the same."""
    parameters, longest = ROPE[kind]
    model = make_model(rope_parameters={"rope_theta": 1e4, **parameters})
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = longest
    weights, model = model.state_dict(), type(model)(config).eval()
    model.load_state_dict(weights)
    draft, options = noisy_copy(model), {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    across = {"max_new_tokens": 60, **options}
    plain = model.generate(prompt(9), **across)
    with specplug.attach(model, draft, gamma=3) as plugin:
        assert torch.equal(model.generate(prompt(9), **across), plain) and plugin.last.engine == "plain"
        assert "position" in plugin.last.reason
        for ids, new in ((prompt(9), 31), (prompt(41), 20))[: 1 + (kind == "longrope")]:  # on one side alone
            served = model.generate(ids, max_new_tokens=new, **options, specplug={"engine": engine})
            assert plugin.last.num_accepted > 0
            plugin.detach()
            assert torch.equal(model.generate(ids, max_new_tokens=new, **options), served)
            plugin.attach(model)
    with specplug.attach(model, draft, gamma=3, engine=engine), pytest.raises(ValueError, match="position"):
        model.generate(prompt(9), **across)
    if PINNED and kind == "longrope":
        assert differs(plain, incumbent(lambda: model.generate(prompt(9), assistant_model=draft, **across)))
