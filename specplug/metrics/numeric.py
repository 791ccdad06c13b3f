"""Numeric answers: the number behind "####" as GSM8K writes it, the content of \\boxed{} as MATH does, or the last number.

Equal as fractions, or, where one is no number (an expression, a word), as text without white space and layout commands.
"""

import re
from fractions import Fraction

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?|[-+]?\.\d+")
BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
LAYOUT = re.compile(r"\\left|\\right|\\!|\\,|\\;|\\ |\\%|\\\$|[$%\s]|\^\{?\\circ\}?")
LONGEST_EXPRESSION = 60  # a longer reference is a solution, whose last number counts


def numeric(answer: str, reference: str) -> float:
    """1.0 or 0.0. Raises ValueError if the reference has nothing to compare with."""
    answer, reference = (text.replace("\u2212", "-") for text in (answer, reference))  # the minus of typeset texts
    expected, given = expected_answer(reference), given_answer(answer)
    if given is None:
        return 0.0
    a, b = value_of(given), value_of(expected)
    if a is None and b is not None and NUMBER.search(given):  # "x = 5", "5 coins"
        a = value_of(NUMBER.findall(given)[-1])
    return float(a == b if a is not None and b is not None else simplified(given) == simplified(expected))


def expected_answer(reference: str) -> str:
    """What the reference says: marked, or a short expression as it stands, or its last number."""
    said = marked(reference)
    if said is not None:
        return said
    short = reference.strip()
    words = re.findall(r"[A-Za-z]{2,}", short) if "\\" not in short else []
    numbers = NUMBER.findall(short)
    if short and len(short) <= LONGEST_EXPRESSION and "\n" not in short and not (words and numbers):
        if len(words) <= 2:
            return short
    elif numbers:
        return numbers[-1]
    raise ValueError("it holds neither a number nor a short expression")


def given_answer(answer: str) -> str | None:
    """What the answer says: marked, or its last number, or its last line."""
    said = marked(answer)
    if said is not None:
        return said
    numbers = NUMBER.findall(answer)
    lines = answer.strip().splitlines()
    return numbers[-1] if numbers else lines[-1] if lines else None


def marked(text: str) -> str | None:
    """The content of the last \\boxed{}, braces balanced, or what stands behind the last "####"."""
    for found in reversed(list(BOXED.finditer(text))):
        depth = 1
        for place in range(found.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[found.end() : place].strip()
    _, mark, behind = text.rpartition("####")
    return (behind.strip().splitlines() or [""])[0].strip() if mark else None


def value_of(text: str) -> Fraction | None:
    """The number that the whole text is; None if it is something else."""
    plain = simplified(text).rstrip(".")
    plain = re.sub(r"^([-+]?)\\frac\{?(\d+)\}?\{?(\d+)\}?$", r"\1\2/\3", plain)
    if not NUMBER.fullmatch(plain):
        return None
    above, _, below = plain.replace(",", "").partition("/")
    try:
        return Fraction(above) / Fraction(below or 1)
    except (ValueError, ZeroDivisionError):  # more digits than Python reads, as in an answer that repeats itself
        return None


def simplified(text: str) -> str:
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}", r"\1", text)
    return LAYOUT.sub("", text)
