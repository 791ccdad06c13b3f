"""Rows of a data set: the turns of its conversations, with references and categories, by the columns that the config names.

A row is one user turn. Further turns of a conversation are rows that follow others. Records come from sources.py. Knows
nothing about models.
"""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from specplug.config import ConfigError, Dataset, Metric
from specplug.sources import Record, Template, flat, lookup, read_file, records, shuffled, stream_hub, where

log = logging.getLogger(__name__)

# Who speaks, in chat and ShareGPT files.
USERS = ("user", "human")
ASSISTANTS = ("assistant", "gpt", "chatgpt", "bing", "bard")


@dataclass(frozen=True)
class Row:
    """`prompt` is empty for plain text, which then is the `reference`."""

    id: str
    prompt: str
    reference: str | None
    category: str = "all"
    follows: str | None = None  # id of the turn before, whose answer belongs to the conversation
    others: tuple[str, ...] = ()  # further references that are as good
    system: str | None = None  # the conversation's own system message
    tests: str | None = None  # what a program has to pass, itself a program
    head: str = ""  # what a program begins with


def load_rows(
    config: Dataset, limit: int | None = None, held_out: bool = False, all_turns: bool = False, tokenizer: Any = None
) -> list[Row]:
    """At most `limit` conversations after all filters. Raises ConfigError in one line if there are none or one is bad.

    `held_out` is for the generated corpus: rows of the half that no training set contains. `all_turns`: the first turn of
    each conversation and those that follow, instead of the first alone.
    """
    found = conversations(config, limit, held_out, tokenizer)
    return [row for turns in found for row in (turns if all_turns else turns[:1])]


def conversations(
    config: Dataset, limit: int | None = None, held_out: bool = False, tokenizer: Any = None
) -> Iterator[list[Row]]:
    """The turns of one conversation after the other, none of them kept: what `load_rows` has in a list.

    With a tokenizer, `dataset.min_prompt_tokens` and `max_prompt_tokens` are judged by the first turn.
    """
    seen: dict[str, int] = {}
    place = 0
    for turns in iterate(config, held_out):
        if tokenizer is not None and not fits(tokenizer, turns[0], config):
            continue
        for row in turns:
            if row.id in seen:
                raise ConfigError(
                    f"dataset.id_column={config.id_column}: the id {row.id!r} stands twice (rows {seen[row.id] + 1} and "
                    f"{place + 1}); ids have to be unique, or leave the column out and rows are numbered"
                )
            seen[row.id] = place
            place += 1
        yield turns
        limit = None if limit is None else limit - 1
        if limit == 0:
            break
    if not place:
        chosen = f" in the categories {', '.join(config.categories)}" if config.categories else ""
        if tokenizer is not None:
            chosen += (
                f" of {config.min_prompt_tokens or 0} to {config.max_prompt_tokens or 'any number of'} prompt tokens"
            )
        raise ConfigError(f"dataset={config.name}: has no rows{chosen}; {where(config)} has to hold at least one")


def iterate(config: Dataset, held_out: bool = False) -> Iterator[list[Row]]:
    """The turns of one conversation after the other, behind the few-shot examples."""
    source = enumerate(records(config, held_out))
    prefix = ""
    if config.few_shot:
        chosen = examples(config)
        if chosen is None:  # the head of the set, which then is not asked
            chosen = [record for _, record in itertools.islice(source, config.few_shot)]
        if len(chosen) < config.few_shot:
            raise ConfigError(
                f"dataset.few_shot={config.few_shot}: there are {len(chosen)} rows to take examples from; lower it"
            )
        prefix = "".join(example(config, record, number) for number, record in enumerate(chosen))
    if config.shuffle:
        source = shuffled(source, config.shuffle_seed, config.shuffle_buffer)  # type: ignore[assignment]
    left_out = 0
    for number, record in source:
        turns = to_rows(config, record, number, prefix)
        left_out += not turns
        if turns and (not config.categories or turns[0].category in config.categories):
            yield turns
    if left_out:
        log.warning("dataset=%s: %d conversations without a message of a user are left out", config.name, left_out)


