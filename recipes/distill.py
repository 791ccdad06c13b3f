"""Distil a draft from a target: the target writes samples, and the draft learns its full distribution on them.

specplug recipe=distill target=custom target.name_or_path=ORG/MODEL dataset=jsonl dataset.path=prompts.jsonl \
    recipe.architecture='{model_type: llama, hidden_size: 256, num_hidden_layers: 2, ...}'

Forward KL on target-generated data (DistillSpec, arXiv 2310.08461, section 4). `recipe.init` starts from a model instead
of random weights. Writes `model/` with a model card; the last line of stdout is JSON with the loss and the acceptance to
expect on held-out prompts. Interrupted or killed, `specplug resume=DIR` goes on: samples and steps are not made twice.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, set_seed

from specplug import training
from specplug.config import Config, Distill
from specplug.console import Bar, console
from specplug.data import Row, prompt_ids
from specplug.models import load_target
from specplug.recipes.train import split
from specplug.runs import begin, describe_environment, drop_partial_line, read_samples


def run(config: Config, folder: Path) -> int:
    recipe = config.recipe
    assert isinstance(recipe, Distill)
    target, tokenizer = load_target(config.target)
    train, held_out = split(config, recipe.held_out)
    set_seed(config.seed)
    if recipe.init is not None:
        draft = training.loaded(AutoModelForCausalLM, recipe.init, "recipe.init", dtype=torch.float32)
    else:
        shape = {"vocab_size": target.config.get_text_config().vocab_size, **(recipe.architecture or {})}
        draft = training.new_model(shape, tokenizer, recipe.max_length)
    environment = describe_environment(training.device_name(), recipe.precision.name)
    begin(folder, config, environment)
    try:
        written = write_samples(target, tokenizer, train[: recipe.samples], config, folder / "target_samples.jsonl")
        greedy = write_samples(target, tokenizer, held_out, config, folder / "held_out_samples.jsonl", greedy=True)
        draft, losses = training.fit(
            recipe,
            folder / "checkpoints",
            draft,
            tokenizer,
            written,
            greedy,
            Bar("distill"),
            config.seed,
            teacher=target,
        )
    except KeyboardInterrupt:
        console.print(f"interrupted; go on with: specplug resume={folder}")
        return 130
    acceptance = training.held_out_acceptance(target, draft.eval(), greedy, tokenizer.pad_token_id or 0)
    output = Path(recipe.output) if recipe.output is not None else folder / "model"
    facts = {
        "command": f"`{' '.join(environment['command'])}`",
        "target": config.target.name_or_path,
        "seed": config.seed,
        "data": f"{len(written)} texts of the target at temperature {recipe.temperature} for {config.dataset.name}",
        "parameters": f"{draft.num_parameters():,}",
        **losses,
        **{f"acceptance on {len(greedy)} held-out greedy texts, {name}": value for name, value in acceptance.items()},
    }
    card = training.model_card(f"Draft for {config.target.name_or_path}", facts, environment)
    training.write_model(output, draft, tokenizer, card, getattr(torch, recipe.save_dtype.value))
    console.print(f"model: {output}")
    print(json.dumps(losses | acceptance | {"model": str(output), "parameters": draft.num_parameters()}))
    return 0


def write_samples(
    target: Any, tokenizer: Any, rows: list[Row], config: Config, file: Path, greedy: bool = False
) -> list[dict[str, list[int]]]:
    """The target's answers to the prompts as training examples, kept in `file` batch by batch."""
    recipe = config.recipe
    assert isinstance(recipe, Distill)
    drop_partial_line(file)
    done = read_samples(file)
    batches = [rows[k : k + recipe.sample_batch_size] for k in range(0, len(rows), recipe.sample_batch_size)]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    bar = Bar("held-out samples" if greedy else "target samples").start(len(rows), len(done))
    target.to(training.device_name())
    with file.open("a", encoding="utf-8") as out:
        for number, batch in enumerate(batches):
            made = len(done) - number * recipe.sample_batch_size
            if made >= len(batch):
                continue
            torch.manual_seed(config.seed + number)  # so that a run cut short goes on with the same samples
            prompts = [prompt_ids(tokenizer, row, config.dataset) for row in batch]
            longest = max(map(len, prompts))
            ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=target.device)
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=target.device)
            how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": recipe.temperature, "top_k": 0}
            new = target.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=recipe.sample_new_tokens, pad_token_id=pad, **how
            )[:, longest:].tolist()
            for row, prompt, answer in list(zip(batch, prompts, new, strict=True))[max(made, 0) :]:
                done.append({"id": row.id, "prompt": prompt, "answer": without_padding(answer, tokenizer.eos_token_id)})
                out.write(json.dumps(done[-1]) + "\n")
            out.flush()
            bar.advance(len(done))
    bar.stop()
    return [training.example(sample["prompt"], sample["answer"], recipe.max_length) for sample in done]


def without_padding(answer: list[int], eos: int | None) -> list[int]:
    """Up to and with the first end-of-sequence token; what `generate` adds behind it is padding."""
    return answer[: answer.index(eos) + 1] if eos in answer else answer
