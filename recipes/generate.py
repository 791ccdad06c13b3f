"""Answer one prompt through a pipeline with the plugin attached.

specplug recipe=generate recipe.prompt="Write a short story about Mia, a red kite and the lake. There should be cake in it."

Prints the answer on stdout as it comes, and the counts of the call on stderr.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from specplug.config import Config, Generate
from specplug.console import console
from specplug.pipelines import generate_arguments, pipeline_from
from specplug.stats import number


def run(config: Config, folder: Path) -> int:
    assert isinstance(config.recipe, Generate)
    pipe, plugin = pipeline_from(config)
    tokenizer: Any = pipe.tokenizer
    prompt: str | list[dict[str, str]] = config.recipe.prompt
    if tokenizer.chat_template is not None:
        prompt = [{"role": "user", "content": config.recipe.prompt}]
    torch.manual_seed(config.seed)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    pipe(prompt, streamer=streamer, **generate_arguments(config))
    sys.stdout.flush()
    last = plugin.last
    if last is not None:
        console.print(
            f"{last.num_new_tokens} tokens in {last.num_rounds} target passes after the prompt's: "
            f"{number(last.mean_acceptance_length)} tokens per pass, alpha {number(last.alpha, 3)}, "
            f"engine {last.engine} ({last.reason})"
        )
    return 0
