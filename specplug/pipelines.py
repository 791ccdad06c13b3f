"""From a configuration to a text-generation pipeline with the plugin attached."""

from typing import Any

import transformers

from specplug.attaching import attach
from specplug.compose import load
from specplug.config import Config, ConfigError, Drafter
from specplug.models import load_target, load_tokenizer
from specplug.plugin import SpeculativeProcessor


def pipeline(*overrides: str) -> transformers.Pipeline:
    """`specplug.pipeline("pair=tiny")`: what `load` composes, as a pipeline that decodes speculatively.

    Sampling values of the configuration become the pipeline's defaults. The plugin: `specplug.attached(pipe)`.
    """
    return pipeline_from(load(*overrides))[0]


def pipeline_from(config: Config) -> tuple[transformers.Pipeline, SpeculativeProcessor]:
    if config.draft.drafter is Drafter.none:
        raise ConfigError("draft=none: there is nothing to draft with; name a draft, or take draft=lookup")
    model, tokenizer = load_target(config.target)
    defaults: Any = generate_arguments(config)
    # A pipeline moves its model to the first GPU unless it is told where the model is, and must not be where accelerate placed it.
    if getattr(model, "hf_device_map", None) is None:
        defaults["device"] = model.device
    pipe = transformers.TextGenerationPipeline(model=model, tokenizer=tokenizer, **defaults)
    try:
        return pipe, attach(pipe, config=config)
    except ConfigError:
        raise
    except ValueError as error:  # a choice that does not fit the other ones, or a file that is not what it should be
        raise ConfigError(str(error)) from error


def length_filter(config: Config) -> Any:
    """The target's tokenizer, if the data set is filtered by tokens of its prompts; else None."""
    asked = config.dataset.min_prompt_tokens is not None or config.dataset.max_prompt_tokens is not None
    return load_tokenizer(config.target, "target") if asked else None


def generate_arguments(config: Config) -> dict[str, Any]:
    """Keyword arguments for `generate`. What is null in the configuration stays with the model's generation config."""
    sampling = config.sampling
    arguments: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "do_sample": sampling.temperature > 0}
    if sampling.repetition_penalty is not None:
        arguments["repetition_penalty"] = sampling.repetition_penalty
    if sampling.temperature > 0:
        arguments["temperature"] = sampling.temperature
        for name in ("top_k", "top_p", "min_p"):
            if getattr(sampling, name) is not None:
                arguments[name] = getattr(sampling, name)
    return arguments
