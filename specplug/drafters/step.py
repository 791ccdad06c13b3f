"""A step of a draft model as one recording: its pass, the caller's processors, and the draw.

What Python does between two passes of a small draft takes a fifth of the time. So all that follows from a token is recorded with the
pass, and compared with what Python makes of it, bit by bit, before it is used; see capture.py. Random numbers are drawn outside.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from specplug import warp
from specplug.cache import NAME, Rooms
from specplug.capture import GivenLayer, Passes, served
from specplug.drafters import Request
from specplug.recording import Recording, trace_with_weights
from specplug.verify import invert

# Recordings of one model: a caller who changes the temperature in every call does not fill the memory with them.
MOST = 16


class Drawn(NamedTuple):
    """What steps drew, in order. `num_fed`: tokens that are in the cache since; one more than there are drafts where the last step's was
    not wanted."""

    tokens: list[Tensor]  # (1, 1) each
    probs: list[Tensor]  # (1, V) each, what they were drawn from, when sampling
    num_fed: int


class Step:
    """Steps of one sequence in one call.

    Args: the request; `passes` of the draft; `logits_of`, one of its passes as Python makes it, which feeds a token (1, 1) and returns
    (1, V) logits; `num_logits`, how many the draft has before they are made the target's.
    """

    def __init__(
        self, request: Request, passes: Passes, logits_of: Callable[[Tensor], Tensor], num_logits: int
    ) -> None:
        self.request, self.passes, self.logits_of = request, passes, logits_of
        self.missing = request.vocab_size - num_logits
        self.recording: Recording | None = None
        processors = warp.key_of(request.processors)
        # A GPU has graphs, see fixed_model.py; and eager attention a mask for each step.
        recordable = passes.model.device.type == "cpu" and passes.model.config._attn_implementation == "sdpa"
        if recordable and processors is not None and request.noise is None and not request.min_confidence:
            key = "step", request.do_sample, request.judge is not None, request.vocab_size, processors
            self.recording = passes.recording(key, True, MOST)

    def serves(self, cache: Any) -> bool:
        """Else its passes alone may be recorded."""
        return self.recording is not None and not self.recording.refused and served(cache)

    def __call__(self, new: Tensor, cache: Any, most: int) -> Drawn:
        """At most so many drafts behind `new`, (1, 1), which stands behind what `cache` holds: as many as the judge wants, or one as
        long as the recording is not ready. To be called in inference mode."""
        recording, passes = self.recording, self.passes
        assert recording is not None
        rooms: Rooms = cache.layers[0].rooms
        length = cache.get_seq_length()
        positions = torch.full_like(new, length)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        if not recording.ready:
            inputs = [new, positions, *self._points(new)]
            found = passes.compared(
                recording, 1, inputs, cache, self._record, lambda: self._drawn(self.logits_of(new), *inputs[1:])
            )
            self._wanted(found, tokens, probs)
            return Drawn(tokens, probs, 1)
        token, num_fed, goes_on = new, 0, True
        rooms.make_room(length + most)
        while goes_on and num_fed < most:
            num_fed += 1
            inputs = [token, positions, *self._points(new), *rooms.held(length + num_fed)]
            found = recording.run(inputs, passes.weights)
            token, positions = found[:2]
            goes_on = self._wanted(found, tokens, probs)
        rooms.lengthen(num_fed)
        passes.capture.count(passes.model, True, num=num_fed)
        return Drawn(tokens, probs, num_fed)

    def _points(self, new: Tensor) -> list[Tensor]:
        """The random number that a draft is drawn by, (1, 1)."""
        return [torch.rand((1, 1), dtype=torch.float64, device=new.device)] if self.request.do_sample else []

    def _wanted(self, found: Any, tokens: list[Tensor], probs: list[Tensor]) -> bool:
        """Whether the judge wants the draft that `_drawn` found; then it is added to `tokens`, and what it was drawn from to `probs`."""
        token, _, *more = found
        judge = self.request.judge
        if judge is not None and not judge(more.pop(0).item()):
            return False
        tokens.append(token)
        probs += more
        return True

    def _drawn(self, logits: Tensor, positions: Tensor, point: Tensor | None = None) -> list[Tensor]:
        """The draft behind (1, V) logits, (1, 1), and its place in the text. Then, where there is somebody to judge by it, the highest
        probability, (1,); when sampling, what it was drawn from, (1, V)."""
        scores = warp.process_draft(self.request.processors, positions, logits)
        judged = self.request.judge is not None
        if point is None and not judged:
            return [scores.argmax(-1, keepdim=True), positions + 1]
        probs = warp.to_probs(scores)
        highest, token = probs.max(-1) if judged else (None, None)
        if point is not None:
            token = invert(probs, point).clamp(min=0)  # of a broken draft anything
        assert token is not None
        return [
            token[:, None],
            positions + 1,
            *([] if highest is None else [highest]),
            *([] if point is None else [probs]),
        ]

    def _record(self, rooms: Rooms, given: list[Tensor]) -> Any:
        """A function of `given`: the token, its position, the random number if there is one, keys and values with room for it."""
        model, missing, sampled = self.passes.model, self.missing, self.request.do_sample
        length = given[-1].shape[-2] - 1

        def step(new: Tensor, positions: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            points, past = (rest[:1], rest[1:]) if sampled else ((), rest)
            cache = DynamicCache(config=model.config)
            cache.layers = [GivenLayer(*each, length, -1) for each in rooms.layers_of(list(past))]
            arguments: dict[str, Any] = {"input_ids": new, "position_ids": positions, "attention_mask": None}
            logits = model(**arguments, use_cache=True, return_dict=True, **{NAME: cache}).logits[:, -1].float()
            if missing > 0:
                logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
            elif missing < 0:
                logits = logits[..., :missing]
            return tuple(self._drawn(logits, positions, *points))

        num_first = 3 if sampled else 2
        longer = [torch.nn.functional.pad(each, (0, 0, 0, 7)) for each in given[num_first:]]
        return trace_with_weights(model, step, given, [*given[:num_first], *longer])
