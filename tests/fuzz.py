"""Random calls of `generate`, with the plugin and without: ids, scores, cache length and streamer chunks must agree.

    python tests/fuzz.py --cases 500            # a fresh seed, which it prints
    python tests/fuzz.py --seed 7 --case 123    # one case again

Greedy calls on every engine, sampled calls under the same `torch.manual_seed` on `lookahead` and by verify=walk, where the
random stream must also end in the same place, and calls with a seed of their own on every engine; tiny random models in
fp32 on the CPU. A failing case is made as small as it stays failing, and printed as one line that
reproduces it.
"""

import argparse
import json
import random
import string
import sys
import time
import warnings
from collections.abc import Callable
from unittest import mock

import torch
import transformers
from conftest import BOS, EOS, PAD, letters, noisy_copy
from transformers import (
    DynamicCache,
    LogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)

import specplug
from specplug import capture
from specplug.cache import NAME
from specplug.drafters import Proposal
from specplug.drafters.cross_vocab import CrossVocabDrafter
from specplug.drafters.early_exit import EarlyExitDrafter
from specplug.schedule import CRITERIA, AdaptiveSchedule, ConfidenceSchedule, FixedSchedule, TreeSchedule
from specplug.tree import Dynamic

VOCAB = 48
LETTERS = string.ascii_letters
BASE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.3,
    pad_token_id=PAD,
    bos_token_id=BOS,
    eos_token_id=EOS,
)
SMALL = {"vocab_size": VOCAB, "initializer_range": 0.3, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
ARCHITECTURES = {
    "Llama": BASE,
    "Qwen2": BASE,
    "Qwen3": BASE | {"head_dim": 8},
    "Mistral": BASE | {"sliding_window": 8},
    "Gemma2": BASE | {"head_dim": 8, "sliding_window": 8},
    # of which half the texts, and drafts, stay within two windows
    "Gemma3Text": BASE | {"head_dim": 8, "sliding_window": 16, "num_hidden_layers": 3, "sliding_window_pattern": 3},
    "GPT2": SMALL | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "GPTNeoX": BASE,
    "Phi3": BASE,
    "OPT": SMALL
    | {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32}
    | {"max_position_embeddings": 256, "init_std": 0.3},
    "Mixtral": BASE | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
CAUSAL = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}


def build(name: str, seed: int = 0):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**ARCHITECTURES[name])
    return getattr(transformers, CAUSAL.get(name, f"{name}ForCausalLM"))(config).eval()


class Counting(LogitsProcessor):
    """Keeps state, and notes a prefix that plain decoding would not show it."""

    def __init__(self):
        self.length = None

    def __call__(self, input_ids, scores):
        assert self.length in (None, input_ids.shape[1] - 1), f"saw {input_ids.shape[1]} after {self.length}"
        self.length = input_ids.shape[1]
        return scores - 2.0 * (torch.arange(scores.shape[1]) % 5 == self.length % 5)


class WritesInPlace(LogitsProcessor):
    """Changes the logits that it is given, as it may; `output_logits` then has what it left."""

    def __call__(self, input_ids, scores):
        scores[:, input_ids.shape[1] % VOCAB] += 3.0
        return scores


class StopAfterRepeats(StoppingCriteria):
    """Keeps state: stops a row when an id divisible by 3 has come three times."""

    def __init__(self):
        self.counts = None

    def __call__(self, input_ids, scores, **kwargs):
        hit = (input_ids[:, -1] % 3 == 0).long()
        self.counts = hit if self.counts is None else self.counts + hit
        return self.counts >= 3


class Streamer:
    def __init__(self):
        self.chunks = []

    def put(self, value):
        self.chunks.append(value.tolist())

    def end(self):
        self.chunks.append("end")


class Junk:
    """Proposes tokens of no use; on its fourth call it fails."""

    name = "junk"
    costs_nothing = True

    def __init__(self, fails):
        self.fails = fails

    def start(self, request):
        session = JunkSession()
        session.fails, session.calls, session.request = self.fails, 0, request
        return session


