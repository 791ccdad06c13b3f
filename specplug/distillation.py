"""What a draft learns from its target: the losses, the target's distributions kept on disk, and a Trainer that measures
acceptance on held-out texts while it trains, which is what counts in the end.

Knows nothing about configs on disk or data set formats: examples come in as in training.py.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, Trainer

from specplug.config import Distill, Loss
from specplug.data import until_end
from specplug.stats import ratio
from specplug.training import IGNORED, Example, collate, example

LOWEST = -1e4  # for the logarithm of nothing: exp() of it is 0, and 0 times it is 0
LN_2 = 0.6931471805599453


def forward_kl(target: Tensor, draft: Tensor) -> Tensor:
    """KL(p || q), per position. The draft covers all that the target may say. Args: log-probabilities (N, V)."""
    return (target.exp() * (target - draft)).sum(-1)


def reverse_kl(target: Tensor, draft: Tensor) -> Tensor:
    """KL(q || p). The draft says only what the target says."""
    return forward_kl(draft, target)


def jsd(target: Tensor, draft: Tensor) -> Tensor:
    """Jensen-Shannon divergence: each one's KL to the mean of both, halved and added."""
    mean = torch.logaddexp(target, draft) - LN_2
    return (forward_kl(target, mean) + forward_kl(draft, mean)) / 2


def total_variation(target: Tensor, draft: Tensor) -> Tensor:
    """sum |p - q| / 2 = 1 - sum(min(p, q)): the chance that a draft is rejected (Leviathan et al. 2022, theorem 3.5)."""
    return (target.exp() - draft.exp()).abs().sum(-1) / 2


# DistillSpec (arXiv 2310.08461, section 4) compares these for drafts.
LOSSES: dict[Loss, Callable[[Tensor, Tensor], Tensor]] = {
    Loss.forward_kl: forward_kl,
    Loss.reverse_kl: reverse_kl,
    Loss.jsd: jsd,
    Loss.tv: total_variation,
}


def log_probs(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).clamp(min=LOWEST)


