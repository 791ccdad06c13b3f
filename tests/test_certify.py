"""recipe=certify: what it finds on the embedded pair, and that it finds rules and drafters that are broken."""

import itertools
import json

import pytest
import torch
from conftest import keep_everything, make_model, prompt

import specplug
from specplug.certificate import Law, compare_race, p_value
from specplug.cli import run_recipe

QUICK = ("recipe=certify", "recipe.limit=2", "recipe.seeds=2", "sampling.max_new_tokens=12", "recipe.draws=40")
HOT = ("sampling.temperature=2.5", "recipe.tokens=3", "recipe.gamma=2")


def certify(capsys, folder, *overrides):
    code = run_recipe(specplug.load(*QUICK, *overrides, "threads=1"), folder)
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_embedded_pair(tmp_path, capsys):
    """Fails by chance with probability 1e-6."""
    code, result = certify(capsys, tmp_path, *HOT)
    assert code == 0 and result["verdict"] == "no difference found"
    assert result["greedy"]["counts"]["identical"] == 2 and result["walk"]["counts"]["identical"] == 4
    law = result["law"]
    assert law["num_texts"] == 80 and law["degrees_of_freedom"] >= 1 and law["rule"] == "block"
    assert json.loads((tmp_path / "certificate.json").read_text()) == result
    page = (tmp_path / "certificate.md").read_text()
    for words in ("No difference found", "p = ", "below p = 1e-06", "fingerprint", "specplug", "torch 2", "| held |"):
        assert words in page
    assert len(page.splitlines()) < 40, "one page"


def test_a_greedy_rule_that_keeps_everything_is_found(tmp_path, capsys, monkeypatch):
    import specplug.round

    monkeypatch.setattr(specplug.round, "verify_walk", keep_everything)
    code, result = certify(
        capsys, tmp_path, "pair=lookup", "recipe.draws=1", "recipe.seeds=1", "sampling.max_new_tokens=40"
    )
    assert code == 1 and result["verdict"] == "not exact" and result["greedy"]["counts"]["mismatch"]
    assert "greedy, mismatch" in (tmp_path / "certificate.md").read_text()


@pytest.mark.parametrize("rule", ["block"])
def test_a_sampled_rule_that_keeps_everything_is_found(tmp_path, capsys, monkeypatch, rule):
    """Always."""
    import specplug.round

    def keep_everything(draft_tokens, draft_probs, target_probs, *args, **kwargs):
        kept = torch.full((1,), draft_tokens.shape[1])
        return specplug.verify.Verified(kept, torch.multinomial(target_probs[:, -1], 1)[:, 0])

    monkeypatch.setitem(specplug.round.RULES, rule, keep_everything)
    broken = [f"verify={rule}", "draft=early_exit", "draft.num_layers=1", "recipe.draws=50", "recipe.limit=1"]
    code, result = certify(capsys, tmp_path, *HOT, *broken)
    assert code == 1 and result["verdict"] == "not exact" and result["law"]["p_value"] < 1e-6


def test_a_walk_that_draws_from_elsewhere_is_found(tmp_path, capsys, monkeypatch):
    import specplug.round

    walk = specplug.round.verify_walk

    def late(*args, **kwargs):
        torch.rand(1)
        return walk(*args, **kwargs)

    monkeypatch.setattr(specplug.round, "verify_walk", late)
    code, result = certify(capsys, tmp_path, *HOT, "recipe.draws=1", "recipe.limit=1")
    assert code == 1 and result["walk"]["counts"]["mismatch"] and "walk, mismatch" in " ".join(result["differences"])


def test_without_drafts_nothing_is_certified(tmp_path, capsys):
    code, result = certify(capsys, tmp_path, "engine=plain", "recipe.draws=5", "recipe.limit=1", "recipe.seeds=1")
    assert code == 1 and result["verdict"] == "not fully tested"
    with pytest.raises(specplug.ConfigError, match="nothing to certify"):
        run_recipe(specplug.load("recipe=certify", "draft=none"), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["recipe.tokens=1"], "the first meets no draft"),
        (["recipe.false_alarm=0"], "must be a probability"),
        (["recipe.draws=0"], "must be 1 or more"),
        (["schedule=fixed", "recipe.gamma=3"], "take schedule.gamma"),
    ],
)
def test_values_that_cannot_be(overrides, match):
    with pytest.raises(specplug.ConfigError, match=match):
        specplug.load("recipe=certify", *overrides)


