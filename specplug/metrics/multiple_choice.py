"""Multiple choice: the letter that the answer settles on."""

import re

LETTERS = "ABCDEFGHIJ"
# In this order: what an answer says most plainly counts. "A" and "I" are words too, so bare ones come last.
PATTERNS = (
    r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-J])\b",
    r"(?i:answer|choice|option)\W{0,3}(?:\s*(?i:is)\b)?\W{0,5}([A-J])\b",
    r"\(([A-J])\)",
    r"^\W{0,3}([A-J])(?:[.:)\]]|\s*$)",
    r"\b([A-J])\b(?!')",
)


def multiple_choice(answer: str, reference: str) -> float:
    """1.0 or 0.0. Raises ValueError if the reference is no letter from A to J and no number counted from 0."""
    return float(chosen(answer) == expected_letter(reference))


def expected_letter(reference: str) -> str:
    text = reference.strip()
    if text.isdigit() and int(text) < len(LETTERS):
        return LETTERS[int(text)]
    found = re.match(r"\(?([A-Ja-j])(?:[\s.:)]|$)", text)
    if found is None:
        raise ValueError("it begins with no letter from A to J")
    return found[1].upper()


def chosen(answer: str) -> str | None:
    """The last letter by the first pattern that finds one."""
    for pattern in PATTERNS:
        found = re.findall(pattern, answer, re.MULTILINE)
        if found:
            return found[-1]
    return answer.strip().upper() if answer.strip().upper() in LETTERS and answer.strip() else None