class JunkSession:
    num_steps, seconds_forward = 0, 0.0

    def propose(self, ids, gamma):
        self.calls += 1
        if self.fails and self.calls == 4:
            raise RuntimeError("out of memory")
        return Proposal((ids[:, -1:] + torch.arange(1, gamma + 1, device=ids.device)) % self.request.vocab_size, None)

    def observe(self, num_accepted):
        pass


PROCESSORS = {
    "repetition_penalty": lambda r: r.choice([0.8, 1.3]),
    "no_repeat_ngram_size": lambda r: r.choice([2, 3]),
    "bad_words_ids": lambda r: [[5], [7, 9]],
    "min_new_tokens": lambda r: r.choice([3, 9]),
    "suppress_tokens": lambda r: [4, 11],
    "begin_suppress_tokens": lambda r: [6, 8],
    "forced_eos_token_id": lambda r: EOS,
    "exponential_decay_length_penalty": lambda r: [4, 1.4],
    "sequence_bias": lambda r: [[[3], 2.0], [[9, 10], 4.0]],
    "encoder_repetition_penalty": lambda r: 1.5,
    "encoder_no_repeat_ngram_size": lambda r: 2,
    "remove_invalid_values": lambda r: True,
    "prefix_allowed": lambda r: True,
    "watermark": lambda r: True,
    "guidance_scale": lambda r: 1.4,
    "counting": lambda r: True,
}
WARPERS = {
    "temperature": lambda r: r.choice([0.7, 1.3]),
    "top_k": lambda r: r.choice([1, 8]),
    "top_p": lambda r: r.choice([0.5, 0.9]),
    "min_p": lambda r: 0.1,
    "typical_p": lambda r: 0.8,
    "epsilon_cutoff": lambda r: 0.02,
    "eta_cutoff": lambda r: 0.02,
}
TOGETHER = {"encoder_repetition_penalty", "encoder_no_repeat_ngram_size"} | {
    "prefix_allowed", "watermark", "guidance_scale", "counting"
}  # fmt: skip
TREES = {
    "static": lambda gamma: TreeSchedule([max(gamma, 1), 2, 1]),
    "dynamic": lambda gamma: TreeSchedule(Dynamic(2 * gamma + 1, 4)),
    "growing": lambda gamma: AdaptiveSchedule(2 * gamma + 1, tree_depth=3),
}
DRAFTERS = ("lookup", "suffix", "early_exit", "chain", "intersection", "string", "junk", "failing")
ENGINES = ("auto", "auto", "rounds", "lookahead", "plain")
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
CACHES = ("default", "filled", "own", "static", "none", "chunked", "embeds")


def draw_case(r: random.Random) -> dict:
    case = {
        "architecture": r.choice(list(ARCHITECTURES)),
        "drafter": r.choice(["model"] * 4 + ["other", *DRAFTERS]),
        "form": r.choice(["attach", "attach", "attach", "processor", "custom"]),
        "engine": r.choice(["auto", "auto", "lookahead"]),
        "gamma": r.choice([0, 1, 2, 3, 5, 7]),
        "schedule": r.choice(["fixed", "fixed", "fixed", "adaptive", "confidence", *TREES]),
        "prompt_seed": r.randrange(10**6),
        "lengths": [r.randint(1, 14) for _ in range(r.choice([1, 1, 2, 3]))],
        "padding": r.choice([0, 0, 0, 3]),
        "new": r.choice([1, 2, 12, 25]),
        "eos": r.choice([EOS, [EOS, 13], [3, 5, 7, 13, 17, 19, 23], None]),
        "sample": r.random() < 0.3,
        "returns": r.choice([1, 1, 1, 2]),
        "cache": r.choice(["default"] * 5 + list(CACHES)),
        "stop": r.choice(["", "", "", "criterion", "strings", "time"]),
        "streamer": r.random() < 0.3,
        "return_dict": r.random() < 0.4,
        "outputs": [name for name in OUTPUTS if r.random() < (0.5 if name in OUTPUTS[:2] else 0.1)],
        "processors": {name: PROCESSORS[name](r) for name in r.sample(list(PROCESSORS), r.choice([0, 0, 1, 1, 2, 3]))},
        "warpers": {name: WARPERS[name](r) for name in r.sample(list(WARPERS), r.choice([0, 1, 2]))},
    }
    if r.random() < 0.35:  # several sequences at their own pace, which any of these would prevent
        case |= {"engine": "auto", "sample": False, "streamer": False, "return_dict": False, "cache": "default"}
        case |= {"lengths": [r.randint(1, 14) for _ in range(r.choice([2, 3, 4]))], "new": r.choice([12, 25, 40])}
        case |= {"form": r.choice(["attach", "custom"]), "eos": r.choice([EOS, [EOS, 13], [3, 5, 7, 13, 17]])}
        case["stop"] = r.choice(["", "", "strings"])
        case["processors"] = {k: v for k, v in case["processors"].items() if k not in TOGETHER}
    if case["sample"] or r.random() < 0.2:
        case["verify"] = r.choice(["block", "walk", "walk"])
        if r.random() < 0.4:  # a seed of the call's own: in whatever way it is decoded
            case |= {"sample": True, "form": "attach", "seed": r.randrange(2**64), "engine": r.choice(ENGINES)}
        elif case["verify"] == "walk":
            case |= {"sample": True, "engine": r.choice(["auto", "auto", "rounds", "lookahead"])}
    # What came later is drawn last, so that a seed and number still name the same case.
    case |= {"positions": r.random() < 0.1, "types": r.random() < 0.1}
    if r.random() < 0.05:
        case["processors"]["in_place"] = True
    return tidy(case)


