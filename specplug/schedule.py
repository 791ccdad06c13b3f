"""How many tokens to draft in the next round: the same number, as long as the draft is confident, or what pays.

A `Schedule` holds what is known across calls and may be shared by threads; `start` gives the `Plan` of one call. Knows
nothing about models: it sees counts and seconds.
"""

import json
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from specplug.choices import Criterion
from specplug.estimates import Acceptance, Costs, Yields
from specplug.sureness import Judge, Sureness
from specplug.tree import Dynamic, Shape, shape_of


class Round(NamedTuple):
    """What one sequence made of one round."""

    num_drafts: int
    num_accepted: int
    bucket: int  # of the proposal: for a lookup the length of its match, else 0


AS_PROPOSED = "as many as are proposed and pay"  # the reason before it is known what a lookup found


class Plan(Protocol):
    # A plan may also have a `reason` for the number, in a few words; a trace writes it down.

    def next_gamma(self) -> int:
        """Most draft tokens for the next round, 0 or more. The room left in the text is seen to elsewhere."""
        ...

    def trim(self, num_drafts: int, bucket: int) -> int:
        """How many of the drafts proposed are worth a wider pass of the target."""
        ...

    def observe(self, rounds: list[Round], num_tokens: float, seconds: float | None) -> None:
        """A round is over: what each sequence made of it, tokens a sequence, seconds since the last one was over; None where its passes
        took longer than they are going to take, so that nothing is to be learned of its price."""
        ...


class Schedule(Protocol):
    min_confidence: float  # a draft model stops before a token where it is less sure than this, see `criterion`
    criterion: str  # by what it is judged how sure the draft is, see CRITERIA
    tree: Shape | None  # how the drafts of a round hang together; None is one behind another

    def start(self, num_rows: int, costs_nothing: bool) -> Plan:
        """The plan of a call. `costs_nothing`: the drafter needs no forward pass, so it may propose more than is used."""
        ...


CRITERIA = tuple(each.value for each in Criterion)


class FixedSchedule:
    """The same gamma in every round; 0 is plain decoding. Its own plan, since nothing is remembered."""

    min_confidence, criterion = 0.0, "probability"
    tree: Shape | None = None
    reason = "the same in every round"

    def __init__(self, gamma: int) -> None:
        self.gamma = _whole("gamma", gamma)

    def start(self, num_rows: int, costs_nothing: bool) -> "FixedSchedule":
        return self

    def next_gamma(self) -> int:
        return self.gamma

    def trim(self, num_drafts: int, bucket: int) -> int:
        return num_drafts

    def observe(self, rounds: list[Round], num_tokens: float, seconds: float | None) -> None:
        pass


class ConfidenceSchedule(FixedSchedule):
    """Up to gamma tokens, fewer where the draft model is unsure what comes next.

    Decided before the token is drawn: to leave out a token because of what it turned out to be would change the law of
    what is kept. How sure it is: by `probability` its highest one; by `entropy` 1 - sqrt(H), H in nats, which is the form of
    SVIP's estimate of the acceptance rate (arXiv 2411.18462, section 3), 0 where H is 1 or more.
    """

    reason = "while the draft is sure"

    def __init__(self, gamma: int, threshold: float, criterion: str = "probability") -> None:
        super().__init__(gamma)
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold={threshold!r}: a number between 0 and 1, how sure the draft has to be")
        if criterion not in CRITERIA:
            raise ValueError(f"criterion={criterion!r}: allowed are {', '.join(CRITERIA)}")
        self.min_confidence, self.criterion = threshold, criterion


class TreeSchedule(FixedSchedule):
    """A tree in every round. `shape`: numbers of children by depth, as [4, 2, 1], or `Dynamic(budget, depth)`.

    `chains`: the schedule of calls that cannot have trees, a chain as long as the tree is deep.
    """

    reason = "a tree in every round"

    def __init__(self, shape: Any) -> None:
        checked = shape_of(shape)
        super().__init__(checked.size)
        self.tree: Shape | None = checked
        self.chains = FixedSchedule(checked.depth)


