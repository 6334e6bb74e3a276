"""Tokens per second of `lm train` for several OpenMP settings, on a quiet and on a busy computer.

Each figure comes from the command as a user starts it, in a new process, with a setting in its
environment: an LSTM with a class-based softmax on synthetic text, which is prepared once. The
settings take turns. A figure is the median over the rounds of the second half of the steps. The
loads are: nothing; busy loops, one more than there are processors; as many programs that multiply
matrices with libgomp's default setting. Overrides of the configuration: --section.key=value.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from lm.training.metrics import read_metrics
from scripts.benchmarks.reporting import Table, benchmark_parser, require_positive

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "libgomp's default": {"GOMP_SPINCOUNT": "300000"},
    "spin count 10,000": {"GOMP_SPINCOUNT": "10000"},
    "spin count 1,000": {"GOMP_SPINCOUNT": "1000"},
    "spin count 0": {"GOMP_SPINCOUNT": "0"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
"""Environment variables; without any of them `lm` chooses."""
LOADS = {
    "none": "",
    "busy loops": "while True: pass",
    "OpenMP programs": "import torch; a = torch.randn(300, 300)\nwhile True: a @ a",
}
"""Programs that run in the background."""
COLUMNS = {
    "load": "{load}",
    "setting": "{setting}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "÷ default": "{ratio_to_default:.2f}",
}
CORPUS = ["--types", "20000", "--tokens", "300000", "--held-out-tokens", "1", "--no-progress"]
CONFIG = """\
name: spin
data: {files: {train: train.txt}}
tokenizer: {vocab_size: 10000}
classes: {method: random}
model: {hidden: 200, layers: 2}
optim: {optimizer: sgd, lr: 1, clip: 0.25}
train: {batch_size: 32, seq_len: 35}
"""


def run(folder: Path, verb: str, setting: dict[str, str], overrides: list[str]) -> None:
    """Run `lm` on the text and the prepared data in `folder`, under one setting alone."""
    folders = [f"--data.dir={folder}", f"--data.prepared_dir={folder / 'data'}"]
    command = [sys.executable, "-m", "lm", verb, str(folder / "config.yaml"), *folders]
    command += ["--no-progress", *overrides]
    subprocess.run(command, env=environment(setting), check=True, capture_output=True)


def environment(setting: dict[str, str]) -> dict[str, str]:
    """This process's environment with the variables of one setting alone."""
    names = {name for values in SETTINGS.values() for name in values}
    return {name: value for name, value in os.environ.items() if name not in names} | setting


def tokens_per_second(folder: Path, setting: dict[str, str], overrides: list[str]) -> float:
    """The speed of a new training run in the last line of its metrics."""
    with TemporaryDirectory(dir=folder) as name:
        run(folder, "train", setting, [*overrides, f"--run_dir={name}/run"])
        return read_metrics(Path(name, "run", "metrics.csv"))[-1].tokens_per_second


@contextmanager
def loaded(load: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run the programs of a load in the background."""
    with ExitStack() as stack:
        programs = []
        for _ in range((os.cpu_count() or 1) + 1 if LOADS[load] else 0):
            program = subprocess.Popen([sys.executable, "-c", LOADS[load]], env=environment({}))
            stack.callback(program.wait)
            stack.callback(program.kill)
            programs.append(program)
        yield programs


def main() -> None:
    """Print a table, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--steps", type=int, default=200, help="steps of a training run")
    parser.add_argument("--rounds", type=int, default=3)
    options, overrides = parser.parse_known_args()
    require_positive(parser, options, ["steps", "rounds"])
    overrides += [f"--train.max_steps={options.steps}"]
    overrides += [f"--log.every_steps={max(1, options.steps // 2)}"]
    settings = dict.fromkeys(["default", *options.settings])
    rates: dict[tuple[str, str], list[float]] = {p: [] for p in product(options.loads, settings)}
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(CONFIG)
        corpus = [sys.executable, "-m", "scripts.synthetic_corpus", *CORPUS, "--out", name]
        subprocess.run(corpus, check=True)
        run(folder, "prepare", {}, overrides)
        for _, load in product(range(options.rounds), options.loads):
            with loaded(load):
                for setting in settings:
                    rate = tokens_per_second(folder, SETTINGS[setting], overrides)
                    rates[load, setting].append(rate)
    medians = {pair: statistics.median(values) for pair, values in rates.items()}
    table = Table(COLUMNS, options.json)
    for (load, setting), rate in medians.items():
        row = {"load": load, "setting": setting, "tokens_per_second": round(rate)}
        row["ratio_to_default"] = round(rate / medians[load, "default"], 3)
        table.add(row | {"cpus": os.cpu_count(), "rounds": options.rounds, "steps": options.steps})


if __name__ == "__main__":
    main()
