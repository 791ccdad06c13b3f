"""Begin a draft with some of the target's own layers, its embeddings and its head.

specplug recipe=prune target=custom target.name_or_path=ORG/MODEL recipe.num_layers=4
specplug recipe=prune target=custom target.name_or_path=ORG/MODEL recipe.layers=[0,1,2,29]

Writes `model/` with tokenizer and model card; the last line of stdout is JSON. As it comes out it says little that is right:
go on with `recipe=distill recipe.init=DIR/model`. Embeddings and head that stay as they are (`recipe.freeze_embeddings`)
are held in memory once when draft and target are loaded together.
"""

import json
from pathlib import Path

from specplug import training
from specplug.config import Config, ConfigError, Prune, QuantizationMethod
from specplug.fingerprint import stated_target
from specplug.models import load_target
from specplug.pruning import keep_layers, spread
from specplug.runs import begin, environment_of


def run(config: Config, folder: Path) -> int:
    recipe = config.recipe
    assert isinstance(recipe, Prune)
    if config.target.quantization.method is not QuantizationMethod.none:
        raise ConfigError(
            f"target/quantization={config.target.quantization.method.name}: a draft begins with weights that can be"
            " trained; take target/quantization=none"
        )
    target, tokenizer = load_target(config.target)
    try:
        layers = recipe.layers or spread(target, recipe.num_layers or 0)
        draft = keep_layers(target, layers)
    except ValueError as error:
        raise ConfigError(f"recipe: {error}") from error
    environment = environment_of(target)
    begin(folder, config, environment)
    facts = {
        "layers": f"{', '.join(map(str, layers))} of the target's, counted from 0; its embeddings and head",
        "parameters": f"{draft.num_parameters():,} of {target.num_parameters():,}",
    }
    title = f"Layers of {config.target.name_or_path}"
    made_for = stated_target(config.target, target)
    output = training.save(recipe, folder, draft, tokenizer, title, facts, environment, made_for)
    print(json.dumps({"model": str(output), "layers": layers, "parameters": draft.num_parameters()}))
    return 0
