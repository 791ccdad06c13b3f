"""When to stop drafting inside a round: how often drafts are kept, by how sure the draft model was of the place.

Decided before a token is drawn, by the distribution that it would be drawn from: to leave out a token for what it turned out to
be would change the law of what is kept. What is learned here changes how many drafts there are, never what they are.
"""

import bisect
from typing import Any


class Sureness:
    """Decaying counts of drafts tested and kept, by the draft's highest probability at the place."""

    EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
    PRIOR, WEIGHT, DECAY = 0.9, 2.0, 0.998

    def __init__(self) -> None:
        self.kept = [0.0] * (len(self.EDGES) + 1)
        self.tested = [0.0] * (len(self.EDGES) + 1)

    def rate(self, place: int) -> float:
        """How probable it is that a draft of this place in EDGES is kept, if it is looked at."""
        return (self.kept[place] + self.WEIGHT * self.PRIOR) / (self.tested[place] + self.WEIGHT)

    def observe(self, places: list[int], num_accepted: int) -> None:
        """A round's drafts, of which the first `num_accepted` were kept and one more was looked at."""
        for number, place in enumerate(places[: num_accepted + 1]):
            self.kept[place] = self.kept[place] * self.DECAY + (number < num_accepted)
            self.tested[place] = self.tested[place] * self.DECAY + 1

    def to_dict(self) -> dict[str, Any]:
        return {"kept": self.kept, "tested": self.tested}

    def load(self, saved: dict[str, Any]) -> None:
        for name in ("kept", "tested"):
            values = [float(each) for each in saved[name]]
            if len(values) != len(self.EDGES) + 1:
                raise ValueError(f"{name} has {len(values)} numbers, and {len(self.EDGES) + 1} are needed")
            setattr(self, name, values)


class Judge:
    """Asked before each draft of a round but the first: whether it is probable enough that it is reached and kept."""

    def __init__(self, sureness: Sureness) -> None:
        self.sureness = sureness
        self.begin(0.0)

    def begin(self, least: float) -> None:
        """A round begins; drafts that are kept less probably than this do not pay."""
        self.least, self.reached = least, 1.0
        self.places: list[int] = []

    def __call__(self, highest: float) -> bool:
        """`highest`: the draft's highest probability at the next place."""
        place = bisect.bisect_right(Sureness.EDGES, highest)
        reached = self.reached * self.sureness.rate(place)
        if self.places and reached < self.least:
            return False
        self.reached = reached
        self.places.append(place)
        return True
