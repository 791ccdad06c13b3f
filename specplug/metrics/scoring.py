"""The score of an answer by `dataset.metric`, with what it needs looked at before anything runs."""

from collections.abc import Callable
from typing import Any

from specplug.config import Answer, ConfigError, Dataset, Metric
from specplug.data import Row
from specplug.metrics import overlap
from specplug.metrics.exact_match import exact_match, last_line
from specplug.metrics.f1 import f1
from specplug.metrics.multiple_choice import expected_letter, multiple_choice
from specplug.metrics.numeric import expected_answer, numeric

Score = dict[str, Any]  # "score", and what else there is to say

SIMPLE: dict[Metric, Callable[[str, str], float]] = {
    Metric.exact_match: exact_match,
    Metric.numeric: numeric,
    Metric.multiple_choice: multiple_choice,
    Metric.f1: f1,
}
EXPECTED: dict[Metric, Callable[[str], str]] = {
    Metric.numeric: expected_answer,
    Metric.multiple_choice: expected_letter,
}


class Scorer:
    """Scores answers of one data set. Raises ConfigError if the metric's library is not installed."""

    def __init__(self, config: Dataset) -> None:
        self.config, self.metric = config, config.metric
        self.library: Any = None
        if self.metric in (Metric.bleu, Metric.chrf):
            self.library = self.load("sacrebleu", lambda: overlap.sacrebleu_metric(self.metric, sentence=True))
        elif self.metric is Metric.rouge:
            self.library = self.load("rouge-score", overlap.rouge_scorer)
        elif self.metric is Metric.pass_at_1:
            try:
                import resource  # noqa: F401
            except ImportError:
                raise ConfigError(
                    "dataset.metric=pass_at_1: needs a POSIX system, whose limits hold the programs; take"
                    " dataset.metric=none"
                ) from None

    def load(self, package: str, load: Callable[[], Any]) -> Any:
        try:
            return load()
        except ImportError:
            raise ConfigError(
                f"dataset.metric={self.metric.name}: needs the package {package}; pip install 'specplug[metrics]', or take"
                " dataset.metric=none"
            ) from None

    def scores(self, row: Row) -> bool:
        """Can an answer to this row be scored? Raises ConfigError if its reference is not what the metric compares with."""
        if self.metric is Metric.none:
            return False
        if self.metric is Metric.pass_at_1:
            return row.tests is not None
        for reference in references(row):
            try:
                EXPECTED.get(self.metric, str)(self.part(reference))
            except ValueError as error:
                raise ConfigError(
                    f"dataset.metric={self.metric.name}: the reference of row {row.id}, {reference[:40]!r}, does not fit:"
                    f" {error}; take another metric, or dataset.reference_column"
                ) from None
        return row.reference is not None

    def __call__(self, answer: str, row: Row) -> Score:
        """Of several references the best counts."""
        if self.metric is Metric.pass_at_1:
            from specplug.metrics.pass_at_k import pass_at_k, passes

            assert row.tests is not None
            outcome = passes(answer, row.head, row.tests)
            return {"score": pass_at_k(1, int(outcome.passed), 1), "reason": outcome.reason}
        answer, expected = self.part(answer), [self.part(each) for each in references(row)]
        if self.metric is Metric.rouge:
            best = max(
                (overlap.rouge(self.library, answer, each) for each in expected), key=lambda each: each["rougeL"]
            )
            return {"score": best["rougeL"], **best}
        if self.library is not None:
            return {"score": overlap.sentence_score(self.library, answer, expected)}
        return {"score": max(SIMPLE[self.metric](answer, each) for each in expected)}

    def part(self, text: str) -> str:
        return last_line(text) if self.config.answer is Answer.last_line else text


def references(row: Row) -> list[str]:
    return [] if row.reference is None else [row.reference, *row.others]
