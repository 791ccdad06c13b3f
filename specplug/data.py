"""Rows of a data set: from a JSONL file, a hub name through `datasets` (streamed), or the project's own corpus.

A row is one user turn, an optional reference and a category. Further turns of a conversation are rows that follow others.
Knows nothing about models.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specplug import corpus
from specplug.config import ConfigError, Dataset, first_line

ASSETS = Path(__file__).parent / "assets"
ASSET_PREFIX = "asset:"
EXTENSIONS = (".jsonl", ".json", ".ndjson")


@dataclass(frozen=True)
class Row:
    """`prompt` is empty for plain text, which then is the `reference`."""

    id: str
    prompt: str
    reference: str | None
    category: str = "all"
    follows: str | None = None  # id of the turn before, whose answer belongs to the conversation


def load_rows(config: Dataset, limit: int | None = None, held_out: bool = False, all_turns: bool = False) -> list[Row]:
    """At most `limit` conversations after the category filter. Raises ConfigError in one line if there are none or one is bad.

    `held_out` is for the generated corpus: rows of the half that no training set contains. `all_turns`: the first turn of
    each conversation and those that follow, instead of the first alone.
    """
    conversations = itertools.islice(iterate(config, held_out), limit)
    rows = [row for turns in conversations for row in (turns if all_turns else turns[:1])]
    if not rows:
        chosen = f" in the categories {', '.join(config.categories)}" if config.categories else ""
        raise ConfigError(f"dataset={config.name}: has no rows{chosen}; {where(config)} has to hold at least one")
    seen: dict[str, int] = {}
    for number, row in enumerate(rows):
        if row.id in seen:
            raise ConfigError(
                f"dataset.id_column={config.id_column}: the id {row.id!r} stands twice (rows {seen[row.id] + 1} and "
                f"{number + 1}); ids have to be unique, or leave the column out and rows are numbered"
            )
        seen[row.id] = number
    return rows


def iterate(config: Dataset, held_out: bool = False) -> Iterator[list[Row]]:
    """The turns of one conversation after the other."""
    for number, record in enumerate(records(config, held_out)):
        turns = to_rows(config, record, number)
        if not config.categories or turns[0].category in config.categories:
            yield turns


def where(config: Dataset) -> str:
    return config.path or config.hub or "the corpus"


def records(config: Dataset, held_out: bool = False) -> Iterator[dict[str, Any]]:
    if config.corpus:
        yield from corpus.generate(config.corpus_seed + held_out, config.corpus_size, held_out)
    elif config.path is not None:
        yield from read_jsonl(locate(config.path))
    elif config.hub is not None:
        yield from stream_hub(config)
    else:
        raise ConfigError(f"dataset={config.name}: give dataset.path=FILE (JSONL) or dataset.hub=NAME")


def locate(path: str) -> Path:
    file = ASSETS / path.removeprefix(ASSET_PREFIX) if path.startswith(ASSET_PREFIX) else Path(path).expanduser()
    if file.is_dir():
        raise ConfigError(f"dataset.path={path}: is a folder; give a JSONL file")
    if not file.is_file():
        raise ConfigError(f"dataset.path={path}: no such file; give a JSONL file")
    if file.suffix not in EXTENSIONS:
        raise ConfigError(f"dataset.path={path}: not a JSONL file; allowed endings are {', '.join(EXTENSIONS)}")
    return file


def read_jsonl(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise ConfigError(
                        f"{file}, line {number}: not JSON ({error}); each line has to be one object"
                    ) from None
                if not isinstance(record, dict):
                    raise ConfigError(
                        f"{file}, line {number}: is a {type(record).__name__}; each line has to be one object"
                    )
                yield record
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text ({error.reason}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error


def stream_hub(config: Dataset) -> Iterator[dict[str, Any]]:
    import datasets

    try:
        yield from datasets.load_dataset(
            config.hub, config.subset, split=config.split, revision=config.revision, streaming=True
        )
    except (OSError, ValueError, RuntimeError) as error:  # the library's own errors derive from these
        raise ConfigError(
            f"dataset.hub={config.hub}: cannot be read: {first_line(error)}; with a local copy use dataset.path=FILE"
        ) from error


def to_rows(config: Dataset, record: dict[str, Any], number: int) -> list[Row]:
    """One record as the turns of a conversation, most have one: the first by `to_row`, the others as they stand."""
    turns = [to_row(config, record, number)]
    if config.text_column is None and isinstance(record[config.prompt_column], list):
        for text in record[config.prompt_column][1:]:
            if not isinstance(text, str) or not text.strip():
                raise ConfigError(
                    f"dataset.prompt_column={config.prompt_column}: row {number + 1} of {where(config)} has a turn that is"
                    " no text; each has to be one"
                )
            unicode(text, f"dataset.prompt_column={config.prompt_column}: row {number + 1} of {where(config)}")
            before = turns[-1]
            turns.append(Row(f"{turns[0].id}.{len(turns) + 1}", text, None, before.category, before.id))
    return turns


def to_row(config: Dataset, record: dict[str, Any], number: int) -> Row:
    """One record by the columns that the config names. Raises ConfigError that names the columns there are."""

    def column(key: str) -> Any:
        name = getattr(config, key)
        if name is None:
            return None
        if name not in record:
            raise ConfigError(
                f"dataset.{key}={name}: row {number + 1} of {where(config)} has no such column;"
                f" it has {', '.join(map(str, record))}"
            )
        return record[name]

    identifier = str(number) if config.id_column is None else str(column("id_column"))
    category = str(column("category_column") or "all")
    if config.text_column is not None:
        return Row(identifier, "", text_of(column("text_column"), config, number, "text_column"), category)
    # Where nothing is scored, references may be missing in single rows, as they are in Spec-Bench.
    if config.scored:
        reference = column("reference_column")
    else:
        reference = record.get(config.reference_column) if config.reference_column else None
    prompt = text_of(column("prompt_column"), config, number, "prompt_column")
    if config.template is not None:
        try:
            prompt = config.template.format(**{**record, "prompt": prompt})
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"dataset.template={config.template!r}: {error!r}; it may use {{prompt}}, {', '.join(map(str, record))}"
            ) from error
    if not prompt.strip():
        raise ConfigError(f"dataset.prompt_column={config.prompt_column}: row {number + 1} of {where(config)} is empty")
    return Row(identifier, prompt, None if not reference else first_text(reference), category)


def first_text(value: Any) -> str:
    return str(value[0]) if isinstance(value, list) else str(value)


def text_of(value: Any, config: Dataset, number: int, key: str) -> str:
    """A string, or the first of a list of turns."""
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str):
        raise ConfigError(
            f"dataset.{key}={getattr(config, key)}: row {number + 1} of {where(config)} holds a {type(value).__name__};"
            " it has to be text, or a list of turns"
        )
    return unicode(value, f"dataset.{key}={getattr(config, key)}: row {number + 1} of {where(config)}")


def unicode(text: str, what: str) -> str:
    """The text, if it can be written as UTF-8: JSON may hold halves of characters. Raises ConfigError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what} is no Unicode text: half a character at position {error.start + 1}; repair or leave it out"
        ) from None
    return text


History = list[tuple[str, str]]  # earlier turns of a conversation: what was asked and what was answered


def chat_text(tokenizer: Any, row: Row, system: str | None = None, history: History | None = None) -> str:
    """The prompt as the model was taught to read it: the tokenizer's chat template, or plain where it has none."""
    turns = [text for turn in history or [] for text in turn] + [row.prompt]
    if getattr(tokenizer, "chat_template", None) is None:
        return "\n\n".join(turns if system is None else [system, *turns])
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages += [
        {"role": "assistant" if place % 2 else "user", "content": content} for place, content in enumerate(turns)
    ]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def prompt_ids(tokenizer: Any, row: Row, config: Dataset, history: History | None = None) -> list[int]:
    """Token ids of the prompt. A chat template brings its own special tokens; plain text gets the tokenizer's."""
    chat = config.chat and getattr(tokenizer, "chat_template", None) is not None
    text = "\n\n".join([text for turn in history or [] for text in turn] + [row.prompt])
    if config.chat:
        text = chat_text(tokenizer, row, config.system, history)
    return tokenizer(text, add_special_tokens=not chat)["input_ids"]
