"""How many tokens to draft in the next round."""

from typing import Protocol


class Schedule(Protocol):
    def next_gamma(self) -> int:
        """Draft tokens for the next round, 0 or more. The room left in the text is seen to elsewhere."""
        ...


class FixedSchedule:
    """The same gamma in every round; 0 is plain decoding."""

    def __init__(self, gamma: int) -> None:
        if isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < 0:
            raise ValueError(f"gamma={gamma!r}: the number of draft tokens a round is a whole number, 0 or more")
        self.gamma = gamma

    def next_gamma(self) -> int:
        return self.gamma
