"""The embedded pair keeps what its card and the README say of it, and was not trained on what it is tested on."""

import json
from pathlib import Path

import pytest
import torch

import specplug
from specplug import corpus
from specplug.data import load_rows
from specplug.metrics.exact_match import exact_match, last_line

ASSETS = Path(specplug.__file__).parent / "assets"


@pytest.fixture(scope="module")
def answers(tiny_pipeline):
    """Plain greedy answers of the embedded target to the embedded data set, and the counts with the embedded draft."""
    pipe, draft = tiny_pipeline
    config = specplug.load("pair=tiny").dataset
    made = []
    with specplug.attach(pipe, draft, gamma=6) as plugin:
        for row in load_rows(config):
            text = pipe(
                [{"role": "user", "content": row.prompt}], max_new_tokens=128, do_sample=False, return_full_text=False
            )[0]["generated_text"]
            made.append((row, exact_match(last_line(text), last_line(row.reference)), plugin.last))
    return made


def test_size():
    files = [file for file in ASSETS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 20e6
    for side in ("target", "draft"):
        names = {file.name for file in (ASSETS / "tiny" / side).iterdir()}
        assert {"model.safetensors", "tokenizer.json", "config.json", "README.md"} <= names


def test_data_set_is_the_held_out_half_of_the_corpus():
    rows = [json.loads(line) for line in (ASSETS / "tiny" / "dataset.jsonl").read_text().splitlines()]
    assert rows == list(corpus.generate(2025, 60, held_out=True))
    assert {row["category"] for row in rows} == set(corpus.CATEGORIES)
    assert all(corpus.is_held_out(row["prompt"]) for row in rows)


def test_no_prompt_of_it_was_trained_on():
    config = specplug.load("dataset=tiny_corpus").dataset
    trained = {row.prompt for row in load_rows(config)}
    assert len(trained) > 50_000
    assert trained.isdisjoint(row.prompt for row in load_rows(specplug.load("pair=tiny").dataset))


@pytest.mark.parametrize("category", corpus.CATEGORIES)
def test_target_solves_each_task_and_draft_agrees(answers, category):
    scores = [score for row, score, _ in answers if row.category == category]
    assert len(scores) == 15 and sum(scores) / 15 >= 0.9
    stats = sum((call for row, _, call in answers if row.category == category), specplug.Stats())
    assert stats.alpha >= 0.75


def test_acceptance_over_all(answers):
    assert sum((call for *_, call in answers), specplug.Stats()).alpha >= 0.87


def test_larger_held_out_sample(tiny_pipeline):
    """120 further held-out prompts of another seed, so that the 60 are no lucky pick."""
    pipe, _ = tiny_pipeline
    tokenizer, model = pipe.tokenizer, pipe.model
    right = dict.fromkeys(corpus.CATEGORIES, 0)
    rows = list(corpus.generate(99, 120, held_out=True))
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": r["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        for r in rows
    ]
    inputs = tokenizer(chats, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    with torch.no_grad():
        output = model.generate(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=128, do_sample=False
        )
    for row, ids in zip(rows, output[:, inputs.input_ids.shape[1] :], strict=True):
        right[row["category"]] += exact_match(
            last_line(tokenizer.decode(ids, skip_special_tokens=True)), last_line(row["reference"])
        )
    assert all(count / 30 >= 0.9 for count in right.values()), right


def test_shape():
    from transformers import AutoConfig, AutoModelForCausalLM

    target, draft = (AutoConfig.from_pretrained(ASSETS / "tiny" / side) for side in ("target", "draft"))
    assert AutoModelForCausalLM.from_config(target).num_parameters() <= 8e6
    assert draft.num_hidden_layers == 1
