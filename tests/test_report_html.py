"""report.html in a real headless Chromium: that everything is there, is read and used by mouse and keyboard, and that texts
of models and data sets are texts in it, whatever they say."""

import json
import shutil

import pytest
from conftest import CONTRAST, show

from specplug import escape, page
from specplug.report import write_reports
from specplug.runs import read_samples

PLOTS = {
    "speedup": ["tokens per second, times those of plain generate", "all"],
    "predicted": ["speed-up over plain generate", "measured", "predicted by the formula alone"],
    "acceptance": ["position of the draft in its round", "share that was kept"],
    "tokens": ["tokens from one target pass", "rounds"],
    "time": ["milliseconds a round", "target's forward", "draft's forward", "other"],
    "latency": ["seconds for a whole call, prompt included", "% of prompts done by then", "plain", "assisted", "ours"],
    "gamma": ["prompt, in the order of the run", "drafts a round"],
    "gamma_by_round": [
        "round of the traced prompts, one after the other",
        "drafts in the round",
        "the same in every round",
    ],
}
HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    "\"'><svg onload=window.hacked=3>",
    "<!-- {{script}} {{traces}} --> \\1 \\g<0>",
    "$\\frac{1}{0}$ & &lt; | ` ~~~ ```",
    "line one\nline two\u2028line three\r\nfour",
    "\x00\x07\x1b[31mred \u202eforwards",
    "[link](javascript:alert(1)) ![x](http://example.invalid/x.png) @everyone",
]


def make_hostile(small_run, folder):
    """The run with hostile text everywhere that text of others can be."""
    shutil.copytree(small_run, folder)
    samples = read_samples(folder / "samples.jsonl")
    lines = []
    for k, text in enumerate(HOSTILE):
        sample = dict(samples[k % len(samples)], id=f"{k} {text}", category=text, exactness={"kind": "mismatch"})
        sample["speculative"] = dict(sample["speculative"], text=text)
        lines.append(json.dumps(sample))
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    traces = read_samples(folder / "trace.jsonl")
    lines = []
    for k, text in enumerate(HOSTILE):
        trace = json.loads(json.dumps(traces[k % len(traces)]))
        trace |= {"id": text, "category": text, "prompt": text}
        for each in trace["rounds"]:
            each["reason"] = text
            for token in (*each["drafts"], *([each["following"]] if each["following"] else [])):
                token["text"] = text
        lines.append(json.dumps(trace))
    (folder / "trace.jsonl").write_text("\n".join(lines) + "\n")
    for name, keys in (("config.json", ("target", "name_or_path")), ("environment.json", ("device",))):
        content = json.loads((folder / name).read_text())
        place = content
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = HOSTILE[0]
        if name == "environment.json":
            content["command"] = ["specplug", *HOSTILE]
        (folder / name).write_text(json.dumps(content))
    return folder


def open_page(browser, file, width=1100, scheme="light"):
    show(browser, width, scheme)
    browser.get(file.as_uri())


@pytest.fixture
def report(browser, small_run):
    """The report as it opens, on a desktop. No test may leave an error in the browser's console."""
    open_page(browser, small_run / "report.html")
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def text(report, selector: str) -> str:
    return report.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def texts(report, selector: str) -> list[str]:
    return report.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)", selector
    )


def test_the_result_is_said_first(report, small_run):
    summary = json.loads((small_run / "summary.json").read_text())
    low, high = summary["speedup_interval"]
    speed, exact, score = texts(report, ".tile")
    assert f"{summary['speedup']:.2f}x" in speed and f"95 % interval {low:.2f} to {high:.2f}" in speed
    assert "not compared" in exact and "the same distribution" in exact
    assert f"{summary['task_score']['baseline']:.3f} / {summary['task_score']['speculative']:.3f}" in score
    assert texts(report, "#categories tbody th") == ["story", "qa", "rewrite", "all"]
    environment = json.loads((small_run / "environment.json").read_text())
    assert environment["device"] in text(report, "#how") and environment["versions"]["torch"] in text(report, "#how")
    assert text(report, "#how pre").startswith("specplug")


def outside(browser, svg: str) -> list[str]:
    """Labels that stick out of their plot."""
    return browser.execute_script(
        """const box = document.querySelector(arguments[0]).getBoundingClientRect();
           return [...document.querySelectorAll(arguments[0] + ' text')].filter((e) => { const b = e.getBoundingClientRect();
             return b.left < box.left - 1 || b.right > box.right + 1 || b.top < box.top - 1 || b.bottom > box.bottom + 1; })
             .map((e) => e.textContent)""",
        svg,
    )


