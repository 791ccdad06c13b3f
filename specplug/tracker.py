"""Where the numbers of a run go besides its folder: TensorBoard, trackio or Weights & Biases, each imported only if asked for."""

import importlib
import logging
from pathlib import Path
from typing import Any

from specplug.config import Config, ConfigError, TrackerName, first_line, to_dict
from specplug.runs import flatten

log = logging.getLogger(__name__)

PROJECT = "specplug"
PACKAGES = {TrackerName.tensorboard: "tensorboard", TrackerName.trackio: "trackio", TrackerName.wandb: "wandb"}


class Tracker:
    """Keeps nothing. A run goes on where a tracker fails: what it is told lies in the run folder all the same."""

    def __init__(self) -> None:
        self.failed = False

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Numbers in nested dicts, under names with slashes; whatever is no number is left out."""
        if not self.failed:
            try:
                self.send(step, numbers(values))
            except Exception as error:  # a library of others, and often a network
                self.failed = True
                log.warning("the tracker fails and is left alone: %s", first_line(error))

    def finish(self) -> None:
        try:
            self.close()
        except Exception as error:
            log.warning("the tracker fails at its end: %s", first_line(error))

    def send(self, step: int, values: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard(Tracker):
    """Event files in the run folder: tensorboard --logdir runs"""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def send(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Module(Tracker):
    """trackio and wandb, whose functions have the same names."""

    def __init__(self, library: Any, **arguments: Any) -> None:
        super().__init__()
        self.library = library
        library.init(project=PROJECT, **arguments)

    def send(self, step: int, values: dict[str, float]) -> None:
        self.library.log(values, step=step)

    def close(self) -> None:
        self.library.finish()


def check_installed(config: Config) -> None:
    """Raise ConfigError before a run begins, not in its middle."""
    package = PACKAGES.get(config.tracker)
    if package is not None:
        try:
            importlib.import_module(package)
        except ImportError:
            raise ConfigError(
                f"tracker={config.tracker.name}: needs the package {package}; pip install {package}, or take tracker=none"
            ) from None


def start(config: Config, folder: Path) -> Tracker:
    """Raises ConfigError if the tracker cannot begin."""
    check_installed(config)
    try:
        if config.tracker is TrackerName.tensorboard:
            return TensorBoard(folder)
        if config.tracker in PACKAGES:
            given: dict[str, Any] = {"name": "/".join(folder.parts[-2:]), "config": flatten(to_dict(config))}
            if config.tracker is TrackerName.wandb:
                given["dir"] = str(folder)
            return Module(importlib.import_module(PACKAGES[config.tracker]), **given)
    except Exception as error:
        raise ConfigError(
            f"tracker={config.tracker.name}: cannot begin: {first_line(error)}; take tracker=none to go without"
        ) from error
    return Tracker()


def numbers(values: dict[str, Any], path: str = "") -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= numbers(value, f"{path}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[f"{path}{key}"] = float(value)
    return flat
