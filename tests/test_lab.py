"""docs/lab.html in a real headless Chromium: what it shows against specplug's own rules and formulas, and how it is used.

Statistical checks: a share or a rate is allowed 5 standard errors. That is a false alarm of 6e-7 a number, below 1e-5 a
page with its dozen numbers; the seeds are fixed, so a test that passes once passes always.
"""

import itertools
import math
import random
from pathlib import Path

import pytest
import torch
from conftest import CONTRAST, show
from test_verify_block import mean_accepted

from specplug import theory, verify

PAGE = Path(__file__).parent.parent / "docs" / "lab.html"
START = {"p": [0.5, 0.25, 0.15, 0.1], "q": [0.3, 0.4, 0.2, 0.1], "gamma": 4}
SETTINGS = {
    "start": START,
    "two words": {"p": [1 / 3, 2 / 3, 0, 0], "q": [2 / 3, 1 / 3, 0, 0], "gamma": 2},
    "two of four above q": {"p": [0.4, 0.3, 0.25, 0.05], "q": [0.5, 0.2, 0.05, 0.25], "gamma": 4},
    "q is 0 where p is not": {"p": [0.4, 0.3, 0.2, 0.1], "q": [0.0, 0.5, 0.5, 0.0], "gamma": 3},
    "p is 0 where q is not": {"p": [0.0, 0.6, 0.4, 0.0], "q": [0.25, 0.25, 0.25, 0.25], "gamma": 3},
    "nothing in common": {"p": [0.5, 0.5, 0, 0], "q": [0, 0, 0.5, 0.5], "gamma": 2},
    "equal": {"p": [0.4, 0.3, 0.2, 0.1], "q": [0.4, 0.3, 0.2, 0.1], "gamma": 4},
    "one draft": {"p": [0.7, 0.1, 0.1, 0.1], "q": [0.1, 0.2, 0.3, 0.4], "gamma": 1},
}
RULES = ("token", "block")


@pytest.fixture
def page(browser):
    """The page as it opens, on a desktop. No test may leave an error in the browser's console."""
    show(browser, width=1000)
    browser.get(PAGE.as_uri())
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def enter(page, **fields) -> None:
    """Type into the fields: p and q as lists, the others by name."""
    values = {f"{row}{x}": value for row in ("p", "q") for x, value in enumerate(fields.pop(row, []))} | fields
    page.execute_script(
        """for (const [id, value] of Object.entries(arguments[0])) {
             const field = document.getElementById(id);
             field.value = value;
             field.dispatchEvent(new Event("input", { bubbles: true }));
           }""",
        {name: str(value) for name, value in values.items()},
    )


def text(page, name: str) -> str:
    return page.execute_script("return document.getElementById(arguments[0]).textContent", name)


def click(page, name: str) -> None:
    page.execute_script("document.getElementById(arguments[0]).click()", name)


def wait_for(page, done) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(page, 60, poll_frequency=0.05).until(lambda _: done())


def run(page) -> None:
    click(page, "run")
    wait_for(page, lambda: text(page, "run-status").startswith("Done: 100,000 rounds"))


def number(shown: str) -> float:
    return float(shown.replace("−", "-"))  # noqa: RUF001


def measured(shown: str) -> tuple[float, float]:
    """A value and its standard error from "0.4988 ± 0.0017", where ± is 1.96 standard errors."""
    value, interval = shown.replace("\xa0", " ").split(" ± ")
    return number(value), number(interval) / 1.96


