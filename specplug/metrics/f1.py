"""Token F1 of SQuAD (Rajpurkar et al. 2016, section 6.1): words in common, without case, punctuation and articles."""

import re
import string
from collections import Counter


def f1(answer: str, reference: str) -> float:
    given, expected = words(answer), words(reference)
    if not given or not expected:
        return float(given == expected)
    common = sum((Counter(given) & Counter(expected)).values())
    return 2 * common / (len(given) + len(expected))


def words(text: str) -> list[str]:
    plain = "".join(" " if mark in "-/" else "" if mark in string.punctuation else mark for mark in text.lower())
    return re.sub(r"\b(?:a|an|the)\b", " ", plain).split()
