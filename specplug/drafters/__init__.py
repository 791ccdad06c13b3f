"""Ways to draft, one file each, all through the small protocol in here.

A `Drafter` can be shared by threads and calls: it holds what does not change. Everything about one call lies in the
`Session` that `start` returns.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor
from transformers import LogitsProcessorList


class Proposal(NamedTuple):
    tokens: Tensor  # (1, G) token ids, G from 0 to the gamma asked for
    probs: Tensor | None  # (1, G, V) that each token was really drawn from; None for tokens that were not drawn


@dataclass(frozen=True)
class Request:
    """What a drafter may know of the call."""

    do_sample: bool
    processors: LogitsProcessorList  # those of the caller that may be used on drafts, see warp.for_draft
    vocab_size: int  # V of the target; proposals stay below it
    time_forward: bool = False  # wait for the device around forward passes, so that their seconds are right


class Session(Protocol):
    num_steps: int  # forward passes of the draft so far
    seconds_forward: float  # spent in them

    def propose(self, ids: Tensor, gamma: int) -> Proposal:
        """Draft at most `gamma` tokens after `ids`, (1, T): the prompt and everything committed so far."""
        ...

    def observe(self, num_accepted: int) -> None:
        """The target kept so many of the tokens last proposed."""
        ...


class Drafter(Protocol):
    name: str

    def start(self, request: Request) -> Session: ...