def log_probs_at(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of `ids`, (N, K), and of all other tokens together: (N, K + 1)."""
    logits = logits.float()
    named = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
    return with_rest(named)


def with_rest(named: Tensor) -> Tensor:
    """(N, K) log-probabilities with the logarithm of what is left of 1 as the last column: a distribution again."""
    rest = (1 - named.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(named.dtype).eps).log()
    return torch.cat([named, rest], dim=-1).clamp(min=LOWEST)


def counted(labels: Tensor) -> Tensor:
    """(B, T - 1): the positions whose next token is one to learn."""
    return labels[:, 1:] != IGNORED


class TopK:
    """The target's `top_k` likeliest tokens at each position to learn, on disk: the target runs once, not once an epoch.

    What is beyond them counts as one token of its own, so every loss stays a divergence of distributions; with top_k = V
    nothing is cut. One safetensors file a batch, written whole or not at all, and never twice.
    """

    def __init__(self, folder: Path, top_k: int) -> None:
        self.folder, self.top_k = folder, top_k
        self.where: list[tuple[Path, int, int]] = []  # of each example: its file, and its rows in it
        folder.mkdir(parents=True, exist_ok=True)

    @torch.no_grad()
    def fill(self, target: PreTrainedModel, examples: list[Example], batch_size: int, pad: int, bar: Any) -> None:
        bar.start(len(examples), 0)
        for start in range(0, len(examples), batch_size):
            batch = examples[start : start + batch_size]
            file = self.folder / f"{start:08d}-{len(batch)}-{self.top_k}.safetensors"
            lengths = [sum(label != IGNORED for label in each["labels"][1:]) for each in batch]
            if not _is_whole(file):
                inputs = collate(batch, pad)
                positions = counted(inputs.pop("labels"))
                del inputs["prompt_length"]
                inputs = {key: value.to(target.device) for key, value in inputs.items()}
                logits = target(**inputs, use_cache=False).logits[:, :-1][positions.to(target.device)]
                top = log_probs(logits).topk(min(self.top_k, logits.shape[-1]), dim=-1)
                content = {"ids": top.indices.int().cpu(), "log_probs": top.values.half().cpu()}
                partial = file.with_suffix(".partial")
                save_file(content, partial)
                partial.replace(file)
            row = 0
            for length in lengths:
                self.where.append((file, row, row + length))
                row += length
            bar.advance(start + len(batch))
        bar.stop()

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities of one example's positions, (T, K) each."""
        file, start, stop = self.where[number]
        with safe_open(file, framework="pt") as content:
            return content.get_slice("ids")[start:stop].long(), content.get_slice("log_probs")[start:stop].float()


def _is_whole(file: Path) -> bool:
    try:
        with safe_open(file, framework="pt") as content:
            return bool(content.keys())
    except (OSError, SafetensorError):
        return False


def collate_with(cache: TopK | None, pad: int, examples: list[Example]) -> dict[str, Tensor]:
    """A batch, and what the target says at its positions, one example after the other: (N, K)."""
    batch = collate(examples, pad)
    if cache is not None and all("number" in each for each in examples):
        ids, values = zip(*(cache[each["number"]] for each in examples), strict=True)
        batch |= {"top_ids": torch.cat(ids), "top_log_probs": torch.cat(values)}
    return batch


class DistillTrainer(Trainer):
    """Learns the target's distribution at each position. `teacher` may be left out where all of it is in the cache."""

    def __init__(self, *args: Any, teacher: PreTrainedModel | None, recipe: Distill, pad: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = None if teacher is None else teacher.eval().to(self.args.device)
        self.recipe, self.pad = recipe, pad
        self.held_out = torch.zeros(3)  # positions where the argmaxes agree, sum of sum(min(p, q)), positions

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        # GKD (arXiv 2306.13649): with some probability the batch's texts are the draft's own, not those given.
        if model.training and self.recipe.on_policy and float(torch.rand(())) < self.recipe.on_policy:
            inputs = self.own_texts(model, inputs)
        labels, _ = inputs.pop("labels"), inputs.pop("prompt_length")
        ids, values = inputs.pop("top_ids", None), inputs.pop("top_log_probs", None)
        outputs = model(**inputs, use_cache=False)
        positions = counted(labels)
        logits = outputs.logits[:, :-1][positions]  # (N, V)
        if ids is not None:
            target, draft = with_rest(values), log_probs_at(logits, ids)
        else:
            assert self.teacher is not None
            with torch.no_grad():
                said = self.teacher(**inputs, use_cache=False).logits[:, :-1][positions]
            # Vocabularies padded to different widths share their first V entries.
            width = min(said.shape[-1], logits.shape[-1])
            target, draft = log_probs(said[:, :width]), log_probs(logits[:, :width])
        if not model.training:
            self.count(logits, target, draft, ids)
        loss = LOSSES[self.recipe.loss](target, draft).mean()
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def own_texts(self, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """The same prompts, continued by the draft."""
        draft = self.accelerator.unwrap_model(model)
        lengths = inputs["prompt_length"].clamp(min=1).tolist()
        prompts = [ids[:length].tolist() for ids, length in zip(inputs["input_ids"], lengths, strict=True)]
        ids, mask = left_padded(prompts, self.pad)
        draft.eval()
        texts = draft.generate(
            input_ids=ids.to(draft.device),
            attention_mask=mask.to(draft.device),
            do_sample=True,
            temperature=self.recipe.temperature,
            top_k=0,
            max_new_tokens=self.recipe.sample_new_tokens,
            pad_token_id=self.pad,
        )[:, ids.shape[1] :].tolist()
        draft.train()
        eos = draft.generation_config.eos_token_id
        examples = [
            example(prompt, until_end(text, eos), self.recipe.max_length, self.recipe.loss_on_prompt)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        return {key: value.to(draft.device) for key, value in collate(examples, self.pad).items()}

    def count(self, logits: Tensor, target: Tensor, draft: Tensor, ids: Tensor | None) -> None:
        """Acceptance at the positions of a held-out batch. With a cache, of the tokens in it alone: a lower bound."""
        best = target.argmax(-1) if ids is None else ids[:, 0]
        smaller = torch.minimum(target, draft).exp()
        overlap = smaller.sum() if ids is None else smaller[:, :-1].sum()
        agree = (logits.argmax(-1) == best).sum()
        self.held_out += torch.tensor([float(agree), float(overlap), float(len(logits))])  # wherever the model is

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.held_out = torch.zeros(3)
        output = super().evaluation_loop(*args, **kwargs)
        agree, overlap, num_positions = self.held_out.tolist()
        if output.metrics is not None and num_positions:
            output.metrics.update(
                {"eval_agreement_at_0": agree / num_positions, "eval_overlap_at_1": overlap / num_positions}
            )
        return output


def left_padded(prompts: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, (B, T) each, for generation."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
    return ids, mask


def trainer_for(recipe: Distill, teacher: PreTrainedModel | None, pad: int) -> Callable[..., Trainer]:
    return functools.partial(DistillTrainer, teacher=teacher, recipe=recipe, pad=pad)


@torch.no_grad()
def held_out_acceptance(
    target: PreTrainedModel, draft: PreTrainedModel, examples: list[Example], pad_token_id: int
) -> dict[str, float | None]:
    """Expected acceptance on texts of the target: argmax agreement (temperature 0) and sum(min(p, q)) (temperature 1).

    Each position is weighted alike, which is what alpha measures when the text is the target's own greedy text. None where
    there is no text.
    """
    agree = overlap = count = 0.0
    for start in range(0, len(examples), 16):
        batch = collate(examples[start : start + 16], pad_token_id)
        positions = counted(batch.pop("labels"))
        del batch["prompt_length"]
        logits = [
            model(**{k: v.to(model.device) for k, v in batch.items()}).logits[:, :-1].cpu()[positions]
            for model in (target, draft)
        ]
        width = min(each.shape[-1] for each in logits)
        p, q = (each[:, :width].float().softmax(-1) for each in logits)
        agree += (p.argmax(-1) == q.argmax(-1)).sum().item()
        overlap += torch.minimum(p, q).sum().item()
        count += positions.sum().item()
    return {"agreement_at_0": ratio(agree, count), "overlap_at_1": ratio(overlap, count)}
