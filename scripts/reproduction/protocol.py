"""The declared comparison of output layers: its points, its runs, and the logs they have."""

import datetime
import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from scripts.reproduction.runs import RESULTS, Run

PROTOCOL = Path(__file__).with_name("protocol.yaml")
PROTOCOLS = {
    corpus: PROTOCOL.with_name(f"protocol{corpus}.yaml")
    for corpus in ("", "_ptb_650", "_wikitext2", "_hungarian", "_hungarian_all_words")
}
"""What follows `search` in the name of a comparison's folder of logs → its declaration."""
SEARCH = RESULTS / "search"
Stage = Literal["trial", "final"]
Log = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Method:
    """An output layer: its options, and the keys that it alone has."""

    options: list[str]
    space: dict[str, dict[str, Any]] = field(default_factory=dict)
    trials: list[int] | None = None  # fewer than those of others
    title: str = ""  # in README.md
    speed: str = ""  # its name in training_speed.jsonl


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The content of protocol.yaml, which explains it."""

    declared: datetime.date
    title: str
    config: str
    seed: int
    num_trials: int
    ngram_order: int
    final_seeds: list[int]
    baseline: str
    margin: float
    shared: list[str]
    stages: dict[Stage, list[str]]
    space: dict[str, dict[str, Any]]
    schedules: dict[str, dict[Stage, list[str]]]
    methods: dict[str, Method]

    @classmethod
    def read(cls, path: Path = PROTOCOL) -> "Protocol":
        """Read a file."""
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
        methods = {name: Method(**each) for name, each in fields.pop("methods").items()}
        return cls(**fields, methods=methods)

    def options(self, method: str, trial: int, stage: Stage) -> list[str]:
        """The overrides of a trial's point, `section.key=value`."""
        point = draw(self.space, f"{self.seed} {trial}")
        schedule = self.schedules[point.pop("schedule")][stage]
        own = draw(self.methods[method].space, f"{self.seed} {trial} {method}")
        drawn = [f"{key}={value}" for key, value in (point | own).items()]
        return [*self.shared, *self.stages[stage], *self.methods[method].options, *schedule, *drawn]

    def trials(self, results: Path) -> Iterator[Run]:
        """All trials, the first one of every method first."""
        for trial in range(self.num_trials):
            for method, each in self.methods.items():
                if each.trials is None or trial in each.trials:
                    options = self.options(method, trial, "trial")
                    row = f"{method}-trial{trial}"
                    yield Run(results.name, row, 1, self.config, tuple(options), results.parent)

    def finals(self, results: Path) -> Iterator[Run]:
        """The final runs of the methods whose trials are complete, seed by seed."""
        chosen = {method: self.chosen(method, results) for method in self.methods}
        for seed in self.final_seeds:
            for method, trial in chosen.items():
                if trial is not None:
                    options = tuple(self.options(method, trial, "final"))
                    yield Run(results.name, method, seed, self.config, options, results.parent)

    def chosen(self, method: str, results: Path) -> int | None:
        """The trial of the lowest validation perplexity; None while trials are missing.

        Without trials, the one point there is.
        """
        if self.num_trials == 0:
            return 0
        runs = [run for run in self.trials(results) if run.row.startswith(f"{method}-")]
        lowest = {run: log["valid_perplexity"] for run in runs if (log := log_of(run)) is not None}
        if len(lowest) < len(runs):
            return None
        return int(min(lowest, key=lowest.__getitem__).row.removeprefix(f"{method}-trial"))


def draw(space: Mapping[str, Mapping[str, Any]], seed: str) -> dict[str, Any]:
    """A point: a value for each key, drawn independently.

    A key has `choice: [values]`, `uniform: [low, high]` or `log_uniform: [low, high]`; the numbers
    of the latter two have three significant digits.
    """
    generator = random.Random(seed)  # of a string: the same in every version of Python
    point = {}
    for key, ((kind, values),) in ((key, each.items()) for key, each in space.items()):
        if kind == "choice":
            point[key] = values[int(generator.random() * len(values))]
        else:
            low, high = map(math.log, values) if kind == "log_uniform" else values
            value = low + generator.random() * (high - low)
            point[key] = float(f"{math.exp(value) if kind == 'log_uniform' else value:.3g}")
    return point


def log_of(run: Run) -> Log | None:
    """The log of a run, if it has the run's command; a final run's test figures are in `test`."""
    if not run.log_path.exists():
        return None
    log: Log = json.loads(run.log_path.read_text(encoding="utf-8"))
    return log if log["command"] == run.command else None
