"""The benchmark: all ways measured in turn, shapes with random weights, and acceptance that is drawn, in there alone."""

import json
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import specplug
from specplug import bench, verify
from specplug.cli import run_recipe
from specplug.config import ConfigError, Model
from specplug.models import load_model, random_model
from specplug.settings import make_schedule
from specplug.ways import Way, ways_of

QUICK = ["recipe=bench", "recipe.limit=2", "recipe.repeats=1", "recipe.gammas=[0,2]", "sampling.max_new_tokens=12"]
SHAPE = "{hidden_size: 32, intermediate_size: 64, num_hidden_layers: %d, num_attention_heads: 4, vocab_size: 1024, max_position_embeddings: 512}"
SHAPES = [f"target.shape={SHAPE % 2}", f"draft.shape={SHAPE % 1}", "draft.name_or_path=null"]


def run(folder, *overrides):
    assert run_recipe(specplug.load(*QUICK, *overrides), folder) == 0
    return json.loads((folder / "bench.json").read_text())


def test_all_ways_are_measured_in_turn(tmp_path):
    summary = run(tmp_path / "run")
    ways = summary["ways"]
    assert list(ways) == [bench.PLAIN, bench.ASSISTED, "gamma 0", "gamma 2", bench.ADAPTIVE]
    assert summary["synthetic_alpha"] is None and summary["num_batches"] == 2
    for name, way in ways.items():
        assert way["num_new_tokens"] <= 24 and way["same_ids"] == 2, name
        assert way["tokens_per_second"] > 0 and way["tokens_per_second_decode"] > 0 and way["seconds_first"] > 0
    assert ways[bench.PLAIN]["speedup"] == 1 and ways[bench.PLAIN]["num_rounds"] == 0
    assert ways["gamma 0"]["mean_acceptance_length"] == 1 < ways["gamma 2"]["mean_acceptance_length"]
    parts = ways["gamma 2"]["round"]
    assert all(part > 0 for part in parts.values())
    assert sum(parts.values()) == pytest.approx(ways["gamma 2"]["seconds_per_round"])
    assert ways["gamma 2"]["predicted_speedup"] > 0 and ways["gamma 2"]["share_of_theory"] > 0
    assert ways[bench.PLAIN]["share_of_memory"] > 0 and ways["gamma 2"]["share_of_memory"] is None
    for name, way in ways.items():
        assert way["seconds_first_call"] > 0 and way["seconds_later"] > 0
        ours = name in ("gamma 0", "gamma 2", bench.ADAPTIVE)
        if name != bench.ADAPTIVE:  # which may be through in one round
            assert (way["host_reads_per_round"] is not None) == (way["launches_per_round"] is not None) == ours
        assert (way["seconds_capture_first_call"] is not None) == ours
    assert ways["gamma 0"]["seconds_capture_first_call"] > 0, "it is the first that replays"
    assert ways["gamma 0"]["host_reads_per_round"] == 1 == ways["gamma 2"]["host_reads_per_round"]
    assert 10 < ways["gamma 0"]["launches_per_round"] < ways["gamma 2"]["launches_per_round"]
    report = (tmp_path / "run" / "bench.md").read_text()
    assert "host reads a round" in report and "| first call |" in report
    assert "gamma 2" in report and "ynthetic" not in report and (tmp_path / "run" / "plots" / "bench.svg").exists()


def test_a_way_of_transformers_that_fails_is_left_out(tmp_path, monkeypatch, caplog):
    """As its static cache may, which is compiled."""

    def with_static(config, sides):
        return ways_of(config, sides) | {bench.STATIC: Way(sides, None, {"cache_implementation": "of no kind"})}

    monkeypatch.setattr("specplug.recipes.bench.ways_of", with_static)
    ways = run(tmp_path / "run", "recipe.compare_assisted=false")["ways"]
    assert list(ways) == [bench.PLAIN, "gamma 0", "gamma 2", bench.ADAPTIVE]
    (said,) = [each.getMessage() for each in caplog.records if "left out" in each.getMessage()]
    assert said.startswith(f"{bench.STATIC} is left out, it fails here: ")


