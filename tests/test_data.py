"""Rows from files: columns, templates, and one line for everything that can be wrong with them."""

import json
import re

import pytest

import specplug
from specplug.config import ConfigError, Dataset, Metric
from specplug.data import Row, load_rows, prompt_ids


def write(tmp_path, *records, name="rows.jsonl"):
    file = tmp_path / name
    file.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records) + "\n")
    return str(file)


def test_columns(tmp_path):
    path = write(
        tmp_path, {"q": "one?", "a": ["1"], "kind": "x", "n": 7}, {"q": ["two?", "more?"], "kind": "y", "n": 8}
    )
    config = Dataset(
        name="mine", path=path, prompt_column="q", reference_column="a", category_column="kind", id_column="n"
    )
    assert load_rows(config) == [Row("7", "one?", "1", "x"), Row("8", "two?", None, "y")]
    assert [row.id for row in load_rows(config, limit=1)] == ["7"]
    config.categories = ["y"]
    assert [row.id for row in load_rows(config, limit=1)] == ["8"]


def test_template_and_numbers(tmp_path):
    path = write(tmp_path, {"prompt": "2 + 2", "hint": "sum"})
    config = Dataset(name="mine", path=path, template="{hint}: {prompt} =")
    assert load_rows(config) == [Row("0", "sum: 2 + 2 =", None)]


def test_plain_text(tmp_path):
    config = Dataset(name="text", path=write(tmp_path, {"text": "Once."}), text_column="text")
    assert load_rows(config) == [Row("0", "", "Once.")]


def test_spec_bench_columns(tmp_path):
    from specplug import load

    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."]},
        {"question_id": 401, "category": "math_reasoning", "turns": ["1 + 1?"], "reference": ["2"]},
    ]
    config = load("dataset=spec_bench", f"dataset.path={write(tmp_path, *rows)}").dataset
    assert load_rows(config) == [Row("81", "Compose.", None, "writing"), Row("401", "1 + 1?", "2", "math_reasoning")]


WRONG = {
    "no such file": (Dataset(name="d", path="/nowhere/rows.jsonl"), "dataset.path=/nowhere/rows.jsonl: no such file"),
    "not a jsonl name": (Dataset(name="d", path=__file__), "not a file of a known kind; allowed endings are .jsonl"),
    "a folder": (Dataset(name="d", path="/"), "is a folder"),
    "nothing named": (Dataset(name="d"), "dataset.path=FILE"),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_cannot_be_read(name):
    config, answer = WRONG[name]
    with pytest.raises(ConfigError, match=re.escape(answer)):
        load_rows(config)


def problem(tmp_path, *records, **config) -> str:
    with pytest.raises(ConfigError) as caught:
        load_rows(Dataset(name="mine", path=write(tmp_path, *records), **config))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_content_that_cannot_be_used(tmp_path):
    good = {"prompt": "x"}
    assert "line 2: not JSON" in problem(tmp_path, good, "{not json")
    assert "line 2: is a list" in problem(tmp_path, good, [1])
    text = problem(tmp_path, good, {"question": "y", "answer": "z"})
    assert "dataset.prompt_column=prompt: row 2" in text and "it has question, answer" in text
    assert "row 1" in problem(tmp_path, {"prompt": 3}) and "int" in problem(tmp_path, {"prompt": 3})
    assert "is empty" in problem(tmp_path, {"prompt": "  "})
    assert "has no rows" in problem(tmp_path, "")
    assert "in the categories b" in problem(tmp_path, {"prompt": "x"}, categories=["b"])
    assert "stands twice (rows 1 and 2)" in problem(tmp_path, {**good, "n": 1}, {**good, "n": 1}, id_column="n")
    assert "dataset.template" in problem(tmp_path, good, template="{nope}")
    assert "dataset.reference_column=a" in problem(tmp_path, good, reference_column="a", metric=Metric.exact_match)


def test_not_utf8(tmp_path):
    file = tmp_path / "latin.jsonl"
    file.write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match="UTF-8"):
        load_rows(Dataset(name="d", path=str(file)))


def test_unreachable_hub(monkeypatch):
    import datasets

    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach the hub\nand more lines")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        ConfigError, match=r"dataset\.hub=org/set: cannot be read: Couldn't reach the hub; .*dataset\.path"
    ):
        load_rows(Dataset(name="d", hub="org/set"))


def test_a_hub_set_is_streamed_by_its_columns(tmp_path, monkeypatch):
    """The real `datasets` reads a local copy, as it would stream the hub's."""
    path = write(tmp_path, *({"question": f"{k}?", "answer": str(k)} for k in range(5)))
    import datasets

    load_dataset = datasets.load_dataset
    asked = {}

    def local(name, subset, split, revision, streaming):
        asked.update(name=name, revision=revision, streaming=streaming)
        return load_dataset("json", data_files=path, split="train", streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", local)
    config = Dataset(
        name="d", hub="org/set", revision="abc", prompt_column="question", reference_column="answer", split="test"
    )
    assert load_rows(config, limit=2) == [Row("0", "0?", "0"), Row("1", "1?", "1")]
    assert asked == {"name": "org/set", "revision": "abc", "streaming": True}


def test_special_tokens_are_added_once(tiny_pipeline):
    tokenizer = tiny_pipeline[0].tokenizer
    ids = prompt_ids(tokenizer, Row("0", "Hello", None), Dataset(name="d"))
    assert tokenizer.decode(ids) == "<|user|>Hello<|end|><|assistant|>"
    plain = prompt_ids(tokenizer, Row("0", "Hello", None), Dataset(name="d", chat=False))
    assert tokenizer.decode(plain) == "Hello"


def test_half_a_character_is_one_line(tmp_path):
    file = tmp_path / "half.jsonl"
    file.write_text('{"prompt": "fine"}\n{"prompt": "\\ud83d hi"}\n')
    with pytest.raises(ConfigError, match=r"row 2 of .* half a character at position 1"):
        load_rows(Dataset(name="d", path=str(file)))
    with pytest.raises(ConfigError, match=r"recipe\.prompt=.*no UTF-8"):
        specplug.load("recipe=generate", "recipe.prompt='\udcff bad'")
