"""The tables of the comparison of output layers, and their statistics."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import UserError
from data_prep.storage import write_atomically
from lm.scoring.comparison import bootstrap_interval
from scripts import markdown
from scripts.reproduction.protocol import Log, Protocol, log_of
from scripts.reproduction.runs import read_logs

NGRAMS = ("ngrams", 0)
"""Row and seed of the log of the n-gram model, which no seed changes."""
LINES = "lines.npz"
"""The lines of the test split: `tokens` [lines], and the nats [lines] of each run by its name, in
hundredths."""


class Lines(NamedTuple):
    """Tokens and nats of each line of the test split."""

    tokens: NDArray[np.int64]  # [lines]
    nats: NDArray[np.float64]  # [lines]


def write_lines(results: Path, name: str, lines: Lines) -> None:
    """Add the nats of a run to those of the comparison.

    Raises:
        UserError: if the lines are not those of the other runs.
    """
    known = _read_lines(results)
    if "tokens" in known and not np.array_equal(known["tokens"], lines.tokens):
        raise UserError(f"{results / LINES} has lines of another test split than {name}")
    hundredths = np.round(100 * lines.nats).astype(np.int32)
    arrays: dict[str, Any] = known | {"tokens": lines.tokens.astype(np.int32), name: hundredths}
    write_atomically(results / LINES, lambda file: np.savez_compressed(file, **arrays))


def _read_lines(results: Path) -> dict[str, NDArray[np.int32]]:
    path = results / LINES
    if not path.exists():
        return {}
    with np.load(path) as arrays:
        return dict(arrays)


def search_tables(protocol: Protocol, results: Path) -> dict[str, str]:
    """The tables by name, from the logs there are."""
    trials, finals = trial_logs(protocol, results), final_logs(protocol, results)
    tables = {
        "trials": _trial_table(protocol, trials),
        "finals": _final_table(protocol, finals),
        "by_target": _frequency_table(protocol, finals, "target"),
        "by_previous": _frequency_table(protocol, finals, "previous"),
    }
    return {f"{results.name}_{name}": table for name, table in tables.items()}


def trial_logs(protocol: Protocol, results: Path) -> dict[str, list[Log]]:
    """The logs of trials by method."""
    trials: dict[str, list[Log]] = {method: [] for method in protocol.methods}
    for run in protocol.trials(results):
        if (log := log_of(run)) is not None:
            trials[run.row.split("-")[0]].append(log)
    return trials


def final_logs(protocol: Protocol, results: Path) -> dict[str, dict[int, Log]]:
    """The logs of final runs with test figures, by method and seed; the baseline first.

    Their test figures have `lines`. The n-gram model has the same log for all seeds.
    """
    arrays = _read_lines(results)

    def with_lines(log: Log, name: str) -> Log:
        lines = Lines(arrays["tokens"].astype(np.int64), arrays[name] / 100)
        return log | {"test": log["test"] | {"lines": lines}}

    names = sorted(protocol.methods, key=lambda name: name != protocol.baseline)
    finals: dict[str, dict[int, Log]] = {name: {} for name in names}
    for run in protocol.finals(results):
        if (log := log_of(run)) is not None and "test" in log:
            finals[run.row][run.seed] = with_lines(log, run.name)
    if (log := read_logs(results).get(NGRAMS)) is not None:
        log = with_lines(log, NGRAMS[0])
        finals[protocol.ngram_name] = dict.fromkeys(protocol.final_seeds, log)
    return {name: logs for name, logs in finals.items() if logs}


def frequency_means(logs: Iterable[Log], which: str) -> list[float]:
    """Nats per token of each bin of the `target` or `previous` word, the mean over runs."""
    bins = [log["test"]["by_frequency"][which] for log in logs]
    return [
        statistics.fmean(each["nll_nats"] / max(1, each["tokens"]) for each in group)
        for group in zip(*bins, strict=True)
    ]


def frequency_differences(
    logs: Mapping[int, Log], base: Mapping[int, Log], which: str
) -> list[float]:
    """Nats per token of each bin less those of the baseline, with the seeds of both; or nothing."""
    seeds = [seed for seed in logs if seed in base]
    if not seeds:
        return []
    ours, other = (frequency_means((of[seed] for seed in seeds), which) for of in (logs, base))
    return [mean - its for mean, its in zip(ours, other, strict=True)]


def expected_lowest(values: Sequence[float], num: int) -> float:
    """The expected minimum of `num` of the values, drawn without replacement.

    E = Σ_i x_(i) C(N - i, num - 1) / C(N, num), with the N values in increasing order. It has no
    bias as an estimate of the expected minimum of `num` further trials.

    Source: Tang, Lee, Xin, Liu, Yu & Lin 2020, section 3.

    Example:
        >>> expected_lowest([3.0, 1.0, 2.0], 2)  # of {1, 2}, {1, 3}, {2, 3}
        1.3333333333333333
    """
    ordered = sorted(values)
    rest = len(ordered) - 1 - np.arange(len(ordered))
    chances = [math.comb(int(each), num - 1) for each in rest]
    return sum(c * x for c, x in zip(chances, ordered, strict=True) if c) / sum(chances)


def upper_bound(differences: Sequence[float]) -> float:
    """The one-sided 95 % bound of the mean by Student's t; infinity for fewer than two.

    Example:
        >>> round(upper_bound([-1.0, 0.0, 1.0]), 3)
        1.686
    """
    from scipy.stats import t  # takes a second

    if len(differences) < 2:
        return math.inf
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) + float(t.ppf(0.95, len(differences) - 1)) * error


def _trial_table(protocol: Protocol, trials: dict[str, list[Log]]) -> str:
    counts = [num for num in (1, 2, 4, 8, 12) if num <= protocol.num_trials]
    rows = []
    for method, logs in trials.items():
        values = [log["valid_perplexity"] for log in logs]
        expected = [
            f"{expected_lowest(values, num):.2f}" if num <= len(values) else "–" for num in counts
        ]
        lowest, point = ("–", "–")
        if values:
            best = values.index(min(values))
            lowest, point = f"{values[best]:.2f}", _point(protocol, method, logs[best])
        rows.append([method, f"{len(values)} of {protocol.num_trials}", lowest, *expected, point])
    titles = [f"expected of {num}" for num in counts]
    return markdown.table(
        ["method", "trials", "lowest validation perplexity", *titles, "its point"], rows
    )


def _point(protocol: Protocol, method: str, log: Log) -> str:
    """What distinguishes a trial's command."""
    keys = {*protocol.space, *protocol.methods[method].space, "optim.schedule"}
    options = log["command"].split("--")
    chosen = [each.strip() for each in options if each.split("=")[0] in keys]
    return ", ".join(f"`{each}`" for each in chosen)


