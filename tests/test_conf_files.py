"""Every shipped YAML composes, says what it is, and takes what its kind has to take."""

from pathlib import Path

import pytest

import specplug

CONF = Path(__file__).parent.parent / "conf"


def names(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def test_every_file_begins_with_a_comment():
    for file in CONF.rglob("*.yaml"):
        if "hydra" not in file.parts:
            assert file.read_text().startswith("#"), file


@pytest.mark.parametrize("pair", names("pair"))
def test_pairs(pair):
    config = specplug.load(f"pair={pair}", *(["recipe=bench"] if pair.startswith("shape_") else []))
    assert config.target.name_or_path


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("method", ["none", "nf4", "fp4", "int8"])
def test_every_model_takes_every_quantization(side, method):
    for name in names(side):
        # What a draft has to be given, and nothing that it does not read.
        given = {"early_exit": ["draft.num_layers=1"], "plugin": ["draft.plugin=x:y"]}.get(name, [])
        if name.startswith("shape_"):  # random weights, for recipe=bench alone
            continue
        named = [] if name in ("early_exit", "plugin", "lookup", "suffix", "none") else [f"{side}.name_or_path=x"]
        config = specplug.load(f"{side}={name}", f"{side}/quantization={method}", *named, *given)
        assert getattr(config, side).quantization.method.name == method


@pytest.mark.parametrize("dataset", names("dataset"))
def test_datasets(dataset):
    # What has to be given: a file, or leave to run what the model wrote.
    given = ["dataset.allow_code_execution=true"] if dataset in ("humaneval", "mbpp") else []
    needed = ["dataset.hub=org/set"] if dataset == "hub" else []
    assert specplug.load(f"dataset={dataset}", *given, *needed).dataset.name == dataset


@pytest.mark.parametrize(
    "recipe", ["evaluate", "bench", "compare", "generate", "theory", "train", "distill", *names("recipe")]
)
def test_recipes(recipe):
    extra = {"generate": ["recipe.prompt=x"], "compare": ["recipe.runs=[a,b]"]}.get(recipe, [])
    assert type(specplug.load(f"recipe={recipe}", *extra).recipe).__name__.lower() == recipe.removesuffix("_tiny")


def test_a_copy_of_the_target_follows_the_target():
    config = specplug.load("pair=self_nf4", "target.name_or_path=org/other", "target.dtype=fp16")
    assert config.draft.name_or_path == "org/other" and config.draft.dtype.name == "fp16"
    assert config.draft.quantization.method.name == "nf4" and config.target.quantization.method.name == "none"
