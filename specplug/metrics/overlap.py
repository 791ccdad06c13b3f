"""BLEU and chrF by sacrebleu, ROUGE by rouge-score, on a scale of 0 to 1.

Per sample the sentence-level scores, which can be averaged and paired; BLEU and chrF are defined on a corpus, so that one is
given too. Both libraries are optional: pip install "specplug[metrics]".
"""

from typing import Any

from specplug.config import Metric

ROUGE = ("rouge1", "rouge2", "rougeL")


def sacrebleu_metric(metric: Metric, sentence: bool) -> Any:
    from sacrebleu.metrics import BLEU, CHRF

    return CHRF() if metric is Metric.chrf else BLEU(effective_order=sentence)


def sentence_score(metric: Any, answer: str, references: list[str]) -> float:
    return metric.sentence_score(answer, references).score / 100


def corpus_score(metric: Metric, answers: list[str], references: list[list[str]]) -> float:
    """`references`: of each answer, one or more."""
    most = max(map(len, references))
    streams = [[each[k] if k < len(each) else None for each in references] for k in range(most)]
    return sacrebleu_metric(metric, sentence=False).corpus_score(answers, streams).score / 100


def rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGE), use_stemmer=True)


def rouge(scorer: Any, answer: str, reference: str) -> dict[str, float]:
    """F-measures of Lin (2004): words, pairs of words, longest common subsequence."""
    return {name: each.fmeasure for name, each in scorer.score(reference, answer).items()}
