"""verify=walk: the ids of plain `generate` under the same `torch.manual_seed`, and the random stream where it leaves it.

Nothing here is statistical: one token that differs fails. Rounding could part two texts where a race is nearly a tie; in
fp32 that is a matter of 1 in 100,000 draws, and these draws are fixed by their seeds.
"""

import pytest
import torch
from conftest import make_model, noisy_copy, prompt
from test_exact_greedy import Recorder, StopAfter
from transformers import LogitsProcessor

import specplug
from specplug import noise, verify
from specplug.drafters.early_exit import EarlyExitDrafter
from specplug.drafters.lookup import LookupDrafter
from specplug.drafters.model import ModelDrafter, ModelSession
from specplug.drafters.suffix import SuffixDrafter
from specplug.schedule import AdaptiveSchedule, ConfidenceSchedule, FixedSchedule

ENDS = [2, 9, 17, 31]  # so that texts end early, and often at a draft that was kept
SETTINGS = {
    "plain": {},
    "temperature 0.7, top-k": {"temperature": 0.7, "top_k": 8},
    "temperature 1.5, top-p": {"temperature": 1.5, "top_p": 0.9},
    "min-p": {"min_p": 0.1},
    "repetition penalty": {"repetition_penalty": 1.3, "temperature": 0.7},
    "guidance": {"guidance_scale": 1.5},  # keeps a cache of its own and wants every token once
    "counting": {"counting": True},
}
DRAFTERS = ["model", "lookup", "suffix", "early_exit", "chain"]


class Counting(LogitsProcessor):
    """Keeps state, and sees that it is shown what plain decoding shows it."""

    def __init__(self):
        self.length = None

    def __call__(self, input_ids, scores):
        assert self.length in (None, input_ids.shape[1] - 1)
        self.length = input_ids.shape[1]
        return scores - 2.0 * (torch.arange(scores.shape[1]) % 5 == self.length % 5)


@pytest.fixture(scope="module")
def target():
    return make_model(layers=3)


@pytest.fixture(scope="module")
def drafters(target):
    model = noisy_copy(target, scale=0.02)
    return {
        "model": model,
        "lookup": LookupDrafter(min_ngram=1),
        "suffix": SuffixDrafter(min_depth=1, min_probability=0.1),
        "early_exit": EarlyExitDrafter(target, 2),
        "chain": [LookupDrafter(min_ngram=1), model],
    }


def arguments(settings):
    given = {"do_sample": True, "max_new_tokens": 30, "eos_token_id": ENDS, **settings}
    if given.pop("counting", False):
        given["logits_processor"] = [Counting()]
    return given


def two_calls(target, ids, settings, seed):
    """Two answers in a row, and where the stream is then. The second shows whether the first left it in its place."""
    torch.manual_seed(seed)
    texts = [target.generate(ids, **arguments(settings)) for _ in range(2)]
    return texts, torch.get_rng_state()


