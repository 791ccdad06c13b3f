"""Every shipped data set read from a small local copy with its columns; file kinds, few-shot, shuffling and filters."""

import gzip
import json
import re

import pytest

import specplug
from specplug.config import ConfigError, Dataset
from specplug.data import Row, conversations, load_rows
from specplug.sources import shuffled

TURNS = {"question_id": "q1", "category": "math", "sub_category": "", "turns": ["One?", "Two?"], "multiturn": True}

# Of each set: a record as the set has it, and the first row that has to come of it.
COPIES = {
    "mt_bench": (
        {"prompt": ["Write.", "Again."], "prompt_id": 7, "category": "writing", "reference": ["a", "b"]},
        Row("7", "Write.", "a", "writing"),
    ),
    "gsm8k": ({"question": "2 + 2?", "answer": "It is 4.\n#### 4"}, Row("0", "2 + 2?", "It is 4.\n#### 4")),
    "math500": (
        {
            "problem": "$x$?",
            "solution": "so",
            "answer": "\\frac12",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "t/1",
        },
        Row("t/1", "$x$?\n\nPut the final answer into \\boxed{}.", "\\frac12", "Algebra"),
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": "def f(x):\n",
            "canonical_solution": "    return x\n",
            "test": "def check(candidate):\n    assert candidate(1) == 1\n",
            "entry_point": "f",
        },
        Row(
            "HumanEval/0",
            "def f(x):\n",
            "    return x\n",
            tests="def check(candidate):\n    assert candidate(1) == 1\n\n\ncheck(f)",
            head="def f(x):\n",
        ),
    ),
    "mbpp": (
        {
            "task_id": 11,
            "text": "Write a function.",
            "code": "def f(): pass",
            "test_list": ["assert f() is None", "assert not f()"],
            "test_setup_code": "",
            "challenge_test_list": [],
        },
        Row(
            "11",
            "Write a function. The function has to pass these tests:\n\nassert f() is None\nassert not f()",
            "def f(): pass",
            tests="\nassert f() is None\nassert not f()",
        ),
    ),
    "cnn_dailymail": (
        {"article": "Long.", "highlights": "Short.", "id": "a"},
        Row("a", "Long.\n\nSummarize this article in three sentences.", "Short."),
    ),
    "xsum": (
        {"document": "Long.", "summary": "Short.", "id": "a"},
        Row("a", "Long.\n\nSummarize this article in one sentence.", "Short."),
    ),
    "wmt14_de_en": (
        {"translation": {"de": "Hallo.", "en": "Hello."}},
        Row("0", "Translate from German to English: Hallo.", "Hello."),
    ),
    "natural_questions": (
        {
            "id": "5",
            "question": {"text": "who is mia", "tokens": ["who", "is", "mia"]},
            "annotations": {"short_answers": [{"text": []}, {"text": ["a girl", "Mia"]}], "yes_no_answer": [-1, -1]},
        },
        Row("5", "who is mia?", "a girl", others=("Mia",)),
    ),
    "alpaca": (
        {"instruction": "Sort.", "input": "b a", "output": "a b", "text": "..."},
        Row("0", "Sort.\n\nb a", "a b"),
    ),
    "speed_bench_qualitative": (TURNS, Row("q1", "One?", None, "math")),
    "speed_bench_throughput": (TURNS, Row("q1", "One?", None, "math")),
    "sharegpt": (
        {
            "id": "x",
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "Hi."},
                {"from": "gpt", "value": "Hello."},
                {"from": "human", "value": "Bye."},
            ],
        },
        Row("0", "Hi.", "Hello.", system="Be brief."),
    ),
}


def write(folder, name, *records):
    """A file of the kind that its name says."""
    file = folder / name
    if name.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), file)
    elif name.endswith(".gz"):
        file.write_bytes(gzip.compress("".join(json.dumps(each) + "\n" for each in records).encode()))
    elif name.endswith((".csv", ".tsv")):
        rows = [list(records[0]), *(each.values() for each in records)]
        file.write_text("".join(("\t" if name.endswith("tsv") else ",").join(map(str, row)) + "\n" for row in rows))
    elif name.endswith(".json"):
        file.write_text(json.dumps(list(records), indent=1))
    else:
        file.write_text("".join(json.dumps(each) + "\n" for each in records))
    return str(file)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", COPIES)
