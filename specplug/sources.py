"""Records of a data set, one dict a row: from a JSONL, JSON, Parquet, CSV or TSV file, a hub name, or the project's corpus.

All but JSON arrays are streamed. Knows nothing about what the columns mean.
"""

import glob
import gzip
import json
import logging
import random
import string
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from specplug import corpus
from specplug.config import ConfigError, Dataset, first_line

ASSETS = Path(__file__).parent / "assets"
ASSET_PREFIX = "asset:"
LINES = (".jsonl", ".json", ".ndjson", ".jsonl.gz")
ENCODING = "utf-8-sig"  # Windows puts a mark of the byte order in front
TABLES = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
Record = dict[str, Any]


def where(config: Dataset) -> str:
    return config.path or config.hub or "the corpus"


def records(config: Dataset, held_out: bool = False) -> Iterator[Record]:
    """Every record in its order. Raises ConfigError in one line where something cannot be read."""
    if config.corpus:
        yield from corpus.generate(config.corpus_seed + held_out, config.corpus_size, held_out)
    elif config.path is not None:
        yield from read_file(config.path)
    elif config.hub is not None:
        yield from stream_hub(config, config.split)
    else:
        raise ConfigError(f"dataset={config.name}: give dataset.path=FILE (JSONL, Parquet, CSV) or dataset.hub=NAME")


def read_file(path: str, key: str = "dataset.path") -> Iterator[Record]:
    file = locate(path, key)
    if file.suffix in TABLES:
        yield from read_table(file)
    else:
        yield from read_lines(file)


def locate(path: str, key: str = "dataset.path") -> Path:
    file = ASSETS / path.removeprefix(ASSET_PREFIX) if path.startswith(ASSET_PREFIX) else Path(path).expanduser()
    kinds = (*LINES, *TABLES)
    if file.is_dir():
        raise ConfigError(f"{key}={path}: is a folder; give a file")
    if not file.is_file():
        raise ConfigError(f"{key}={path}: no such file")
    if not file.name.endswith(kinds):
        raise ConfigError(f"{key}={path}: not a file of a known kind; allowed endings are {', '.join(kinds)}")
    return file


def read_lines(file: Path) -> Iterator[Record]:
    """One object a line; or, in a .json file, one array of objects, which is read whole."""
    try:
        with opened(file) as lines:
            if file.suffix == ".json" and next((line for line in lines if line.strip()), "").lstrip().startswith("["):
                lines.seek(0)
                yield from read_array(file, lines)
                return
            lines.seek(0)
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
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
    except (OSError, EOFError, zlib.error) as error:  # a gzip file that was cut off, or damaged
        raise ConfigError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or first_line(error)}") from error


def opened(file: Path) -> TextIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding=ENCODING)
    return file.open(encoding=ENCODING)


def read_array(file: Path, lines: TextIO) -> Iterator[Record]:
    try:
        array = json.load(lines)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file}: not JSON ({error}); it has to be one array of objects, or an object a line"
        ) from None
    for number, record in enumerate(array, start=1):
        if not isinstance(record, dict):
            raise ConfigError(f"{file}, entry {number}: is a {type(record).__name__}; each entry has to be one object")
        yield record


def read_table(file: Path) -> Iterator[Record]:
    """Parquet, CSV or TSV through `datasets`. Cells of CSV and TSV are text, whatever they look like."""
    what = f"{file}: cannot be read as {file.suffix.removeprefix('.').upper()}"
    options: dict[str, Any] = {}
    if TABLES[file.suffix] == "csv":
        import datasets
        import pandas

        options = {"keep_default_na": False, "sep": "\t" if file.suffix == ".tsv" else ","}
        try:  # what `datasets` reads with: it gives names to columns that have none, or one that is taken
            head = pandas.read_csv(file, nrows=1, dtype=str, **options)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: not UTF-8 text ({error.reason}); save it as UTF-8") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{what}: {first_line(error)}; mend the file") from error
        # Where rows have more cells than the header, pandas takes their first cells for names of the rows.
        if len(head) and not isinstance(head.index, pandas.RangeIndex):
            raise ConfigError(f"{what}: its first row has more cells than the header; mend the file")
        options["features"] = datasets.Features({name: datasets.Value("string") for name in head.columns})
    yield from streamed(
        TABLES[file.suffix], what, "mend the file", data_files=glob.escape(str(file)), split="train", **options
    )


def stream_hub(config: Dataset, split: str) -> Iterator[Record]:
    what = f"dataset.hub={config.hub}: cannot be read"
    way_out = "with a local copy use dataset.path=FILE"
    yield from streamed(config.hub, what, way_out, config.subset, split=split, revision=config.revision)


def streamed(source: Any, what: str, way_out: str, *arguments: Any, **options: Any) -> Iterator[Record]:
    import datasets

    for name in ("datasets.packaged_modules", "datasets.iterable_dataset"):  # it logs what it raises
        logging.getLogger(name).setLevel(logging.CRITICAL)
    failures = (OSError, ValueError, RuntimeError, TypeError, datasets.exceptions.DatasetsError)
    try:
        yield from datasets.load_dataset(source, *arguments, streaming=True, **options)
    except failures as error:
        raise ConfigError(f"{what}: {first_line(error)}; {way_out}") from error


def shuffled(source: Iterator[Any], seed: int, size: int) -> Iterator[Any]:
    """In an order drawn from the seed: of `size` that are held, one is given out and the next takes its place."""
    rng = random.Random(seed)
    held: list[Any] = []
    for item in source:
        if len(held) < size:
            held.append(item)
            continue
        place = rng.randrange(size)
        yield held[place]
        held[place] = item
    rng.shuffle(held)
    yield from held


def lookup(record: Any, name: str) -> Any:
    """A column by its name. Dots go into nested ones, and through the entries of lists. Raises KeyError."""
    if isinstance(record, dict):
        if name in record:
            return record[name]
        first, dot, rest = name.partition(".")
        if dot and first in record:
            return lookup(record[first], rest)
    if isinstance(record, list):
        return [lookup(each, name) for each in record]
    raise KeyError(name)


def flat(value: Any) -> list[str]:
    """All texts in a value, however deep in lists; nothing for None and for empty ones."""
    if isinstance(value, list):
        return [text for each in value for text in flat(each)]
    return [] if value in (None, "") else [str(value)]


class Template(string.Formatter):
    """`{column}` and `{nested.column}`; lists as one text a line. Attributes of objects are out of reach."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        value = lookup(kwargs, field_name)
        return "\n".join(flat(value)) if isinstance(value, list) or value is None else value, field_name