def _final_table(protocol: Protocol, finals: dict[str, dict[int, Log]]) -> str:
    baseline, rows = finals.get(protocol.baseline, {}), []
    for method, logs in finals.items():
        perplexity = [log["test"]["perplexity"] for log in logs.values()]
        by_seed = ", ".join(f"{each:.2f}" for each in dict.fromkeys(perplexity))
        row = [method, f"{statistics.fmean(perplexity):.2f}", by_seed]
        paired = [seed for seed in logs if seed in baseline]
        compared = ["–"] * 4
        if each := differences(logs, baseline):
            bound = upper_bound(each)
            nats, other = (_mean_nats(group, paired) for group in (logs, baseline))
            interval = bootstrap_interval(nats, other, logs[paired[0]]["test"]["lines"].tokens)
            compared = [
                f"{statistics.fmean(each):+.2f}",
                f"{bound:+.2f}" if math.isfinite(bound) else "–",
                " … ".join(f"{limit:+.4f}" for limit in interval or ()) or "–",
                "not inferior" if bound < protocol.margin else "not shown",
            ]
        minutes = [log["cpu_seconds"] / 60 for log in logs.values() if log.get("cpu_seconds")]
        cost = [
            f"{next(iter(logs.values()))['test']['parameters'] / 1e6:.2f}M",
            _minutes(statistics.fmean(minutes)) if minutes else "–",
        ]
        rows.append([*row, *compared, *cost])
    titles = ["difference", "95 % bound", "nats per token, 95 % within the text", "margin"]
    titles += ["parameters", "CPU minutes"]
    return markdown.table(["method", "test perplexity", "by seed", *titles], rows)


def _minutes(mean: float) -> str:
    return f"{mean:.0f}" if mean >= 10 else f"{mean:.1f}"


def differences(logs: dict[int, Log], baseline: dict[int, Log]) -> list[float]:
    """Differences of the perplexity with each seed that both have; none of the baseline itself.

    Example:
        >>> log = lambda perplexity: {"test": {"perplexity": perplexity}}
        >>> differences({1: log(3.0), 2: log(5.0)}, {1: log(4.0)})
        [-1.0]
    """
    seeds = [seed for seed in logs if seed in baseline and logs is not baseline]
    of_both = [[each[seed]["test"]["perplexity"] for each in (logs, baseline)] for seed in seeds]
    return [ours - other for ours, other in of_both]


def _mean_nats(logs: dict[int, Log], seeds: Sequence[int]) -> NDArray[np.float64]:
    mean: NDArray[np.float64]
    mean = np.mean([logs[seed]["test"]["lines"].nats for seed in seeds], axis=0)
    return mean


def _frequency_table(protocol: Protocol, finals: dict[str, dict[int, Log]], which: str) -> str:
    """Nats per token of bins of a word's rank; of other methods, less the baseline's."""
    if protocol.baseline not in finals:
        return markdown.table(["method"], [])
    base = finals[protocol.baseline]
    rows = [[protocol.baseline, *(f"{mean:.4f}" for mean in frequency_means(base.values(), which))]]
    for method, logs in finals.items():
        if method != protocol.baseline and (found := frequency_differences(logs, base, which)):
            rows.append([method, *(f"{difference:+.4f}" for difference in found)])
    first = next(iter(finals[protocol.baseline].values()))["test"]
    titles = [
        f"{each['first_rank']:,} … {each['last_rank']:,}" for each in first["by_frequency"][which]
    ]
    return markdown.table(["method", *titles], rows)