def tidy(case: dict) -> dict:
    """What transformers itself refuses, or what would compare two random streams, is taken out."""
    case = json.loads(json.dumps(case))
    rows = len(case["lengths"])
    given = case["cache"] in ("filled", "chunked", "embeds") or case["processors"].get("guidance_scale")
    if given or case["architecture"] == "OPT":
        case["positions"] = False
    if given or case["architecture"] != "GPT2":  # the one that takes them
        case["types"] = False
    if case["schedule"] == "confidence" and case["drafter"] in ("lookup", "suffix", "junk", "failing"):
        case["schedule"] = "fixed"  # there is no model to be sure or unsure
    if case["sample"]:
        if case.get("verify") != "walk" and "seed" not in case:
            case["engine"] = "lookahead"
        if case["form"] == "attach" and case["drafter"] == "other":
            case["drafter"] = "model"
    else:
        case["warpers"], case["returns"] = {}, 1
        case.pop("seed", None)
    if rows * case["returns"] > 1 and case["cache"] in ("embeds", "chunked"):
        case["cache"] = "default"
    if case["cache"] in ("embeds", "chunked"):
        case["padding"] = 0
    if case["cache"] == "embeds":
        case["form"] = "attach" if case["form"] == "processor" else case["form"]
        for name in ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "guidance_scale"):
            case["processors"].pop(name, None)
    if case["processors"].get("guidance_scale") and (rows * case["returns"] > 1 or case["cache"] != "default"):
        case["processors"].pop("guidance_scale")
    if case["eos"] is None:
        for name in ("min_new_tokens", "exponential_decay_length_penalty"):
            case["processors"].pop(name, None)
    if "seed" in case:  # transformers' loop cannot give scores then, and our own can
        case["outputs"] = [name for name in case["outputs"] if name != "output_scores"]
    if not case["return_dict"]:
        case["outputs"] = []
    if case["cache"] == "filled" and case["returns"] > 1:
        case["cache"] = "default"
    if case["schedule"] in TREES:  # what is refused before the call, and left out are drafters without trees
        windowed = {"Mistral", "Gemma2", "Gemma3Text"}
        has_model = case["drafter"] not in ("lookup", "suffix")
        without = case["drafter"] in ("intersection", "string", "junk", "failing")
        if without or case["engine"] in ("rounds", "lookahead") or (has_model and case["architecture"] in windowed):
            case["schedule"] = "fixed"
        elif has_model and case["architecture"] == "OPT":
            case["drafter"] = "suffix"
    return case


