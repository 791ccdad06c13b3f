"""A smaller model drafts. It keeps its own cache across rounds and never calls `generate`.

The drafted token's `probs` are the draft's logits after the caller's processors, then softmax: exactly what the token was
drawn from. When the call is greedy the draft is greedy too, and there is nothing to state.
"""

import time

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specplug import warp
from specplug.cache import NAME, crop, new_draft_cache, prepare_for_crop, why_not_croppable
from specplug.drafters import Proposal, Request
from specplug.verify import sample_draft


class ModelDrafter:
    name = "model"

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        reason = why_not_croppable(new_draft_cache(model.config))
        if model._is_stateful or reason:
            raise ValueError(
                f"the draft {type(model).__name__} cannot be rolled back after a rejection"
                f" ({reason or 'it keeps a recurrent state'}); choose a draft with an ordinary key-value cache"
            )
        self.max_length = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def start(self, request: Request) -> "ModelSession":
        return ModelSession(self, request)


class ModelSession:
    def __init__(self, drafter: ModelDrafter, request: Request) -> None:
        self.model, self.max_length, self.request = drafter.model, drafter.max_length, request
        self.cache: DynamicCache | None = None
        self.num_cached = 0  # leading tokens of the text whose keys and values are in the cache
        self.num_proposed = 0
        self.num_steps, self.seconds_forward = 0, 0.0

    def propose(self, ids: Tensor, gamma: int) -> Proposal:
        device = self.model.device
        if self.max_length is not None:  # the draft's context may be shorter than the target's
            gamma = min(gamma, self.max_length - ids.shape[1])
        self.num_proposed = max(gamma, 0)
        text = ids.to(device)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for _ in range(gamma):
            # The first pass catches up with all that was committed since; the later ones feed one draft token.
            scores = warp.process(self.request.processors, text, self._forward(text[:, self.num_cached :]))
            if self.request.do_sample:
                probs.append(warp.to_probs(scores))
                token = sample_draft(probs[-1])
            else:
                token = scores.argmax(-1)
            tokens.append(token)
            text = torch.cat([text, token[:, None]], dim=1)
        if not tokens:
            return Proposal(ids.new_empty((1, 0)), None)
        stacked = torch.stack(tokens, dim=1).to(ids.device)
        return Proposal(stacked, torch.stack(probs, dim=1).to(ids.device) if probs else None)

    def observe(self, num_accepted: int) -> None:
        """The cache holds all drafts but the last, which was never fed; keep those that the target kept."""
        if self.num_proposed and self.cache is not None:
            fed = self.num_proposed - 1
            kept = min(num_accepted, fed)
            crop(self.cache, fed - kept)
            self.num_cached -= fed - kept
        self.num_proposed = 0

    def _forward(self, new: Tensor) -> Tensor:
        """Feed new tokens (1, N); returns fp32 logits of the next token, (1, V) with V of the target."""
        if self.cache is None:
            self.cache = new_draft_cache(self.model.config)
        started = self._now()
        with torch.inference_mode():  # a tenth quicker than no_grad for a small draft; nothing here is written in place
            outputs = self.model(input_ids=new, use_cache=True, return_dict=True, **{NAME: self.cache})
        self.seconds_forward += self._now() - started
        self.num_steps += 1
        if self.num_cached == 0:
            prepare_for_crop(self.cache)
        self.num_cached += new.shape[1]
        logits = outputs.logits[:, -1].float()
        missing = self.request.vocab_size - logits.shape[-1]
        if missing > 0:  # padded vocabularies of one tokenizer: the draft never says what it does not have
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self.request.vocab_size]

    def _now(self) -> float:
        if self.request.time_forward and self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()
