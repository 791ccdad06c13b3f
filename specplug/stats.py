"""Counts, as whole numbers that can be added up; every rate is derived from them.

Rates that have no data (nothing drafted, nothing generated) are None, never 0 and never NaN.
"""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def number(value: float | None, digits: int = 2, unit: str = "", scale: float = 1) -> str:
    """A figure as reports and tables write it; a dash where there is none."""
    return "-" if value is None else f"{scale * value:.{digits}f}{unit}"


@dataclass
class Stats:
    """Counts of one call, or of many added up. Field names follow vLLM's per-request statistics where it has them."""

    num_calls: int = 0
    num_new_tokens: int = 0
    num_prefill_tokens: int = 0  # new tokens that came from the prompt's pass: one a call
    num_rounds: int = 0  # target passes after the prompt's
    num_draft_tokens: int = 0  # of a tree, all of its nodes
    num_accepted: int = 0  # drafts kept, the bonus token not among them
    num_tested: int = 0  # accepted + 1 for each round that rejected
    accepted: Counter[int] = field(default_factory=Counter)  # drafts kept in a round -> rounds
    drafted: Counter[int] = field(default_factory=Counter)  # drafts made one behind another in a round -> rounds
    seconds_prefill: float = 0.0
    seconds_rounds: float = 0.0  # everything after the prompt's pass
    seconds_target: float = 0.0  # of that, in the target's forward passes
    seconds_draft: float = 0.0  # of that, drafting
    seconds_draft_forward: float = 0.0  # of that, in its passes, and in choosing tokens if recorded with them
    num_draft_steps: int = 0  # forward passes of the draft
    seconds_capture: float = 0.0  # of the rounds, spent on recording passes that later ones replay
    # Passes behind the prompts' that might have been replays: the target's, and draft steps that are launched alone.
    num_passes: int = 0
    num_replayed: int = 0  # of these, as recordings or graphs
    # Model and reason -> passes that were none, besides those that came too early.
    not_replayed: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: "Stats") -> "Stats":
        return Stats(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(Stats)})

    def count_round(
        self, num_drafted: int, num_accepted: int, rejected: bool, num_tokens: int, depth: int | None = None
    ) -> None:
        """Add one round that drafted, kept and emitted so many tokens. `rejected`: a draft was tested and refused, in a tree all
        that stood for one place, which count as one. `depth`: drafts of a tree's longest path."""
        self.num_rounds += 1
        self.num_new_tokens += num_tokens
        self.num_draft_tokens += num_drafted
        self.num_accepted += num_accepted
        self.num_tested += num_accepted + rejected
        self.accepted[num_accepted] += 1
        self.drafted[num_drafted if depth is None else depth] += 1

    @property
    def alpha(self) -> float | None:
        """Accepted over tested: how probable it is that a draft token that is looked at is kept; in a tree, one of those for a place."""
        return ratio(self.num_accepted, self.num_tested)

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted over drafted. Lower than alpha, since drafts after a rejection are never looked at."""
        return ratio(self.num_accepted, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float | None:
        """New tokens per target pass, bonus included, the prompt's pass left out. Plain decoding has 1.0."""
        return ratio(self.num_new_tokens - self.num_prefill_tokens, self.num_rounds)

    @property
    def mean_gamma(self) -> float | None:
        """Drafts a round; of a tree, nodes."""
        return ratio(self.num_draft_tokens, self.num_rounds)

    @property
    def mean_depth(self) -> float | None:
        """Drafts one behind another in a round: the gamma of the theory, and of a chain that of `mean_gamma`."""
        return ratio(sum(depth * rounds for depth, rounds in self.drafted.items()), self.num_rounds)

    @property
    def acceptance_histogram(self) -> list[int]:
        """Entry k: rounds that kept exactly k drafts."""
        return [self.accepted[k] for k in range(max(self.accepted, default=-1) + 1)]

    @property
    def acceptance_by_position(self) -> list[float]:
        """Entry i: of the rounds that made more than i drafts, the share that kept at least i + 1."""
        rates = []
        for i in range(max(self.drafted, default=0)):
            made = sum(rounds for drafts, rounds in self.drafted.items() if drafts > i)
            kept = sum(rounds for drafts, rounds in self.accepted.items() if drafts > i)
            rates.append(kept / made)
        return rates

    @property
    def seconds_other(self) -> float:
        """Of the rounds, the time outside the two models' forward passes and their recording: our overhead."""
        return self.seconds_rounds - self.seconds_draft_forward - self.seconds_target - self.seconds_capture

    @property
    def replayed(self) -> float | None:
        """Share of the passes that were replays."""
        return ratio(self.num_replayed, self.num_passes)

    @property
    def overhead(self) -> float | None:
        return ratio(self.seconds_other, self.seconds_rounds)

    def speculative_decoding(self) -> dict[str, Any]:
        """The same under the names of vLLM's per-request statistics, over the rounds that drafted; a round is a step.

        `num_spec_tokens` is the number of drafts a step there, and the largest here.
        """
        undrafted = self.drafted[0]
        histogram = self.acceptance_histogram
        if histogram:
            histogram[0] -= undrafted
        steps = self.num_rounds - undrafted
        return {
            "mean_acceptance_length": ratio(self.num_accepted + steps, steps),
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": histogram if steps else [],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": max(self.drafted, default=0),
        }

    def to_dict(self) -> dict[str, Any]:
        """Counts and rates, ready for JSON."""
        counts = {each.name: getattr(self, each.name) for each in fields(Stats)}
        for name in ("accepted", "drafted"):
            counts[name] = {str(key): value for key, value in sorted(counts[name].items())}
        rates = ("alpha", "draft_acceptance_rate", "mean_acceptance_length", "overhead")
        lists = ("acceptance_histogram", "acceptance_by_position")
        return counts | {name: getattr(self, name) for name in (*rates, *lists)}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "Stats":
        """Those of an older run may lack what is counted since."""
        counts = {each.name: saved[each.name] for each in fields(Stats) if each.name in saved}
        for name in ("accepted", "drafted"):
            counts[name] = Counter({int(key): value for key, value in counts[name].items()})
        counts["not_replayed"] = Counter(saved.get("not_replayed", {}))
        return cls(**counts)


@dataclass
class Call(Stats):
    """The counts of one call, and how it was served."""

    engine: str = "refused"  # until decoding begins; then "rounds", "lookahead" or "plain"
    reason: str = ""  # why it was served so, or the error by which it was refused
