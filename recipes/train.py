"""Train a causal model from scratch, or go on from `recipe.init`, on any text or chat data set.

specplug recipe=train dataset=text dataset.path=corpus.jsonl recipe.steps=5000
specplug recipe=train dataset=jsonl dataset.path=chats.jsonl dataset.reference_column=answer recipe.init=org/model

Writes checkpoints while it runs, and `model/` (safetensors, tokenizer, model card) at the end; the last line of stdout is
JSON with the losses. Ctrl-C writes a checkpoint first; after it, or after a kill, `specplug resume=DIR` goes on from the
last checkpoint and comes to the same model.
"""

import json
import logging
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from specplug import tracker, training
from specplug.config import Config, Train
from specplug.console import Bar, console
from specplug.data import Row, load_rows
from specplug.runs import begin, describe_environment

log = logging.getLogger(__name__)


def run(config: Config, folder: Path) -> int:
    recipe = config.recipe
    assert isinstance(recipe, Train)
    tracker.check_installed(config)
    train, held_out = split(config, recipe.held_out)
    if recipe.tokenizer is not None or recipe.init is not None:
        tokenizer = training.loaded(AutoTokenizer, recipe.tokenizer or recipe.init, "recipe.tokenizer")
    else:
        tokenizer = training.train_tokenizer((text for row in train for text in texts(row)), recipe.vocab_size)
    set_seed(config.seed)
    if recipe.init is not None:
        model = training.loaded(AutoModelForCausalLM, recipe.init, "recipe.init", dtype=torch.float32)
    else:
        model = training.new_model(recipe.architecture, tokenizer, recipe.max_length)
    environment = describe_environment(training.device_name(), recipe.precision.name)
    begin(folder, config, environment)
    examples, held_examples = (
        training.encode(rows, tokenizer, config.dataset, recipe.max_length, recipe.loss_on_prompt)
        for rows in (train, held_out)
    )
    tracking = tracker.start(config, folder)
    try:
        model, losses = training.fit(
            recipe,
            folder / "checkpoints",
            model,
            tokenizer,
            examples,
            held_examples,
            Bar("train"),
            config.seed,
            tracker=tracking,
        )
    except KeyboardInterrupt:
        console.print(f"interrupted; go on with: specplug resume={folder}")
        return 130
    finally:
        tracking.finish()
    facts = {
        "seed": config.seed,
        "data": f"{config.dataset.name}, {len(train)} examples for training, {len(held_out)} held out",
        "parameters": f"{model.num_parameters():,}",
        **losses,
    }
    title = f"{model.config.model_type} trained on {config.dataset.name}"
    output = training.save(recipe, folder, model, tokenizer, title, facts, environment)
    print(json.dumps(losses | {"model": str(output), "parameters": model.num_parameters()}))
    return 0


def split(config: Config, held_out: int) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows. The generated corpus has a half for each; of other data the last rows are held out."""
    rows = load_rows(config.dataset)
    if config.dataset.corpus:
        return rows, load_rows(config.dataset, held_out, held_out=True) if held_out else []
    if held_out > len(rows) // 10:
        log.warning(
            "recipe.held_out=%d: of %d rows at most a tenth is held out, %d", held_out, len(rows), len(rows) // 10
        )
        held_out = len(rows) // 10
    return rows[: len(rows) - held_out], rows[len(rows) - held_out :]


def texts(row: Row) -> list[str]:
    return [text for text in (row.prompt, row.reference) if text]
