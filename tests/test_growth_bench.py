"""How cost grows: which points, what is measured there and left out, what is wrong in one line."""

import json
from xml.etree import ElementTree

import pytest
import torch
from conftest import make_model, prompt
from test_bench import SHAPE, SHAPES

import specplug
from specplug import growth_bench, ways
from specplug.cache import get_cache
from specplug.cli import run_recipe
from specplug.config import Bench, ConfigError
from specplug.stats import Stats

QUICK = ["recipe=bench", "recipe.limit=1", "recipe.repeats=1", "recipe.gammas=[0,2]", "sampling.max_new_tokens=6"]


def run(folder, *overrides, code=0):
    assert run_recipe(specplug.load(*QUICK, *overrides), folder) == code
    return json.loads((folder / "bench.json").read_text())


def test_contexts_and_what_the_model_cannot_hold(tmp_path, capsys):
    folder = tmp_path / "run"
    summary = run(folder, "recipe.growth=context", "recipe.points=[400,40,800]")
    rows = summary["growth"]["context"]
    assert [(each["point"], each["side"], each["gamma"]) for each in rows] == [
        (40, "plain", 0), (40, "speculative", 2), (400, "plain", 0), (400, "speculative", 2),
    ]  # fmt: skip
    for each in rows:
        assert each["seconds_per_token"] > each["seconds_outside_per_token"] > 0 and each["seconds_prefill"] > 0
    # The embedded target: 10 layers, keys and values of 192 numbers of 4 bytes; the last token is not in the cache.
    assert rows[0]["kv_bytes"] == (40 + 6 - 1) * 10 * 2 * 192 * 4
    assert summary["left_out"] == [
        "context=800 is left out: prompts with 6 new tokens come to 806, and the target has 512 positions"
    ]
    assert summary["left_out"][0] in " ".join(capsys.readouterr().err.split())
    lengths = [json.loads(line)["prompt_tokens"] for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert lengths == [[40], [400]]
    report = (folder / "bench.md").read_text()
    assert "| 400 | speculative | 2 |" in report and "(plots/growth_context.svg)" in report
    assert (folder / "plots" / "growth_context.svg").exists()


def test_several_in_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(growth_bench, "POINTS", {"batch": [1, 3], "gamma": [0, 2]})
    summary = run(tmp_path / "run", "recipe.growth=[batch,gamma]", "recipe.prompt_tokens=12")
    batch, gamma = summary["growth"]["batch"], summary["growth"]["gamma"]
    assert [(each["point"], each["side"]) for each in gamma] == [(0, "plain"), (2, "speculative")]
    assert [each["num_new_tokens"] for each in batch if each["side"] == "plain"] == [6, 18]
    assert batch[2]["kv_bytes"] == 3 * batch[0]["kv_bytes"]


def test_vocabularies_of_models_that_are_built_for_them(tmp_path):
    overrides = [*SHAPES, "recipe.synthetic_alpha=1", "sampling.temperature=1", "recipe.growth=vocabulary"]
    summary = run(tmp_path / "run", *overrides, "recipe.points=[1024,4096]")
    rows = summary["growth"]["vocabulary"]
    assert [each["point"] for each in rows] == [1024, 1024, 4096, 4096]
    assert all(each["alpha"] == 1 for each in rows if each["side"] == "speculative")
    assert "Synthetic" in (tmp_path / "run" / "bench.md").read_text()


def test_cut_short_it_goes_on(tmp_path, monkeypatch):
    from specplug.recipes import bench as recipe

    original, calls = recipe.at_point, []

    def interrupted(*arguments):
        calls.append(arguments[-1])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(recipe, "at_point", interrupted)
    folder, given = tmp_path / "run", ["recipe.growth=gamma", "recipe.points=[0,1,2]", "recipe.gammas=[1,2,4,8]"]
    assert [each["point"] for each in run(folder, *given, code=130)["growth"]["gamma"]] == [0]
    first = (folder / "samples.jsonl").read_text()
    summary = run(folder, *given, f"resume={folder}")
    assert calls == [0, 1, 1, 2] and (folder / "samples.jsonl").read_text().startswith(first)
    assert [each["point"] for each in summary["growth"]["gamma"]] == [0, 1, 2]


def test_a_point_without_memory_is_left_out(tmp_path, monkeypatch):
    def call(sides, prompts, *rest):
        if len(prompts) > 1:
            raise torch.OutOfMemoryError
        return original(sides, prompts, *rest)

    original = ways.call
    monkeypatch.setattr(ways, "call", call)
    summary = run(tmp_path / "run", "recipe.growth=batch", "recipe.points=[1,2]")
    assert summary["left_out"] == ["batch=2 is left out: it does not fit into the memory of the device"]
    assert len(summary["growth"]["batch"]) == 2


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_bytes_of_keys_and_values_are_those_of_the_cache(kind):
    model, ids = make_model(kind), prompt(20)
    with torch.no_grad():
        cache = get_cache(model(input_ids=ids, use_cache=True))
    held = sum(each.nbytes for layer in cache.layers for each in (layer.keys, layer.values))
    assert ways.kv_bytes(model, 1, 20) == held and ways.kv_bytes(model, 3, 20) == 3 * held


def test_nothing_can_be_measured(tmp_path, capsys):
    config = specplug.load(*QUICK, "recipe.growth=context", "recipe.points=[600]")
    assert run_recipe(config, tmp_path / "run") == 1
    assert "no point could be measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("recipe.growth=depth", "recipe.growth=depth: allowed are context, batch, gamma, vocabulary, a list of these"),
        ("recipe.growth=[batch,batch]", "each once"),
        ("recipe.growth=[]", "or null"),
        ("recipe.growth=3", "recipe.growth=3: allowed are"),
        ("recipe.points=[3]", r"recipe.points=\[3\]: nothing reads it without recipe.growth"),
        ("recipe.growth=[batch,context] recipe.points=[3]", "are those of one growth"),
        ("recipe.growth=batch recipe.points=[0]", "must be numbers from 1 on"),
        (
            "recipe.growth=context recipe.prompt_tokens=8",
            "recipe.prompt_tokens=8: recipe.growth=context takes its place",
        ),
        ("recipe.growth=batch recipe.batch_size=8", "recipe.batch_size=8: recipe.growth=batch takes its place"),
        ("recipe.growth=batch recipe.compare_assisted=false", "nothing reads it with recipe.growth"),
        ("recipe.growth=batch recipe.gammas=[0]", "has to have a number above 0"),
        ("recipe.growth=gamma recipe.gammas=[3]", "nothing reads it with recipe.growth=gamma; take recipe.points"),
        ("recipe.growth=batch schedule=fixed", "schedule=fixed: nothing reads it with recipe.growth"),
        ("recipe.growth=batch schedule.max_gamma=3", "schedule.max_gamma=3: nothing reads it with recipe.growth"),
        ("recipe.growth=vocabulary", "take a pair named shape_"),
        ("recipe.growth=vocabulary target.shape=" + (SHAPE % 1).replace(" ", ""), "target.shape and draft.shape"),
    ],
)
def test_what_cannot_be_measured_is_one_line(overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        specplug.load("recipe=bench", *overrides.split())
    assert "\n" not in str(caught.value)


def test_the_pairs_that_have_shapes_take_vocabularies():
    config = specplug.load("recipe=bench", "pair=shape_qwen1b5_0b5", "recipe.growth=vocabulary")
    assert growth_bench.points_of(config.recipe)[-1] == ("vocabulary", 262_144)
    specplug.load("recipe=bench", "pair=shape_qwen1b5_0b5", "draft=lookup", "recipe.growth=vocabulary")


def test_points_are_those_of_each_or_those_given():
    assert growth_bench.points_of(Bench(growth="gamma"))[:2] == [("gamma", 0), ("gamma", 1)]
    assert growth_bench.points_of(Bench(growth=["batch"], points=[4, 2, 4])) == [("batch", 2), ("batch", 4)]


def sample(axis, point, gamma, seconds):
    stats = Stats(
        num_new_tokens=11, num_prefill_tokens=1, num_rounds=5, seconds_rounds=seconds, seconds_target=seconds / 2
    )
    made = {"gamma": gamma, "stats": stats.to_dict(), "peak_bytes": None}
    return {"axis": axis, "point": point, "kv_bytes": 2**20, "sides": {"speculative" if gamma else "plain": made}}


def test_what_a_token_costs_and_how_it_is_drawn():
    samples = [sample("vocabulary", point, 0, point / 1e5) for point in (65_536, 32_768)]
    rows = growth_bench.summarize(samples, None)["growth"]["vocabulary"]
    assert [each["seconds_per_token"] for each in rows] == pytest.approx([0.032768, 0.065536])
    assert rows[0]["seconds_outside_per_token"] == pytest.approx(0.016384)
    assert growth_bench.table("vocabulary", rows)[1][:6] == ["32768", "plain", "0", "32.77 ms", "16.38 ms", "50 %"]
    drawn = growth_bench.plot("vocabulary", rows)
    texts = [
        "".join(each.itertext()) for each in ElementTree.fromstring(drawn.svg).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"32k", "64k", "plain loop", "tokens of the vocabulary"} <= set(texts)


def test_calls_of_one_token_have_no_cost_a_token():
    one = sample("batch", 1, 0, 0.0)
    one["sides"]["plain"]["stats"] |= {"num_new_tokens": 1}
    rows = growth_bench.summarize([one], None)["growth"]["batch"]
    assert rows[0]["seconds_per_token"] is None and growth_bench.plot("batch", rows) is None
    assert growth_bench.table("batch", rows)[1][3] == "-"
