"""Distil a draft from a target: the target writes samples, and the draft learns its distribution on them.

specplug recipe=distill target=custom target.name_or_path=ORG/MODEL dataset=jsonl dataset.path=prompts.jsonl \
    recipe.architecture='{model_type: llama, hidden_size: 256, num_hidden_layers: 2, ...}'
specplug recipe=distill ... recipe.init=pruned/model recipe.loss=tv recipe.top_k=64 recipe.freeze_embeddings=true

DistillSpec (arXiv 2310.08461, section 4): forward KL by default, on target-generated data; other losses, references of the
data set, and texts of the draft's own are choices. `recipe.init` starts from a model instead of random weights. Writes
`model/` with a model card; the last line of stdout is JSON with the loss and the acceptance on held-out prompts.
Interrupted or killed, `specplug resume=DIR` goes on: samples, the target's distributions and steps are not made twice.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, set_seed

from specplug import tracker, training
from specplug.config import Config, Distill, Texts
from specplug.console import Bar, console
from specplug.data import Row, pad_of, prompt_ids, until_end
from specplug.distillation import TopK, collate_with, held_out_acceptance, left_padded, trainer_for
from specplug.fingerprint import stated_target
from specplug.models import load_target
from specplug.recipes.train import split
from specplug.runs import begin, describe_environment, drop_partial_line, read_samples
from specplug.training import Example


def run(config: Config, folder: Path) -> int:
    recipe = config.recipe
    assert isinstance(recipe, Distill)
    tracker.check_installed(config)
    target, tokenizer = load_target(config.target)
    train, held_out = split(config, recipe.held_out)
    set_seed(config.seed)
    draft = untrained_draft(recipe, target, tokenizer)
    environment = describe_environment(training.device_name(), recipe.precision.name)
    begin(folder, config, environment)
    pad = pad_of(tokenizer)
    where: Any = target
    where.to(training.device_name())
    tracking = tracker.start(config, folder)
    try:
        written, held = texts(target, tokenizer, train[: recipe.samples], held_out, config, folder)
        cache = None
        if recipe.top_k is not None:
            cache = TopK(folder / "target_top_k", recipe.top_k)
            cache.fill(target, [*written, *held], recipe.batch_size, pad, Bar("target's distributions"))
            for number, each in enumerate([*written, *held]):
                each["number"] = number
        teacher = target if cache is None or recipe.on_policy else None
        draft, losses = training.fit(
            recipe,
            folder / "checkpoints",
            draft,
            tokenizer,
            written,
            held,
            Bar("distill"),
            config.seed,
            trainer_for(recipe, teacher, pad),
            partial(collate_with, cache, pad),
            tracking,
        )
    except KeyboardInterrupt:
        console.print(f"interrupted; go on with: specplug resume={folder}")
        return 130
    finally:
        tracking.finish()
    acceptance = held_out_acceptance(target, draft.eval(), held, pad)
    source = f"of the target at temperature {recipe.temperature}" if recipe.texts is Texts.target else "given"
    facts = {
        "target": config.target.name_or_path,
        "seed": config.seed,
        "data": f"{len(written)} texts {source} for {config.dataset.name}, loss {recipe.loss.value}",
        "parameters": f"{draft.num_parameters():,}",
        **losses,
        **{f"acceptance on {len(held)} held-out greedy texts, {name}": value for name, value in acceptance.items()},
    }
    title = f"Draft for {config.target.name_or_path}"
    made_for = stated_target(config.target, target)
    output = training.save(recipe, folder, draft, tokenizer, title, facts, environment, made_for)
    print(json.dumps(losses | acceptance | {"model": str(output), "parameters": draft.num_parameters()}))
    return 0


def untrained_draft(recipe: Distill, target: Any, tokenizer: Any) -> Any:
    if recipe.init is not None:
        draft = training.loaded(AutoModelForCausalLM, recipe.init, "recipe.init", dtype=torch.float32)
    else:
        shape = {"vocab_size": target.config.get_text_config().vocab_size, **(recipe.architecture or {})}
        draft = training.new_model(shape, tokenizer, recipe.max_length)
    if recipe.freeze_embeddings:
        for module in (draft.get_input_embeddings(), draft.get_output_embeddings()):
            module.requires_grad_(False)
    return draft


def texts(
    target: Any, tokenizer: Any, train: list[Row], held_out: list[Row], config: Config, folder: Path
) -> tuple[list[Example], list[Example]]:
    """What the draft learns on, and the greedy texts of the target that its acceptance is measured on."""
    recipe = config.recipe
    assert isinstance(recipe, Distill)
    if recipe.texts is Texts.reference:
        written = training.encode(train, tokenizer, config.dataset, recipe.max_length, recipe.loss_on_prompt)
    else:
        written = write_samples(target, tokenizer, train, config, folder / "target_samples.jsonl")
    return written, write_samples(target, tokenizer, held_out, config, folder / "held_out_samples.jsonl", greedy=True)


def write_samples(
    target: Any, tokenizer: Any, rows: list[Row], config: Config, file: Path, greedy: bool = False
) -> list[Example]:
    """The target's answers to the prompts as training examples, kept in `file` batch by batch."""
    recipe = config.recipe
    assert isinstance(recipe, Distill)
    drop_partial_line(file)
    done = read_samples(file)
    batches = [rows[k : k + recipe.sample_batch_size] for k in range(0, len(rows), recipe.sample_batch_size)]
    pad = pad_of(tokenizer)
    bar = Bar("held-out samples" if greedy else "target samples").start(len(rows), len(done))
    with file.open("a", encoding="utf-8") as out:
        for number, batch in enumerate(batches):
            made = len(done) - number * recipe.sample_batch_size
            if made >= len(batch):
                continue
            torch.manual_seed(config.seed + number)  # so that a run cut short goes on with the same samples
            prompts = [prompt_ids(tokenizer, row, config.dataset) for row in batch]
            ids, mask = (each.to(target.device) for each in left_padded(prompts, pad))
            how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": recipe.temperature, "top_k": 0}
            new = target.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=recipe.sample_new_tokens, pad_token_id=pad, **how
            )[:, ids.shape[1] :].tolist()
            for row, prompt, answer in list(zip(batch, prompts, new, strict=True))[max(made, 0) :]:
                done.append({"id": row.id, "prompt": prompt, "answer": until_end(answer, tokenizer.eos_token_id)})
                out.write(json.dumps(done[-1]) + "\n")
            out.flush()
            bar.advance(len(done))
    bar.stop()
    on_prompt = recipe.loss_on_prompt and not greedy
    return [training.example(each["prompt"], each["answer"], recipe.max_length, on_prompt) for each in done]
