"""Exact match: the answer is the reference, but for white space."""


def exact_match(answer: str, reference: str) -> float:
    """1.0 or 0.0."""
    return float(_compared(answer) == _compared(reference))


def last_line(text: str) -> str:
    """The last line that is not empty."""
    return _compared(text).rpartition("\n")[2]


def _compared(text: str) -> str:
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return "\n".join(line for line in lines if line)
