"""Exactness alone: many prompts and seeds, a verdict, and one page to be put into a model card.

specplug recipe=certify
specplug recipe=certify pair=smollm2 dataset=spec_bench dataset.path=question.jsonl recipe.limit=20 recipe.seeds=16

Greedy answers to every prompt with and without the plugin; sampled ones under `recipe.seeds` seeds with verify=walk, whose ids
have to be those of plain decoding; and `recipe.draws` short sampled texts for each prompt with the accept rule that is configured,
compared with the target's own probabilities. Writes certificate.json and certificate.md into the run folder; the last line
of stdout is JSON. Under schedule=adaptive, which may stop drafting, there are `recipe.gamma` drafts a round. Exit code 1 on a difference that rounding does not explain, or if there was nothing to test.
"""

import copy
import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from specplug import certificate, report, tracker
from specplug.attaching import attached
from specplug.certificate import Law, compare_race, p_value, processed_logprobs
from specplug.config import Adaptive, Certify, Config, ConfigError, Drafter, choice, to_dict
from specplug.console import Bar, console
from specplug.data import load_rows
from specplug.fingerprint import fingerprint
from specplug.measure import Verdict, compare, processors_of
from specplug.pipelines import generate_arguments, length_filter, pipeline_from
from specplug.recipes.evaluate import encode
from specplug.runs import begin, environment_of, write_json
from specplug.schedule import FixedSchedule


def run(config: Config, folder: Path) -> int:
    recipe = config.recipe
    assert isinstance(recipe, Certify)
    if config.draft.drafter is Drafter.none:
        raise ConfigError("draft=none: without drafts there is nothing to certify; name a draft, or draft=lookup")
    tracker.check_installed(config)
    rows = load_rows(config.dataset, recipe.limit, tokenizer=length_filter(config))
    pipe, plugin = pipeline_from(config)
    prompts = {row.id: encode(pipe.tokenizer, row, config, pipe.model) for row in rows}
    environment = environment_of(pipe.model)
    begin(folder, config, environment)
    adaptive = isinstance(config.schedule, Adaptive)
    if adaptive:  # which may stop drafting, where the clock says that it does not pay
        plugin.schedule = FixedSchedule(recipe.gamma)
    checks = Checks(config, pipe.model, plugin)
    bar = Bar("certify").start(len(prompts))
    try:
        for number, (identifier, ids) in enumerate(prompts.items()):
            checks.prompt(identifier, ids, number)
            bar.advance(number + 1)
    except KeyboardInterrupt:
        console.print("interrupted: nothing is certified")
        return 130
    finally:
        bar.stop()
    result = checks.result() | {
        "title": report.title(to_dict(config)),
        "target": config.target.name_or_path + (f" at {config.target.revision}" if config.target.revision else ""),
        "fingerprint": fingerprint(pipe.model),
        "draft": config.draft.name_or_path or config.draft.drafter.value,
        "schedule": f"fixed, gamma {recipe.gamma}" if adaptive else choice(config.schedule),
        "engine": choice(config.engine),
        "dataset": config.dataset.name,
        "num_prompts": len(prompts),
        "seed": config.seed,
        "environment": environment,
        "command": shlex.join(environment["command"]),
    }
    result["verdict"] = certificate.verdict(result)
    write_json(folder / "certificate.json", result)
    (folder / "certificate.md").write_text(certificate.markdown(result), encoding="utf-8")
    tracking = tracker.start(config, folder)
    tracking.log(len(prompts), {"certificate": {name: result[name] for name in ("greedy", "walk", "law")}})
    tracking.finish()
    for found in certificate.findings(result):
        outcome = {True: "held", False: "failed", None: "not tested"}[found.held]
        console.print(Text(f"{found.name}: {outcome}. {found.told}"))
    console.print(Text(f"{result['verdict']}; certificate: {folder}/certificate.md"))
    print(json.dumps(result, ensure_ascii=False))
    return 0 if result["verdict"] == "no difference found" else 1