class Words:
    """A tokenizer as far as stop strings need one: token i is a letter."""

    def __init__(self):
        from tokenizers import Tokenizer, decoders, models

        vocab = {chr(97 + i) if i < 26 else chr(65 + i - 26): i for i in range(VOCAB)}
        tokenizer = Tokenizer(models.BPE(vocab, []))
        tokenizer.decoder = decoders.Fuse()
        self.fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def arguments(case: dict, model) -> tuple[dict, object]:
    """Keyword arguments of one `generate` call, made anew each time, since some keep state; and the streamer."""
    r = torch.Generator().manual_seed(case["prompt_seed"])
    longest = max(case["lengths"]) + case["padding"]
    ids = torch.randint(3, VOCAB, (len(case["lengths"]), longest), generator=r)
    mask = torch.ones_like(ids)
    for b, length in enumerate(case["lengths"]):
        ids[b, : longest - length], mask[b, : longest - length] = PAD, 0
    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": case["new"], "do_sample": case["sample"]}
    call |= {"eos_token_id": case["eos"], "pad_token_id": PAD, "num_return_sequences": case["returns"]}
    call |= case["warpers"]
    processors = dict(case["processors"])
    custom = []
    if processors.pop("counting", False):
        custom.append(Counting())
    if processors.pop("in_place", False):
        custom.append(WritesInPlace())
    if case.get("positions"):
        call["position_ids"] = (mask.cumsum(1) - 1 + torch.arange(len(ids))[:, None] * 3 + 2).clamp(min=0)
    if case.get("types"):
        call["token_type_ids"] = torch.randint(3, VOCAB, ids.shape, generator=r)
    if processors.pop("prefix_allowed", False):
        call["prefix_allowed_tokens_fn"] = lambda b, ids: [2, *range(3 + (len(ids) + b) % 3, VOCAB, 2)]
    if processors.pop("watermark", False):
        call["watermarking_config"] = WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")
    if "sequence_bias" in processors:
        processors["sequence_bias"] = {tuple(key): value for key, value in processors["sequence_bias"]}
    if "exponential_decay_length_penalty" in processors:
        processors["exponential_decay_length_penalty"] = tuple(processors["exponential_decay_length_penalty"])
    call |= processors
    if custom:
        call["logits_processor"] = custom
    if case["stop"] == "criterion":
        call["stopping_criteria"] = StoppingCriteriaList([StopAfterRepeats()])
    elif case["stop"] == "strings":
        call |= {"stop_strings": ["kf", "T", "mA"], "tokenizer": Words().fast}
    elif case["stop"] == "time":
        call["max_time"] = 1e6
    if case["return_dict"]:
        call |= {"return_dict_in_generate": True} | dict.fromkeys(case["outputs"], True)
    streamer = Streamer() if case["streamer"] else None
    if streamer is not None:
        call["streamer"] = streamer
    if case["cache"] == "static":
        call["cache_implementation"] = "static"
        call["disable_compile"] = True
    elif case["cache"] == "none":
        call["use_cache"] = False
    elif case["cache"] == "chunked":
        call["prefill_chunk_size"] = 3
    elif case["cache"] == "own":
        call[NAME] = DynamicCache(config=model.config)
    elif case["cache"] == "filled" and longest > 1:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, :-1]
            extra = {} if case["architecture"] == "OPT" else {"position_ids": positions}
            model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True, **extra, **{NAME: cache})
        call[NAME] = cache
    elif case["cache"] == "embeds":
        call["inputs_embeds"] = model.get_input_embeddings()(call.pop("input_ids"))
    return call, streamer


_MODELS: dict = {}


def models(name: str):
    if name not in _MODELS:
        target = build(name)
        _MODELS[name] = target, noisy_copy(target, 0.02)
    return _MODELS[name]


def drafter_of(case: dict):
    if case["drafter"] == "model":
        return models(case["architecture"])[1]
    if case["drafter"] == "other":
        return models("GPT2" if case["architecture"] == "Llama" else "Llama")[1]
    if case["drafter"] == "early_exit":
        return EarlyExitDrafter(models(case["architecture"])[0], 1)
    if case["drafter"] in ("intersection", "string"):
        draft = models(case["architecture"])[1]
        return CrossVocabDrafter(draft, letters(LETTERS[:40] + "+-*/=%&#"), letters(LETTERS[:VOCAB]), case["drafter"])
    if case["drafter"] == "chain":
        return ["suffix", models(case["architecture"])[1]]
    return case["drafter"] if case["drafter"] in ("lookup", "suffix") else Junk(case["drafter"] == "failing")


