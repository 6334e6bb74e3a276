"""The declared comparison of output layers: its points, its runs, and the logs they have."""

import datetime
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from data_prep.errors import UserError
from data_prep.settings import Strict
from lm.config.load import first_error, load_config, nearest, read_values
from scripts.reproduction.runs import RESULTS, TOP, Run

PROTOCOL = Path(__file__).with_name("protocol.yaml")
PROTOCOLS = {
    corpus: PROTOCOL.with_name(f"protocol{corpus}.yaml")
    for corpus in ("", "_ptb_650", "_wikitext2", "_hungarian", "_hungarian_all_words")
}
"""What follows `search` in the name of a comparison's folder of logs → its declaration."""
SEARCH = RESULTS / "search"
Stage = Literal["trial", "final"]
Log = dict[str, Any]
Space = dict[str, dict[Literal["choice", "uniform", "log_uniform"], list[Any]]]
"""Key of a configuration → what its value is drawn from, see `draw`."""


@dataclass(frozen=True, kw_only=True)
class Method(Strict):
    """An output layer: its options, and the keys that it alone has."""

    options: list[str]
    space: Space = field(default_factory=dict)
    trials: list[int] | None = None  # fewer than those of others
    title: str = ""  # in README.md
    speed: str = ""  # its name in training_speed.jsonl


@dataclass(frozen=True, kw_only=True)
class Protocol(Strict):
    """The content of protocol.yaml, which explains it, as PROTOCOL.md does."""

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
    space: Space
    methods: dict[str, Method]
    schedules: dict[str, dict[Stage, list[str]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = PROTOCOL) -> "Protocol":
        """Read a file.

        Raises:
            UserError: if it is not a protocol, or an option of one of its runs is wrong; the
                message names the key.
        """
        values = read_values(path, "the protocol")
        try:
            protocol = TypeAdapter(cls).validate_json(json.dumps(values, default=str))
        except ValidationError as error:
            known = [each.name for kind in (cls, Method) for each in fields(kind)]
            raise UserError(f"{path}: {first_error(error, known)}") from error
        if problem := protocol.first_problem():
            raise UserError(f"{path}: {problem}")
        return protocol

    def first_problem(self) -> str | None:
        """What is wrong with it that no type tells; None if nothing is."""
        spaces = {"": self.space} | {
            f"methods.{name}.": each.space for name, each in self.methods.items()
        }
        for of, space in spaces.items():
            for key, distribution in space.items():
                if problem := _problem_of(distribution):
                    return f"{of}space.{key}: {problem}"
        if self.baseline not in self.methods:
            hint = nearest(self.baseline, list(self.methods))
            return f"baseline: {self.baseline!r} is not one of the methods{hint}"
        schedule = self.space.get("schedule", {"choice": []})
        for name in schedule.get("choice", ["a number"]):
            if name not in self.schedules:
                return f"space.schedule: {name!r} is not one of the schedules"
        of_stages = {"stages": self.stages}
        of_stages |= {f"schedules.{name}": each for name, each in self.schedules.items()}
        for name, stages in of_stages.items():
            for missing in {"trial", "final"} - stages.keys():
                return f"{name}.{missing} is missing"
        for method, trial in itertools.product(self.methods, range(max(1, self.num_trials))):
            for stage in self.stages:
                options = self.options(method, trial, stage)
                try:
                    load_config(TOP / self.config, [f"--{option}" for option in options])
                except UserError as error:
                    return f"{method}, {stage} of trial {trial}: {error}"
        return None

    @property
    def ngram_name(self) -> str:
        """The name of the n-gram model in tables."""
        return f"Kneser–Ney {self.ngram_order}-gram"

    def options(self, method: str, trial: int, stage: Stage) -> list[str]:
        """The overrides of a trial's point, `section.key=value`."""
        point = draw(self.space, f"{self.seed} {trial}")
        schedule = self.schedules[point.pop("schedule")][stage] if "schedule" in point else []
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


def _problem_of(distribution: Mapping[Any, list[Any]]) -> str | None:
    """What is wrong with the values of a distribution."""
    if len(distribution) != 1:
        return f"expected one of choice, uniform and log_uniform, got {len(distribution)}"
    ((kind, values),) = distribution.items()
    if kind == "choice":
        return None if values else "choice has no values"
    numbers = all(isinstance(value, int | float) for value in values) and len(values) == 2
    if not numbers or not values[0] <= values[1] or (kind == "log_uniform" and values[0] <= 0):
        return f"{kind} takes two numbers [low, high], got {values}"
    return None


def draw(space: Mapping[Any, Mapping[Any, Any]], seed: str) -> dict[str, Any]:
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
    log = run.entry
    return log if log and log["command"] == run.command else None
