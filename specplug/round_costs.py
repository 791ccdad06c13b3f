"""What the passes of a round cost, measured in the order in which a round has them: draft steps, then the target's pass.

A pass that follows one of the same model finds other things in the processor's caches than one that follows another model. So
whole rounds are simulated: drafts are fed whatever they are, and nothing is verified or done in between.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel

from specplug import packed
from specplug.cache import NAME, crop, prepare_for_crop
from specplug.capture import Capture, Passes
from specplug.config import ConfigError
from specplug.drafters import Request
from specplug.drafters.model import ModelDrafter
from specplug.fixed import FixedPasses, why_not
from specplug.kernel import swapped
from specplug.models import context_length

# Rounds of one gamma in a row, and how many of them are not timed: until the processor's caches are those of such rounds.
IN_A_TURN, NOT_TIMED = 10, 2
MOST_DRAFTS = 3  # fed in a simulated round; more of them cost what these do
# Positions that a text grows by with passes over one, and with those over several, so that recordings of either are compared at
# another length; then it stays as it is.
GROWTH = 4


@dataclass
class RoundCosts:
    """Median seconds."""

    plain_step: float  # the target, one position, as transformers runs it
    target: dict[int, float]  # by gamma: the target's pass over gamma + 1 positions
    first_draft: float  # the draft's first step of a round; of a drafter without passes, a proposal
    later_draft: float  # each later one; of a drafter without passes, nothing

    def drafting(self, gamma: int) -> float:
        """Seconds that a round spends on its drafts."""
        return self.first_draft + (gamma - 1) * self.later_draft if gamma else 0.0

    def cost_coefficient(self, gamma: int) -> float:
        """Of a draft step, in steps of plain decoding; of a drafter without passes, of a proposal."""
        steps = gamma if self.later_draft else 1
        return self.drafting(max(gamma, 1)) / max(steps, 1) / self.plain_step

    def width_cost(self, gamma: int) -> float:
        """Of a pass over gamma + 1 positions, in steps of plain decoding."""
        return self.target[gamma] / self.plain_step

    def seconds(self, gamma: int) -> float:
        """Of the passes of a round."""
        return self.drafting(gamma) + self.target[gamma]

    def to_dict(self, gamma: int) -> dict[str, float]:
        """Of one gamma, ready for JSON."""
        return {
            "gamma": gamma,
            "seconds_plain_step": self.plain_step,
            "seconds_target_step": self.target[0],
            "seconds_target_pass": self.target[gamma],
            "seconds_draft_step": self.cost_coefficient(gamma) * self.plain_step,
            "cost_coefficient": self.cost_coefficient(gamma),
            "width_cost": self.width_cost(gamma),
        }


class Standing:
    """A model with a text in its cache, over which passes are timed. The first few of them make the text longer."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, roomy: bool = True) -> None:
        self.model: Any = model
        self.cache = DynamicCache(config=model.config)
        # A draft with another tokenizer may have fewer tokens; any will do.
        text = ids.to(model.device) % model.config.get_text_config().vocab_size
        with torch.no_grad():
            self.model(input_ids=text, use_cache=True, **{NAME: self.cache})
        prepare_for_crop(self.cache, roomy)
        self.last, self.grown = text[:, -1:], {True: 0, False: 0}
        self.length = text.shape[1]
        self.fixed: FixedPasses | None = None

    def use_graphs(self, capture: Capture) -> None:
        """Where rounds go by passes at fixed shapes, go by them from now on, until the capture is closed."""
        if self.fixed is None and why_not(self.model, capture.graph, 1, self.length) is None:
            self.fixed = capture.fixed(self.model)
            self.fixed.fill(self.cache, [0])

    def seconds(self, passes: Passes, width: int) -> float:
        """Of a pass over `width` positions."""
        new = self.last.expand(1, width).contiguous()

        def ordinary() -> Tensor:
            logits: Tensor = self.model(input_ids=new, use_cache=True, return_dict=True, **{NAME: self.cache}).logits
            return logits

        synchronize(self.model)
        started = time.perf_counter()
        if self.fixed is not None:
            self.fixed(new, [self.length])
        else:
            passes(new, self.cache, ordinary)
        synchronize(self.model)
        seconds = time.perf_counter() - started
        grows = int(self.grown[width > 1] < GROWTH)
        self.grown[width > 1] += grows
        self.length += grows
        if self.fixed is None:
            crop(self.cache, width - grows)
        return seconds