def schedule_of(case: dict):
    if case["schedule"] == "adaptive":
        return AdaptiveSchedule(max(case["gamma"], 1))
    if case["schedule"] in TREES:
        return TREES[case["schedule"]](case["gamma"])
    if case["schedule"] == "confidence":
        return ConfidenceSchedule(case["gamma"], 0.3, CRITERIA[case["prompt_seed"] % 2])
    return FixedSchedule(case["gamma"])


def outcome(case: dict, ours: bool):
    target = models(case["architecture"])[0]
    call, streamer = arguments(case, target)
    plugin = None
    if ours:
        plugin = specplug.SpeculativeProcessor(
            drafter_of(case), schedule=schedule_of(case), engine=case["engine"], verify=case.get("verify", "block")
        )
        if case["form"] == "attach":
            plugin.attach(target)
        elif case["form"] == "custom":
            call["custom_generate"] = plugin
        else:
            call["logits_processor"] = [*call.get("logits_processor", []), plugin]
    elif "seed" in case:  # without drafts
        plugin = specplug.SpeculativeProcessor("lookup", engine="plain").attach(target)
    if "seed" in case:
        call["specplug"] = {"seed": case["seed"]}
    torch.manual_seed(case["prompt_seed"])
    try:
        with mock.patch.object(capture, "USES_BEFORE", 1):  # texts are short here
            result = target.generate(**call)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    finally:
        if plugin is not None:
            plugin.detach()
    return result, streamer.chunks if streamer else None, plugin, torch.get_rng_state()


def router_tie(case: dict, target, ids: torch.Tensor) -> bool:
    """Whether some token of a mixture of experts stands so close between two experts that rounding decides.

    Which expert it goes to then depends on how many positions are computed together, in any two ways to compute it.
    """
    if "num_local_experts" not in ARCHITECTURES[case["architecture"]]:
        return False
    chosen = target.config.num_experts_per_tok
    for row in ids:
        text = row[(row != PAD).long().argmax() :][None]
        with torch.no_grad():
            routers = target(input_ids=text, output_router_logits=True).router_logits
        for logits in routers:
            probs = logits.softmax(-1).sort(-1, descending=True).values
            if (probs[:, chosen - 1] - probs[:, chosen]).min() < 1e-5:
                return True
    return False


def difference(case: dict) -> str | None:
    """None if the two calls agree, or if rounding between two experts explains why not, else what differs."""
    found = compare(case)
    if found is not None and "static" not in case["cache"]:
        plain = outcome(case, ours=False)[0]
        if not isinstance(plain, str) and case["cache"] != "embeds":
            ids = plain.sequences if case["return_dict"] else plain
            if router_tie(case, models(case["architecture"])[0], ids):
                case["explained"] = found
                return None
    return found


def compare(case: dict) -> str | None:
    plain, plain_chunks, _, plain_state = outcome(case, ours=False)
    ours, our_chunks, plugin, our_state = outcome(case, ours=True)
    compare.plugin = plugin
    target = models(case["architecture"])[0]
    if type(target).__name__ not in str(type(target)) or hasattr(type(target), "_specplug_original"):
        return "the model's class was not put back"
    if isinstance(plain, str) or isinstance(ours, str):
        if isinstance(plain, str) and isinstance(ours, str):
            case["refused"] = plain
            return None
        if isinstance(ours, str) and ours.startswith("ValueError: engine="):
            case["refused"] = ours
            return None
        return f"plain: {str(plain)[:100]!r}, ours: {str(ours)[:300]!r}"
    if plain_chunks != our_chunks:
        return f"streamer chunks: {plain_chunks} != {our_chunks}"
    if not torch.equal(plain_state, our_state):
        return "the random stream ended in another place"
    if not case["return_dict"]:
        return None if torch.equal(plain, ours) else f"ids: {plain.tolist()} != {ours.tolist()}"
    if not torch.equal(plain.sequences, ours.sequences):
        return f"ids: {plain.sequences.tolist()} != {ours.sequences.tolist()}"
    for name in ("scores", "logits"):
        a, b = plain.get(name), ours.get(name)
        if (a is None) != (b is None) or len(a or ()) != len(b or ()):
            return f"{name}: {a and len(a)} entries != {b and len(b)}"
        for i, (x, y) in enumerate(zip(a or (), b or (), strict=True)):
            if not torch.allclose(x.clamp(min=-1e9), y.clamp(min=-1e9), atol=2e-4, rtol=1e-4):
                return f"{name}[{i}] differ by {(x - y).abs().nan_to_num(0).max().item()}"
    for name in ("attentions", "hidden_states"):
        a, b = plain.get(name), ours.get(name)
        if [len(x) for x in a or ()] != [len(x) for x in b or ()]:
            return f"{name}: lengths differ"
    a, b = plain.get(NAME), ours.get(NAME)
    if (a is None) != (b is None) or (a is not None and a.get_seq_length() != b.get_seq_length()):
        return f"cache: {a and a.get_seq_length()} != {b and b.get_seq_length()}"
    return None