class Checks:
    """Counts over prompts. The plugin comes attached and is attached again at the end."""

    def __init__(self, config: Config, model: Any, plugin: Any) -> None:
        assert isinstance(config.recipe, Certify)
        self.recipe, self.model, self.plugin, self.seed = config.recipe, model, plugin, config.seed
        greedy, sampled = copy.copy(config), copy.copy(config)
        greedy.sampling, sampled.sampling = copy.copy(config.sampling), copy.copy(config.sampling)
        greedy.sampling.temperature = 0.0
        sampled.sampling.temperature = config.sampling.temperature or 1.0
        self.greedy, self.sampled = generate_arguments(greedy), generate_arguments(sampled)
        self.rule = plugin.verify
        self.verdicts: dict[str, Counter[str]] = {name: Counter() for name in ("greedy", "walk")}
        self.tested: Counter[str] = Counter()
        self.differences: list[str] = []
        self.statistic, self.freedom, self.num_texts = 0.0, 0, 0

    def prompt(self, identifier: str, ids: torch.Tensor, number: int) -> None:
        plain = self.plain(ids, self.seed, self.greedy)
        ours = self.ours("greedy", ids, self.seed, self.greedy)
        self.note("greedy", identifier, compare(self.model, ids, plain, ours, processors_of(self.model, self.greedy)))
        for k in range(self.recipe.seeds):
            seed = self.seed + number * self.recipe.seeds + k
            plain = self.plain(ids, seed, self.sampled)
            ours = self.ours("walk", ids, seed, self.sampled)
            self.plugin.detach(release=False)
            self.note(
                "walk", f"{identifier}, seed {seed}", compare_race(self.model, ids, self.sampled, seed, plain, ours)
            )
        self.law(ids, number)

    def law(self, ids: torch.Tensor, number: int) -> None:
        """The first tokens, of which the very first comes from the prompt's pass and meets no draft."""
        self.plugin.detach(release=False)
        short = self.sampled | {"max_new_tokens": self.recipe.tokens}
        ends = self.model.generation_config.eos_token_id
        law = Law(
            lambda text: processed_logprobs(self.model, torch.cat([ids, ids.new_tensor([text]).long()], dim=1), short),
            set(ends if isinstance(ends, list) else [ends]),
            self.recipe.tokens,
            self.recipe.draws,
        )
        first = self.seed + number * self.recipe.draws
        texts = [tuple(self.ours("law", ids, first + k, short)) for k in range(self.recipe.draws)]
        statistic, freedom = law.test(texts)
        self.statistic += statistic
        self.freedom += freedom
        self.num_texts += len(texts)

    def plain(self, ids: torch.Tensor, seed: int, arguments: dict[str, Any]) -> list[int]:
        self.plugin.detach(release=False)
        return self.answer(ids, seed, arguments)

    def ours(self, check: str, ids: torch.Tensor, seed: int, arguments: dict[str, Any]) -> list[int]:
        if attached(self.model) is None:
            self.plugin.attach(self.model)
        self.plugin.verify = "walk" if check == "walk" else self.rule
        made = self.answer(ids, seed, arguments)
        self.tested[check] += self.plugin.last.num_tested
        return made

    def answer(self, ids: torch.Tensor, seed: int, arguments: dict[str, Any]) -> list[int]:
        torch.manual_seed(seed)
        output = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **arguments)
        return output[0, ids.shape[1] :].tolist()

    def note(self, check: str, what: str, verdict: Verdict) -> None:
        self.verdicts[check][verdict.kind] += 1
        if verdict.kind != "identical":
            gap = ""
            if verdict.gap is not None:
                gap = f", the two tokens {verdict.gap:.3g} apart, rounding {verdict.tolerance:.3g}"
            self.differences.append(
                f"{check}, {verdict.kind.replace('_', ' ')}: {what}, new token {(verdict.position or 0) + 1}{gap}"
            )

    def result(self) -> dict[str, Any]:
        kinds = ("identical", "tie", "mismatch", "not_compared")
        found: dict[str, Any] = {
            name: {"counts": {kind: counts[kind] for kind in kinds}, "num_tested": self.tested[name]}
            for name, counts in self.verdicts.items()
        }
        found["law"] = {
            "rule": self.rule,
            "temperature": self.sampled["temperature"],
            "tokens": self.recipe.tokens,
            "num_texts": self.num_texts,
            "statistic": self.statistic,
            "degrees_of_freedom": self.freedom,
            "p_value": p_value(self.statistic, self.freedom),
            "false_alarm": self.recipe.false_alarm,
            "num_tested": self.tested["law"],
        }
        return found | {"differences": self.differences}
