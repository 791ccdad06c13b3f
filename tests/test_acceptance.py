"""The commands that compare chains and trees, and that time verification: that they run, and what they print."""

import json
import sys

import acceptance
import pytest
import torch
import verification


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


def test_what_verification_costs(monkeypatch, capsys):
    options = ["--target", "tiny", "--batch-size", "2", "--gamma", "3", "--vocabulary", "997"]
    monkeypatch.setattr(sys, "argv", ["verification.py", *options])
    verification.main()
    found = json.loads(capsys.readouterr().out)
    assert all(found[name] > 0 for name in ("pass", "token", "block", "token_share", "block_share"))


def test_what_is_wrong_is_said(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["acceptance.py", "--limit", "none"])
    with pytest.raises(SystemExit):
        acceptance.main()
    assert "--limit" in capsys.readouterr().err
