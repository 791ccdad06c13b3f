"""Training and distilling, small: they learn, they write what is loadable, they go on after a kill to the same end."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

import specplug
from specplug import corpus, training
from specplug.cli import run_recipe
from specplug.config import Dataset
from specplug.data import Row

SHAPE = "recipe.architecture={model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, tie_word_embeddings: true}"
TRAIN = (
    "recipe=train",
    "dataset=tiny_corpus",
    "dataset.corpus_size=400",
    SHAPE,
    "recipe.vocab_size=400",
    "recipe.held_out=8",
    "recipe.warmup_steps=2",
    "recipe.log_steps=5",
    "recipe.max_length=256",
    "threads=1",
)


DATASET = Dataset(name="d")


def last_json(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_train_then_distil(tmp_path, capsys):
    assert run_recipe(specplug.load(*TRAIN, "recipe.steps=40", "recipe.learning_rate=0.01"), tmp_path / "target") == 0
    trained = last_json(capsys)
    assert trained["held_out_loss"] < 5.0  # ln 400 = 5.99 is knowing nothing
    card = (tmp_path / "target" / "model" / "README.md").read_text()
    for word in ("command", "seed: 0", "train_loss", "held_out_loss", "tiny_corpus", "torch 2"):
        assert word in card
    distil = [
        "recipe=distill",
        "dataset=tiny_corpus",
        "dataset.corpus_size=64",
        "target=custom",
        f"target.name_or_path={tmp_path / 'target' / 'model'}",
        SHAPE,
        "recipe.samples=40",
        "recipe.sample_batch_size=16",
        "recipe.sample_new_tokens=24",
        "recipe.held_out=8",
        "recipe.steps=60",
        "recipe.learning_rate=0.01",
        "recipe.warmup_steps=2",
        "recipe.log_steps=5",
        "threads=1",
    ]
    assert run_recipe(specplug.load(*distil), tmp_path / "draft") == 0
    distilled = last_json(capsys)
    assert 0 < distilled["agreement_at_0"] <= 1 and 0 < distilled["overlap_at_1"] <= 1
    assert "acceptance on 8 held-out greedy texts" in (tmp_path / "draft" / "model" / "README.md").read_text()
    samples = [json.loads(line) for line in (tmp_path / "draft" / "target_samples.jsonl").read_text().splitlines()]
    assert len(samples) == 40
    evaluate = [
        "target=custom",
        f"target.name_or_path={tmp_path / 'target' / 'model'}",
        "draft=custom",
        f"draft.name_or_path={tmp_path / 'draft' / 'model'}",
        "recipe.limit=2",
        "sampling.max_new_tokens=16",
    ]
    assert run_recipe(specplug.load(*evaluate), tmp_path / "evaluated") == 0


def test_killed_and_resumed_comes_to_the_same_weights(tmp_path):
    arguments = [*TRAIN, "recipe.steps=60", "recipe.save_steps=5"]
    command = [sys.executable, "-m", "specplug.cli"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    subprocess.run([*command, *arguments, f"hydra.run.dir={whole}"], check=True, capture_output=True)
    for number in (signal.SIGKILL, signal.SIGINT):
        # Twice cut short: once without warning, once as Ctrl-C does; both times after a checkpoint is there.
        started = subprocess.Popen(
            [*command, *([f"resume={cut}"] if cut.exists() else [*arguments, f"hydra.run.dir={cut}"])]
        )
        before = training.last_checkpoint(cut / "checkpoints") if cut.exists() else None
        deadline = time.monotonic() + 120
        while training.last_checkpoint(cut / "checkpoints") in (None, before) and started.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(started.pid, number)
        assert started.wait(timeout=60) in (-signal.SIGKILL, 130), "it was done before it could be cut short"
    subprocess.run([*command, f"resume={cut}"], check=True, capture_output=True)
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (whole, cut)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], atol=0, rtol=0)


def test_going_on_from_half_precision_weights_trains_in_fp32(tmp_path, capsys):
    """Trained in the fp16 that they were saved in, weights turn to NaN."""
    run_recipe(specplug.load(*TRAIN, "recipe.steps=5", "recipe.save_dtype=fp16"), tmp_path / "half")
    assert {w.dtype for w in load_file(tmp_path / "half" / "model" / "model.safetensors").values()} == {torch.float16}
    start = f"recipe.init={tmp_path / 'half' / 'model'}"
    assert run_recipe(specplug.load(*TRAIN, "recipe.steps=5", start), tmp_path / "on") == 0
    weights = load_file(tmp_path / "on" / "model" / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.float32}
    assert all(w.isfinite().all() for w in weights.values()) and 0 < last_json(capsys)["held_out_loss"] < 7


def test_an_unfinished_checkpoint_is_passed_over(tmp_path):
    for step, state in ((5, '{"global_step": 5}'), (10, '{"glob'), (15, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert training.last_checkpoint(tmp_path).name == "checkpoint-5"


def test_labels_cover_the_answer_alone():
    rows = [Row("0", "What?", "This.")]
    tokenizer = training.train_tokenizer(["What? This."], 300)
    example = training.encode(rows, tokenizer, DATASET, 99, loss_on_prompt=False)[0]
    counted = [token for token, label in zip(example["input_ids"], example["labels"], strict=True) if label >= 0]
    assert tokenizer.decode(counted) == "This.<|end|>"
    assert training.encode(rows, tokenizer, DATASET, 99, loss_on_prompt=True)[0]["labels"] == example["input_ids"]
    plain = training.encode([Row("0", "", "Text.")], tokenizer, DATASET, 99, loss_on_prompt=False)[0]
    assert plain["labels"] == plain["input_ids"]


def test_examples_without_an_answer_are_left_out(tmp_path, llama):
    tokenizer = training.train_tokenizer(["What? This."], 300)
    rows = [Row("0", "What?" * 50, "This."), Row("1", "What?", "This.")]
    examples = training.encode(rows, tokenizer, DATASET, 30, loss_on_prompt=False)
    assert [len(each["input_ids"]) for each in training.with_labels(examples)] == [len(examples[1]["input_ids"])]


@pytest.mark.parametrize("override", ["recipe.architecture={model_type: nothing}", "recipe.init=./nothing"])
def test_wrong_architecture_or_start(tmp_path, override):
    with pytest.raises(specplug.ConfigError, match="recipe"):
        run_recipe(specplug.load(*TRAIN, override), tmp_path)


def test_corpus_is_decided_by_its_seed_and_has_right_answers():
    first, second = (list(corpus.generate(3, 40)) for _ in range(2))
    assert first == second != list(corpus.generate(4, 40))
    for row in corpus.generate(0, 400):
        if row["category"] == "arithmetic":
            start, more, away = (int(word) for word in row["prompt"].split() if word.isdigit())
            assert row["reference"].endswith(f"Answer: {start + more - away}")
        if row["category"] == "rewrite":
            new, old = (
                row["prompt"].split("with ")[1].split(" instead of ")[0],
                row["prompt"].split("instead of ")[1].split(".")[0],
            )
            assert new in row["reference"] and old not in row["reference"].replace(".", "").split()
