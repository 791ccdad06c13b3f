"""What one call is decoded with: what transformers prepared, the plugin's settings and the call's own; schedules by configuration."""

from typing import Any, NamedTuple

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from specplug.config import Adaptive, Confidence, Config, Fixed
from specplug.config import Tree as TreeConfig
from specplug.noise import Seed
from specplug.schedule import AdaptiveSchedule, ConfidenceSchedule, FixedSchedule, Schedule, TreeSchedule
from specplug.tree import Dynamic

ENGINES = ("auto", "rounds", "lookahead", "plain")
CALL_SETTINGS = ("gamma", "engine", "seed", "row_ids")


class LoopInputs(NamedTuple):
    """What transformers has prepared for its decoding loop, in the order in which the loop takes it."""

    input_ids: Tensor  # (B, T)
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    synced_gpus: bool
    streamer: Any
    model_kwargs: dict[str, Any]


class Settings(NamedTuple):
    """What one call is decoded with."""

    schedule: Schedule
    engine: str
    seed: Seed | None

    def of_call(self, given: dict[str, Any] | None) -> "Settings":
        """The same with those of one call in their place."""
        if given is None:
            return self
        if not isinstance(given, dict) or set(given) - set(CALL_SETTINGS):
            raise ValueError(f"specplug={given!r}: give a dict with any of: {', '.join(CALL_SETTINGS)}")
        settings = self
        if "gamma" in given:
            settings = settings._replace(schedule=FixedSchedule(given["gamma"]))
        if "engine" in given:
            settings = settings._replace(engine=allowed("engine", given["engine"], ENGINES))
        return settings._replace(seed=Seed.checked(given))


def allowed(name: str, value: str, choices: tuple[str, ...]) -> str:
    """`value`, or ValueError if it is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(choices)}")
    return value


def make_schedule(config: Config) -> Schedule:
    schedule = config.schedule
    if isinstance(schedule, Fixed):
        return FixedSchedule(schedule.gamma)
    if isinstance(schedule, Confidence):
        return ConfidenceSchedule(schedule.gamma, schedule.threshold, schedule.criterion.value)
    if isinstance(schedule, TreeConfig):
        return TreeSchedule(schedule.branching or Dynamic(schedule.budget, schedule.depth))
    assert isinstance(schedule, Adaptive)
    return AdaptiveSchedule(schedule.max_gamma, schedule.frozen, schedule.tree_depth)
