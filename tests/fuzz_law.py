"""Random sampled calls with the plugin: what they bring must have the law that plain `generate` has.

    python tests/fuzz_law.py --cases 100             # a fresh seed, which it prints
    python tests/fuzz_law.py --seed 7 --case 12      # one case again

fuzz.py compares texts, so it sees sampled calls only where the same seed brings the same text. Here the law of the first tokens
is computed from plain `generate` by enumeration, for tiny random models with a vocabulary of a few tokens, and the texts of many
calls are held against it by chi-square tests. A case that looks odd (p < 1/50) is drawn again, five times as often, and fails if
the fresh counts have p < 1e-7: by chance, one case in ten million.
"""

import itertools
import json
import random
import sys
from unittest import mock

import torch
import transformers
from conftest import EOS, PAD, letters, noisy_copy
from fuzz import ARCHITECTURES, CAUSAL, command
from scipy.stats import chisquare
from transformers import LogitsProcessor

import specplug
from specplug import capture
from specplug.drafters.chain import ChainDrafter
from specplug.drafters.cross_vocab import CrossVocabDrafter
from specplug.drafters.early_exit import EarlyExitDrafter
from specplug.drafters.lookup import LookupDrafter
from specplug.drafters.model import ModelDrafter
from specplug.drafters.suffix import SuffixDrafter
from specplug.schedule import CRITERIA, AdaptiveSchedule, ConfidenceSchedule, FixedSchedule, TreeSchedule
from specplug.tree import Dynamic

V, TOKENS = 7, 4
TEXTS = torch.tensor(list(itertools.product(range(V), repeat=TOKENS)))
NAMES = ("Llama", "Llama", "GPT2", "Qwen3", "Mistral", "Gemma2")
CALLS, MANY = 700, 5
ODD, WRONG = 1 / 50, 1e-7


class DependsOnLength(LogitsProcessor):
    """Not one that specplug knows: goes the way of stateful ones, and not to the draft."""

    def __call__(self, input_ids, scores):
        return scores + (torch.arange(V, device=scores.device) % 3 == input_ids.shape[1] % 3) * 1.5


class Timed(AdaptiveSchedule):
    """A draft takes a tenth of a pass, whatever the machine does meanwhile, so that it often pays and sometimes does not."""

    def start(self, num_rows, costs_nothing):
        plan = super().start(num_rows, costs_nothing)
        observe = plan.observe
        plan.observe = lambda rounds, num_tokens, seconds: observe(
            rounds, num_tokens, 1 + 0.1 * max((each.num_drafts for each in rounds), default=0)
        )
        return plan


WARPERS = {
    "temperature": (0.6, 1.5),
    "top_k": (3, 5),
    "top_p": (0.7, 0.95),
    "min_p": (0.1,),
    "typical_p": (0.8,),
    "epsilon_cutoff": (0.05,),
}
PROCESSORS = {
    "repetition_penalty": (0.8, 1.4),
    "no_repeat_ngram_size": (2,),
    "bad_words_ids": ([[5], [3, 4]],),
    "min_new_tokens": (2, 3),
    "suppress_tokens": ([4],),
    "begin_suppress_tokens": ([5],),
    "forced_eos_token_id": (EOS,),
    "sequence_bias": ([[[3], 1.0], [[4, 5], 3.0]],),
    "exponential_decay_length_penalty": ([1, 1.5],),
    "custom": (True,),
}
SCHEDULES = ("fixed", "fixed", "adaptive", "confidence", "static", "dynamic", "growing")
DRAFTERS = (
    "model",
    "model",
    "model",
    "other",
    "early_exit",
    "lookup",
    "suffix",
    "model+lookup",
    "lookup+model",
    "intersection",
    "string",
)


def draw_case(r: random.Random) -> dict:
    case = {
        "architecture": r.choice(NAMES),
        "drafter": r.choice(DRAFTERS),
        "noise": r.choice([0.03, 0.1, 0.3]),
        "schedule": r.choice(SCHEDULES),
        "gamma": r.choice([1, 2, 3, 4]),
        "verify": r.choice(["token", "block", "block", "walk"]),
        "engine": r.choice(["auto", "auto", "auto", "rounds", "lookahead"]),
        "graph": r.choice(["capture", "capture", "off"]),
        "lengths": [r.randint(1, 9) for _ in range(r.choice([1, 1, 1, 2, 3]))],
        "returns": r.choice([1, 1, 2, 6]),
        "more": r.choice([0, 1, 2, 3]),  # tokens that are not looked at, but leave room for drafts
        "eos": r.choice([None, EOS, [EOS, 5]]),
        "seeded": r.random() < 0.2,
        "draws": r.randrange(10**6),
        "warpers": {name: r.choice(WARPERS[name]) for name in r.sample(list(WARPERS), r.choice([0, 1, 1, 2]))},
        "processors": {name: r.choice(PROCESSORS[name]) for name in r.sample(list(PROCESSORS), r.choice([0, 0, 1, 2]))},
    }
    return tidy(case)


