"""The snippets of docs/callers.md, with the plugin and without: the same result, and drafts were accepted.

The libraries are not among the project's dependencies: `make callers` installs them into an environment of their own.
"""

import re
from pathlib import Path

import pytest

import specplug

PAGE = (Path(__file__).parents[2] / "docs" / "callers.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M))
NEEDS = {
    "lm-evaluation-harness": "lm_eval",
    "LangChain": "langchain_huggingface",
    "smolagents": "smolagents",
    "PEFT": "peft",
    "TRL": "trl",
}


def code(text: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))


@pytest.mark.filterwarnings("default")  # of those libraries
@pytest.mark.parametrize("name", SECTIONS)
def test_the_result_is_that_without_the_plugin(name, tmp_path, monkeypatch):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed; make callers installs it")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    source = code(PAGE[: PAGE.index("\n## ")]) + code(SECTIONS[name])
    ours: dict = {}
    attach = specplug.attach
    with monkeypatch.context() as patch:  # a gamma that no measurement decides
        patch.setattr(specplug, "attach", lambda *args, **kwargs: attach(*args, gamma=4, **kwargs))
        exec(compile(source, f"docs/callers.md, {name}", "exec"), ours)
    stats = ours["plugin"].stats
    assert stats.num_accepted > 0 and stats.num_calls > 0, ours["plugin"].last
    assert ours["plugin"].last.engine in ("rounds", "lookahead")
    plain: dict = {}
    with monkeypatch.context() as patch:
        patch.setattr(specplug, "attach", lambda *args, **kwargs: None)
        exec(compile(source, f"docs/callers.md, {name}, plain", "exec"), plain)
    assert ours["result"] == plain["result"]
