"""Is a pair exact here? The three checks of recipe=certify, and the page that says how they came out.

Greedy: equal token ids, or a near tie. Walk: equal ids under equal seeds, or a race that nearly ties. Law: sampled texts
against the target's own probabilities, by chi-square. Knows nothing about files.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specplug.drafters.translate import common_prefix
from specplug.escape import code_block, in_markdown
from specplug.measure import TIE_ROUNDINGS, Verdict

SMALLEST = 10  # expected texts in a class of the chi-square
Text = tuple[int, ...]


def processed_logprobs(model: Any, ids: Tensor, arguments: dict[str, Any]) -> Tensor:
    """(V,) log-probabilities of the token after (1, T) ids, through all processors of the call, as plain `generate` has them."""
    call = {**arguments, "max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **call)
    return output.scores[0][0].double().log_softmax(-1)


class Law:
    """Probabilities of the first tokens after a prompt, in classes that are likely enough for a chi-square test.

    A class is a beginning that is expected `SMALLEST` times or more and goes no further, or all other ways to go on from one.
    What is rarer than that is one class together. Which classes there are depends on the law alone, not on what is drawn.
    """

    def __init__(self, after: Callable[[Text], Tensor], ends: set[int], length: int, draws: int) -> None:
        """`after`: (V,) log-probabilities behind a text of new tokens."""
        self.draws, self.nodes, self.classes = draws, set[Text](), dict[Text, float]()
        self.rest = 0.0
        frontier: list[tuple[Text, float]] = [((), 1.0)]
        while frontier:
            text, mass = frontier.pop()
            self.nodes.add(text)
            if len(text) == length or (text and text[-1] in ends):
                self.classes[text] = mass
                continue
            probs = after(text).exp()
            likely = (mass * probs * draws >= SMALLEST).nonzero().flatten().tolist()
            frontier += [((*text, token), mass * float(probs[token])) for token in likely]
            other = mass * float(1 - probs[likely].sum())
            if other * draws >= SMALLEST:
                self.classes[(*text, -1)] = other  # -1: any other token
            else:
                self.rest += max(other, 0.0)

    def class_of(self, text: Text) -> Text | None:
        """None for the rare ones together."""
        for length in range(len(text) + 1):
            if text[:length] in self.classes:
                return text[:length]
            if text[:length] not in self.nodes:
                other = (*text[: length - 1], -1)
                return other if other in self.classes else None
        return None

    def test(self, texts: list[Text]) -> tuple[float, int]:
        """Pearson's statistic and its degrees of freedom. Rare texts are put to the smallest class where they are too few."""
        seen = Counter(self.class_of(text) for text in texts)
        pairs = sorted((mass * self.draws, seen[name]) for name, mass in self.classes.items())
        rare, found = self.rest * self.draws, seen[None]
        if rare < 1e-9 * self.draws and found:
            return float("inf"), max(len(pairs) - 1, 1)  # what the target never says was said
        if rare >= SMALLEST or not pairs:
            pairs.append((rare, found))
        else:
            pairs[0] = (pairs[0][0] + rare, pairs[0][1] + found)
        return sum((count - expected) ** 2 / expected for expected, count in pairs), len(pairs) - 1


def p_value(statistic: float, freedom: int) -> float:
    """Chance of a chi-square of so many degrees of freedom to be as large."""
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def compare_race(
    model: Any, ids: Tensor, arguments: dict[str, Any], seed: int, plain: list[int], ours: list[int]
) -> Verdict:
    """Equal ids are identical. Else, at the first difference: did the two tokens nearly tie in the race that drew them?

    `torch.multinomial` is a race, argmax of p / e with exponential e (see noise.py). Where drawing the numbers again does not
    give the token of plain decoding, this device draws otherwise, and nothing is said: not_compared.
    """
    if plain == ours:
        return Verdict("identical")
    position = common_prefix(plain, ours)
    if position == min(len(plain), len(ours)):
        return Verdict("mismatch", position)
    logprobs = processed_logprobs(model, torch.cat([ids, ids.new_tensor([plain[:position]])], dim=1), arguments)
    torch.manual_seed(seed)
    for _ in range(position + 1):
        noise = torch.empty((1, len(logprobs)), device=ids.device).exponential_()
    race = logprobs - noise[0].double().log()
    dtype = model.dtype if model.dtype in TIE_ROUNDINGS else torch.float32
    tolerance = TIE_ROUNDINGS[dtype] * torch.finfo(dtype).eps * float(logprobs[logprobs.isfinite()].abs().max())
    gap = float(race[plain[position]] - race[ours[position]])
    if float(race.max() - race[plain[position]]) > tolerance:
        return Verdict("not_compared", position)
    return Verdict("tie" if abs(gap) <= tolerance else "mismatch", position, abs(gap), tolerance)