def test_a_local_copy_of_each_set(tmp_path, name, kind):
    record, row = COPIES[name]
    config = specplug.load(f"dataset={name}", f"dataset.path={write(tmp_path, f'copy.{kind}', record)}", "recipe=train")
    assert load_rows(config.dataset) == [row]
    assert config.dataset.hub or name == "sharegpt"
    assert config.dataset.revision is None, "a revision that nobody has looked at"


def test_later_turns_of_a_set(tmp_path):
    def turns(name):
        record, _ = COPIES[name]
        return load_rows(
            specplug.load(f"dataset={name}", f"dataset.path={write(tmp_path, 'copy.jsonl', record)}").dataset,
            all_turns=True,
        )

    assert turns("mt_bench")[1] == Row("7.2", "Again.", "b", "writing", "7")
    assert turns("speed_bench_qualitative")[1] == Row("q1.2", "Two?", None, "math", "q1")
    assert turns("sharegpt")[1] == Row("0.2", "Bye.", None, "all", "0", system="Be brief.")


def test_the_systems_message_of_a_conversation_is_said(tiny_pipeline):
    from specplug.data import prompt_ids

    tokenizer = tiny_pipeline[0].tokenizer
    plain = prompt_ids(tokenizer, Row("0", "Hi", None), Dataset(name="d", system="Mia"))
    own = prompt_ids(tokenizer, Row("0", "Hi", None, system="Ben"), Dataset(name="d", system="Mia"))
    assert "Mia" in tokenizer.decode(plain) and "Ben" in tokenizer.decode(own) and "Mia" not in tokenizer.decode(own)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "a.csv", "a.tsv"])
def test_file_kinds(tmp_path, name):
    path = write(tmp_path, name, {"prompt": "2 + 2", "answer": "4"}, {"prompt": "7", "answer": "NA"})
    rows = load_rows(Dataset(name="mine", path=path, reference_column="answer"))
    assert rows == [Row("0", "2 + 2", "4"), Row("1", "7", "NA")]


def test_any_set_of_the_hub(tmp_path, monkeypatch):
    import datasets

    load_dataset, asked = datasets.load_dataset, {}

    def local(name, subset, **options):
        asked.update(options, name=name, subset=subset)
        return load_dataset("parquet", data_files=path, split="train", streaming=True)

    path = write(tmp_path, "a.parquet", {"question": {"text": "who"}})
    monkeypatch.setattr(datasets, "load_dataset", local)
    overrides = (
        "dataset=hub",
        "dataset.hub=org/set",
        "dataset.prompt_column=question.text",
        "dataset.split=validation",
    )
    assert load_rows(specplug.load(*overrides).dataset) == [Row("0", "who", None)]
    assert asked["name"] == "org/set" and asked["split"] == "validation" and asked["streaming"]


def numbered(tmp_path, count=12, **config):
    path = write(tmp_path, "n.jsonl", *({"prompt": f"{k}?", "answer": f"a{k}", "kind": k % 2} for k in range(count)))
    return Dataset(name="n", path=path, reference_column="answer", **config)


def test_few_shot_examples_are_the_head_and_are_not_asked(tmp_path):
    rows = load_rows(numbered(tmp_path, 4, few_shot=2, template="Q: {prompt}\nA:"))
    assert [row.id for row in rows] == ["2", "3"]
    assert rows[0].prompt == "Q: 0?\nA: a0\n\nQ: 1?\nA: a1\n\nQ: 2?\nA:"


def test_few_shot_examples_of_their_own_file_or_split(tmp_path, monkeypatch):
    own = write(tmp_path, "own.jsonl", {"prompt": "x?", "answer": "y"})
    rows = load_rows(numbered(tmp_path, 3, few_shot=1, few_shot_path=own))
    assert [row.id for row in rows] == ["0", "1", "2"] and rows[0].prompt == "x?\ny\n\n0?"
    from specplug import data, sources

    def split(config, name):
        return iter([{"prompt": name, "answer": "s"}])

    monkeypatch.setattr(data, "stream_hub", split)
    monkeypatch.setattr(sources, "stream_hub", split)
    config = Dataset(
        name="n", hub="org/set", split="test", reference_column="answer", few_shot=1, few_shot_split="train"
    )
    assert load_rows(config)[0].prompt == "train\ns\n\ntest"
    with pytest.raises(ConfigError, match=r"dataset\.few_shot=3: there are 1 rows"):
        load_rows(numbered(tmp_path, 3, few_shot=3, few_shot_path=own))
    with pytest.raises(ConfigError, match="has no reference to show"):
        load_rows(Dataset(name="n", path=own, few_shot=1))


