"""``streamengine bench``: what things cost, measured where it is called. Each scenario ends in one line of JSON."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from streamengine.bench import guided, reuse, scheduling, serving, split, startup, steps
from streamengine.config import EngineConfig
from streamengine.link import Progress

Scenario = Literal["steps", "startup", "scheduler", "prefix", "speculation", "guided", "serve", "pd"]
Measure = Callable[[EngineConfig, Callable[[Progress], None], Callable[[str], None]], Mapping[str, Any]]

_MEASURES: dict[Scenario, Measure] = {
    "steps": steps.measure,
    "scheduler": scheduling.measure,
    "prefix": reuse.measure_prefix,
    "speculation": reuse.measure_speculation,
    "guided": guided.measure,
    "serve": serving.measure,
    "pd": split.measure,
    "startup": startup.measure,
}


def run(
    scenario: Scenario, config: EngineConfig, report: Callable[[Progress], None], show: Callable[[str], None]
) -> None:
    """Measure in this process; ``show`` a line for each figure, and last all of them as JSON.

    Raises:
        StartupError: the model cannot be loaded, or the KV pool is too small for what is measured.
    """
    show(json.dumps({"scenario": scenario, **_MEASURES[scenario](config, report, show)}))
