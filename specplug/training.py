"""Training on top of `transformers.Trainer`, which brings devices, mixed precision (accelerate), checkpoints and exact
resumption. Here: the tokenizer, examples to tensors, a stop that saves, and model cards. What a draft learns from its
target is in distillation.py.

Knows nothing about configs on disk or data set formats: examples come in as `Row`s.
"""

import json
import logging
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from specplug.config import ConfigError, Dataset, Prune, Training, first_line
from specplug.console import console
from specplug.data import Row, prompt_ids
from specplug.models import random_model
from specplug.tracker import Tracker

log = logging.getLogger(__name__)

Example = dict[str, Any]  # input_ids and labels, and how many of the ids are the prompt
IGNORED = -100  # the label that the loss of transformers leaves out
ACCEPTANCE = ("agreement_at_0", "overlap_at_1")  # what a distillation measures on held-out texts
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a chat template; at most `vocab_size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=SPECIAL_TOKENS,
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def new_model(
    architecture: dict[str, Any] | None, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> PreTrainedModel:
    """A model with random weights from the fields of a transformers configuration."""
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    shape = {"max_position_embeddings": max_length, "vocab_size": len(tokenizer), **(architecture or {}), **special}
    return random_model(f"recipe.architecture={architecture}", shape)


def encode(
    rows: Iterable[Row], tokenizer: Any, dataset: Dataset, max_length: int, loss_on_prompt: bool
) -> list[Example]:
    """Rows to `{input_ids, labels}`. The labels cover the answer, or everything with `loss_on_prompt` or plain text."""
    eos = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    examples = []
    for row in rows:
        prompt = prompt_ids(tokenizer, row, dataset) if row.prompt else []  # plain text is all answer
        answer = tokenizer(row.reference or "", add_special_tokens=False)["input_ids"] + eos
        examples.append(example(prompt, answer, max_length, loss_on_prompt))
    return examples


def example(prompt: list[int], answer: list[int], max_length: int, loss_on_prompt: bool = False) -> Example:
    labels = [*prompt, *answer] if loss_on_prompt else [IGNORED] * len(prompt) + answer
    return {
        "input_ids": [*prompt, *answer][:max_length],
        "labels": labels[:max_length],
        "prompt_length": min(len(prompt), max_length),
    }


def with_labels(examples: list[Example]) -> list[Example]:
    """Examples that say something: an answer that `max_length` cut off, or an empty one, teaches nothing."""
    kept = [each for each in examples if any(label != IGNORED for label in each["labels"][1:])]
    if len(kept) < len(examples):
        log.warning(
            "%d of %d examples have no answer within recipe.max_length, and are left out",
            len(examples) - len(kept),
            len(examples),
        )
    return kept


def collate(examples: list[Example], pad_token_id: int) -> dict[str, Tensor]:
    """Right-padded batch: input_ids, labels and attention_mask, each (B, T), and prompt_length, (B,)."""
    longest = max(len(example["input_ids"]) for example in examples)

    def padded(key: str, value: int) -> Tensor:
        return torch.tensor([example[key] + [value] * (longest - len(example[key])) for example in examples])

    lengths = torch.tensor([len(example["input_ids"]) for example in examples])
    mask = (torch.arange(longest)[None] < lengths[:, None]).long()
    return {
        "input_ids": padded("input_ids", pad_token_id),
        "labels": padded("labels", IGNORED),
        "attention_mask": mask,
        "prompt_length": torch.tensor([example["prompt_length"] for example in examples]),
    }


def without_prompt_length(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `forward` takes."""
    return {key: value for key, value in batch.items() if key != "prompt_length"}


class Progress(TrainerCallback):
    """One progress bar on stderr; on Ctrl-C or SIGTERM the step is finished, a checkpoint written, the run left."""

    def __init__(self, bar: Any, tracker: Tracker) -> None:
        self.tracker = tracker
        self.bar, self.interrupted, self.losses = bar, False, list[dict[str, float]]()
        self.previous: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.previous[number] = signal.signal(number, self.interrupt)
            except ValueError:  # not the main thread: whoever runs us there handles its own signals
                break
        self.bar.start(total=state.max_steps, done=state.global_step)

    def interrupt(self, *_: Any) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        log.warning("stopping: finishing this step and writing a checkpoint (once more to leave at once)")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.advance(state.global_step, f"loss {self.losses[-1]['loss']:.4f}" if self.losses else "")
        if self.interrupted:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        self.tracker.log(state.global_step, logs or {})
        if logs and "loss" in logs:
            self.losses.append({"step": state.global_step, "loss": logs["loss"]})
        if logs and "eval_loss" in logs:
            acceptance = "".join(f", {key} {logs[f'eval_{key}']:.3f}" for key in ACCEPTANCE if f"eval_{key}" in logs)
            log.info("step %d: held-out loss %.4f%s", state.global_step, logs["eval_loss"], acceptance)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.stop()
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint: Trainer writes trainer_state.json last, so one cut short has none or half."""

    def is_complete(checkpoint: Path) -> bool:
        try:
            return bool(json.loads((checkpoint / "trainer_state.json").read_text()))
        except (OSError, ValueError):
            return False

    found = [path for path in folder.glob("checkpoint-*") if is_complete(path)]
    return max(found, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)


def training_arguments(
    recipe: Training, folder: Path, evaluate: bool, seed: int, evaluate_first: bool
) -> TrainingArguments:
    try:
        return TrainingArguments(
            output_dir=str(folder),
            max_steps=recipe.steps,
            per_device_train_batch_size=recipe.batch_size,
            per_device_eval_batch_size=recipe.batch_size,
            learning_rate=recipe.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=recipe.warmup_steps,
            weight_decay=recipe.weight_decay,
            bf16=recipe.precision.name == "bf16",
            fp16=recipe.precision.name == "fp16",
            logging_steps=recipe.log_steps,
            save_steps=recipe.save_steps,
            eval_strategy="steps" if evaluate else "no",
            eval_steps=recipe.save_steps,
            eval_on_start=evaluate and evaluate_first,
            use_cpu=device_name() == "cpu",
            save_total_limit=2,
            seed=seed,
            data_seed=seed,
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            prediction_loss_only=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
    except ValueError as error:  # a precision that this device does not have
        raise ConfigError(f"recipe.precision={recipe.precision.name}: {first_line(error)}") from error


def fit(
    recipe: Training,
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: list[Example],
    held_out: list[Example],
    bar: Any,
    seed: int,
    make_trainer: Callable[..., Trainer] = Trainer,
    collator: Callable[[list[Example]], dict[str, Tensor]] | None = None,
    tracker: Tracker | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train, from the last complete checkpoint in `folder` if there is one. Returns the model and its losses, of a
    distillation also its acceptance on the held-out texts by step.

    Raises KeyboardInterrupt after a checkpoint was written, if the user asked to stop.
    """
    train, held_out = with_labels(train), with_labels(held_out)
    if not train:
        raise ConfigError(
            "dataset: no example has an answer to learn from; name dataset.reference_column, or text_column"
        )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    checkpoint = last_checkpoint(folder)
    arguments = training_arguments(recipe, folder, bool(held_out), seed, evaluate_first=checkpoint is None)
    progress = Progress(bar, tracker or Tracker())
    common: dict[str, Any] = dict(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out or None,
        data_collator=collator or (lambda examples: without_prompt_length(collate(examples, pad))),
        callbacks=[progress],
    )
    trainer = make_trainer(**common)
    trainer.model_accepts_loss_kwargs = False
    for unwanted in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(unwanted)
    if checkpoint:
        log.info("going on from %s", checkpoint)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if progress.interrupted:
        raise KeyboardInterrupt
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    mean = [entry for entry in trainer.state.log_history if "train_loss" in entry]  # over all steps, of short runs
    held = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert isinstance(trainer.model, PreTrainedModel)
    facts: dict[str, Any] = {
        "train_loss": losses[-1]["loss"] if losses else mean[-1]["train_loss"] if mean else None,
        "held_out_loss": held[-1]["eval_loss"] if held else None,
        "steps": trainer.state.global_step,
    }
    if any(f"eval_{ACCEPTANCE[0]}" in entry for entry in held):
        facts["acceptance_by_step"] = {
            entry["step"]: [round(entry[f"eval_{key}"], 4) for key in ACCEPTANCE] for entry in held
        }
    return trainer.model, facts


def save(
    recipe: Training | Prune,
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    title: str,
    facts: dict[str, Any],
    environment: dict[str, Any],
    front_matter: dict[str, Any] | None = None,
) -> Path:
    """Write the model and its card where the recipe says, or else into the run folder."""
    output = Path(recipe.output) if recipe.output is not None else folder / "model"
    facts = {"command": f"`{' '.join(environment['command'])}`", **facts}
    card = model_card(title, facts, environment, front_matter)
    write_model(output, model, tokenizer, card, getattr(torch, recipe.save_dtype.value))
    console.print(f"model: {output}")
    return output


def write_model(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, card: str, dtype: torch.dtype
) -> None:
    """safetensors in `dtype`, tokenizer and model card."""
    stored: Any = model
    stored.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")


def model_card(
    title: str, facts: dict[str, Any], environment: dict[str, Any], front_matter: dict[str, Any] | None = None
) -> str:
    """Markdown with the front matter that hubs read. `facts` become a list."""
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items() if v is not None)
    head = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["specplug", "speculative-decoding"],
        **(front_matter or {}),
    }
    return "\n".join(
        [
            "---",
            yaml.safe_dump(head, sort_keys=False, allow_unicode=True).strip(),
            "---",
            "",
            f"# {title}",
            "",
            *(f"- {name}: {value}" for name, value in facts.items()),
            f"- made on: {environment['device']}, {environment['threads']} torch threads; {versions}",
            "",
        ]
    )


def device_name() -> str:
    """Where Trainer will put the model."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def loaded(auto: Any, name: str | None, key: str, **options: Any) -> Any:
    try:
        return auto.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={name}: cannot be loaded: {first_line(error)}") from error
