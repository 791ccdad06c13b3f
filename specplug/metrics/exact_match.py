"""Exact match: the answer is the reference, but for white space."""

from specplug.config import Answer


def exact_match(answer: str, reference: str, part: Answer = Answer.full) -> float:
    """1.0 or 0.0. With `part` last_line only the last line of both that is not empty is compared."""
    return float(_compared(answer, part) == _compared(reference, part))


def _compared(text: str, part: Answer) -> str:
    lines = [" ".join(line.split()) for line in text.splitlines()]
    lines = [line for line in lines if line]
    return "\n".join(lines[-1:] if part is Answer.last_line else lines)