def shares(page) -> dict[str, list[float]]:
    """The displayed shares of the four words by rule."""
    table = page.execute_script(
        "return [...document.querySelectorAll('#shares tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    return {rule: [measured(row[3 + k])[0] for row in table] for k, rule in enumerate(RULES)}


def rates(page) -> list[dict[str, tuple[float, float, float]]]:
    """Per displayed rate and rule: measured value, its standard error, expected value."""
    table = page.execute_script(
        """return [...document.querySelectorAll('#rates tbody tr')].map((r) => [...r.cells].slice(1).map((c) =>
             ['.measured', '.expected'].map((s) => c.querySelector(s)?.textContent)))"""
    )
    shown = [{rule: cell for rule, cell in zip(RULES, row, strict=True) if cell[0]} for row in table]
    return [{rule: (*measured(cell[0]), number(cell[1])) for rule, cell in row.items()} for row in shown]


def tokens_of_the_run(page) -> dict[str, int]:
    return page.execute_script(
        "return { token: lab.sum(state.counts.token.words), block: lab.sum(state.counts.block.words) }"
    )


def distance(share: list[float], probs: list[float], tokens: int) -> float:
    """The largest distance from `probs` in standard errors; half a last digit of what is shown is no distance."""
    worst = 0.0
    for seen, wanted in zip(share, probs, strict=True):
        error = math.sqrt(wanted * (1 - wanted) / tokens)
        away = max(0.0, abs(seen - wanted) - 5e-5)
        worst = max(worst, away / error if error else math.inf if away else 0.0)
    return worst


@pytest.mark.parametrize("name", SETTINGS)
def test_words_come_out_in_the_proportions_of_the_target(page, name):
    settings = SETTINGS[name]
    enter(page, **settings, seed=7)
    run(page)
    tokens = tokens_of_the_run(page)
    for rule, share in shares(page).items():
        assert distance(share, settings["p"], tokens[rule]) < 5
        if settings["p"] != settings["q"]:
            assert distance(share, settings["q"], tokens[rule]) > 20


BROKEN = {
    "the recovered token comes from q": ("lab.residual = (p, q) => q", RULES),
    "the recovered token comes from p": ("lab.residual = (p) => p", RULES),
    "every draft is accepted": ("lab.ratio = () => 1", RULES),
    "the token rule accepts too often": (
        "const right = lab.threshold; lab.threshold = (...a) => Math.sqrt(right(...a))",
        ["token"],
    ),
    "the block rule's residual has no weight": (
        "const right = lab.residual; lab.residual = (p, q) => right(p, q)",
        ["block"],
    ),
    "the block rule's h is w": ("lab.blockChance = (p, q, w) => w", ["block"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_shows(page, name):
    script, rules = BROKEN[name]
    settings = SETTINGS["two of four above q"]  # with one word above q, the residual is that word under any weight
    page.execute_script(script)
    enter(page, **settings, seed=7)
    run(page)
    tokens, share = tokens_of_the_run(page), shares(page)
    for rule in RULES:
        assert (distance(share[rule], settings["p"], tokens[rule]) > 5) == (rule in rules)


@pytest.mark.parametrize("name", SETTINGS)
def test_rates_are_those_of_the_formulas_and_of_specplug(page, name):
    settings = SETTINGS[name]
    p, q, gamma = settings["p"], settings["q"], settings["gamma"]
    alpha = sum(map(min, p, q))
    tensors = [torch.tensor(each, dtype=torch.float64) for each in (p, q)]
    enter(page, **settings, c=0.05, seed=11)
    run(page)
    shown = rates(page)
    for row in shown:
        for value, error, expected in row.values():
            assert value == pytest.approx(expected, abs=5 * error + 1.1e-3 * (error > 0) + 1e-9)
    rate, accepted, tokens, drafted, speedup = shown
    assert rate["token"][2] == pytest.approx(alpha, abs=1e-4)
    assert tokens["token"][2] == pytest.approx(theory.expected_tokens(min(alpha, 1.0), gamma), abs=1e-4)
    assert speedup["token"][2] == pytest.approx(theory.speedup(min(alpha, 1.0), gamma, 0.05), abs=1e-3)
    for rule in RULES:
        mean = mean_accepted(*tensors, gamma, rule)
        assert accepted[rule][2] == pytest.approx(mean, abs=1e-4)
        assert drafted[rule][2] == pytest.approx(mean / gamma, abs=1e-4)
    assert accepted["block"][2] >= accepted["token"][2]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_rules_are_those_of_verify(page, name):
    """Chances, weights and residuals for all drafts, and the exact share of each word in a round's tokens, which is p.

    A round stops at a random length. That does not bend the shares: the expected count of each word in one round is its p
    times the expected number of tokens, and so is the sum over rounds.
    """
    p, q = (torch.tensor(SETTINGS[name][row], dtype=torch.float64) for row in ("p", "q"))
    gamma = min(3, SETTINGS[name]["gamma"])
    counted = {rule: torch.zeros(4, dtype=torch.float64) for rule in RULES}
    drawn = [drafts for drafts in itertools.product(range(4), repeat=gamma) if all(q[x] > 0 for x in drafts)]
    found = page.execute_script(
        """const [p, q, all] = arguments, never = all[0].map(() => 0);
           return all.map((drafts) => {
             const token = lab.tokenRule(p, q, drafts, never), block = lab.blockRule(p, q, drafts, never);
             return [token.chances, block.chances, block.weights, block.weights.map((w) => lab.residual(p, q, w))];
           })""",
        p.tolist(),
        q.tolist(),
        [list(drafts) for drafts in drawn],
    )
    for drafts, (token_chances, block_chances, weights, residuals) in zip(drawn, found, strict=True):
        tokens = torch.tensor([drafts])
        given = (tokens, q.expand(1, gamma, -1), p.expand(1, gamma + 1, -1))
        assert token_chances == pytest.approx(verify.token_acceptance(*given)[0].tolist(), abs=1e-12)
        assert residuals[0] == pytest.approx(verify.residual(*given)[0, 0].tolist(), abs=1e-12)
        chances, wanted = verify.block_acceptance(*given)
        assert block_chances == pytest.approx(chances[0, 1:].tolist(), abs=1e-12)
        assert weights == pytest.approx(wanted[0].tolist(), abs=1e-12)
        # Exact counts: the chance of each number of accepted drafts, times the words that it commits.
        chance_of_drafts = q[list(drafts)].prod()
        all_accepted, none_longer = 1.0, 1.0
        for k in range(gamma + 1):
            ends = all_accepted * (1 - token_chances[k] if k < gamma else 1.0)
            all_accepted *= token_chances[k] if k < gamma else 1.0
            last = torch.tensor(residuals[0], dtype=torch.float64) if k < gamma else p
            counted["token"] += chance_of_drafts * ends * (torch.eye(4)[list(drafts[:k])].sum(0) + last)
        for k in range(gamma, -1, -1):
            ends = none_longer * (block_chances[k - 1] if k else 1.0)
            none_longer -= ends
            last = torch.tensor(residuals[k], dtype=torch.float64) if k < gamma else p
            counted["block"] += chance_of_drafts * ends * (torch.eye(4)[list(drafts[:k])].sum(0) + last)
    for rule in RULES:
        torch.testing.assert_close(counted[rule], p * (mean_accepted(p, q, gamma, rule) + 1), atol=1e-12, rtol=0)


def test_block_is_never_below_token(page):
    """Expected values for random p and q, up to three drafts against specplug.verify, up to sixteen against each other."""
    rng = random.Random(0)
    for _ in range(25):
        rows = [[rng.random() ** 3 for _ in range(4)] for _ in range(2)]
        p, q = ([each / sum(row) for each in row] for row in rows)
        expected = page.execute_script("return lab.expected({ p: arguments[0], q: arguments[1], c: 0.1 })", p, q)
        token, block = expected["token"]["tokens"], expected["block"]["tokens"]
        assert all(b >= t - 1e-12 for b, t in zip(block, token, strict=True))
        tensors = [torch.tensor(each, dtype=torch.float64) for each in (p, q)]
        for gamma in (1, 2, 3):
            for rule, tokens in (("token", token), ("block", block)):
                assert tokens[gamma] == pytest.approx(mean_accepted(*tensors, gamma, rule) + 1, abs=1e-9)


@pytest.mark.parametrize("cost", [0, 0.05, 0.3, 2])
def test_the_curve_and_its_best_gamma(page, cost):
    enter(page, **START, c=cost)
    table = page.execute_script(
        "return [...document.querySelectorAll('#curve tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    assert len(table) == 17
    for gamma, row in enumerate(table):
        assert number(row[1]) == pytest.approx(theory.expected_tokens(0.8, gamma), abs=1e-4)
        assert number(row[2]) == pytest.approx(theory.speedup(0.8, gamma, cost), abs=1e-3)
    best = theory.best_gamma(0.8, cost, max_gamma=16)
    assert text(page, "best").startswith(f"Token rule: the best gamma is {best}, ")
    assert f"best: gamma {best}, " in text(page, "speed")


def test_the_example_of_the_block_paper_and_reset(page):
    click(page, "toy")
    accepted = rates_expected(page)[1]
    assert accepted == pytest.approx([10 / 9, 11 / 9], abs=1e-4)
    assert "10/9" in text(page, "about") and "11/9" in text(page, "about")
    run(page)
    assert [rates(page)[1][rule][0] for rule in RULES] == pytest.approx([10 / 9, 11 / 9], abs=0.02)
    enter(page, seed=5)
    click(page, "reset")
    values = page.execute_script("return [...document.querySelectorAll('#settings input')].map((each) => each.value)")
    assert values == ["0.5", "0.25", "0.15", "0.1", "0.3", "0.4", "0.2", "0.1", "4", "0.05", "1"]
    assert rates_expected(page)[2][0] == pytest.approx(3.3616, abs=1e-4)
    assert "gamma 4 gives 2.80" in text(page, "best")


def rates_expected(page) -> list[list[float]]:
    table = page.execute_script(
        """return [...document.querySelectorAll('#rates tbody tr')].map((r) =>
             [...r.querySelectorAll('.expected')].map((each) => each.textContent))"""
    )
    return [[number(each) for each in row] for row in table]


BAD_INPUT = [
    ("p1", "-0.25", "p", 'p of dog is "-0.25"; allowed: a number from 0 to 1'),
    ("q2", "half", "q", 'q of cow is "half"; allowed: a number from 0 to 1'),
    ("q0", "0,3", "q", 'q of cat is "0,3"; allowed: a number from 0 to 1'),
    ("p0", "", "p", "p of cat is empty; allowed: a number from 0 to 1"),
    ("p0", "1/0", "p", 'p of cat is "1/0"; allowed: a number from 0 to 1'),
    ("p3", "<b>x</b>", "p", 'p of hen is "<b>x</b>"; allowed: a number from 0 to 1'),
    ("p3", "0.2", "p", "p sums to 1.1; allowed: 1."),
    ("q3", "0.0999", "q", "q sums to 0.9999; allowed: 1."),
    ("gamma", "2.5", "gamma", 'gamma is "2.5"; allowed: a whole number from 1 to 16'),
    ("gamma", "0", "gamma", 'gamma is "0"; allowed: a whole number from 1 to 16'),
    ("gamma", "17", "gamma", 'gamma is "17"; allowed: a whole number from 1 to 16'),
    ("gamma", "", "gamma", "gamma is empty; allowed: a whole number from 1 to 16"),
    ("c", "-0.1", "c", 'c is "-0.1"; allowed: a number of 0 or more'),
    ("c", "cheap", "c", 'c is "cheap"; allowed: a number of 0 or more'),
    ("c", "1e999", "c", 'c is "1e999"; allowed: a number of 0 or more'),
    ("seed", "-1", "seed", 'seed is "-1"; allowed: a whole number from 0 to 4294967295'),
    ("seed", "x" * 50, "seed", f'seed is "{"x" * 20}…"; allowed: a whole number from 0 to 4294967295'),
]


@pytest.mark.parametrize("field, value, where, line", BAD_INPUT)
def test_broken_input_is_explained_beside_its_field_and_nothing_runs(page, field, value, where, line):
    click(page, "next")
    before = page.execute_script("return document.getElementById(arguments[0]).value", field)
    enter(page, **{field: value})
    assert line in text(page, f"{where}-note")
    told = "return [arguments[0], arguments[1]].map((id) => document.getElementById(id))"
    input_, note = page.execute_script(told, field, f"{where}-note")
    assert input_.get_attribute("aria-invalid") == "true"
    assert input_.get_attribute("aria-describedby") == f"{where}-note"
    assert 0 <= note.location["y"] - input_.location["y"] - input_.size["height"] < 30  # right below it
    for name in ("next", "run", "again"):
        assert page.execute_script("return document.getElementById(arguments[0]).disabled", name)
    page.execute_script("runMany(); nextRound();")
    page.execute_script("document.getElementById('settings').requestSubmit()")
    assert page.execute_script("return state.counts.rounds") == 0
    assert "corrected" in text(page, "run-status")
    enter(page, **{field: before})
    assert page.execute_script("return document.querySelectorAll('[aria-invalid=true], .bad').length") == 0
    assert page.execute_script("return !document.getElementById('run').disabled")


def test_normalise(page):
    enter(page, p=[5, 3, 1, 1])
    assert "p sums to 10; allowed: 1." in text(page, "p-note")
    page.execute_script("document.querySelector('#p-note button').click()")
    values = page.execute_script("return [0, 1, 2, 3].map((x) => document.getElementById(`p${x}`).value)")
    assert values == ["0.5", "0.3", "0.1", "0.1"]
    assert page.switch_to.active_element.get_attribute("id") == "p0"
    assert page.execute_script("return !document.getElementById('run').disabled")
    enter(page, p=[0.7, 0.7, 0.7, 1e-7])
    page.execute_script("document.querySelector('#p-note button').click()")
    assert text(page, "p-note") == "sums to 1"
    enter(page, p=[0, 0, 0, 0])
    assert text(page, "p-note") == "p sums to 0; allowed: 1."  # and there is nothing to normalise


def test_the_same_seed_gives_the_same_run(page):
    def numbers():
        run(page)
        return page.execute_script("return JSON.stringify(state.counts)")

    first = numbers()
    assert numbers() == first
    enter(page, seed=2)
    assert numbers() != first
    settings = "{ p: [0.5, 0.25, 0.15, 0.1], q: [0.3, 0.4, 0.2, 0.1], gamma: 4, seed: 1 }"
    assert page.execute_script(f"return JSON.stringify(lab.simulate({settings}, 100000))") == first


def test_a_round_is_shown_as_it_was(page):
    """Each row's verdict follows from the numbers in it, and the committed tokens from the verdicts."""
    for _ in range(30):
        click(page, "next")
        table = page.execute_script(
            "return [...document.querySelectorAll('#round-token tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
        )
        shown = page.execute_script(
            "return [...document.querySelectorAll('#round-token .new')].map((c) => c.textContent)"
        )
        told = text(page, "round-token")
        open_ = True
        for _, word, q, p, threshold, uniform, verdict in table:
            assert number(threshold) == pytest.approx(min(1, number(p) / number(q)), abs=1e-3)
            wanted = "not tested" if not open_ else "accepted" if number(uniform) < number(threshold) else "rejected"
            assert verdict == wanted and word in ("cat", "dog", "cow", "hen")
            open_ = open_ and verdict == "accepted"
        accepted = [row[1] for row in table if row[6] == "accepted"]
        assert shown[:-1] == accepted
        assert ("bonus token" if len(accepted) == 4 else "recovered token") in told
        if len(accepted) < 4:
            assert shown[-1] == "cat"  # the only word with p above q
        block = page.execute_script(
            "return [...document.querySelectorAll('#round-block td:last-child')].map((c) => c.textContent)"
        )
        kept = block.count("accepted")
        assert block == ["accepted"] * kept + ["rejected"] * (4 - kept)


def test_a_long_run_can_be_stopped_and_does_not_freeze_the_page(page):
    enter(page, gamma=16)
    page.execute_script(
        "document.getElementById('run').click(); setTimeout(() => document.getElementById('stop').click(), 100)"
    )
    wait_for(page, lambda: text(page, "run-status").startswith("Stopped after"))
    rounds = page.execute_script("return state.counts.rounds")
    assert 0 < rounds < 100_000 and f"{rounds:,} rounds" in text(page, "run-status")
    assert page.execute_script("return document.getElementById('progress').value") == rounds
    page.execute_script(
        """window.longest = 0; let last = performance.now();
           setInterval(() => { const now = performance.now(); longest = Math.max(longest, now - last); last = now; }, 10);"""
    )
    run(page)
    assert page.execute_script("return longest") < 1000  # milliseconds
    click(page, "run")
    enter(page, gamma=2)  # a change of the settings ends a run
    assert page.execute_script("return [state.running, state.counts.rounds]") == [False, 0]


def test_keyboard_alone(page):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def press(*keys):
        ActionChains(page).send_keys(*keys).perform()

    def focused():
        return page.switch_to.active_element.get_attribute("id")

    order = []
    while "run" not in order and len(order) < 40:
        press(Keys.TAB)
        order.append(focused())
        style = (
            "const s = getComputedStyle(document.activeElement); return [s.outlineStyle, parseFloat(s.outlineWidth)]"
        )
        outline, width = page.execute_script(style)
        assert outline == "solid" and width >= 2
    fields = [f"{row}{x}" for row in "pq" for x in range(4)] + ["gamma", "c", "seed"]
    assert order[1:] == [*fields, "reset", "toy", "next", "again", "run"]  # before them: the link to the algorithm
    press(Keys.ENTER)
    wait_for(page, lambda: text(page, "run-status").startswith("Done"))
    assert focused() == "run"
    for _ in range(2):
        ActionChains(page).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()
    assert focused() == "next"
    press(Keys.ENTER)
    assert text(page, "round-status").startswith("Round 100,001.")
    page.execute_script("document.getElementById('gamma').select(); document.getElementById('gamma').focus()")
    press("3")
    press(Keys.ENTER)  # in a field: the next round
    assert text(page, "round-status").startswith("Round 1. Token rule: ")
    page.execute_script("document.getElementById('q3').select(); document.getElementById('q3').focus()")
    press("0.4", Keys.ENTER)
    assert page.execute_script("return state.counts.rounds") == 0
    press(Keys.TAB)
    assert page.switch_to.active_element.text == "Normalise q"
    press(Keys.ENTER)
    assert focused() == "q0" and text(page, "q-note") == "sums to 1"


def test_names_and_live_regions(page):
    unnamed = page.execute_script(
        """return [...document.querySelectorAll('input, button, progress')].filter((e) =>
             !e.getAttribute('aria-label') && !e.labels?.length && !e.textContent.trim()).map((e) => e.id)"""
    )
    assert unnamed == []
    for name in ("round-status", "run-status", "p-note", "q-note", "gamma-note", "c-note", "seed-note"):
        assert page.execute_script("return document.getElementById(arguments[0]).ariaLive", name) == "polite"
    assert page.execute_script("return [...document.querySelectorAll('svg[role=img]')].every((e) => e.ariaLabel)")


def test_width_of_a_phone(page):
    show(page, width=360)

    def overflow():
        return page.execute_script(
            """return [...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > 360.5)
                 .map((e) => e.outerHTML.slice(0, 80)).concat(document.documentElement.scrollWidth > 360 ? ['page'] : [])"""
        )

    page.execute_script("document.querySelector('details').open = true")
    assert overflow() == []
    run(page)
    click(page, "next")
    assert overflow() == []
    enter(page, gamma=16)
    click(page, "next")
    assert overflow() == []
    enter(page, p=["-1", "x" * 60, "", "9" * 60], q=[1, 2, 3, 4], gamma="2.5", c="-1", seed="x" * 60)
    assert overflow() == []


CONTRASTS = (
    CONTRAST
    + """
for (const e of document.querySelectorAll('body *')) {
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || ['SCRIPT', 'NOSCRIPT'].includes(e.tagName) || e.disabled) continue;
  const style = getComputedStyle(e), colour = parse(e.closest('svg') ? style.fill : style.color);
  out.text[`${e.tagName} ${e.className.baseVal ?? e.className} ${e.textContent.slice(0, 20)}`] = contrast(colour, ground(e));
}
for (const e of document.querySelectorAll('rect, circle')) out.shapes[e.className.baseVal] = contrast(parse(getComputedStyle(e).fill), ground(e));
return out;
"""
)


def test_light_and_dark(page):
    """Every text has a contrast of 4.5, every bar and point one of 3 (WCAG 2.2, 1.4.3 and 1.4.11)."""
    grounds = set()
    for scheme in ("light", "dark"):
        show(page, 1000, scheme)
        run(page)
        click(page, "next")
        for state in ("results", "broken input"):
            if state == "broken input":
                enter(page, p=[1, 1, 1, 1], gamma="x")
            found = page.execute_script(CONTRASTS)
            grounds.add(found["background"])
            assert {name: ratio for name, ratio in found["text"].items() if ratio < 4.5} == {}
            assert {name: ratio for name, ratio in found["shapes"].items() if ratio < 3} == {}
            assert len(found["text"]) > 30
        click(page, "reset")
    assert len(grounds) == 2


def test_nothing_comes_from_elsewhere(page):
    import json

    source = PAGE.read_text()
    assert "http:" not in source and "https:" not in source and "//cdn" not in source
    assert "default-src 'none'" in source
    page.get_log("performance")
    page.get(PAGE.as_uri())
    run(page)
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert asked and {url.split(":")[0] for url in asked} <= {"file", "data"}
