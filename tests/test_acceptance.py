"""The command that compares chains and trees: that it runs, and its table."""

import sys

import acceptance
import pytest
import torch


def test_a_table_comes_out(monkeypatch, capsys):
    options = ["--limit", "1", "--widths", "2", "--temperatures", "0", "1", "--rules", "walk"]
    monkeypatch.setattr(sys, "argv", ["acceptance.py", *options, "--", "sampling.max_new_tokens=12"])
    threads = torch.get_num_threads()
    try:
        acceptance.main()
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and lines[0].startswith("| temperature | rule | drafts |")
    chain, static = (float(line.split("|")[4]) for line in lines[2:4])
    assert 1 <= static <= 2 < chain <= 3, "one place against two"


def test_what_is_wrong_is_said(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["acceptance.py", "--limit", "none"])
    with pytest.raises(SystemExit):
        acceptance.main()
    assert "--limit" in capsys.readouterr().err