def after(text):
    """A law of four tokens that depends on the text before; token 3 ends it, and token 0 never follows itself."""
    weights = torch.tensor([0.0 if text[-1:] == (0,) else 3.0, 2.0 + len(text), 1.0, 0.5])
    return (weights / weights.sum()).log()


def test_the_classes_of_a_law_are_all_there_is():
    law = Law(after, {3}, 3, draws=400)
    assert sum(law.classes.values()) + law.rest == pytest.approx(1)
    texts = [text[: text.index(3) + 1] if 3 in text else text for text in itertools.product(range(4), repeat=3)]
    mass: dict = {}
    for text in set(texts):
        chance = 1.0
        for k, token in enumerate(text):
            chance *= float(after(text[:k])[token].exp())
        mass[law.class_of(text)] = mass.get(law.class_of(text), 0.0) + chance
    for name, chance in mass.items():
        assert chance == pytest.approx(law.rest if name is None else law.classes[name])
    assert all(chance * 400 >= 9.999 for chance in law.classes.values())


def drawn(generator, law=after):
    text = ()
    while len(text) < 3 and text[-1:] != (3,):
        text += (int(torch.multinomial(law(text).exp(), 1, generator=generator)),)
    return text


def test_the_p_value_is_uniform_where_the_law_holds_and_small_where_it_does_not():
    """The mean of 60 p-values is within five standard deviations: fails by chance with probability 6e-7."""
    law, generator = Law(after, {3}, 3, draws=200), torch.Generator().manual_seed(0)
    found = [p_value(*law.test([drawn(generator) for _ in range(200)])) for _ in range(60)]
    assert abs(sum(found) / 60 - 0.5) < 5 * (1 / 12 / 60) ** 0.5
    wrong = [drawn(generator, lambda text: after(text[:1])) for _ in range(200)]
    assert p_value(*law.test(wrong)) < 1e-6
    certain = Law(lambda text: torch.tensor([1.0, 0.0, 0.0, 0.0]).log(), set(), 2, draws=200)
    assert certain.test([(0, 0)] * 200) == (0, 0)
    assert p_value(*certain.test([(0, 0)] * 199 + [(0, 1)])) == 0, "what cannot be said was said"


def test_p_value_is_that_of_scipy():
    from scipy.stats import chi2

    for statistic, freedom in ((3.0, 2), (55.0, 9), (0.0, 4)):
        assert p_value(statistic, freedom) == pytest.approx(chi2.sf(statistic, freedom))
    assert p_value(0.0, 0) == 1 and p_value(float("inf"), 3) == 0


def test_a_race_that_nearly_ties_is_no_mismatch():
    """The head's row of another token is made so that it loses the race by less than rounding explains."""
    model, ids = make_model(seed=5), prompt()
    arguments = {"do_sample": True, "max_new_tokens": 1, "top_k": 0}
    torch.manual_seed(3)
    noise = torch.empty(1, 64).exponential_()[0].double().log()
    torch.manual_seed(3)
    won = int(model.generate(ids, **arguments)[0, -1])
    with torch.no_grad():
        logit = float(model(ids).logits[0, -1, won])
        factor = (logit - float(noise[won]) + float(noise[40]) - 1e-7) / logit
        model.lm_head.weight[40] = model.lm_head.weight[won] * factor
    found = compare_race(model, ids, arguments, 3, [won], [40])
    assert found.kind == "tie" and found.gap <= found.tolerance


def test_differences_in_sampled_answers_are_explained_by_their_race():
    model, ids = make_model(seed=5), prompt()
    arguments = {"do_sample": True, "max_new_tokens": 4, "top_k": 0}
    torch.manual_seed(3)
    plain = model.generate(ids, **arguments)[0, ids.shape[1] :].tolist()
    other = next(token for token in range(3, 64) if token not in plain)
    assert compare_race(model, ids, arguments, 3, plain, plain).kind == "identical"
    wrong = [*plain[:2], other]
    found = compare_race(model, ids, arguments, 3, plain, wrong)
    assert found.kind == "mismatch" and found.position == 2 and found.gap > found.tolerance
    assert compare_race(model, ids, arguments, 4, plain, wrong).kind == "not_compared", "no race of this seed says that"
    assert compare_race(model, ids, arguments, 3, plain, plain[:2]).kind == "mismatch"