SIMPLER = [
    *({"processors": name} for name in PROCESSORS),
    *({"warpers": name} for name in WARPERS),
    *({key: value} for key, value in (
        ("padding", 0), ("outputs", []), ("return_dict", False), ("streamer", False), ("stop", ""), ("cache", "default"), ("returns", 1), ("schedule", "fixed"),
        ("form", "attach"), ("drafter", "lookup"), ("architecture", "Llama"), ("sample", False), ("eos", EOS),
        ("engine", "auto"), ("new", 12), ("new", 4), ("gamma", 2), ("verify", "block"),
    )),
]  # fmt: skip


def shrink(case: dict) -> dict:
    """Leave out one thing after another while the case still fails."""
    for change in SIMPLER:
        ((key, value),) = change.items()
        smaller = json.loads(json.dumps(case))
        if key not in case:
            continue
        if isinstance(case[key], dict):
            smaller[key].pop(value, None)
        else:
            smaller[key] = value
        smaller = tidy(smaller)
        if smaller != case and difference(smaller) is not None:
            case = smaller
    while len(case["lengths"]) > 1 and difference(tidy(case | {"lengths": case["lengths"][1:]})) is not None:
        case = tidy(case | {"lengths": case["lengths"][1:]})
    return case


def run(seed: int, cases: range, bar=None) -> tuple[list[str], dict[str, int]]:
    """Failing cases, each as the line to print, and how many calls each engine served."""
    failures, served = [], {}
    for number in cases:
        case = draw_case(random.Random(f"{seed}-{number}"))
        found = difference(case)
        engine = "refused by both" if "refused" in case else compare.plugin.last.engine
        engine = "explained by a tie between experts" if "explained" in case else engine
        served[engine] = served.get(engine, 0) + 1
        if found is not None:
            small = shrink(case)
            failures.append(f"case {number}: {found}\n  smallest: python tests/fuzz.py --json '{json.dumps(small)}'")
        if bar is not None:
            bar(number, failures)
    return failures, served


def command(
    doc: str, num_cases: int, judge: Callable[[dict], str | None], run: Callable, right: str, wrong: str
) -> int:
    """The command line of a fuzzer; returns the exit code. `judge`: what is wrong with a case. `right`, `wrong`: how that is called."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--cases", type=int, default=num_cases)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--case", type=int, default=None, help="run this one alone")
    parser.add_argument("--json", default=None, help="run the case that is written here")
    options = parser.parse_args()
    quiet()
    if options.json is not None:
        found = judge(json.loads(options.json))
        print(found or right)
        return found is not None
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    cases = range(options.cases) if options.case is None else range(options.case, options.case + 1)
    started = time.perf_counter()

    def bar(number, failures):
        print(f"\r{number + 1}/{cases.stop}, {len(failures)} {wrong}", end="", file=sys.stderr, flush=True)

    failures, served = run(seed, cases, bar)
    print(file=sys.stderr)
    for failure in failures[:10]:
        print(failure)
    seconds = time.perf_counter() - started
    print(f"seed {seed}: {len(cases)} cases, {len(failures)} {wrong}, {served}, {seconds:.0f} s")
    return bool(failures)


def quiet() -> None:
    import logging

    warnings.simplefilter("ignore")
    logging.getLogger("specplug").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    sys.exit(command(__doc__, 500, difference, run, "agrees", "differ"))