def ours(*overrides):
    """The ways of ours, by what their schedule is; nothing is loaded."""
    config = specplug.load(*QUICK, *overrides)
    model = SimpleNamespace(device=torch.device("cpu"))
    sides = SimpleNamespace(model=model, assisted=None, plugin=SimpleNamespace(schedule=make_schedule(config)))
    return {name: way.schedule for name, way in ways_of(config, sides).items() if way.schedule is not None}


def test_the_schedule_that_is_chosen_is_a_way():
    named = ["gamma 0", "gamma 2", bench.ADAPTIVE]
    assert list(ours()) == list(ours("schedule=fixed", "schedule.gamma=2")) == named
    assert ours("schedule.max_gamma=3")[bench.ADAPTIVE].max_gamma == 3
    assert list(ours("schedule=fixed", "schedule.gamma=5")) == ["gamma 0", "gamma 2", "gamma 5", bench.ADAPTIVE]
    confident = ours("schedule=confidence", "schedule.threshold=0.6", "schedule.gamma=5")
    assert list(confident) == [*named, "confidence"]
    assert (confident["confidence"].gamma, confident["confidence"].min_confidence) == (5, 0.6)
    tree = ours("schedule=tree", "schedule.branching=[2,1]")
    assert list(tree) == [*named, "tree"] and tree["tree"].tree.size == 4


def test_the_schedule_that_is_chosen_is_measured(tmp_path):
    given = ["recipe.limit=1", "recipe.gammas=[0]", "recipe.compare_assisted=false", "schedule=fixed"]
    ways = run(tmp_path / "run", *given, "schedule.gamma=3")["ways"]
    assert list(ways) == [bench.PLAIN, "gamma 0", "gamma 3", bench.ADAPTIVE]
    assert ways["gamma 3"]["mean_gamma"] > 2 and ways["gamma 3"]["share_of_theory"] > 0


def test_a_batch_and_prompts_of_a_length(tmp_path):
    summary = run(tmp_path / "run", "recipe.batch_size=2", "recipe.prompt_tokens=20")
    (sample,) = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert sample["prompt_tokens"] == [20, 20]
    ways = summary["ways"]
    assert bench.ASSISTED not in ways and ways["gamma 2"]["same_ids"] == 1
    assert ways["gamma 2"]["seconds_first"] is None and ways["gamma 2"]["share_of_theory"] is None


def test_shapes_with_drawn_acceptance(tmp_path):
    torch.manual_seed(0)
    found = run(tmp_path / "run", *SHAPES, "recipe.synthetic_alpha=1", "sampling.temperature=1")
    assert bench.ASSISTED not in found["ways"]
    assert found["ways"]["gamma 2"]["alpha"] == 1 and found["ways"]["gamma 2"]["num_new_tokens"] == 24
    assert "Synthetic" in (tmp_path / "run" / "bench.md").read_text()
    assert bench.SYNTHETIC not in verify.RULES
    never = run(tmp_path / "never", *SHAPES, "recipe.synthetic_alpha=0", "sampling.temperature=1")
    assert never["ways"]["gamma 2"]["alpha"] == 0 and never["ways"]["gamma 2"]["mean_acceptance_length"] == 1


def test_drafts_are_kept_as_often_as_is_asked_for():
    """A binomial count of 4,000: false alarm below 1e-6 (5 standard deviations). Behind a row's last draft nothing is kept."""
    generator = torch.Generator().manual_seed(0)
    tokens, probs = torch.zeros((4000, 3), dtype=torch.long), torch.full((4000, 4, 5), 0.2)
    num_drafts = torch.full((4000,), 2)
    verified = bench.verify_synthetic(0.7, tokens, None, probs, generator, num_drafts)
    assert abs(int((verified.num_accepted > 0).sum()) - 2800) < 5 * (4000 * 0.7 * 0.3) ** 0.5
    assert verified.num_accepted.max() == 2 and verified.next_token.unique().tolist() == [0, 1, 2, 3, 4]