def tidy(case: dict) -> dict:
    """What is refused, or changes nothing, is taken out."""
    if case["eos"] is None:
        for name in ("min_new_tokens", "exponential_decay_length_penalty", "forced_eos_token_id"):
            case["processors"].pop(name, None)
    if case["more"]:
        case["processors"].pop("forced_eos_token_id", None)  # at the last token, which is another in the law
    if case["schedule"] == "confidence" and case["drafter"] in ("lookup", "suffix"):
        case["schedule"] = "fixed"
    if case["schedule"] in ("static", "dynamic", "growing"):
        windowed = case["architecture"] in ("Mistral", "Gemma2") and case["drafter"] not in ("lookup", "suffix")
        if windowed or case["drafter"] in ("intersection", "string") or case["engine"] != "auto":
            case["schedule"] = "fixed"
    if len(case["lengths"]) * case["returns"] > 1 and case["engine"] == "rounds":
        case["engine"] = "auto"
    return case


_MODELS: dict = {}


def build(name: str):
    if name not in _MODELS:
        torch.manual_seed(11)
        config = getattr(transformers, f"{name}Config")(**(ARCHITECTURES[name] | {"vocab_size": V}))
        _MODELS[name] = getattr(transformers, CAUSAL.get(name, f"{name}ForCausalLM"))(config).eval()
        _MODELS[name].generation_config.top_k = 0
    return _MODELS[name]


def drafter_of(case: dict, target):
    copied = noisy_copy(target, case["noise"])
    made = {
        "model": lambda: ModelDrafter(copied),
        "other": lambda: ModelDrafter(build("GPT2" if case["architecture"] == "Llama" else "Llama")),
        "early_exit": lambda: EarlyExitDrafter(target, 1),
        "lookup": lambda: LookupDrafter(min_ngram=1),
        "suffix": lambda: SuffixDrafter(min_depth=1, min_probability=0.1, warm=case["draws"] % 2 == 0),
        "model+lookup": lambda: ChainDrafter([ModelDrafter(copied), LookupDrafter(min_ngram=1)]),
        "lookup+model": lambda: ChainDrafter([LookupDrafter(min_ngram=1), ModelDrafter(copied)]),
        "intersection": lambda: CrossVocabDrafter(copied, letters("abcdxyz"), letters("abcdefg"), "intersection"),
        "string": lambda: CrossVocabDrafter(copied, letters("abcdxyz"), letters("abcdefg"), "string"),
    }
    return made[case["drafter"]]()


def schedule_of(case: dict):
    gamma = case["gamma"]
    return {
        "fixed": lambda: FixedSchedule(gamma),
        "adaptive": lambda: Timed(gamma),
        "confidence": lambda: ConfidenceSchedule(gamma, 0.5, CRITERIA[case["draws"] % 2]),
        "static": lambda: TreeSchedule([gamma, 2, 1]),
        "dynamic": lambda: TreeSchedule(Dynamic(2 * gamma + 1, 3)),
        "growing": lambda: Timed(2 * gamma + 1, tree_depth=3),
    }[case["schedule"]]()


def arguments(case: dict) -> dict:
    r = torch.Generator().manual_seed(case["draws"])
    longest = max(case["lengths"])
    ids = torch.randint(3, V, (len(case["lengths"]), longest), generator=r)
    mask = torch.ones_like(ids)
    for b, length in enumerate(case["lengths"]):
        ids[b, : longest - length], mask[b, : longest - length] = PAD, 0
    processors = dict(case["processors"])
    call = {
        "input_ids": ids,
        "attention_mask": mask,
        "do_sample": True,
        "eos_token_id": case["eos"],
        "pad_token_id": PAD,
    }
    call |= {"logits_processor": [DependsOnLength()]} if processors.pop("custom", False) else {}
    if "sequence_bias" in processors:
        processors["sequence_bias"] = {tuple(key): value for key, value in processors["sequence_bias"]}
    if "exponential_decay_length_penalty" in processors:
        processors["exponential_decay_length_penalty"] = tuple(processors["exponential_decay_length_penalty"])
    return call | processors | case["warpers"]


def until_eos(texts: torch.Tensor, eos) -> torch.Tensor:
    """What comes behind an end of text is padding."""
    if eos is None:
        return texts
    ends = torch.isin(texts, torch.tensor(eos))
    return texts.masked_fill(ends.long().cumsum(1) - ends.long() > 0, PAD)


def number(texts: torch.Tensor) -> torch.Tensor:
    return (texts * V ** torch.arange(TOKENS - 1, -1, -1)).sum(-1)


