"""One recording of a model's pass: made by torch's tracer, compared with the pass itself, and run in its place.

Which passes are recorded, and of which models, is said in capture.py and ragged_pass.py.
"""

import builtins
import contextlib
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import TracerWarning
from torch.nn.utils.stateless import _reparametrize_module
from transformers import PreTrainedModel, masking_utils

from specplug.config import first_line
from specplug.folding import folded

log = logging.getLogger(__name__)

# What is decided there depends on whether there is one position or several, and a mask, which is the same in every replay.
# Processors compare what they were given with the size of the vocabulary.
DECIDED_BEFORE = ("sdpa_attention.py", "masking_utils.py", "specplug/packed.py", "generation/logits_process.py")

RECORDING = threading.Lock()


class Recording:
    """The pass of one position, or of several: first counted, then recorded, then compared, then used; or refused for good."""

    def __init__(self) -> None:
        self.uses = 0
        self.recorded_at = 0  # positions before it
        self.replay: Any = None
        self.ready: set[Any] = set()  # widths, and numbers of rows, at which it was right
        self.refused: str | None = None  # the reason

    def prepare(self, make: Callable[[], Any], length: int, inputs: list[Tensor], weights: list[nn.Parameter]) -> Any:
        """Record, or return a replay that is to be compared. `length`: positions before those of the pass."""
        with RECORDING:
            try:
                if self.refused:  # by another thread
                    return None
                if self.replay is None:
                    self.replay, self.recorded_at = make(), length
                elif length != self.recorded_at:  # recorded at one length, it has to be right at another
                    return self.run(inputs, weights)
            except Exception as error:  # whatever a model does that cannot be recorded
                self._refuse(first_line(error))
            return None

    def run(self, inputs: list[Tensor], weights: list[nn.Parameter]) -> Any:
        """Logits, or whatever was recorded; keys and values of each layer are in the inputs then."""
        # Without torch's rewriting of recordings: it takes time again and again, and what it fuses rounds otherwise. This is
        # `torch.jit.optimized_execution(False)`, which as a context manager costs more than an operation of a small draft.
        before = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)
        try:
            return self.replay(*inputs, *weights)
        except RuntimeError as error:
            raised = as_raised(error)
            if raised is error:
                raise
            raise raised from error
        finally:
            torch._C._set_graph_executor_optimize(before)

    def check(self, width: Any, replayed: list[Tensor], expected: list[Tensor]) -> None:
        if not self.refused and len(replayed) == len(expected) and all(map(torch.equal, replayed, expected)):
            self.ready.add(width)
        else:
            self._refuse("a replay differs from the pass")

    def _refuse(self, reason: str) -> None:
        self.refused, self.ready = reason, set()
        log.debug("specplug: passes are not captured: %s", reason)


def as_raised(error: RuntimeError) -> BaseException:
    """What Python raised where a replay comes to an operation of ours: Ctrl-C, or what a handler of signals raises.

    torch makes of it a RuntimeError that has its name and its text.
    """
    found = re.search(r"^RuntimeError: (\w+): (.*?)\n\nAt:\n", str(error), re.MULTILINE | re.DOTALL)
    kind = getattr(builtins, found[1], None) if found else None
    if found is None or not isinstance(kind, type) or not issubclass(kind, BaseException):
        return error
    text = "" if found[2] == "<EMPTY MESSAGE>" else found[2]
    if kind is SystemExit and text.lstrip("-").isdigit():
        return SystemExit(int(text))
    try:
        raised: BaseException = kind(text) if text else kind()
    except TypeError:  # made of more than a text
        return error
    return raised


def trace_with_weights(
    model: PreTrainedModel, forward: Callable[..., Any], inputs: list[Tensor], others: list[Tensor]
) -> Any:
    """`trace` of a `forward` that runs the model, as a function of `inputs` and of the model's weights, in the order of
    `named_parameters`: so a recording stays right where they are replaced by others."""
    names, weights = zip(*model.named_parameters(), strict=True)

    def with_weights(*given: Tensor) -> Any:
        num = len(given) - len(names)
        with _reparametrize_module(model, dict(zip(names, given[num:], strict=True)), tie_weights=True):
            return forward(*given[:num])

    return trace(with_weights, [*inputs, *weights], [*others, *weights])


def trace(forward: Callable[..., Any], inputs: list[Tensor], others: list[Tensor]) -> Any:
    """A function of the same inputs that does what `forward` does with these, written down by torch's tracer.

    `others`: the same with other sizes wherever sizes may be others. Raises ValueError if `forward` decides anything by what it sees.
    """
    with warnings.catch_warnings(record=True) as caught, _masks_as_untraced():
        warnings.simplefilter("always")
        # `torch.jit.trace` is these two lines, but that it keeps what it made, megabytes a recording, until the process ends.
        graph, _ = torch._C._create_graph_by_tracing(forward, tuple(inputs), lambda _: "", True, False, None, [])
        recording = torch._C._create_function_from_graph("forward", folded(graph, inputs, others))
    for each in caught:
        if issubclass(each.category, TracerWarning) and not _is_decided_before(each):
            raise ValueError(f"{each.filename}, line {each.lineno}: {first_line(each.message)}")  # type: ignore[arg-type]
    return recording


def _is_decided_before(warning: warnings.WarningMessage) -> bool:
    if warning.filename.endswith(DECIDED_BEFORE):
        return True
    # Where a model has a token for padding, its embedding looks whether the vocabulary has it.
    embedding = nn.functional.embedding.__code__
    lines = [line for *_, line in embedding.co_lines() if line is not None]
    return warning.filename == embedding.co_filename and min(lines) <= warning.lineno <= max(lines)


@contextlib.contextmanager
def _masks_as_untraced() -> Iterator[None]:
    """Older transformers, 5.17 among them, makes masks wherever anything is traced, where one position needs none."""
    is_tracing = masking_utils.is_tracing
    masking_utils.is_tracing = lambda *_: False
    try:
        yield
    finally:
        masking_utils.is_tracing = is_tracing
