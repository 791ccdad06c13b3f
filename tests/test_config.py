"""load and check: what is composed, what is refused, and how it is said."""

import subprocess
import sys
import threading

import pytest

import specplug
from specplug.config import Adaptive, Auto, Block, Config, ConfigError, Evaluate, QuantizationMethod, Rounds, to_dict


def test_the_default_is_the_embedded_pair():
    config = specplug.load()
    assert isinstance(config, Config) and type(config.recipe) is Evaluate
    assert (config.target.name_or_path, config.draft.name_or_path) == ("asset:tiny/target", "asset:tiny/draft")
    assert (type(config.verify), type(config.schedule), type(config.engine)) == (Block, Adaptive, Auto)
    assert config.threads == 1


def test_overrides():
    config = specplug.load(
        "engine=rounds", "schedule=fixed", "schedule.gamma=2", "draft/quantization=int8", "sampling.temperature=0.7"
    )
    assert type(config.engine) is Rounds and config.schedule.gamma == 2 and config.sampling.temperature == 0.7
    assert config.draft.quantization.method is QuantizationMethod.int8
    assert to_dict(config)["draft"]["quantization"]["method"] == "int8"


def test_a_draft_over_a_pair():
    assert specplug.load("pair=qwen25", "draft=lookup").draft.drafter.name == "lookup"


WRONG = {
    "draft.gama=5": ["gama"],
    "+draft.gama=5": ["draft.gama", "unknown key", "allowed are"],
    "+schedule.max_gamm=5": ["schedule.max_gamm", "did you mean schedule.max_gamma?"],
    "schedule.gamma=5": ["schedule.gamma", "schedule=fixed has it"],
    "+recipe.limits=5": ["recipe.limits", "did you mean recipe.limit?"],
    "+nothing=1": ["nothing", "unknown key"],
    "pair=nope": ["pair/nope", "tiny"],
    "pear=tiny": ["pear"],
    "draft.min_ngram=five": ["five", "Integer"],
    "draft.dtype=float": ["float", "fp32"],
    "draft.min_ngram=9": ["draft.min_ngram=9", "max_ngram"],
    "schedule.max_gamma=0": ["schedule.max_gamma=0", "1 or more"],
    "schedule.tree_depth=0": ["schedule.tree_depth=0", "or null"],
    "schedule.frozen=none.json": ["schedule.frozen=none.json", "no such file"],
    "sampling.temperature=-0.1": ["sampling.temperature", "0 (greedy)"],
    "sampling.temperature=inf": ["sampling.temperature=inf", "finite"],
    "sampling.top_p=1.5": ["sampling.top_p=1.5", "at most 1"],
    "sampling.top_k=0": ["sampling.top_k=0", "null"],
    "sampling.num_beams=4": ["sampling.num_beams=4", "beam search"],
    "sampling.max_new_tokens=0": ["sampling.max_new_tokens=0"],
    "recipe.limit=0": ["recipe.limit=0"],
    "threads=0": ["threads=0"],
    "threads=100000": ["threads=100000", "up to 1024"],
    "seed=-1": ["seed=-1", "between 0 and 4294967295"],
    "seed=99999999999999999999": ["seed=99999999999999999999", "between"],
}


WRONG_TREES = {
    "schedule.budget=0": "schedule.budget=0: must be 1 or more",
    "schedule.depth=-1": "schedule.depth=-1: must be 1 or more",
    "schedule.branching=[3,0]": "numbers of 1 or more",
    "schedule.branching=[3] schedule.depth=3": "takes the place of both",
    "engine=lookahead": "engine=lookahead drafts no trees",
    "recipe=calibrate": "schedule=tree: nothing reads it with recipe=calibrate, which drafts recipe.gamma",
    "draft=cross_vocab draft.name_or_path=x": "draft=cross_vocab drafts no trees",
}


@pytest.mark.parametrize("overrides", WRONG_TREES)
def test_wrong_trees_are_refused(overrides):
    with pytest.raises(ConfigError, match=WRONG_TREES[overrides]) as caught:
        specplug.load("schedule=tree", *overrides.split())
    assert "\n" not in str(caught.value)


def test_trees():
    assert specplug.load("schedule=tree", "schedule.branching=[4,2,1]").schedule.branching == [4, 2, 1]
    with pytest.raises(ConfigError, match="drafts no trees"):
        specplug.load("schedule.tree_depth=3", "engine=lookahead")


@pytest.mark.parametrize(
    ("overrides", "unread"),
    [
        ("recipe=calibrate schedule=fixed", "schedule=fixed"),
        ("recipe=calibrate schedule.max_gamma=3", "schedule.max_gamma=3"),
        ("recipe=certify schedule.max_gamma=3", "schedule.max_gamma=3"),
        ("recipe=certify schedule.tree_depth=3", "schedule.tree_depth=3"),
    ],
)
def test_a_schedule_that_nothing_would_read(overrides, unread):
    with pytest.raises(ConfigError, match=f"^{unread}: nothing reads it with recipe=.*leave it out$"):
        specplug.load(*overrides.split())
    specplug.load("recipe=certify", "schedule=fixed", "schedule.gamma=2")


@pytest.mark.parametrize("override", WRONG)
def test_wrong_values_are_refused_in_one_line(override):
    with pytest.raises(specplug.ConfigError) as caught:
        specplug.load(override)
    assert "\n" not in str(caught.value)
    for word in WRONG[override]:
        assert word in str(caught.value)


def test_all_problems_at_once():
    with pytest.raises(specplug.ConfigError) as caught:
        specplug.load("schedule.max_gamma=-1", "sampling.top_p=0", "threads=0")
    assert len(str(caught.value).splitlines()) == 3


def test_what_has_to_be_given():
    with pytest.raises(specplug.ConfigError, match=r"target\.name_or_path=\?\?\?"):
        specplug.load("target=custom")


def test_load_works_from_several_threads():
    seeds, threads = [], []
    for seed in range(8):
        work = threading.Thread(target=lambda seed=seed: seeds.append(specplug.load(f"seed={seed}").seed == seed))
        threads.append(work)
        work.start()
    for work in threads:
        work.join()
    assert seeds == [True] * 8


def test_load_works_inside_somebody_elses_hydra():
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    with hydra.initialize_config_module("specplug.conf", version_base="1.3"):
        theirs = GlobalHydra.instance().hydra
        assert specplug.load("seed=3").seed == 3
        with pytest.raises(specplug.ConfigError):
            specplug.load("pair=nope")
        assert GlobalHydra.instance().hydra is theirs
        assert hydra.compose("config").seed == 0


def test_importing_and_composing_needs_no_torch():
    code = "import sys, specplug, specplug.cli; specplug.load(); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["draft.warm=true"], r"draft\.warm=True: nothing reads it with draft=model; it is for suffix"),
        (["draft=lookup", "draft.warm=true"], "it is for suffix"),
        (["draft=suffix", "draft.name_or_path=x"], "it is for model, cross_vocab"),
        (["draft.num_layers=3"], "it is for early_exit"),
    ],
)
def test_a_value_that_nothing_reads_is_a_problem(overrides, match):
    with pytest.raises(ConfigError, match=match):
        specplug.load(*overrides)


def test_what_is_asked_before_the_drafter_reads_its_values():
    assert specplug.load("draft.before=suffix", "draft.warm=true").draft.warm