@pytest.mark.parametrize("name", PLOTS)
def test_plots_are_there_and_labelled(report, name):
    svg = f"#plot-{name} svg"
    shown = texts(report, f"{svg} text")
    for label in PLOTS[name]:
        assert label in shown
    assert report.execute_script(
        "const e = document.querySelector(arguments[0]); const by = (a) => document.getElementById(e.getAttribute(a)).textContent;"
        "return e.getAttribute('role') === 'img' && by('aria-labelledby').length > 5 && by('aria-describedby').length > 20",
        svg,
    )
    assert text(report, f"#plot-{name} h3") and text(report, f"#plot-{name} figcaption")
    assert outside(report, svg) == []


def test_ids_are_used_once(report):
    repeated = report.execute_script(
        "const ids = [...document.querySelectorAll('[id]')].map((e) => e.id); return ids.filter((id, k) => ids.indexOf(id) !== k)"
    )
    assert repeated == []


def rows_of_round(report) -> list[list[str]]:
    return report.execute_script(
        "return [...document.querySelectorAll('#round tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )


def test_the_inspector_shows_the_trace(report, small_run):
    from selenium.webdriver.support.ui import Select

    traces = read_samples(small_run / "trace.jsonl")
    chooser = Select(report.find_element("id", "sample"))
    assert [option.text for option in chooser.options] == [f"{t['id']} ({t['category']})" for t in traces] != []
    for trace in traces:
        chooser.select_by_visible_text(f"{trace['id']} ({trace['category']})")
        assert text(report, "#prompt") == trace["prompt"]
        wanted = []
        for number, each in enumerate(trace["rounds"]):
            wanted += [[d["text"], "accepted", str(number)] for d in each["drafts"] if d["decision"] == "accepted"]
            following = each["following"]
            wanted += [[following["text"], following["origin"], str(number)]] if following else []
        shown = report.execute_script(
            "return [...document.querySelectorAll('#tokens .token')].map((e) => [e.textContent, e.classList[1], e.dataset.round])"
        )
        assert shown == [[t.replace("\n", "↵\n") or shown[k][0], o, n] for k, (t, o, n) in enumerate(wanted)]
        counts = trace["stats"]
        assert f"{counts['num_accepted']} accepted drafts" in text(report, "#about-sample")
        assert f"{counts['num_rounds']} rounds" in text(report, "#about-sample")
    origins = {origin for _, origin, _ in shown}
    assert origins >= {"accepted", "recovered", "plain"}
    styles = report.execute_script(
        "return ['accepted', 'recovered', 'bonus', 'plain'].map((n) => getComputedStyle(document.querySelector('.keys .' + n)))"
        ".map((s) => [s.textDecorationStyle, s.textDecorationColor])"
    )
    assert len({style for style, _ in styles}) == len({colour for _, colour in styles}) == 4  # also without colour


def test_a_round_by_mouse(report, small_run):
    from selenium.webdriver.common.action_chains import ActionChains

    trace = read_samples(small_run / "trace.jsonl")[0]
    number = next(
        k for k, each in enumerate(trace["rounds"]) if any(d["decision"] == "rejected" for d in each["drafts"])
    )
    tokens = report.find_elements("css selector", f"#tokens [data-round='{number}']")
    report.execute_script("arguments[0].scrollIntoView({ block: 'center' })", tokens[-1])
    ActionChains(report).move_to_element(tokens[-1]).perform()
    assert text(report, "#round h3") == f"Round {number} of {len(trace['rounds']) - 1}"
    drafts, following = trace["rounds"][number]["drafts"], trace["rounds"][number]["following"]
    assert "the same in every round" in text(report, "#round p")
    shown = rows_of_round(report)
    assert [row[4] for row in shown] == [*(d["decision"].replace("_", " ") for d in drafts), "recovered token"]
    for row, token in zip(shown, [*drafts, following], strict=True):
        for cell, value in ((row[2], token["p"]), (row[3], token.get("q"))):
            if value is None:
                assert cell == "–"  # noqa: RUF001
            elif 0.001 <= value <= 0.999:
                assert cell == f"{value:.3f}"
            else:
                assert cell in ("<0.001", ">0.999", "1.000")
    assert all(row[3] != "–" for row in shown[:-1])  # noqa: RUF001  these drafts were drawn
    here = report.execute_script("return [...document.querySelectorAll('#tokens .here')].map((e) => e.dataset.round)")
    assert here == [str(number)] * len(tokens)


def test_the_inspector_by_keyboard(report, small_run):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    trace = read_samples(small_run / "trace.jsonl")[0]

    def press(*keys):
        ActionChains(report).send_keys(*keys).perform()

    def now():
        return report.execute_script(
            """const spans = [...document.querySelectorAll('#tokens .token')], now = spans.indexOf(document.activeElement);
               return [now, now < 0 ? null : Number(spans[now].dataset.round), spans.filter((e) => e.tabIndex === 0).length]"""
        )

    report.execute_script("document.getElementById('sample').focus()")
    for _ in range(4):  # the select, the prompt behind its summary, the tokens
        press(Keys.TAB)
        if now()[0] >= 0:
            break
    assert now() == [1, 1, 1]  # one stop for all tokens
    outline = "const s = getComputedStyle(document.activeElement); return [s.outlineStyle, parseFloat(s.outlineWidth)]"
    assert report.execute_script(outline) == ["solid", 3]
    press(Keys.HOME)
    assert now()[:2] == [0, 0] and text(report, "#round h3") == "The prompt's pass"
    press(Keys.ARROW_LEFT)
    assert now()[0] == 0
    press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert now()[0] == 2
    press(Keys.HOME)
    for number in (1, 2, 3):
        press(Keys.ARROW_DOWN)
        assert now()[1] == number and text(report, "#round h3").startswith(f"Round {number} of")
    press(Keys.ARROW_UP)
    assert now()[1] == 2
    press(Keys.END)
    count = len(trace["token_ids"])
    assert now()[0] == count - 1 and now()[1] == len(trace["rounds"]) - 1
    press(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert now()[0] == count - 1
    assert report.execute_script("return document.querySelectorAll('#tokens [aria-selected=true]').length") == 1
    press(Keys.TAB)
    assert now()[0] == -1


def overflow(browser) -> list[str]:
    """What sticks out of a window of 360 pixels, but for what is scrolled in a box of its own."""
    return browser.execute_script(
        """return [...document.querySelectorAll('body *')].filter((e) => !e.closest('.scroll table')
             && e.getBoundingClientRect().right > 360.5 && e.getBoundingClientRect().width > 0).map((e) => e.outerHTML.slice(0, 90))
             .concat(document.documentElement.scrollWidth > 360 ? ['page'] : [])"""
    )


def test_width_of_a_phone(report, small_run):
    open_page(report, small_run / "report.html", width=360)
    report.execute_script("document.querySelector('details').open = true")
    assert overflow(report) == []
    report.execute_script("document.querySelector('#about-sample').style.width = '400px'")
    assert overflow(report) != []


CONTRASTS = (
    CONTRAST
    + """
for (const e of document.querySelectorAll('body *')) {
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || e.closest('script, title, desc, noscript')) continue;
  const style = getComputedStyle(e), colour = parse(e.closest('svg') ? style.fill : style.color);
  out.text[`${e.tagName} ${e.className.baseVal ?? e.className} ${e.textContent.slice(0, 20)}`] = contrast(colour, ground(e));
}
for (const e of document.querySelectorAll('figure svg use, figure svg [id*=bar] path'))
  out.shapes[e.outerHTML.slice(0, 60)] = contrast(parse(getComputedStyle(e).stroke === 'none' ? getComputedStyle(e).fill : getComputedStyle(e).stroke), ground(e));
for (const e of document.querySelectorAll('.keys .token'))
  out.shapes[e.className] = contrast(parse(getComputedStyle(e).textDecorationColor), ground(e.parentElement));
return out;
"""
)


def test_light_and_dark(report, small_run):
    """Every text has a contrast of 4.5, every point and underline one of 3 (WCAG 2.2, 1.4.3 and 1.4.11)."""
    grounds = set()
    for scheme in ("light", "dark"):
        open_page(report, small_run / "report.html", scheme=scheme)
        report.execute_script("document.querySelector('details').open = true")
        found = report.execute_script(CONTRASTS)
        grounds.add(found["background"])
        assert {name: ratio for name, ratio in found["text"].items() if ratio < 4.5} == {}
        assert {name: ratio for name, ratio in found["shapes"].items() if ratio < 3} == {}
        assert len(found["text"]) > 150 and len(found["shapes"]) > 20
    assert len(grounds) == 2


def test_on_paper(report, small_run):
    """Light, whatever the screen prefers; no controls; nothing cut off at the side of an A4 page."""
    open_page(report, small_run / "report.html", width=690, scheme="dark")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    report.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
    try:
        ink = report.execute_script("return getComputedStyle(document.body).color")
        assert ink == "rgb(31, 38, 48)"
        assert not report.find_element("id", "sample").is_displayed()
        assert report.execute_script("return document.documentElement.scrollWidth") <= 690
        paper = report.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})["data"]
        assert len(paper) > 20_000
    finally:
        report.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_nothing_comes_from_elsewhere(report, small_run):
    source = (small_run / "report.html").read_text()
    assert "default-src 'none'" in source and "unsafe-eval" not in source
    outside = source.replace("http://www.w3.org/2000/svg", "").replace("http://www.w3.org/1999/xlink", "")
    assert "http:" not in outside and "https:" not in outside
    report.get_log("performance")
    report.get((small_run / "report.html").as_uri())
    messages = [json.loads(entry["message"])["message"] for entry in report.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert asked and {url.split(":")[0] for url in asked} <= {"file", "data"}


ELEMENTS = "return ['img', 'main script', '[onload]', '[onerror]', '[href^=javascript]'].flatMap((s) => [...document.querySelectorAll(s)]).length"


def test_hostile_text_is_text(browser, small_run, tmp_path):
    from selenium.webdriver.support.ui import Select

    folder = make_hostile(small_run, tmp_path / "hostile")
    write_reports(folder)
    open_page(browser, folder / "report.html", width=360)
    assert browser.execute_script("return window.hacked") is None and browser.execute_script(ELEMENTS) == 0
    shown = [escape.printable(each, keep="\n") for each in HOSTILE]
    told = [" ".join(each.split()) for each in texts(browser, "#categories tbody th")]
    assert told == [*(" ".join(escape.printable(each, keep="\n").split()) for each in HOSTILE), "all"]
    assert all(" ".join(each.split())[:12] in " ".join(text(browser, "#result p.bad").split()) for each in shown)
    assert "window.hacked = 1" in text(browser, "h1") and "onerror='" not in text(browser, "#how pre")[:9]
    for name in PLOTS:
        assert browser.execute_script("return document.querySelector(arguments[0]) !== null", f"#plot-{name} svg")
        assert outside(browser, f"#plot-{name} svg") == []
    labels = texts(browser, "#plot-speedup text")
    assert all(escape.one_line(each, 22) in labels for each in HOSTILE)
    chooser = Select(browser.find_element("id", "sample"))
    for k, each in enumerate(HOSTILE):
        chooser.select_by_index(k)
        assert text(browser, "#prompt") == each
        assert set(texts(browser, "#tokens .token")) == {each.replace("\n", "↵\n")}
        assert each in text(browser, "#round")
    assert browser.execute_script("return window.hacked") is None and browser.execute_script(ELEMENTS) == 0
    assert overflow(browser) == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_unescaped_it_would_not_be(browser, small_run, tmp_path, monkeypatch):
    """The test above sees what comes through; and even then the page's policy lets nothing of it run."""
    folder = make_hostile(small_run, tmp_path / "hostile")
    monkeypatch.setattr(page, "in_html", str)
    write_reports(folder)
    open_page(browser, folder / "report.html")
    assert browser.execute_script(ELEMENTS) > 0
    assert browser.execute_script("return window.hacked") is None
    refused = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert any("Content Security Policy" in message for message in refused)


def test_a_comparison(browser, small_run, tmp_path, capsys):
    import specplug
    from specplug.cli import run_recipe

    hostile = make_hostile(small_run, tmp_path / "<img src=x onerror=window.hacked=1>")
    config = specplug.load("recipe=compare", "recipe.runs=[a,b]")
    config.recipe.runs = [str(small_run), str(hostile)]
    assert run_recipe(config, tmp_path / "compared") == 0
    for width in (1100, 360):
        open_page(browser, tmp_path / "compared" / "compare.html", width=width)
        assert "These runs are not comparable: targets differ" in text(browser, "[role=note]")
        assert texts(browser, "#runs tbody th") == ["run", "<img src=x onerror=window.hacked=1>"]
        assert "tokens per second, times those of plain generate" in texts(browser, "#plot-speedup text")
        assert browser.execute_script("return window.hacked") is None and browser.execute_script(ELEMENTS) == 0
    assert overflow(browser) == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