def test_shuffling_is_by_the_seed_and_streams(tmp_path):
    def order(**config):
        return [row.id for row in load_rows(numbered(tmp_path, shuffle=True, **config))]

    plain = [str(k) for k in range(12)]
    assert order() == order() != plain and sorted(order(), key=int) == plain
    assert order(shuffle_seed=1) != order()
    assert order(shuffle_buffer=1) == plain
    taken = []
    source = shuffled((taken.append(k) or k for k in range(1000)), 0, 5)
    next(source)
    assert len(taken) == 6, "more was read than is held"


def test_filters(tmp_path, tiny_pipeline):
    tokenizer = tiny_pipeline[0].tokenizer
    path = write(tmp_path, "l.jsonl", *({"prompt": "Mia " * k, "kind": k % 2} for k in (1, 5, 50)))
    config = Dataset(name="l", path=path, category_column="kind", max_prompt_tokens=20)
    assert [len(turns) for turns in conversations(config, tokenizer=tokenizer)] == [1, 1]
    config.min_prompt_tokens = 7
    assert [row.id for row in load_rows(config, limit=1, tokenizer=tokenizer)] == ["1"]
    config.categories, config.min_prompt_tokens = ["0"], 60
    config.max_prompt_tokens = 70
    with pytest.raises(ConfigError, match="in the categories 0 of 60 to 70 prompt tokens"):
        load_rows(config, tokenizer=tokenizer)


def one_line(*arguments, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        load_rows(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"not a table")
    assert "cannot be read as PARQUET" in one_line(Dataset(name="d", path=str(tmp_path / "bad.parquet")))
    (tmp_path / "ragged.csv").write_text("prompt,a\nx,1\ny,1,2,3\n")
    assert "line 3" in one_line(Dataset(name="d", path=str(tmp_path / "ragged.csv")))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n')[:-4])
    assert "cannot be read" in one_line(Dataset(name="d", path=str(tmp_path / "cut.jsonl.gz")))
    (tmp_path / "array.json").write_text('[{"prompt": "x"}, 3]')
    assert "entry 2: is a int" in one_line(Dataset(name="d", path=str(tmp_path / "array.json")))
    mixed = write(tmp_path, "mixed.jsonl", {"prompt": "x"}, {"prompt": 3})
    assert "row 2" in (said := one_line(Dataset(name="d", path=mixed))) and "holds a int" in said
    nested = write(tmp_path, "nested.jsonl", {"translation": {"de": "x"}})
    said = one_line(Dataset(name="d", path=nested, prompt_column="translation.fr"))
    assert "dataset.prompt_column=translation.fr" in said and "it has translation" in said
    no_object = Dataset(name="d", path=nested, prompt_column="translation.de", template="{translation.__class__}")
    assert "dataset.template" in one_line(no_object)
    hollow = write(tmp_path, "s.jsonl", {**TURNS, "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"]})
    config = specplug.load("dataset=speed_bench_qualitative", f"dataset.path={hollow}").dataset
    assert "holds a placeholder" in one_line(config)


def test_conversations_without_a_user_are_left_out_with_a_word(tmp_path, caplog):
    empty = {"conversations": [{"from": "gpt", "value": "Hello."}]}
    path = write(tmp_path, "c.jsonl", empty, COPIES["sharegpt"][0])
    rows = load_rows(specplug.load("dataset=sharegpt", f"dataset.path={path}").dataset)
    assert [row.id for row in rows] == ["1"] and "1 conversations without a message" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (["dataset.few_shot=-1"], "dataset.few_shot=-1: must be 0"),
        (["dataset.few_shot_path=x.jsonl"], "nothing reads it without dataset.few_shot=N"),
        (["dataset.few_shot=1", "dataset.few_shot_split=train"], "a file has no splits"),
        (["dataset.shuffle_seed=3"], "nothing reads it without dataset.shuffle=true"),
        (["dataset.shuffle=true", "dataset.shuffle_buffer=0"], "must be 1 or more rows"),
        (["dataset.shuffle=true", "dataset.shuffle_seed=-1"], "must be between 0 and 4294967295"),
        (["dataset.min_prompt_tokens=9", "dataset.max_prompt_tokens=3"], "must be at most max_prompt_tokens"),
        (["recipe=train", "dataset.max_prompt_tokens=3"], "nothing reads it while training"),
    ],
)
def test_values_of_a_data_set_that_cannot_be(overrides, answer):
    with pytest.raises(ConfigError, match=re.escape(answer)):
        specplug.load(*overrides)