class Finding(NamedTuple):
    name: str
    held: bool | None  # None: nothing was tested
    told: str


def findings(result: dict[str, Any]) -> list[Finding]:
    """The three checks, in words."""
    found = []
    for name, what in (
        ("greedy", "prompts at temperature 0"),
        ("walk", "sampled answers under equal seeds, verify=walk"),
    ):
        counts = result[name]["counts"]
        total = sum(counts.values())
        said = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in counts.items() if count)
        tested = result[name]["num_tested"]
        found.append(
            Finding(
                f"{name}: {what}",
                False if counts["mismatch"] else True if tested and not counts["not_compared"] else None,
                f"{said} of {total}; {result[name]['num_tested']} drafts were tested",
            )
        )
    law = result["law"]
    told = (
        f"chi-square {law['statistic']:.1f} with {law['degrees_of_freedom']} degrees of freedom, p = {law['p_value']:.3g};"
        f" {law['num_texts']} texts of {law['tokens']} tokens at temperature {law['temperature']:g}, rule {law['rule']},"
        f" {law['num_tested']} drafts tested. It is called a difference below p = {law['false_alarm']:g}, which is how often"
        " this check fails where nothing is wrong"
    )
    tested = law["degrees_of_freedom"] and law["num_tested"]
    found.append(Finding("law: sampled texts", law["p_value"] >= law["false_alarm"] if tested else None, told))
    return found


def verdict(result: dict[str, Any]) -> str:
    held = [each.held for each in findings(result)]
    return "not exact" if False in held else "no difference found" if all(held) else "not fully tested"


def markdown(result: dict[str, Any]) -> str:
    """One page, to be put into a model card."""
    environment = result["environment"]
    versions = ", ".join(f"{name} {value}" for name, value in environment["versions"].items() if value is not None)
    rows = [
        f"| {in_markdown(each.name)} | {'not tested' if each.held is None else 'held' if each.held else '**failed**'} |"
        f" {in_markdown(each.told)} |"
        for each in findings(result)
    ]
    lines = [
        "# Exactness of speculative decoding",
        "",
        f"**{result['verdict'][0].upper() + result['verdict'][1:]}**: {in_markdown(result['title'])}",
        "",
        "| check | outcome | what was seen |",
        "| --- | --- | --- |",
        *rows,
        "",
        *(f"- {in_markdown(line)}" for line in result["differences"]),
        *([""] if result["differences"] else []),
        f"- target: {in_markdown(result['target'])}, fingerprint {result['fingerprint']}",
        f"- draft: {in_markdown(result['draft'])}; schedule {result['schedule']}, engine {result['engine']}",
        f"- prompts: {result['num_prompts']} of {in_markdown(result['dataset'])}; seed {result['seed']}",
        f"- made on: {in_markdown(environment['device'])}, {environment['dtype']}, {environment['threads']} torch threads",
        f"- versions: {versions}; Python {environment['python']}; commit {environment['commit']}",
        "",
        "A tie is a place where rounding decides between two tokens: their logits (when sampling, their logits less the logarithms of"
        " the random numbers) differ by less than the rounding of this dtype. What holds on one device, dtype and version need not"
        " hold on another, so the checks belong to those named above. Made by:",
        "",
        "",
    ]
    return "\n".join(lines) + code_block(result["command"]) + "\n"