def measure_rounds(
    model: PreTrainedModel,
    drafter: Any,
    ids: Tensor,
    gammas: Iterable[int],
    kernel: str = "auto",
    graph: str = "capture",
    repeats: int = 24,
) -> RoundCosts:
    """Time rounds of these gammas and plain steps by turns. `ids`: (1, T) text to stand on; `repeats`: rounds that are timed, at least."""
    chosen = sorted({0, *gammas})
    ids = ids[:, : max(_context([model, getattr(drafter, "model", model)]) - chosen[-1] - 1 - 2 * GROWTH, 1)]
    target, plain = Standing(model, ids), Standing(model, ids, roomy=False)
    draft = Standing(drafter.model, ids) if isinstance(drafter, ModelDrafter) else None
    graphs = Capture(graph, uses_before=0)

    def propose(gamma: int) -> float:
        text = ids if ids.shape[1] > 1 else ids.repeat(1, 2)  # something has to stand before its last token
        session = drafter.start(Request(False, LogitsProcessorList(), model.config.get_text_config().vocab_size))
        session.propose(text[:, :-1], gamma)
        session.observe(0)
        started = time.perf_counter()
        session.propose(text, gamma)
        return time.perf_counter() - started

    def act(gamma: int) -> list[tuple[list[float], float]]:
        """Of each round of a turn: its draft steps, and the target's pass."""
        models = [model] if draft is None else [model, draft.model]
        with swapped(kernel, *models), packed.swapped(kernel, *models):
            with torch.no_grad():
                for each in (target, draft):
                    if each is not None:
                        each.use_graphs(graphs)
                passes = Capture(graph, uses_before=0).passes(model)
            with torch.inference_mode():  # where drafts are made
                of_draft = None if draft is None else Capture(graph, uses_before=0).passes(draft.model)
            acted = []
            for _ in range(IN_A_TURN):
                drafts: list[float] = []
                if draft is not None and of_draft is not None:
                    with torch.inference_mode():
                        drafts = [draft.seconds(of_draft, 1) for _ in range(min(gamma, MOST_DRAFTS))]
                elif gamma:
                    drafts = [propose(gamma)]
                with torch.no_grad():
                    acted.append((drafts, target.seconds(passes, gamma + 1)))
        return acted

    def plain_steps() -> list[float]:
        with torch.no_grad():
            passes = Capture().passes(model)
            return [plain.seconds(passes, 1) for _ in range(IN_A_TURN)]

    seconds: dict[int, list[float]] = {gamma: [] for gamma in chosen}
    steps: list[float] = []
    first: list[float] = []
    later: list[float] = []
    try:
        for gamma in chosen:  # to record, to compare, and to see whether that was all
            act(gamma)
        for _ in range(-(-repeats // (IN_A_TURN - NOT_TIMED))):
            steps += plain_steps()[NOT_TIMED:]
            for gamma in chosen:
                for drafts, pass_ in act(gamma)[NOT_TIMED:]:
                    seconds[gamma].append(pass_)
                    first += drafts[:1]
                    later += drafts[1:]
    finally:
        graphs.close()
    by_gamma = {gamma: median(each) for gamma, each in seconds.items()}
    once = median(first) if first else 0.0
    return RoundCosts(median(steps), by_gamma, once, median(later) if later else (once if draft is not None else 0.0))


def check_room(model: PreTrainedModel, drafter: Any, gammas: Iterable[int], key: str) -> None:
    """Raises ConfigError, under the name of `key`, if a round of one of these has more tokens than a model has positions."""
    largest, room = max(gammas), _context([model, getattr(drafter, "model", model)])
    if largest + 2 > room:  # behind one token, the last one committed
        raise ConfigError(
            f"{key}: a round of {largest} drafts has no room in the {room} positions of target and draft; take fewer drafts"
        )


def _context(models: list[Any]) -> int:
    """Positions that all of them can have."""
    return min((length for each in models if (length := context_length(each))), default=1 << 30)


def synchronize(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
