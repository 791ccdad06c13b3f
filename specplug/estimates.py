"""What an adaptive schedule estimates: how many drafts are kept, and what a round costs. Counts and seconds, no models."""

import bisect
import math
from collections import defaultdict, deque
from statistics import median


class Acceptance:
    """How probable it is that the draft at each position is kept, if it is looked at: decaying counts.

    A position without data is thought to be like the one before it, the first like `PRIOR`.
    """

    PRIOR, WEIGHT, DECAY = 0.7, 1.0, 0.98

    def __init__(self) -> None:
        self.kept: list[float] = []
        self.tested: list[float] = []

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        for i in range(min(num_accepted + 1, num_drafts)):
            if i == len(self.tested):
                self.kept.append(0.0)
                self.tested.append(0.0)
            self.kept[i] = self.kept[i] * self.DECAY + (i < num_accepted)
            self.tested[i] = self.tested[i] * self.DECAY + 1

    def expected_tokens(self, max_gamma: int) -> list[float]:
        """Entry g: tokens a round with g drafts gives, 1 to g + 1."""
        expected, reached, rate = [1.0], 1.0, self.PRIOR
        for i in range(max_gamma):
            if i < len(self.tested):
                rate = (self.kept[i] + self.WEIGHT * rate) / (self.tested[i] + self.WEIGHT)
            reached *= rate
            expected.append(expected[-1] + reached)
        return expected


class Yields(Acceptance):
    """The same for trees, by their number of nodes: what rounds with so many kept in the mean, in decaying counts.

    A size that was seen seldom is thought to lie on a curve through everything seen: a multiple of log(1 + nodes), since each
    node more is a less likely one.
    """

    PRIOR, WEIGHT = 0.7, 8.0

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        missing = num_drafts + 1 - len(self.tested)
        self.kept += [0.0] * missing
        self.tested += [0.0] * missing
        self.kept[num_drafts] = self.kept[num_drafts] * self.DECAY + num_accepted
        self.tested[num_drafts] = self.tested[num_drafts] * self.DECAY + 1

    def expected_tokens(self, max_gamma: int) -> list[float]:
        """Entry n: tokens a round with n nodes gives."""
        spread = sum(times * math.log2(1 + size) for size, times in enumerate(self.tested))
        factor = (sum(self.kept) + self.PRIOR) / (spread + 1)  # as if one round with one node had kept PRIOR
        expected = []
        for size in range(max_gamma + 1):
            kept, tested = (self.kept[size], self.tested[size]) if size < len(self.tested) else (0.0, 0.0)
            expected.append(1 + (kept + self.WEIGHT * factor * math.log2(1 + size)) / (tested + self.WEIGHT))
        return expected


class Costs:
    """Seconds of a whole round by the number of drafts in it, everything included: medians of the latest rounds.

    Between widths that were measured the line between them; behind the widest, the line through the last two.
    """

    def __init__(self) -> None:
        self.samples: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=9))
        self.known: dict[int, float] = {}

    def observe(self, num_drafts: int, seconds: float) -> None:
        self.samples[num_drafts].append(seconds)
        self.known[num_drafts] = median(self.samples[num_drafts])

    def seconds(self, num_drafts: int) -> float:
        if num_drafts in self.known:
            return self.known[num_drafts]
        widths = sorted(self.known)
        above = min(max(bisect.bisect(widths, num_drafts), 1), len(widths) - 1)
        low, high = widths[above - 1], widths[above]
        slope = (self.known[high] - self.known[low]) / (high - low)
        return self.known[low] + max(slope, 0.0) * (num_drafts - low)
