"""Trackers: TensorBoard's files are read back; trackio and wandb are stood in for by a module with their functions."""

import sys
import types

import pytest

import specplug
from specplug import tracker
from specplug.cli import run_recipe
from specplug.config import ConfigError

QUICK = (
    "recipe.limit=2",
    "recipe.warmup=0",
    "recipe.trace=0",
    "recipe.bootstrap=50",
    "sampling.max_new_tokens=12",
    "threads=1",
)


pytestmark = pytest.mark.usefixtures("quick_reports")


def scalars(folder):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_has_the_numbers_of_the_summary(tmp_path):
    import json

    pytest.importorskip("tensorboard")
    assert run_recipe(specplug.load(*QUICK, "tracker=tensorboard"), tmp_path) == 0
    summary, found = json.loads((tmp_path / "summary.json").read_text()), scalars(tmp_path)
    assert [step for step, _ in found["speedup"]] == [1, 2]
    assert found["speedup"][-1][1] == pytest.approx(summary["speedup"])
    assert found["summary/alpha"] == [(2, pytest.approx(summary["alpha"]))]
    assert found["summary/categories/story/tokens_per_second/plain"][0][1] > 0


def test_losses_of_a_training_are_logged(tmp_path):
    pytest.importorskip("tensorboard")
    small = "recipe.architecture={model_type: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,"
    small += " num_attention_heads: 2}"
    steps = (
        "recipe.steps=4",
        "recipe.log_steps=2",
        "recipe.held_out=0",
        "recipe.vocab_size=300",
        "recipe.batch_size=2",
    )
    data = ("recipe=train", "dataset=tiny", "recipe.warmup_steps=0", "recipe.max_length=64", "threads=1")
    assert run_recipe(specplug.load(*data, *steps, small, "tracker=tensorboard"), tmp_path) == 0
    assert [step for step, _ in scalars(tmp_path)["loss"]] == [2, 4]


@pytest.fixture(params=["trackio", "wandb"])
def library(request, monkeypatch):
    module = types.ModuleType(request.param)
    module.begun, module.logged, module.ended = [], [], []
    module.init = lambda **arguments: module.begun.append(arguments)
    module.log = lambda values, step: module.logged.append((step, values))
    module.finish = lambda: module.ended.append(True)
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def test_the_two_others(tmp_path, library):
    assert run_recipe(specplug.load(*QUICK, f"tracker={library.__name__}"), tmp_path / "day" / "run") == 0
    (begun,) = library.begun
    assert begun["project"] == "specplug" and begun["name"] == "day/run" and begun["config"]["recipe.limit"] == 2
    assert ("dir" in begun) == (library.__name__ == "wandb") and library.ended == [True]
    steps, values = zip(*library.logged, strict=True)
    assert steps == (1, 2, 2) and values[0]["tokens_per_second/plain"] > 0 and values[2]["summary/speedup"] > 0
    assert all(isinstance(value, float) for each in values for value in each.values())


def test_a_tracker_that_fails_in_the_middle_is_left_alone(tmp_path, library, caplog):
    def fail(values, step):
        library.logged.append(step)
        raise ConnectionError("no network\nand more lines")

    library.log = fail
    tracking = tracker.start(specplug.load(f"tracker={library.__name__}"), tmp_path)
    tracking.log(1, {"a": 1})
    tracking.log(2, {"a": 2})
    tracking.finish()
    assert library.logged == [1] and library.ended and caplog.text.count("no network") == 1


def test_what_is_said_of_one_that_cannot_begin(tmp_path, library):
    def fail(**_):
        raise ValueError("not logged in\nand more lines")

    library.init = fail
    with pytest.raises(
        ConfigError, match=f"^tracker={library.__name__}: cannot begin: not logged in; take tracker=none"
    ):
        tracker.start(specplug.load(f"tracker={library.__name__}"), tmp_path)


@pytest.mark.parametrize("name", ["trackio", "wandb", "tensorboard"])
def test_one_that_is_not_installed_is_one_line(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"^tracker={name}: needs the package {name}; pip install {name}"):
        run_recipe(specplug.load(*QUICK, f"tracker={name}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_recipes_that_measure_nothing_refuse_a_tracker():
    with pytest.raises(ConfigError, match="tracker=wandb: nothing reads it with recipe=theory"):
        specplug.load("recipe=theory", "tracker=wandb")


def test_what_is_no_number_is_left_out():
    found = tracker.numbers({"a": {"b": 1, "c": None, "d": True, "e": [1]}, "f": "x", "g": 0.5})
    assert found == {"a/b": 1.0, "g": 0.5}