def without_tree(schedule: Schedule) -> Schedule:
    """The same for calls that cannot have trees."""
    chains: Schedule = schedule if schedule.tree is None else schedule.chains  # type: ignore[attr-defined]
    return chains


SECOND_TRIAL = 3


class AdaptiveSchedule:
    """The gamma with the most expected tokens per second, 0 included, from what was measured here and lately.

    The first rounds draft nothing and set the price of plain decoding. Then widths are tried, each at most about twice the
    widest known. While drafting does not pay it is tried again at growing distances. A running account of the seconds that
    drafted rounds took, against what plain decoding would have taken for the same tokens, bounds the loss: below the
    allowance nothing is drafted, whatever the estimates say. It is `ALLOWANCE` plain steps and `SHARE` of the time so far,
    and the round that passes it: 3 % of a run of 200 tokens.

    Args:
        max_gamma: most draft tokens a round.
        frozen: a file that `save` wrote: the estimates are taken from it and not changed any more, so that every run
            drafts the same numbers of tokens.
        tree_depth: draft dynamic trees no deeper than this; what is chosen is the number of nodes. None drafts chains.
    """

    min_confidence, criterion = 0.0, "probability"
    PLAIN_FIRST, ALLOWANCE, SHARE = 2, 2.5, 0.01
    FIRST_WAIT, LONGEST_WAIT, REFRESH = 16, 1024, 96

    def __init__(self, max_gamma: int = 16, frozen: str | Path | None = None, tree_depth: int | None = None) -> None:
        self.max_gamma = _whole("max_gamma", max_gamma)
        self.frozen = frozen is not None
        self.tree: Shape | None = None
        if tree_depth is not None:
            self.tree = shape_of(Dynamic(max(max_gamma, 1), tree_depth))
            self.chains = AdaptiveSchedule(max_gamma)  # for calls that cannot have trees
        self.lock = threading.Lock()
        self.states: dict[int, State] = defaultdict(lambda: State(self.tree))  # by sequences in the batch
        if frozen is not None:
            self.load(Path(frozen))

    def start(self, num_rows: int, costs_nothing: bool) -> "AdaptivePlan":
        return AdaptivePlan(self, num_rows, costs_nothing)

    def save(self, path: Path) -> None:
        """Write the estimates as JSON, to look at or to be frozen."""
        with self.lock:
            states = {str(rows): state.to_dict() for rows, state in self.states.items()}
        path.write_text(json.dumps(states, indent=2) + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            self.states.update({int(rows): State.from_dict(state, self.tree) for rows, state in saved.items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"frozen={path}: not a file that an adaptive schedule wrote ({error})") from error


class State:
    """What is known for batches of one size. `tree`: of the drafts, if they are trees."""

    def __init__(self, tree: Shape | None = None) -> None:
        self.tree = tree
        self.costs = Costs()
        self.acceptance: dict[int, Acceptance] = defaultdict(Acceptance if tree is None else Yields)  # by bucket
        self.sureness = Sureness()
        self.tokens = self.seconds = 0.0  # of the latest drafted rounds
        self.account = 0.0  # seconds saved by drafted rounds; losses are below 0
        self.seconds_plain = 0.0  # what plain decoding would have taken for everything so far
        self.since_draft = self.since_plain = 0
        self.wait = AdaptiveSchedule.FIRST_WAIT

    @property
    def in_debt(self) -> bool:
        allowed = AdaptiveSchedule.ALLOWANCE * self.costs.known[0] + AdaptiveSchedule.SHARE * self.seconds_plain
        return self.account < -allowed

    def best(self, max_gamma: int, bucket: int) -> int:
        """The gamma with the most tokens per second as far as is known; the smallest of equals."""
        expected = self.acceptance[bucket].expected_tokens(max_gamma)
        return max(range(len(expected)), key=lambda gamma: (expected[gamma] / self.costs.seconds(gamma), -gamma))

    def least(self, gamma: int) -> float:
        """How probable it has to be that one more draft is kept: its price in tokens. `gamma`: what gives most."""
        known = sorted(width for width in self.costs.known if width)
        low, high = (known[0], known[-1]) if len(known) > 1 else (0, known[-1])
        price = (self.costs.known[high] - self.costs.known[low]) / (high - low)
        expected = self.acceptance[0].expected_tokens(gamma)[gamma] / self.costs.seconds(gamma)
        return max(price, 0.0) * (self.tokens / self.seconds if self.seconds else expected)

    def reach(self, max_gamma: int) -> int:
        return min(max_gamma, 2 * max(self.costs.known) + 2)

    def most_hopeful(self, reach: int) -> tuple[int, bool]:
        """The gamma that gives most if every draft is kept, and whether that would beat plain decoding."""
        longest = reach if self.tree is None else self.tree.depth
        speed = {gamma: (min(gamma, longest) + 1) / self.costs.seconds(gamma) for gamma in range(1, reach + 1)}
        gamma = max(speed, key=lambda each: (speed[each], -each))
        return gamma, speed[gamma] > 1 / self.costs.known[0]

    def to_dict(self) -> dict[str, Any]:
        return {
            "trees": self.tree is not None,
            "sureness": self.sureness.to_dict(),
            "tokens_per_second": self.tokens / self.seconds if self.seconds else None,
            "seconds_by_gamma": {str(gamma): seconds for gamma, seconds in sorted(self.costs.known.items())},
            "acceptance": {
                str(bucket): {"kept": each.kept, "tested": each.tested} for bucket, each in self.acceptance.items()
            },
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any], tree: Shape | None) -> "State":
        if saved.get("trees", False) != (tree is not None):
            raise ValueError("it is about trees, and these are chains" if tree is None else "it is about chains")
        state = cls(tree)
        state.costs.known = {int(gamma): float(seconds) for gamma, seconds in saved["seconds_by_gamma"].items()}
        for bucket, counts in saved["acceptance"].items():
            state.acceptance[int(bucket)].kept = [float(each) for each in counts["kept"]]
            state.acceptance[int(bucket)].tested = [float(each) for each in counts["tested"]]
        if "sureness" in saved:
            state.sureness.load(saved["sureness"])
            if saved["tokens_per_second"] is not None:
                state.tokens, state.seconds = float(saved["tokens_per_second"]), 1.0
        return state


class AdaptivePlan:
    """One call under an adaptive schedule."""

    def __init__(self, schedule: AdaptiveSchedule, num_rows: int, costs_nothing: bool) -> None:
        self.schedule, self.state, self.costs_nothing = schedule, schedule.states[num_rows], costs_nothing
        self.reason = ""
        self.has_drafted = False  # the first proposal of a call also reads the prompt
        self.judge: Judge | None = None

    def use_judge(self) -> Judge | None:
        """To be asked while drafting, where that is cheap; None if it would not know what to say."""
        if not self.costs_nothing and self.state.tree is None:
            self.judge = Judge(self.state.sureness)
        return self.judge

    def next_gamma(self) -> int:
        with self.schedule.lock:
            state = self.state
            if self.judge is not None:
                self.judge.begin(0.0)
            if self.schedule.frozen:
                return self._frozen_gamma(0)
            if len(state.costs.samples[0]) < AdaptiveSchedule.PLAIN_FIRST:
                return self._because("to see what plain decoding costs", 0)
            if state.in_debt:
                return self._because("drafts have cost as much as they may", 0)
            if self.costs_nothing:
                self.reason = AS_PROPOSED
                return state.reach(self.schedule.max_gamma)
            return self._gamma(state.reach(self.schedule.max_gamma), 0)

    def trim(self, num_drafts: int, bucket: int) -> int:
        if not self.costs_nothing or num_drafts == 0:
            return num_drafts
        with self.schedule.lock:
            if self.schedule.frozen:
                return min(self._frozen_gamma(bucket), num_drafts)
            return self._gamma(min(num_drafts, self.state.reach(self.schedule.max_gamma)), bucket)

    def observe(self, rounds: list[Round], num_tokens: float, seconds: float | None) -> None:
        width = max((each.num_drafts for each in rounds), default=0)
        with self.schedule.lock:
            state = self.state
            if self.schedule.frozen:
                return
            for each in rounds:
                if each.num_drafts:
                    if self.judge is not None and len(self.judge.places) >= each.num_drafts:
                        state.sureness.observe(self.judge.places[: each.num_drafts], each.num_accepted)
                    state.acceptance[each.bucket].observe(each.num_drafts, each.num_accepted)
            if seconds is None:
                self.has_drafted = self.has_drafted or width > 0
                return
            if width == 0 or self.has_drafted or self.costs_nothing:
                state.costs.observe(width, seconds)
            if 0 not in state.costs.known:
                return
            plain = num_tokens * state.costs.known[0]
            state.seconds_plain += plain
            if width:
                if self.has_drafted:
                    state.tokens, state.seconds = 0.95 * state.tokens + num_tokens, 0.95 * state.seconds + seconds
                self.has_drafted = True
                # Old gains do not pay for new losses without end.
                state.account = min(state.account + plain - seconds, 30 * state.costs.known[0])
                state.since_draft, state.since_plain = 0, state.since_plain + 1
            else:
                state.since_draft, state.since_plain = state.since_draft + 1, 0

    def _because(self, reason: str, gamma: int) -> int:
        self.reason = reason
        return gamma

    def _gamma(self, reach: int, bucket: int) -> int:
        """What pays, or a trial of what may."""
        state = self.state
        if reach == 0:
            return 0
        if max(state.costs.known) == 0:
            return self._because("a trial", 1)  # nothing was drafted yet: the least that tells the price
        if state.tree is not None and max(state.costs.known) < reach:
            # A larger tree gains little by each node, so that a price guessed too high would hide that it pays.
            return self._because("a trial", reach)
        best = state.best(reach, bucket)
        if best > 0:
            state.wait = AdaptiveSchedule.FIRST_WAIT
            # Texts grow longer and machines busier: see from time to time what plain decoding costs now.
            if state.since_plain >= AdaptiveSchedule.REFRESH:
                return self._because("to see what plain decoding costs", 0)
            return self._paying(best, reach)
        # By what is known it does not pay. A second width is tried at once, since the first passes that are wider than
        # one position cost more than the next ones; later trials wait, longer each time.
        gamma, could_pay = state.most_hopeful(reach)
        if not could_pay:
            return self._because("does not pay", 0)
        if len(state.costs.known) < 3:
            return self._because("a trial", min(SECOND_TRIAL, reach))
        if state.since_draft >= state.wait:
            state.wait = min(2 * state.wait, AdaptiveSchedule.LONGEST_WAIT)
            return self._because("a trial", gamma)
        return self._because("does not pay", 0)

    def _paying(self, best: int, reach: int) -> int:
        """So many drafts pay in the mean; with a judge, as many as it finds worth their price this time."""
        if self.judge is None:
            return self._because("pays most", best)
        self.judge.begin(self.state.least(best))
        return self._because("for as long as it pays", reach)

    def _frozen_gamma(self, bucket: int) -> int:
        self.reason = "by frozen estimates"
        if len(self.state.costs.known) < 2:
            return 0
        best = self.state.best(self.schedule.max_gamma, bucket)
        if self.judge is None or best == 0:
            return best
        self.judge.begin(self.state.least(best))
        return self.schedule.max_gamma


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}={value!r}: the number of draft tokens a round is a whole number, 0 or more")
    return value