def test_cut_short_it_goes_on(tmp_path, monkeypatch):
    from specplug.recipes import bench as recipe

    original, calls = recipe.measured, []

    def interrupted(*arguments):
        calls.append(arguments[2])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(recipe, "measured", interrupted)
    folder = tmp_path / "run"
    config = specplug.load(*QUICK)
    assert run_recipe(config, folder) == 130
    first = (folder / "samples.jsonl").read_text()
    config.resume = str(folder)
    assert run_recipe(config, folder) == 0
    assert calls == [0, 1, 1] and (folder / "samples.jsonl").read_text().startswith(first)
    assert json.loads((folder / "bench.json").read_text())["num_batches"] == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe.synthetic_alpha=0.8"], "recipe.synthetic_alpha=0.8: is drawn where drafts are sampled"),
        (["recipe.synthetic_alpha=1.5", "sampling.temperature=1"], "must be between 0 and 1"),
        (["recipe.synthetic_alpha=1", "sampling.temperature=1", "schedule=tree"], "keeps drafts of chains alone"),
        (["recipe.synthetic_alpha=1", "sampling.temperature=1", "schedule.tree_depth=3"], "leave the tree out"),
        (["recipe.synthetic_alpha=1", "sampling.temperature=1", "engine=lookahead"], "is drawn by engine=rounds alone"),
        (["engine=plain"], "engine=plain: every way of ours would be plain decoding"),
        (["recipe.gammas=[]"], "recipe.gammas"),
        (["recipe.repeats=0"], "recipe.repeats=0: must be 1 or more"),
        (["recipe=evaluate", SHAPES[0]], "target.shape=(given): random weights write no text"),
        (["draft=lookup", SHAPES[1]], "draft.shape"),
    ],
)
def test_what_cannot_be_measured_is_one_line(overrides, message):
    quick = [each for each in QUICK if "recipe=" not in each or "recipe=evaluate" not in overrides]
    if "recipe=evaluate" in overrides:
        quick = []
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(")", r"\)").replace(".", r"\.")):
        specplug.load(*quick, *overrides)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 5}, ".*give the fields of a transformers configuration"),
        ({"model_type": "no-such-model"}, ".*give the fields of a transformers configuration"),
        ({"pad_token_id": 4096}, ".*give the fields of a transformers configuration"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: must be 1 or more"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: must be 1 or more"),
        ({"vocab_size": -1}, "vocab_size=-1: must be 1 or more"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 with num_key_value_heads=3: must be a multiple of it"),
        ({"model_type": "qwen2"}, ".*=32, which qwen2 has where it is not given: .*give num_key_value_heads=4"),
        ({"num_hidden_layer": 2}, "num_hidden_layer=2: nothing of llama reads it; did you mean num_hidden_layers?"),
    ],
)
def test_a_shape_that_cannot_run_is_one_line(fields, message):
    shape = yaml.safe_load(SHAPE % 1) | fields
    with pytest.raises(ConfigError, match=rf"target\.shape: {message}") as caught:
        load_model(Model(name_or_path="none", shape=shape), "target")
    assert "\n" not in str(caught.value)


def test_a_shape_of_which_not_all_names_are_the_usual_ones():
    shape = {
        "model_type": "gpt2",
        "n_embd": 32,
        "num_hidden_layers": 2,
        "n_head": 4,
        "vocab_size": 64,
        "eos_token_id": 1,
    }
    model = load_model(Model(name_or_path="none", shape=shape), "target")
    assert model.config.n_layer == 2 and not model.training


def test_a_pass_to_see_that_a_model_runs_takes_no_random_numbers():
    torch.manual_seed(0)
    random_model(
        "key", {"model_type": "gpt2", **(shape := {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64})}
    )
    after = torch.rand(1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **shape))
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("key", ["recipe=bench target.shape", "recipe=train recipe.architecture"])
def test_a_shape_is_made_of_fields(key):
    with pytest.raises(ConfigError, match=r"=llama: give fields of a transformers configuration, as {hidden"):
        specplug.load(*f"{key}=llama".split())
