"""Plots: what they say, in which form they are written, and that nothing of matplotlib is loaded before one is drawn."""

import subprocess
import sys
from xml.etree import ElementTree

import pytest
from test_report import COSTS, sample

from specplug import plots, svg
from specplug.summary import summarize

NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawn():
    samples = [
        sample("1"),
        sample("2", category="b", plain=4.0),
        sample("3", category="<b>&\x00 $x_1$\u2028y"),
        sample("4"),
    ]
    for each in samples:
        each["speculative"]["stats"] |= {"seconds_rounds": 0.9, "seconds_target": 0.5, "seconds_draft_forward": 0.3}
    return {plot.name: plot for plot in plots.of_run(summarize(samples, COSTS, 50, 0), samples, TRACES)}


def traced(*reasons):
    following = {"token": 1, "p": 0.5, "origin": "bonus", "text": "x"}
    draft = {"token": 1, "p": 0.5, "q": None, "decision": "accepted", "text": "x"}
    rounds = [{"gamma": 2, "reason": each, "drafts": [draft] * 2, "following": following} for each in reasons]
    return {
        "id": "1",
        "category": "a",
        "rounds": [{"gamma": 0, "reason": "", "drafts": [], "following": following}, *rounds],
    }


TRACES = [traced("a trial", "pays most", ""), traced("pays most")]


def labels(svg: str) -> list[str]:
    return ["".join(each.itertext()) for each in ElementTree.fromstring(svg).iter(f"{NAMESPACE}text")]


@pytest.mark.parametrize("form", [svg.inline, svg.standalone])
def test_text_is_text_and_hostile_names_are_labels(drawn, form):
    assert list(drawn) == ["speedup", "predicted", "acceptance", "tokens", "time", "latency", "gamma", "gamma_by_round"]
    for plot in drawn.values():
        root = ElementTree.fromstring(form(plot))
        assert root.tag == f"{NAMESPACE}svg" and root.get("role") == "img"
        assert root.find(f"{NAMESPACE}title").text == plot.title and root.find(f"{NAMESPACE}desc").text == plot.caption
        assert len(labels(form(plot))) >= 5
    for name in ("speedup", "predicted", "time"):
        assert labels(form(drawn[name]))[-20:] and "<b>&� $x_1$ y" in labels(form(drawn[name]))


def test_colours_follow_the_page_or_the_reader(drawn):
    for plot in drawn.values():
        inline, alone = svg.inline(plot), svg.standalone(plot)
        assert "var(--soft)" in inline and not any(light in inline for light, _ in svg.COLOURS.values())
        assert "prefers-color-scheme: dark" in alone and "var(" not in alone
        used = {light for light, _ in svg.COLOURS.values() if f": {light}" in alone.split("</style>")[1]}
        assert len(used) >= 3
        for light, dark in svg.COLOURS.values():
            assert f'[style*="fill: {light}"]{{fill:{dark}!important}}' in alone
        assert "#000000" not in inline, "a colour that is in no role is black on black in the dark"
        assert "DejaVu" not in inline and "dc:date" not in inline and "<?xml" not in inline


def test_the_same_data_give_the_same_file(drawn):
    samples = [sample("1"), sample("2")]
    first, second = (plots.latency(samples) for _ in range(2))
    assert first == second


def test_nothing_to_show_is_no_plot():
    samples = [sample("1")]
    samples[0]["speculative"]["stats"] |= {
        "num_rounds": 0, "num_accepted": 0, "num_tested": 0, "num_draft_tokens": 0, "accepted": {}, "drafted": {},
    }  # fmt: skip
    summary = summarize(samples, COSTS, 0, 0)
    assert [plot.name for plot in plots.of_run(summary, samples, [])] == ["speedup", "latency"]


def test_more_categories_than_fit_are_said_to_be_left_out():
    samples = [sample(str(k), category=f"category {k}") for k in range(plots.MOST_ROWS + 5)]
    plot = plots.speedup(summarize(samples, COSTS, 0, 0))
    assert "The last 5 categories are left out here." in plot.caption
    assert f"category {plots.MOST_ROWS - 1}" in labels(plot.svg) and f"category {plots.MOST_ROWS}" not in labels(
        plot.svg
    )


def test_reasons_are_in_the_legend(drawn):
    assert {"a trial", "pays most", "not known"} <= set(labels(drawn["gamma_by_round"].svg))


def test_matplotlib_comes_late_and_pyplot_never():
    code = (
        "import sys, specplug, specplug.cli, specplug.report, specplug.plots; assert 'matplotlib' not in sys.modules;"
        "plot = specplug.plots.acceptance({'acceptance_by_position': [0.9, 0.5]});"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules;"
        "import matplotlib; assert matplotlib.rcParams['svg.fonttype'] == 'path'"  # nothing of ours is left behind
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
