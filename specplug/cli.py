"""The `specplug` command: Hydra composes, `check` looks it over, a recipe runs. No torch until a recipe is chosen."""

import errno
import importlib
import logging
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from specplug import __version__
from specplug.compose import CONF_MODULE, readable, to_config
from specplug.config import Config, ConfigError, choice

STOPPED = 130  # what a shell reports after Ctrl-C


@hydra.main(version_base="1.3", config_path=f"pkg://{CONF_MODULE}", config_name="config")
def compose_and_run(composed: DictConfig) -> None:
    try:
        code = run_recipe(to_config(composed), Path(HydraConfig.get().runtime.output_dir))
    except ConfigError as error:  # caught in here, before Hydra has something to add
        fail(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            raise
        folder = HydraConfig.get().runtime.output_dir
        fail(f"{folder}: cannot be written: {error.strerror}; make room, then go on with: specplug resume={folder}")
    except KeyboardInterrupt:
        print("specplug: interrupted", file=sys.stderr)
        sys.exit(STOPPED)
    if code:
        sys.exit(code)


def run_recipe(config: Config, folder: Path) -> int:
    """Run the chosen recipe in the folder (of the run to go on with, if `resume` names one); returns its exit code."""
    logging.captureWarnings(True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    recipe = importlib.import_module(f"specplug.recipes.{choice(config.recipe)}")
    return recipe.run(config, Path(config.resume) if config.resume is not None else folder)


def main() -> None:
    if sys.argv[1:] in (["--version"], ["-V"]):
        print(f"specplug {__version__}")
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, not to a traceback with advice to set this
    try:
        sys.argv[1:] = expand_resume([quote_prompt(each) for each in sys.argv[1:]])
        compose_and_run()
    except ConfigError as error:
        fail(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        fail(readable(error))
    except OSError as error:
        # Hydra makes the run folder before anything of ours runs.
        if error.filename is None:
            raise
        fail(f"{error.filename}: {error.strerror}; the run folder can be chosen with hydra.run.dir=DIR")


def fail(problems: str) -> NoReturn:
    for line in problems.splitlines():
        print(f"specplug: {line}", file=sys.stderr)
    sys.exit(1)


def quote_prompt(argument: str) -> str:
    """A prompt is text: commas, braces and quotes in it are no Hydra syntax. One that is quoted already stays."""
    key, _, value = argument.partition("=")
    if key != "recipe.prompt" or (len(value) > 1 and value[0] in "'\"" and value[-1] == value[0]):
        return argument
    value = re.sub(r'(\\*)"', r"\1\1\"", value)  # Hydra reads backslashes as escapes only before a quote
    value = re.sub(r"(\\+)$", r"\1\1", value)
    return f'{key}="{value}"'


def expand_resume(arguments: list[str]) -> list[str]:
    """`specplug resume=DIR` alone stands for the command line that began the run; its files go on in DIR."""
    folders = [each.removeprefix("resume=") for each in arguments if each.startswith("resume=")]
    if len(folders) != 1 or folders[0] in ("", "null"):
        return arguments
    folder = Path(folders[0])
    began = folder / ".hydra" / "overrides.yaml"
    if not (folder / "config.json").is_file() and not began.is_file():
        raise ConfigError(f"resume={folder}: holds no run to go on with")
    others = [each for each in arguments if not each.startswith("resume=")]
    if not others and began.is_file():
        others = [each for each in yaml.safe_load(began.read_text()) or [] if not each.startswith("resume=")]
    # Hydra would make a new folder, and write over what is in .hydra.
    return [*others, f"resume={folder}", f"hydra.run.dir={folder}", "hydra.output_subdir=null"]


if __name__ == "__main__":
    main()
