"""pass@k of Chen et al. (2021): does a program that the model wrote pass its tests?"""

import re
from math import comb

from specplug.metrics.guard import Outcome, run_program

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
# Where the completion of a function body ends: before the next thing at the left margin.
NEXT = re.compile(r"\n(?=(?:class|def|if|print|import|from|assert)\b|[#@`])")


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The unbiased estimate (equation 1): the chance that one of k, drawn from n samples of which c are right, is right.

    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= num_samples and 0 <= num_correct <= num_samples):
        raise ValueError(f"k={k} of {num_samples} samples, {num_correct} correct: must be 1 <= k <= n and 0 <= c <= n")
    return 1 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def program(answer: str, head: str, tests: str) -> str:
    """What is run: the head that was to be completed, the answer's code, the tests.

    Code is the fenced block, or the last of several that defines something; else all of it up to the next thing at the left
    margin. An answer that writes the whole function anew defines it again behind the head, which is what then counts.
    """
    blocks = FENCED.findall(answer)
    defining = [block for block in blocks if "def " in block] or blocks
    code = defining[-1] if blocks else NEXT.split(answer, maxsplit=1)[0] if head and answer[:1] in " \t\n" else answer
    return f"{head}{code}\n\n{tests}\n" if code[:1] in " \t" else f"{head}\n{code}\n\n{tests}\n"


def passes(answer: str, head: str, tests: str) -> Outcome:
    return run_program(program(answer, head, tests))
