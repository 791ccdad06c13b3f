"""A run folder: config.json and environment.json, samples.jsonl flushed sample by sample, and going on with a run.

Reports are made from these files alone, see report.py.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specplug.config import Config, ConfigError, to_dict

PACKAGES = (
    "specplug", "torch", "transformers", "tokenizers", "hydra-core", "omegaconf", "bitsandbytes", "datasets",
    "matplotlib",
)  # fmt: skip
# By which a run that goes on may differ from the one that was begun: a finished run may be taken further.
MAY_DIFFER = {"resume", "recipe.limit", "recipe.trace", "recipe.on_error", "tracker"}


class Run:
    """One folder. `done`: samples by id, those of an earlier, interrupted run too, and where in the file each begins.

    Failed ones are not done: going on tries them again, and what is written of a sample last counts.
    """

    def __init__(self, folder: Path, config: Config, environment: dict[str, Any]) -> None:
        self.folder, self.samples_file = folder, folder / "samples.jsonl"
        begin(folder, config, environment)
        drop_partial_line(self.samples_file)
        self.done: dict[str, int] = {}
        place = 0
        for number, line in enumerate(whole_lines(self.samples_file), start=1):
            sample = parsed(line, self.samples_file, number)
            if "id" not in sample:
                raise ConfigError(
                    f"{self.samples_file}, line {number}: has no id; remove the line, and its prompt is asked again"
                )
            if "error" not in sample:
                self.done[sample["id"]] = place
            place += len(line)
        self.samples = self.samples_file.open("ab")

    def append(self, sample: dict[str, Any]) -> None:
        """On disk when this returns: a kill later loses nothing."""
        place = self.samples.tell()
        self.samples.write(json.dumps(sample, ensure_ascii=False).encode() + b"\n")
        self.samples.flush()
        os.fsync(self.samples.fileno())
        if "error" not in sample:
            self.done[sample["id"]] = place

    def read(self, identifier: str) -> dict[str, Any]:
        """A sample that is done, from the file: a long run does not fit into memory. Raises KeyError."""
        with self.samples_file.open("rb") as file:
            file.seek(self.done[identifier])
            return json.loads(file.readline())

    def close(self) -> None:
        self.samples.close()


_LOCKS: dict[Path, FileLock] = {}  # held until this process ends, however it ends


def claim(folder: Path) -> None:
    """Keep other processes out of the folder. Raises ConfigError if one is at work in it."""
    lock = _LOCKS.setdefault(folder.resolve(), FileLock(folder / ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"{folder}: another process is at work in it; wait for it, or choose another folder with hydra.run.dir=DIR"
        ) from None


def begin(folder: Path, config: Config, environment: dict[str, Any]) -> None:
    """Write down what is run and where; or, with `resume`, make sure that it is what was begun. Raises ConfigError."""
    if config.resume is not None:
        refuse_other_config(folder, config)
        claim(folder)
    elif (folder / "config.json").exists():
        raise ConfigError(f"{folder}: holds a run already; take resume={folder} or another hydra.run.dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim(folder)
        write_json(folder / "config.json", to_dict(config))
        write_json(folder / "environment.json", environment)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written: {error.strerror}; choose another with hydra.run.dir=DIR"
        ) from error


def append_line(file: Path, record: dict[str, Any]) -> None:
    """One line of JSON more."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_samples(file: Path) -> list[dict[str, Any]]:
    return list(each_sample(file))


def each_sample(file: Path) -> Iterator[dict[str, Any]]:
    """One after the other, none of them kept. Raises ConfigError for a line that is none."""
    for number, line in enumerate(whole_lines(file), start=1):
        if line.strip():
            yield parsed(line, file, number)


def parsed(line: bytes, file: Path, number: int) -> dict[str, Any]:
    """The object of one line. Raises ConfigError: a disk or an editor may have spoiled it."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ConfigError(f"{file}, line {number}: not a JSON object; remove the line, and its prompt is asked again")
    return record


def whole_lines(file: Path) -> Iterator[bytes]:
    """Without what a run killed while writing may leave at the end; nothing of a file that is not there."""
    if file.exists():
        with file.open("rb") as lines:
            yield from (line for line in lines if line.endswith(b"\n"))


def drop_partial_line(file: Path) -> None:
    if file.exists():
        whole = file.read_bytes().rpartition(b"\n")
        with file.open("r+b") as samples:
            samples.truncate(len(whole[0]) + len(whole[1]))


def refuse_other_config(folder: Path, config: Config) -> None:
    """Raise ConfigError that names every key by which this configuration is not the one the run began with."""
    try:
        saved = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"resume={folder}: holds no run to go on with (no readable config.json in it)") from error
    before, now = flatten(saved), flatten(to_dict(config))
    different = [
        f"{key}={now.get(key)} (the run has {before.get(key)})"
        for key in sorted(before.keys() | now.keys())
        if key not in MAY_DIFFER and before.get(key) != now.get(key)
    ]
    if different:
        raise ConfigError(f"resume={folder}: was begun with another configuration: {'; '.join(different)}")


def flatten(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{path}{key}.")
        else:
            flat[f"{path}{key}"] = value
    return flat


def write_json(file: Path, content: Any) -> None:
    """Whole or not at all."""
    partial = file.with_suffix(file.suffix + ".partial")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(file)


def environment_of(model: Any, batch_size: int = 1) -> dict[str, Any]:
    """Where and with what this model runs."""
    return describe_environment(str(model.device), str(model.dtype).removeprefix("torch."), batch_size)


def describe_environment(device: str, dtype: str, batch_size: int = 1) -> dict[str, Any]:
    """What a figure depends on besides the configuration."""
    import torch

    cuda = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return {
        "device": cuda or f"{device} ({cpu_name()})",
        "dtype": dtype,
        "batch_size": batch_size,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: package_version(name) for name in PACKAGES},
        "commit": git_commit(),
        "command": ["specplug", *sys.argv[1:]],
    }


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def git_commit() -> str | None:
    """Commit of the checkout that this package runs from, "+" if it was changed; None outside a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "runs.py") is None:  # installed inside somebody else's checkout
        return None
    commit = git("rev-parse", "--short=12", "HEAD")
    return commit and commit + ("+" if git("status", "--porcelain", "--", str(here)) else "")
