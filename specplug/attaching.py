"""`attach`, `detach` and `attached`: a plugin for all calls of a model, by what is given or by a configuration."""

from typing import Any

from specplug import hook
from specplug.config import Config, choice
from specplug.plugin import SpeculativeProcessor
from specplug.schedule import FixedSchedule, Schedule, TreeSchedule
from specplug.settings import make_schedule


def attach(
    model_or_pipeline: Any,
    draft: Any = None,
    *,
    gamma: int | None = None,
    tree: Any = None,
    verify: str | None = None,
    schedule: Schedule | None = None,
    engine: str | None = None,
    kernel: str | None = None,
    graph: str | None = None,
    config: Config | None = None,
) -> SpeculativeProcessor:
    """Let `generate` of a model, or of a pipeline's model, decode speculatively. Its output stays what it was.

    Args:
        model_or_pipeline: a transformers model, or a text-generation pipeline.
        draft: a model, the name or folder of one, a `Drafter`, a `Draft` config, "suffix", None or "lookup" for n-gram
            lookup, or a list of these: a chain, each asked when the one before has nothing good.
        gamma: draft tokens in every round. Without it, and without `schedule`, as many as pay, by measurement.
        tree: in every round a tree of drafts: numbers of children by depth, as [4, 2, 1], or
            `specplug.tree.Dynamic(budget=16, depth=5)`. One sequence at a time; batches draft chains.
        schedule: see schedule.py.
        verify: accept rule for sampling, "block" (the default), "token", or "walk", which gives equal ids under the same
            `torch.manual_seed`; at temperature 0 it is the comparison with the argmax.
        engine: "auto" takes our own loop ("rounds") where everything passed is known to come out the same there, and else
            transformers' loop over a target that looks ahead ("lookahead"); what neither can serve is decoded plainly,
            with one warning. "rounds" and "lookahead" raise instead of changing over; "plain" never drafts.
            "lookahead" also gives equal ids under the same seed when sampling.
        kernel: on the CPU in fp32, bf16 and fp16, "auto" decodes with a linear layer that reads each weight once for all
            positions of a pass, see kernel.py, and on any device attention of a few positions is packed, see packed.py; "torch"
            keeps torch's and transformers', "numba" raises where our layer cannot be had. As a logits processor the plugin leaves
            modules as they are.
        graph: "capture" records passes of one sequence that come up again and again, and replays them without Python, see
            capture.py; on CUDA passes have fixed shapes and are replayed as graphs, see fixed.py. "compile" has torch.compile compile
            those first, on any device, which takes minutes; "off" does neither.
        config: a `Config` from `specplug.load()`, for what is not given here.
    Raises:
        ValueError: draft and target do not fit, or a value is not allowed; the text says what is.
    """
    if config is not None:
        draft = config.draft if draft is None else draft
        schedule = make_schedule(config) if gamma is None and tree is None and schedule is None else schedule
        engine = choice(config.engine) if engine is None else engine
        verify = choice(config.verify) if verify is None else verify
        kernel = config.kernel.value if kernel is None else kernel
        graph = config.graph.value if graph is None else graph
    given = [name for name, value in (("gamma", gamma), ("tree", tree), ("schedule", schedule)) if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} both say how many tokens to draft; give one of them")
    if gamma is not None:
        schedule = FixedSchedule(gamma)
    if tree is not None:
        schedule = TreeSchedule(tree)
    return SpeculativeProcessor(
        draft,
        schedule=schedule,
        engine=engine or "auto",
        verify=verify or "block",
        kernel=kernel or "auto",
        graph=graph or "capture",
    ).attach(model_or_pipeline)


def detach(model_or_pipeline: Any) -> None:
    """Undo `attach`. Does nothing to a model that has no plugin."""
    plugin = attached(model_or_pipeline)
    if plugin is not None:
        plugin.detach()


def attached(model_or_pipeline: Any) -> SpeculativeProcessor | None:
    """The plugin that serves this model, or None."""
    plugin: SpeculativeProcessor | None = hook.attached(hook.model_of(model_or_pipeline))
    return plugin
