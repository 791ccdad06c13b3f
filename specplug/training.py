"""Training a target and distilling a draft on top of `transformers.Trainer`, which brings devices, mixed precision
(accelerate), checkpoints and exact resumption. Here: the tokenizer, examples to tensors, the distillation loss, and a
stop that saves.

Knows nothing about configs on disk or data set formats: examples come in as `Row`s.
"""

import json
import logging
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from specplug.config import ConfigError, Dataset, Training, first_line
from specplug.data import Row, prompt_ids

log = logging.getLogger(__name__)

IGNORED = -100  # the label that the loss of transformers leaves out
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
    try:
        shape = {"max_position_embeddings": max_length, "vocab_size": len(tokenizer), **(architecture or {})}
        config = AutoConfig.for_model(shape.pop("model_type", "llama"), **shape, **special)
        return AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"recipe.architecture={architecture}: {first_line(error)}; give the fields of a transformers configuration"
        ) from error


def encode(
    rows: Iterable[Row], tokenizer: Any, dataset: Dataset, max_length: int, loss_on_prompt: bool
) -> list[dict[str, list[int]]]:
    """Rows to `{input_ids, labels}`. The labels cover the answer, or everything with `loss_on_prompt` or plain text."""
    eos = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    examples = []
    for row in rows:
        prompt = prompt_ids(tokenizer, row, dataset) if row.prompt else []  # plain text is all answer
        answer = tokenizer(row.reference or "", add_special_tokens=False)["input_ids"] + eos
        examples.append(example(prompt, answer, max_length, loss_on_prompt))
    return examples


def example(
    prompt: list[int], answer: list[int], max_length: int, loss_on_prompt: bool = False
) -> dict[str, list[int]]:
    labels = [*prompt, *answer] if loss_on_prompt else [IGNORED] * len(prompt) + answer
    return {"input_ids": [*prompt, *answer][:max_length], "labels": labels[:max_length]}


def with_labels(examples: list[dict[str, list[int]]]) -> list[dict[str, list[int]]]:
    """Examples that say something: an answer that `max_length` cut off, or an empty one, teaches nothing."""
    kept = [each for each in examples if any(label != IGNORED for label in each["labels"][1:])]
    if len(kept) < len(examples):
        log.warning(
            "%d of %d examples have no answer within recipe.max_length, and are left out",
            len(examples) - len(kept),
            len(examples),
        )
    return kept


def collate(examples: list[dict[str, list[int]]], pad_token_id: int) -> dict[str, Tensor]:
    """Right-padded batch: input_ids, labels and attention_mask, each (B, T)."""
    longest = max(len(example["input_ids"]) for example in examples)

    def padded(key: str, value: int) -> Tensor:
        return torch.tensor([example[key] + [value] * (longest - len(example[key])) for example in examples])

    lengths = torch.tensor([len(example["input_ids"]) for example in examples])
    mask = (torch.arange(longest)[None] < lengths[:, None]).long()
    return {"input_ids": padded("input_ids", pad_token_id), "labels": padded("labels", IGNORED), "attention_mask": mask}


class DistillTrainer(Trainer):
    """Knowledge distillation: forward KL from the target's full distribution (DistillSpec, arXiv 2310.08461)."""

    def __init__(self, *args: Any, teacher: PreTrainedModel, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = teacher.eval().to(self.args.device)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        with torch.no_grad():
            teacher_logits = self.teacher(**inputs, use_cache=False).logits
        outputs = model(**inputs, use_cache=False)
        # Position t predicts label t + 1. Vocabularies padded to different widths share their first V entries.
        counted = labels[:, 1:] != IGNORED
        width = min(teacher_logits.shape[-1], outputs.logits.shape[-1])
        target = teacher_logits[:, :-1, :width][counted].float().log_softmax(-1)  # (N, V)
        draft = outputs.logits[:, :-1, :width][counted].float().log_softmax(-1)  # (N, V)
        loss = torch.nn.functional.kl_div(draft, target, reduction="batchmean", log_target=True)
        return (loss, outputs) if return_outputs else loss


@torch.no_grad()
def held_out_acceptance(
    target: PreTrainedModel, draft: PreTrainedModel, examples: list[dict[str, list[int]]], pad_token_id: int
) -> dict[str, float]:
    """Expected acceptance on texts of the target: argmax agreement (temperature 0) and sum(min(p, q)) (temperature 1).

    Each position is weighted alike, which is what alpha measures when the text is the target's own greedy text.
    """
    agree = overlap = count = 0.0
    for start in range(0, len(examples), 16):
        batch = collate(examples[start : start + 16], pad_token_id)
        labels = batch.pop("labels")
        counted = labels[:, 1:] != IGNORED
        logits = [model(**{k: v.to(model.device) for k, v in batch.items()}).logits.cpu() for model in (target, draft)]
        width = min(each.shape[-1] for each in logits)
        p, q = (each[:, :-1, :width][counted].float().softmax(-1) for each in logits)
        agree += (p.argmax(-1) == q.argmax(-1)).sum().item()
        overlap += torch.minimum(p, q).sum().item()
        count += counted.sum().item()
    return {"agreement_at_0": agree / max(count, 1), "overlap_at_1": overlap / max(count, 1)}


class Progress(TrainerCallback):
    """One progress bar on stderr; on Ctrl-C or SIGTERM the step is finished, a checkpoint written, the run left."""

    def __init__(self, bar: Any) -> None:
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
        if logs and "loss" in logs:
            self.losses.append({"step": state.global_step, "loss": logs["loss"]})
        if logs and "eval_loss" in logs:
            log.info("step %d: held-out loss %.4f", state.global_step, logs["eval_loss"])

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


def training_arguments(recipe: Training, folder: Path, evaluate: bool, seed: int) -> TrainingArguments:
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
    train: list[dict[str, list[int]]],
    held_out: list[dict[str, list[int]]],
    bar: Any,
    seed: int,
    teacher: PreTrainedModel | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train, from the last complete checkpoint in `folder` if there is one. Returns the model and its losses.

    Raises KeyboardInterrupt after a checkpoint was written, if the user asked to stop.
    """
    train, held_out = with_labels(train), with_labels(held_out)
    if not train:
        raise ConfigError(
            "dataset: no example has an answer to learn from; name dataset.reference_column, or text_column"
        )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    arguments = training_arguments(recipe, folder, bool(held_out), seed)
    progress = Progress(bar)
    common: dict[str, Any] = dict(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out or None,
        data_collator=lambda examples: collate(examples, pad),
        callbacks=[progress],
    )
    trainer = Trainer(**common) if teacher is None else DistillTrainer(**common, teacher=teacher)
    trainer.model_accepts_loss_kwargs = False
    for unwanted in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(unwanted)
    checkpoint = last_checkpoint(folder)
    if checkpoint:
        log.info("going on from %s", checkpoint)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if progress.interrupted:
        raise KeyboardInterrupt
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    held = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert isinstance(trainer.model, PreTrainedModel)
    return trainer.model, {
        "train_loss": losses[-1]["loss"] if losses else None,
        "held_out_loss": held[-1]["eval_loss"] if held else None,
        "steps": trainer.state.global_step,
    }


def write_model(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, card: str, dtype: torch.dtype
) -> None:
    """safetensors in `dtype`, tokenizer and model card."""
    stored: Any = model
    stored.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")


def model_card(title: str, facts: dict[str, Any], environment: dict[str, Any]) -> str:
    """Markdown with the front matter that hubs read. `facts` become a list."""
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items() if v is not None)
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "tags: [specplug, speculative-decoding]",
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
