"""The bar: a live table in a terminal, plain lines elsewhere; texts of others are no markup."""

import io

import pytest
from rich.console import Console

from specplug import console
from specplug.console import Bar, table_of
from specplug.report import SoFar

TABLE = [["", "tokens / s"], ["plain", "12"], ["[red]x[/red] [/nothing]", "34"]]


def run(monkeypatch, terminal: bool):
    out = io.StringIO()
    monkeypatch.setattr(console, "console", Console(file=out, force_terminal=terminal, width=100, legacy_windows=False))
    monkeypatch.setattr(console.sys, "stderr", out)
    bar = Bar("evaluate").start(3, 1)
    bar.advance(2, "34 tok/s", TABLE)
    if bar.live is not None:
        bar.live.refresh()
    shown = out.getvalue()
    bar.advance(3, "35 tok/s", TABLE)
    bar.stop()
    return shown, out.getvalue()[len(shown) :]


def test_in_a_terminal(monkeypatch):
    shown, after = run(monkeypatch, True)
    for text in ("evaluate", "2/3", "34 tok/s", "tokens / s", "plain", "12", "[red]x[/red] [/nothing]"):
        assert text in shown
    last = after.rpartition("evaluate")
    assert "3/3" in last[2] and "plain" not in last[2]  # the table goes, the bar stays


def test_elsewhere_it_is_lines(monkeypatch):
    shown, after = run(monkeypatch, False)
    assert shown == "" and after == "evaluate 3/3  35 tok/s  0 s left\n"


def test_a_table_takes_any_text():
    out = io.StringIO()
    Console(file=out, width=80).print(table_of([["[b]", "x"], ["[/]", "[link=x]y"]]))
    assert "[b]" in out.getvalue() and "[/]" in out.getvalue() and "[link=x]y" in out.getvalue()


def so_far(samples):
    tally = SoFar()
    for each in samples:
        tally.add(each)
    return tally.told()


def test_so_far():
    from test_report import sample

    samples = [sample("1"), sample("2", plain=4.0, kind="tie", assisted=None)]
    line, table = so_far(samples)
    assert line == "10 tok/s, 3.00x plain, 4.50 tokens per target pass, 1 identical, 1 tie"
    assert [row[0] for row in table] == ["", "plain", "assisted", "ours"]
    assert table[1][1:] == ["3", "3", "-"] and table[2][1:] == ["-", "-", "-"] and table[3][1:] == ["10", "10", "3.00x"]
    assert all(len(row) == len(table[0]) for row in table)


@pytest.mark.parametrize("count", [1, 5])
def test_so_far_of_sampled_runs(count):
    from test_report import sample

    line, _ = so_far([sample(str(k), kind="not_compared") for k in range(count)])
    assert line.endswith(f"{count} not compared")