def examples(config: Dataset) -> list[Record] | None:
    """Records for few-shot examples from a file or split of their own; None if there is none."""
    if config.few_shot_path is not None:
        return list(itertools.islice(read_file(config.few_shot_path, "dataset.few_shot_path"), config.few_shot))
    if config.few_shot_split is not None:
        return list(itertools.islice(stream_hub(config, config.few_shot_split), config.few_shot))
    return None


def example(config: Dataset, record: Record, number: int) -> str:
    """One solved example in front of a prompt: its prompt, its reference and an empty line."""
    row = to_row(config, record, number)
    if row.reference is None:
        raise ConfigError(
            f"dataset.few_shot={config.few_shot}: row {number + 1} of the examples has no reference to show; name a column"
            " with dataset.reference_column, or leave few_shot out"
        )
    return f"{row.prompt}{' ' if row.prompt.endswith(':') else chr(10)}{row.reference}\n\n"


def fits(tokenizer: Any, row: Row, config: Dataset) -> bool:
    length = len(prompt_ids(tokenizer, row, config))
    return (config.min_prompt_tokens or 0) <= length <= (config.max_prompt_tokens or length)


def to_rows(config: Dataset, record: Record, number: int, prefix: str = "") -> list[Row]:
    """One record as the turns of a conversation, most have one: the first by `to_row`, the others as they stand.

    `prefix`: few-shot examples before the first turn. Empty for a list of messages in which no user says anything.
    """
    value = None if config.text_column else column(config, record, number, "prompt_column")
    asked = texts_of(value, USERS) if messages(value) else value
    if messages(value) and not asked:
        return []
    turns = [to_row(config, record, number, prefix)]
    for text in asked[1:] if isinstance(asked, list) else []:
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{at(config, 'prompt_column', number)} has a turn that is no text; each has to be one")
        unicode(text, at(config, "prompt_column", number))
        first, before = turns[0], turns[-1]
        identifier = f"{first.id}.{len(turns) + 1}"
        turns.append(Row(identifier, text, None, first.category, before.id, system=first.system))
    if len(turns) > 1 and not messages(value):  # a reference for each turn, not several for the first
        references = [turns[0].reference, *turns[0].others]
        turns = [
            replace(row, reference=references[k] if k < len(references) else None, others=())
            for k, row in enumerate(turns)
        ]
    return turns


def column(config: Dataset, record: Record, number: int, key: str) -> Any:
    """What the record has in the column that `key` names. Raises ConfigError that names the columns there are."""
    name = getattr(config, key)
    if name is None:
        return None
    try:
        return lookup(record, name)
    except KeyError:
        raise ConfigError(
            f"{at(config, key, number)} has no such column; it has {', '.join(map(str, record))}"
        ) from None


def to_row(config: Dataset, record: Record, number: int, prefix: str = "") -> Row:
    """One record by the columns that the config names. Raises ConfigError."""
    identifier = str(number) if config.id_column is None else str(column(config, record, number, "id_column"))
    category = text_or(column(config, record, number, "category_column"), "all")
    if config.text_column is not None:
        text = text_of(column(config, record, number, "text_column"), config, number, "text_column")
        return Row(identifier, "", text, category)
    references = references_of(config, record, number)
    value = column(config, record, number, "prompt_column")
    prompt = text_of(value, config, number, "prompt_column")
    if config.placeholder is not None and prompt.startswith(config.placeholder):
        raise ConfigError(
            f"dataset={config.name}: row {number + 1} of {where(config)} holds a placeholder, not a prompt; fill the set in"
            " with the tool that its page names and take the result with dataset.path=FILE"
        )
    if config.template is not None:
        prompt = filled(config, "template", {**record, "prompt": prompt}).rstrip()
    if not prompt.strip():
        raise ConfigError(f"{at(config, 'prompt_column', number)} is empty")
    system = first_text(value, ("system",), "a system message", config, number, "prompt_column")
    row = Row(
        identifier,
        prefix + prompt,
        references[0] if references else None,
        category,
        others=tuple(references[1:]),
        system=system,
        tests=None if config.tests is None else filled(config, "tests", record),
        head=text_or(column(config, record, number, "head_column"), ""),
    )
    for key, texts in {
        "id_column": [row.id],
        "template": [prompt],
        "reference_column": references,
        "category_column": [category],
        "prompt_column": [row.system or ""],
        "tests": [row.tests or ""],
        "head_column": [row.head],
    }.items():
        for text in texts:
            unicode(text, at(config, key, number))
    return row