def exact_law(case: dict, target) -> torch.Tensor:
    """(rows, V ** TOKENS): the probability of each text behind each prompt, from the scores of plain `generate`."""
    laws = []
    call = arguments(case)
    for ids, mask in zip(call.pop("input_ids"), call.pop("attention_mask"), strict=True):
        with mock.patch.object(
            torch, "multinomial", side_effect=TEXTS.T[..., None].unbind()
        ):  # instead of what is drawn
            plain = target.generate(
                input_ids=ids.expand(len(TEXTS), -1), attention_mask=mask.expand(len(TEXTS), -1), max_new_tokens=TOKENS,
                return_dict_in_generate=True, output_scores=True, **call,
            )  # fmt: skip
        texts = until_eos(TEXTS, case["eos"])
        law = torch.ones(len(TEXTS), dtype=torch.float64)
        for place, scores in enumerate(plain.scores):
            over = place > 0 and case["eos"] is not None
            ended = (
                torch.isin(TEXTS[:, :place], torch.tensor(case["eos"])).any(1)
                if over
                else torch.zeros(len(TEXTS), dtype=bool)
            )
            chance = scores.double().softmax(-1).gather(1, TEXTS[:, place, None])[:, 0]
            law *= torch.where(ended, (TEXTS[:, place] == PAD).double(), chance)
        laws.append(torch.zeros(len(TEXTS), dtype=torch.float64).index_add_(0, number(texts), law))
    laws = torch.stack(laws)
    assert torch.allclose(laws.sum(1), torch.ones(len(laws), dtype=torch.float64), atol=1e-5), laws.sum(1)
    return laws


def counted(case: dict, target, calls: int, seed: int):
    """(rows, V ** TOKENS): how often each text came; and the plugin."""
    plugin = specplug.SpeculativeProcessor(
        drafter_of(case, target),
        schedule=schedule_of(case),
        engine=case["engine"],
        verify=case["verify"],
        graph=case["graph"],
    )
    rows, returns = len(case["lengths"]), case["returns"]
    counts = torch.zeros(rows, len(TEXTS), dtype=torch.float64)
    torch.manual_seed(seed)
    with plugin.attach(target), mock.patch.object(capture, "USES_BEFORE", 1):  # texts are short here
        for turn in range(calls):
            call = arguments(case) | {"max_new_tokens": TOKENS + case["more"], "num_return_sequences": returns}
            if case["seeded"]:
                call["specplug"] = {"seed": seed * 10**6 + turn}
            length = call["input_ids"].shape[1]
            new = target.generate(**call)[:, length : length + TOKENS]
            new = torch.nn.functional.pad(new, (0, TOKENS - new.shape[1]), value=PAD)
            for row, text in enumerate(number(new).tolist()):
                counts[row // returns, text] += 1
    return counts, plugin


def pvalue(counts: torch.Tensor, laws: torch.Tensor) -> float:
    """The least of the tests of all rows: of whole texts, of the first and of the last two tokens; times how many they are."""
    least, tests = 1.0, 0
    for row, law in zip(counts, laws, strict=True):
        if row[law < 1e-9].sum() > 0:
            return 0.0
        seen, expected = (each.reshape(V**2, V**2) for each in (row, law * row.sum()))
        for dims in ((), (1,), (0,)):
            a, b = (each.sum(dims) if dims else each.flatten() for each in (seen, expected))
            rare = b < 5
            a, b = (torch.cat([each[~rare], each[rare].sum()[None]]) for each in (a, b))
            a, b = a[b > 1e-6], b[b > 1e-6]
            tests += 1
            if len(a) > 1:
                least = min(least, chisquare(a, b * (a.sum() / b.sum())).pvalue)
    return min(1.0, least * tests)


def judge(case: dict, calls: int = CALLS) -> tuple[str | None, object]:
    """None if the law is the target's, else what was found; and the plugin."""
    target = build(case["architecture"])
    laws = exact_law(case, target)
    each = -(-calls // min(case["returns"], 4))
    counts, plugin = counted(case, target, each, 1)
    first = pvalue(counts, laws)
    if first >= ODD:
        return None, plugin
    counts, plugin = counted(case, target, MANY * each, 2)
    again = pvalue(counts, laws)
    return (f"p = {first:.1e}, then {again:.1e}" if again < WRONG else None), plugin


def run(seed: int, cases: range, bar=None, calls: int = CALLS) -> tuple[list[str], dict[str, int]]:
    """Failing cases, each as the line to print, and how many cases each engine served."""
    failures, served = [], {}
    for place in cases:
        case = draw_case(random.Random(f"{seed}-{place}"))
        try:
            found, plugin = judge(case, calls)
            engine = f"{plugin.last.engine}{' batch' if len(case['lengths']) * case['returns'] > 1 else ''}"
        except Exception as error:
            found, engine = f"{type(error).__name__}: {error}", "failed"
        served[engine] = served.get(engine, 0) + 1
        if found is not None:
            failures.append(f"case {place}: {found}\n  python tests/fuzz_law.py --json '{json.dumps(case)}'")
        if bar is not None:
            bar(place, failures)
    return failures, served


if __name__ == "__main__":
    sys.exit(command(__doc__, 100, lambda case: judge(case)[0], run, "has the law of the target", "wrong"))