def assert_replayed(plain, ours):
    for one, other in zip(plain[0], ours[0], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(plain[1], ours[1]), "the random stream is not where plain decoding leaves it"


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_ids_of_plain_generate(target, drafters, settings, drafter):
    with specplug.attach(target, drafters[drafter], verify="walk", engine="rounds", gamma=4) as plugin:
        plugin.detach()
        for seed in range(4):
            ids = prompt(seed=seed)
            plain = two_calls(target, ids, SETTINGS[settings], seed)
            plugin.attach(target)
            assert_replayed(plain, two_calls(target, ids, SETTINGS[settings], seed))
            plugin.detach()
    assert plugin.stats.num_draft_tokens > 0 and plugin.last.engine == "rounds"
    assert plugin.stats.num_accepted > 0 or drafter in ("lookup", "suffix"), "nothing was kept, so little was tested"


@pytest.mark.parametrize(
    "schedule",
    [*map(FixedSchedule, (0, 1, 9)), ConfidenceSchedule(6, 0.4), AdaptiveSchedule(8)],
    ids=["fixed 0", "fixed 1", "fixed 9", "confidence", "adaptive"],
)
def test_for_every_schedule(target, drafters, schedule):
    for seed in range(6):
        plain = two_calls(target, prompt(seed=seed), {}, seed)
        with specplug.attach(target, drafters["model"], verify="walk", engine="rounds", schedule=schedule):
            assert_replayed(plain, two_calls(target, prompt(seed=seed), {}, seed))


@pytest.mark.parametrize("drafter", ["model", "lookup", "chain"])
def test_a_batch_goes_to_the_loop_that_draws_for_all_its_rows(target, drafters, drafter):
    ids, settings = torch.cat([prompt(seed=seed) for seed in range(3)]), {"temperature": 0.7}
    with specplug.attach(target, drafters[drafter], verify="walk", gamma=4) as plugin:
        plugin.detach()
        for seed in range(4):
            for more in ({}, {"num_return_sequences": 2}):
                plain = two_calls(target, ids, settings | more, seed)
                plugin.attach(target)
                assert_replayed(plain, two_calls(target, ids, settings | more, seed))
                assert plugin.last.engine == "lookahead" and "verify=walk" in plugin.last.reason
                plugin.detach()
        plugin.attach(target)
        target.generate(ids, do_sample=False, max_new_tokens=5)
        assert plugin.last.engine == "rounds"  # greedy rows draw nothing
    assert plugin.stats.num_accepted > 0


def test_rounds_refuses_such_a_batch_in_one_line(target, drafters):
    with (
        specplug.attach(target, drafters["model"], verify="walk", engine="rounds"),
        pytest.raises(ValueError, match=r"engine=rounds cannot serve .*verify=walk.*lookahead engine") as caught,
    ):
        target.generate(prompt().expand(2, -1), **arguments({}))
    assert "\n" not in str(caught.value)


def test_scores_criteria_and_processors_that_keep_state(target, drafters):
    """All that a caller sees of the call, and a criterion that stops at a token of its own choice."""
    seen = []
    for plugin in (None, specplug.SpeculativeProcessor(drafters["model"], verify="walk", schedule=FixedSchedule(4))):
        recorder = Recorder()
        if plugin:
            plugin.attach(target)
        torch.manual_seed(3)
        output = target.generate(
            prompt(), do_sample=True, max_new_tokens=30, eos_token_id=None, logits_processor=[recorder],
            stopping_criteria=[StopAfter(17)], return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        seen.append((output, recorder.seen, torch.get_rng_state()))
    (plain, shown, state), (ours, our_shown, our_state) = seen
    plugin.detach()
    assert plugin.last.engine == "rounds" and plugin.last.num_accepted > 0
    assert torch.equal(plain.sequences, ours.sequences) and shown == our_shown and torch.equal(state, our_state)
    for one, other in zip(plain.scores, ours.scores, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("vocab_size", [5, 16, 64, 1003])
def test_the_stream_is_seen_ahead(num_rows, vocab_size):
    """The draws that torch.multinomial is going to make, for several in a row: where this fails, acceptance does too."""
    for seed in range(20):
        torch.manual_seed(seed)
        torch.randn(seed)  # from the middle of the stream, also with half of a normal pair in hand
        before = torch.get_rng_state()
        ahead = noise.StreamAhead(num_rows, vocab_size, torch.device("cpu"))
        probs = (torch.randn(4, num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3).softmax(-1)
        probs[:, :, vocab_size // 2] = 0
        rows = list(range(num_rows))
        ahead.begin([10] * num_rows)
        foreseen = [verify.race(probs[k], ahead.of(rows, [10 + k] * num_rows, probs)) for k in range(4)]
        assert torch.equal(torch.get_rng_state(), before)
        for k in range(4):
            assert torch.equal(torch.multinomial(probs[k], 1)[:, 0], foreseen[k])


def test_both_engines_keep_the_same_drafts(target, drafters):
    """Coupled drafts too are the same, whoever draws: a text takes as many passes."""
    counts = []
    for engine in ("rounds", "lookahead"):
        with specplug.attach(target, drafters["model"], verify="walk", engine=engine, gamma=4) as plugin:
            for seed in range(8):
                two_calls(target, prompt(seed=seed), {}, seed)
        counts.append((plugin.stats.num_rounds, plugin.stats.num_draft_tokens, plugin.stats.num_new_tokens))
    assert counts[0] == counts[1] and counts[0][0] < counts[0][2] / 2


def means(target, draft, monkeypatch, change=None, rule="walk"):
    """Tokens per pass over 20 calls, each replayed."""
    with monkeypatch.context() as patched:
        if change is not None:
            patched.setattr("specplug.drafters.forward.race", change)
        with specplug.attach(target, draft, verify=rule, engine="rounds", gamma=4) as plugin:
            for seed in range(20):
                torch.manual_seed(seed)
                target.generate(
                    prompt(seed=seed), do_sample=True, max_new_tokens=30, eos_token_id=None, temperature=1.3
                )
    return plugin.stats.mean_acceptance_length


def test_coupled_drafts_are_kept_nearly_as_often_as_drawn_ones(target, drafters, monkeypatch):
    """Fixed seeds, so no chance: more than the argmax, and most of what the token rule keeps."""
    coupled = means(target, drafters["model"], monkeypatch)
    by_argmax = means(target, drafters["model"], monkeypatch, lambda probs, _: probs.argmax(-1))
    drawn = means(target, drafters["model"], monkeypatch, rule="token")
    assert coupled > by_argmax + 0.3 and coupled > 0.85 * drawn, (coupled, by_argmax, drawn)


def test_a_stream_that_is_not_foreseen_costs_acceptance_alone(target, drafters, monkeypatch):
    """As on a device whose multinomial works otherwise: the ids stay."""
    good = means(target, drafters["model"], monkeypatch)
    other = torch.Generator().manual_seed(0)
    monkeypatch.setattr(
        noise.StreamAhead, "of", lambda self, rows, lengths, like: torch.empty_like(like).exponential_(generator=other)
    )
    for seed in range(6):
        with specplug.attach(target, drafters["model"], gamma=0):
            plain = two_calls(target, prompt(seed=seed), {}, seed)
        with specplug.attach(target, drafters["model"], verify="walk", engine="rounds", gamma=4):
            assert_replayed(plain, two_calls(target, prompt(seed=seed), {}, seed))
    assert means(target, drafters["model"], monkeypatch) < good - 0.3


class TakesRandomNumbers(ModelDrafter):
    """Negative control: a draft that draws from the global stream, whatever it is told."""

    def start(self, request):
        session = ModelSession(self, request)
        propose = session.propose

        def drawing(ids, gamma):
            torch.rand(3)
            return propose(ids, gamma)

        session.propose = drawing
        return session


@pytest.mark.parametrize("engine", ["rounds", "lookahead"])
def test_a_draft_that_moves_the_stream_is_caught(target, drafters, engine):
    plain = two_calls(target, prompt(), {}, 1)
    draft = TakesRandomNumbers(drafters["model"])
    with specplug.attach(target, draft, verify="walk", engine=engine, gamma=4), pytest.raises(AssertionError):
        assert_replayed(plain, two_calls(target, prompt(), {}, 1))


def test_a_draft_that_fails_has_taken_nothing(target, drafters):
    class Fails(ModelDrafter):
        def start(self, request):
            session = ModelSession(self, request)
            propose = session.propose

            def failing(ids, gamma):
                propose(ids, gamma)
                raise MemoryError("out of memory")

            session.propose = failing
            return session

    plain = two_calls(target, prompt(), {}, 1)
    with specplug.attach(target, Fails(drafters["model"]), verify="walk", gamma=4):
        assert_replayed(plain, two_calls(target, prompt(), {}, 1))


@pytest.mark.parametrize("settings", [{"verify": "walk"}, {"engine": "lookahead"}, {"verify": "walk", "seed": 3}])
def test_the_stream_is_never_put_back(target, drafters, settings, monkeypatch):
    """Another thread may have drawn from it meanwhile, and would draw the same numbers again."""

    def forbidden(*_):
        raise AssertionError("the global stream was set")

    seed = {"specplug": {"seed": settings.pop("seed")}} if "seed" in settings else {}
    with specplug.attach(target, drafters["model"], gamma=4, **settings) as plugin:
        for name in ("set_rng_state", "manual_seed", "seed"):
            monkeypatch.setattr(torch, name, forbidden)
            monkeypatch.setattr(torch.random, name, forbidden)
        for ids in (prompt(), prompt().expand(2, -1)):
            target.generate(ids, **arguments({}), **seed)
            assert plugin.last.num_accepted > 0


@pytest.mark.parametrize("engine", ["rounds", "lookahead"])
def test_where_the_stream_cannot_be_read_the_text_goes_on_without_drafts(target, drafters, engine, monkeypatch, caplog):
    plain = two_calls(target, prompt(), {}, 1)

    def unknown(device):
        raise NotImplementedError(f"no generator on {device}")

    monkeypatch.setattr(noise, "_state_of_stream", unknown)
    with specplug.attach(target, drafters["model"], verify="walk", engine=engine, gamma=4):
        assert_replayed(plain, two_calls(target, prompt(), {}, 1))
    assert "no generator on cpu" in caplog.text


def draws_ahead(children, draw):
    """Negative control: all positions are drawn for at once, as a tensor would be."""
    drawn = [draw(node) for node in range(len(children))]
    return verify.verify_walk(children, drawn.__getitem__)


def keeps_drafts(children, draw):
    """Negative control: what was drafted is said where it was likely enough, as some lossy rules do."""
    for step in verify.verify_walk(children, draw):
        yield step._replace(token=next(iter(children[step.node]), step.token))


@pytest.mark.parametrize("rule", [draws_ahead, keeps_drafts])
def test_broken_walks_are_caught(target, drafters, rule, monkeypatch):
    plain = two_calls(target, prompt(), {}, 0)
    monkeypatch.setattr("specplug.round.verify_walk", rule)
    with specplug.attach(target, drafters["model"], verify="walk", gamma=4), pytest.raises(AssertionError):
        assert_replayed(plain, two_calls(target, prompt(), {}, 0))


def test_the_other_rules_do_not_replay(target, drafters):
    """What the table in docs/exactness.md says of them."""
    for rule in ("token", "block"):
        with specplug.attach(target, drafters["model"], gamma=0):
            plain = two_calls(target, prompt(), {}, 0)
        with specplug.attach(target, drafters["model"], verify=rule, gamma=4), pytest.raises(AssertionError):
            assert_replayed(plain, two_calls(target, prompt(), {}, 0))


def test_from_a_configuration(tiny_pipeline):
    pipe, _ = tiny_pipeline
    call = {"max_new_tokens": 25, "do_sample": True, "temperature": 1.2}
    ask = "Ben has 12 coins. Ben finds 5 more coins. How many coins does Ben have now?"
    torch.manual_seed(5)
    plain = pipe(ask, **call)
    config = specplug.load("pair=tiny", "verify=walk", "schedule=fixed", "schedule.gamma=4")
    own = specplug.SpeculativeProcessor(config)
    torch.manual_seed(5)
    assert pipe(ask, custom_generate=own, **call) == plain
    with specplug.attach(pipe, config=config) as plugin:
        torch.manual_seed(5)
        assert pipe(ask, **call) == plain
    for each in (own, plugin):
        assert each.verify == "walk" and each.last.engine == "rounds" and each.last.num_accepted > 0