def references_of(config: Dataset, record: Record, number: int) -> list[str]:
    """The row's reference and the others that are as good; of a conversation the first answer."""
    if config.reference_column is None:
        return []
    try:
        value = lookup(record, config.reference_column)
    except KeyError:
        # Where nothing is scored, references may be missing in single rows, as they are in Spec-Bench.
        if config.metric not in (Metric.none, Metric.pass_at_1):
            column(config, record, number, "reference_column")
        return []
    if not messages(value):
        return flat(value)
    answer = first_text(value, ASSISTANTS, "an answer", config, number, "reference_column")
    return [] if answer is None else [answer]


def first_text(value: Any, who: tuple[str, ...], what: str, config: Dataset, number: int, key: str) -> str | None:
    """What they say first in a conversation; None if they say nothing, or if this is none."""
    said = texts_of(value, who) if messages(value) else []
    if said and not isinstance(said[0], str):
        raise ConfigError(f"{at(config, key, number)} has {what} that is a {type(said[0]).__name__}; it has to be text")
    return said[0] if said else None


def at(config: Dataset, key: str, number: int) -> str:
    """How messages name a cell: the setting, and the row counted from 1."""
    return f"dataset.{key}={getattr(config, key)}: row {number + 1} of {where(config)}"


def text_or(value: Any, otherwise: str) -> str:
    """A cell as text; `otherwise` for one that is missing or empty."""
    return otherwise if value in (None, "") else str(value)


def filled(config: Dataset, key: str, record: Record) -> str:
    """A template with the record's columns in it. Raises ConfigError."""
    template = getattr(config, key)
    try:
        return Template().format(template, **record)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise ConfigError(f"dataset.{key}={template!r}: {error!r}; it may use {', '.join(map(str, record))}") from error


def messages(value: Any) -> bool:
    """Is it a conversation as chat files have it: role and content, or from and value?"""
    if not isinstance(value, list) or not value:
        return False
    return all(
        isinstance(each, dict) and ({"role", "content"} <= each.keys() or {"from", "value"} <= each.keys())
        for each in value
    )


def texts_of(value: Any, names: tuple[str, ...]) -> list[Any]:
    """What those said, in order, empty messages left out."""
    said = [(each.get("role", each.get("from")), each.get("content", each.get("value"))) for each in value]
    return [text for who, text in said if who in names and text]


def text_of(value: Any, config: Dataset, number: int, key: str) -> str:
    """A string, or the first of a list of turns."""
    if messages(value):
        value = texts_of(value, USERS)
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str):
        raise ConfigError(
            f"{at(config, key, number)} holds a {type(value).__name__}; it has to be text, or a list of turns"
        )
    return unicode(value, at(config, key, number))


def unicode(text: str, what: str) -> str:
    """The text, if it can be written as UTF-8: JSON may hold halves of characters. Raises ConfigError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what} is no Unicode text: half a character at position {error.start + 1}; repair or leave it out"
        ) from None
    return text


def pad_of(tokenizer: Any) -> int:
    """The id to pad with: the tokenizer's own, else its end of sequence, else 0."""
    pad: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    return pad


def until_end(ids: list[int], eos: int | list[int] | None) -> list[int]:
    """New tokens up to and with the first that ends a text: what `generate` adds behind it is padding."""
    ends = eos if isinstance(eos, list) else [eos]
    return ids[: next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))]


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
        text = chat_text(tokenizer, row, row.system if row.system is not None else config.system, history)
    return tokenizer(text, add_special_tokens=not chat)["input_ids"]
