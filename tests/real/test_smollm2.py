"""Real weights, real prompts: SmolLM2-135M-Instruct from GGUF on Spec-Bench, with lookup drafts."""

import json
import os
from pathlib import Path

import pytest
import torch

import specplug
from specplug.cli import run_recipe

WEIGHTS, QUESTIONS = os.environ.get("SPECPLUG_SMOLLM2"), os.environ.get("SPECPLUG_SPEC_BENCH")
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not WEIGHTS, reason="SPECPLUG_SMOLLM2 does not name the GGUF file of SmolLM2-135M-Instruct"),
    pytest.mark.skipif(not QUESTIONS, reason="SPECPLUG_SPEC_BENCH does not name Spec-Bench's question.jsonl"),
]
GROUPS = ("summarization", "rag", "math_reasoning")


@pytest.fixture(scope="module")
def six_questions(tmp_path_factory):
    """The first two of each group."""
    rows = [json.loads(line) for line in Path(QUESTIONS).read_text(encoding="utf-8").splitlines()]
    chosen = [row for group in GROUPS for row in [row for row in rows if row["category"] == group][:2]]
    file = tmp_path_factory.mktemp("data") / "six.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return file


def test_six_questions_with_lookup_are_identical(six_questions, tmp_path, capsys):
    config = specplug.load(
        "pair=lookup",
        "target=custom",
        f"target.name_or_path={WEIGHTS}",
        "dataset=spec_bench",
        f"dataset.path={six_questions}",
        "sampling.max_new_tokens=64",
        "threads=1",
        "recipe.warmup=0",
        "recipe.compare_assisted=false",
        "schedule=fixed",  # on a busy machine an adaptive one may find that nothing pays
        "schedule.gamma=8",
    )
    threads = torch.get_num_threads()
    code = run_recipe(config, tmp_path)
    torch.set_num_threads(threads)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0 and summary["exactness"] == {"identical": 6, "tie": 0, "mismatch": 0, "not_compared": 0}
    assert set(summary["categories"]) == set(GROUPS)
    assert summary["num_accepted"] > 0 and 0 < summary["alpha"] < 1
    print(json.dumps({name: part["alpha"] for name, part in summary["categories"].items()}))


def test_the_chat_template_is_used():
    from specplug.config import Dataset
    from specplug.data import Row, prompt_ids
    from specplug.models import load_tokenizer

    config = specplug.load("target=custom", f"target.name_or_path={WEIGHTS}")
    tokenizer = load_tokenizer(config.target, "target")
    text = tokenizer.decode(prompt_ids(tokenizer, Row("0", "Hello", None), Dataset(name="d")))
    assert "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n" in text
