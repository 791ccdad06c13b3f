"""Tiny random models and the embedded pair. Nothing here needs a network."""

import copy
import functools
import logging
import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from specplug.verify import Step

torch.set_num_threads(1)


PAD, BOS, EOS = 0, 1, 2


def make_model(kind: str = "llama", vocab_size: int = 64, layers: int = 2, seed: int = 0, **extra) -> PreTrainedModel:
    """Weights wide enough that the argmax is clear and texts do not repeat at once."""
    torch.manual_seed(seed)
    special = dict(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    if kind == "gpt2":
        shape = dict(n_embd=32, n_layer=layers, n_head=4, n_positions=256, vocab_size=vocab_size, initializer_range=0.3)
        return GPT2LMHeadModel(GPT2Config(**shape, **special, **extra)).eval()
    shape = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**shape, sliding_window=8, **special, **extra)).eval()
    return LlamaForCausalLM(LlamaConfig(**shape, **special, **extra)).eval()


def noisy_copy(model: PreTrainedModel, scale: float = 0.03, seed: int = 1) -> PreTrainedModel:
    """A draft that agrees with the model often but not always."""
    torch.manual_seed(seed)
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weights in draft.parameters():
            weights.add_(torch.randn_like(weights) * scale)
    return draft


def prompt(length: int = 7, seed: int = 0, vocab_size: int = 64) -> torch.Tensor:
    return torch.randint(3, vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


def keep_everything(children, draw):
    """A broken walk rule: each draft of a chain is kept, whatever was drawn."""
    node = 0
    while children[node]:
        ((token, child),) = children[node].items()
        yield Step(node, token, True)
        node = child
    yield Step(node, draw(node), False)


def letters(alphabet: str) -> PreTrainedTokenizerFast:
    """One token a letter; the ids are the places in the alphabet."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    )


@pytest.fixture
def quiet():
    """What a fuzzer's calls warn of is not said."""
    import fuzz  # which imports this module

    logger = logging.getLogger("specplug")
    before = logger.level
    fuzz.quiet()
    yield
    logger.setLevel(before)  # other tests read what is logged


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(scope="session")
def llama_draft(llama) -> PreTrainedModel:
    return noisy_copy(llama)


@pytest.fixture(scope="session")
def six_tokens() -> PreTrainedModel:
    """A target of so few tokens that the law of its texts can be written down, see laws.py; texts do not end early."""
    model = make_model(vocab_size=6, seed=3)
    model.generation_config.eos_token_id = None
    model.generation_config.top_k = 0
    return model


@pytest.fixture(scope="session")
def tiny_pipeline():
    """The embedded target as a pipeline, and the embedded draft."""
    from transformers import TextGenerationPipeline

    import specplug
    from specplug.models import load_model, load_target

    config = specplug.load("pair=tiny")
    model, tokenizer = load_target(config.target)
    return TextGenerationPipeline(model=model, tokenizer=tokenizer), load_model(config.draft, "draft")


@pytest.fixture
def quick_reports(monkeypatch):
    """Evaluations without plots, and with few timed rounds: these take most of a short run's time."""
    from specplug import plots, round_costs
    from specplug.recipes import evaluate

    monkeypatch.setattr(plots, "of_run", lambda *_: [])
    monkeypatch.setattr(evaluate, "measure_rounds", functools.partial(round_costs.measure_rounds, repeats=1))


BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A headless Chromium for the tests of pages, or a skip that says what is missing."""
    pytest.importorskip(
        "selenium", reason="the tests of pages need selenium: pip install -c constraints.txt -e '.[test]'"
    )
    if not BROWSER or not DRIVER:
        missing = " and ".join(name for name, found in (("chromium", BROWSER), ("chromedriver", DRIVER)) if not found)
        pytest.skip(f"the tests of pages need {missing}; on Debian: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def show(browser, width: int, scheme: str = "light") -> None:
    """Set the window's width and the colour scheme that the reader prefers."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    colours = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", colours)


# For scripts in a page: the contrast of two colours (WCAG 2, relative luminance), the colour behind an element, what is found.
CONTRAST = """
const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
const ground = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; } };
const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((m, n) => n - m); return (x + 0.05) / (y + 0.05); };
const out = { background: getComputedStyle(document.body).backgroundColor, text: {}, shapes: {} };
"""


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """The folder of an evaluation of the embedded pair on three prompts, hot enough that drafts are refused. Read only."""
    import specplug
    from specplug.cli import run_recipe

    folder = tmp_path_factory.mktemp("evaluation") / "run"
    quick = [
        "recipe.limit=3",
        "recipe.warmup=0",
        "recipe.bootstrap=200",
        "recipe.trace=2",
        "sampling.max_new_tokens=40",
    ]
    config = specplug.load(*quick, "sampling.temperature=2.5", "schedule=fixed", "schedule.gamma=3")
    threads = torch.get_num_threads()
    try:
        assert run_recipe(config, folder) == 0
    finally:
        torch.set_num_threads(threads)
    return folder
