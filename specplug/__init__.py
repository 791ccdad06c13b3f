"""Exact speculative decoding for generation code that already exists.

import specplug
plugin = specplug.attach(pipeline_or_model, draft="name-of-a-smaller-model")

Importing this package imports neither torch nor transformers; the names below are loaded when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "attach": "specplug.attaching",
    "detach": "specplug.attaching",
    "SpeculativeProcessor": "specplug.plugin",
    "attached": "specplug.attaching",
    "pipeline": "specplug.pipelines",
    "load": "specplug.compose",
    "Config": "specplug.config",
    "ConfigError": "specplug.config",
    "Stats": "specplug.stats",
}
_MODULES = ("theory", "trace", "tree", "verify")
__all__ = [
    "Config",
    "ConfigError",
    "SpeculativeProcessor",
    "Stats",
    "__version__",
    "attach",
    "attached",
    "detach",
    "load",
    "pipeline",
    "theory",
    "trace",
    "tree",
    "verify",
]

if TYPE_CHECKING:
    from specplug import theory, trace, tree, verify
    from specplug.attaching import attach, attached, detach
    from specplug.compose import load
    from specplug.config import Config, ConfigError
    from specplug.pipelines import pipeline
    from specplug.plugin import SpeculativeProcessor
    from specplug.stats import Stats


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"specplug.{name}")
    raise AttributeError(f"module 'specplug' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