def test_files_as_windows_and_pandas_write_them(tmp_path):
    """A mark of the byte order in front, and tables whose first column has no name."""
    for name, text in {
        "a.jsonl": '{"prompt": "x", "answer": "007"}\r\n',
        "a.json": '[{"prompt": "x", "answer": "007"}]',
        "a.csv": "prompt,answer\r\nx,007\r\n",
        "b.csv": '"prompt",answer\nx,007\n',
        "c.csv": ",prompt,answer\n0,x,007\n",
        "d.csv": "prompt,prompt,answer\nx,8,007\n",
        "e.csv": f"{'long' * 40_000},prompt,answer\n1,x,007\n",
    }.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        config = Dataset(name="mine", path=str(tmp_path / name), reference_column="answer")
        assert load_rows(config) == [Row("0", "x", "007")], name
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'\xef\xbb\xbf{"prompt": "x"}\n'))
    assert load_rows(Dataset(name="mine", path=str(tmp_path / "a.jsonl.gz"))) == [Row("0", "x", None)]


def test_a_table_with_more_cells_than_names_is_not_shifted(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\nx,1,2\ny,1,2\n")
    assert "more cells than the header" in one_line(Dataset(name="d", path=str(tmp_path / "a.csv")))


def test_a_category_may_be_0(tmp_path):
    path = write(tmp_path, "c.jsonl", *({"prompt": "x", "c": c} for c in (0, 1, None)))
    config = Dataset(name="d", path=path, category_column="c")
    assert [row.category for row in load_rows(config)] == ["0", "1", "all"]
    config.categories = ["0"]
    assert [row.id for row in load_rows(config)] == ["0"]


@pytest.mark.parametrize(
    "key", ["id_column", "category_column", "reference_column", "template", "tests", "head_column"]
)
def test_halves_of_characters_are_refused_wherever_they_stand(tmp_path, key):
    path = write(tmp_path, "h.jsonl", {"prompt": "x", "answer": "y"}, {"prompt": "x", "answer": "\ud800"})
    value = "{prompt}{answer}" if key in ("template", "tests") else "answer"
    assert f"dataset.{key}" in (said := one_line(Dataset(name="d", path=path, **{key: value}))) and "row 2" in said


def test_messages_that_are_no_text_are_refused(tmp_path):
    system = write(
        tmp_path, "s.jsonl", {"prompt": [{"role": "system", "content": 5}, {"role": "user", "content": "x"}]}
    )
    assert "system message" in one_line(Dataset(name="d", path=system))
    parts = {"role": "assistant", "content": [{"type": "text", "text": "y"}]}
    answer = write(tmp_path, "a.jsonl", {"prompt": [{"role": "user", "content": "x"}, parts]})
    assert "dataset.reference_column=prompt: row 1" in one_line(
        Dataset(name="d", path=answer, reference_column="prompt")
    )


def test_damaged_and_hostile_files_are_one_line(tmp_path):
    whole = gzip.compress(b'{"prompt": "x"}\n' * 50)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:12] + bytes(8) + whole[20:])
    assert "cannot be read" in one_line(Dataset(name="d", path=str(tmp_path / "a.jsonl.gz")))
    (tmp_path / "deep.jsonl").write_text('{"prompt": ' + "[" * 100_000)
    assert "line 1: not JSON" in one_line(Dataset(name="d", path=str(tmp_path / "deep.jsonl")))
    (tmp_path / "deep.json").write_text('[{"prompt": ' + "[" * 100_000)
    assert "not JSON" in one_line(Dataset(name="d", path=str(tmp_path / "deep.json")))
    path = write(tmp_path, "t.jsonl", {"prompt": "x", "d": {"a": 1}})
    assert "dataset.template" in one_line(Dataset(name="d", path=path, template="{d:>5}"))


def test_a_name_of_a_file_is_no_pattern(tmp_path):
    (tmp_path / "a1.csv").write_text("prompt\nwrong\n")
    for name in ("a [1].csv", "a*.csv", "a?.csv"):
        (tmp_path / name).write_text("prompt\nright\n")
        assert load_rows(Dataset(name="d", path=str(tmp_path / name))) == [Row("0", "right", None)]
