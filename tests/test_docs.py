"""What README and docs show is what there is: snippets run, commands compose, links and files exist."""

import re
import shlex
from pathlib import Path

import pytest

import specplug
from specplug.cli import quote_prompt

PROJECT = Path(__file__).parent.parent
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
SNIPPETS = [page for page in PAGES if page.name != "callers.md"]  # which tests/callers runs
PYTHON = [
    (page, block) for page in SNIPPETS for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
]


def commands() -> list[str]:
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        found += [line.strip() for line in text.splitlines() if re.match(r"\s*(\$ )?specplug( |$)", line)]
    for file in [*(PROJECT / "recipes").glob("*.py"), *(PROJECT / "conf").rglob("*.yaml")]:
        text = file.read_text().replace("\\\n", " ")
        found += re.findall(r"^(?:# +)?(specplug(?: [^\n]*)?)$", text, re.MULTILINE)
    return sorted({line.removeprefix("$ ").split("   ")[0].split(" - ")[0].strip() for line in found})


def test_there_are_snippets_and_commands():
    assert PYTHON and len(commands()) > 10


@pytest.mark.parametrize("command", commands())
def test_commands_compose(command, monkeypatch):
    arguments = shlex.split(command)[1:]
    if arguments[:1] in (["-sc"], ["--help"], ["--version"], ["--cfg"]) or arguments[:1] == ["resume=DIR"]:
        return  # run by test_cli.py
    overrides = [each for each in arguments if each not in ("-m", "...") and not each.endswith("=...")]
    overrides = [each for each in overrides if not each.startswith(("hydra.", "resume="))]
    swept = [re.sub(r"=([^,{]*),.*", r"=\1", each) for each in overrides] if "-m" in arguments else overrides
    if "recipe=generate" in swept and not any("recipe.prompt" in each for each in swept):
        swept.append("recipe.prompt=x")
    if "{" in command and "..." in command:
        swept = [each for each in swept if "architecture" not in each]
    needed = [f"{side}.name_or_path=x" for side in ("target", "draft") if f"{side}=custom" in swept]
    quoted = [quote_prompt(each) for each in swept]
    given = {each.split("=")[0] for each in quoted}
    specplug.load(*quoted, *(each for each in needed if each.split("=")[0] not in given))


@pytest.mark.parametrize("page, block", PYTHON, ids=[f"{page.name}-{k}" for k, (page, _) in enumerate(PYTHON)])
def test_python_snippets_run(page, block, tiny_pipeline, monkeypatch, capsys):
    """Names of models on a hub stand for the embedded pair here."""
    import transformers

    pipe, draft = tiny_pipeline
    monkeypatch.setattr(transformers, "pipeline", lambda *args, **kwargs: pipe)
    attach = specplug.attach

    def attach_embedded(model, **named):
        on_a_hub = isinstance(named["draft"], str) and "/" in named["draft"]
        return attach(model, **{**named, "draft": draft if on_a_hub else named["draft"]})

    monkeypatch.setattr(specplug, "attach", attach_embedded)
    try:
        exec(compile(block, str(page), "exec"), {})
    finally:
        specplug.detach(pipe)


def test_linked_files_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_file_tree_of_the_readme():
    """Every module and recipe has its line in the README's tree, and nothing stands there that is not."""
    tree = re.search(r"```text\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL).group(1)
    named = set(re.findall(r"[\w]+\.py", tree))
    there = {
        file.name
        for folder in ("specplug", "specplug/drafters", "specplug/metrics", "recipes")
        for file in (PROJECT / folder).glob("*.py")
    }
    assert there - {"__init__.py"} <= named | {"__init__.py"}
    assert named - {"__init__.py"} <= there
