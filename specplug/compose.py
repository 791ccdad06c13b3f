"""From Hydra to the dataclasses of config.py: the choices that are code, and `load()`. No torch in here, so a Tab press is quick.

Compose -> check (checks.py) -> plain dataclasses. No DictConfig leaves this module.
"""

import difflib
import re
import threading
from dataclasses import fields, is_dataclass

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specplug.checks import check
from specplug.config import (
    Adaptive,
    Auto,
    Bench,
    Block,
    Calibrate,
    Certify,
    Compare,
    Confidence,
    Config,
    ConfigError,
    Distill,
    Evaluate,
    Fixed,
    Generate,
    Lookahead,
    Plain,
    Prune,
    Rounds,
    Sweep,
    Theory,
    Token,
    Train,
    Tree,
    Walk,
)

CONF_MODULE = "specplug.conf"

OPTIONS: dict[str, tuple[type, ...]] = {
    "verify": (Token, Block, Walk),
    "schedule": (Fixed, Confidence, Adaptive, Tree),
    "engine": (Auto, Rounds, Lookahead, Plain),
    "recipe": (Evaluate, Bench, Sweep, Calibrate, Certify, Compare, Generate, Theory, Train, Distill, Prune),
}


def register() -> None:
    """Put the schema and the choices that are code into Hydra's store. Choices that are data lie in conf/."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, options in OPTIONS.items():
        for option in options:
            store.store(group=group, name=option.__name__.lower(), node=option)


register()
_COMPOSING = threading.Lock()  # Hydra's state is global


def load(*overrides: str) -> Config:
    """Compose the shipped configuration with overrides, as the command line does: `load("pair=tiny", "seed=1")`.

    Works inside an application that uses Hydra itself, and from several threads. Raises ConfigError.
    """
    with _COMPOSING:
        before = GlobalHydra.instance()
        theirs, before.hydra = before.hydra, None
        try:
            with hydra.initialize_config_module(CONF_MODULE, version_base="1.3"):
                composed = hydra.compose("config", list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(readable(error)) from error
        finally:
            GlobalHydra.instance().hydra = theirs
    return to_config(composed)


def to_config(composed: DictConfig) -> Config:
    """Check a composed configuration and turn it into plain dataclasses. Raises ConfigError with all problems."""
    problems = unknown_keys(composed)
    if not problems:
        problems = [f"{key}=???: has to be given; add {key}=VALUE" for key in sorted(OmegaConf.missing_keys(composed))]
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(readable(error)) from error
    assert isinstance(config, Config)
    check(config)
    return config


def unknown_keys(node: DictConfig, path: str = "") -> list[str]:
    """Keys that the schema does not have: `+key=value` opens Hydra's structs, and nothing else would notice."""
    node_type = OmegaConf.get_type(node)
    if not (isinstance(node_type, type) and is_dataclass(node_type)):
        return []
    known = [each.name for each in fields(node_type)]
    problems = []
    for key in map(str, node):
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {path}{near[0]}?" if near else f"allowed are {', '.join(known)}"
            problems.append(f"{path}{key}: unknown key; {hint}")
        elif not OmegaConf.is_missing(node, key):
            child = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none():
                problems += unknown_keys(child, f"{path}{key}.")
    return problems


def readable(error: Exception) -> str:
    """What Hydra and OmegaConf have to say, without the traceback and without their lines on where they keep it."""
    parts = [str(error)]
    if error.__cause__ is not None:
        parts.append(str(error.__cause__))
    lines: list[str] = []
    for line in map(str.strip, "\n".join(parts).splitlines()):
        noise = (
            "full_key:", "object_type=", "reference_type=", "Check available options", "Set the environment",
            "Config search path", "provider=",
        )  # fmt: skip
        if line and not line.startswith(noise) and line not in lines:
            lines.append(line)
    text = " ".join(lines)
    return f"{text}{_who_has_it(text)}"


def _who_has_it(text: str) -> str:
    """A key that another choice of the same group has: which one."""
    found = re.search(r"Key '(\w+)' not in '(\w+)'", text)
    if found is None:
        return ""
    key, chosen = found.groups()
    for group, options in OPTIONS.items():
        if chosen in [option.__name__ for option in options]:
            has = [o.__name__.lower() for o in options if key in [each.name for each in fields(o)]]
            return "".join(f"; {group}={name} has it" for name in has)
    return ""
