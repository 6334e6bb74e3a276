"""The recipe that `lm new` writes for a text, next to variations of it and a Kneser–Ney model.

Each row is trained and evaluated by the commands of a user, on one thread and the same prepared
data; `÷ best` is its test perplexity relative to the lowest of all rows of the text. `mixed` is
that of the mixture with the Kneser–Ney 5-gram model of the same training tokens, with the share
that is best on the validation split. Processor seconds and peak memory are those of the processes
that prepare (classes included), train, or estimate the n-gram model. What FOLDER already
holds is not trained again.
"""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from data_prep.errors import UserError
from data_prep.prepared import open_prepared
from data_prep.storage import write_json_atomically
from lm.config import Config, load_config, to_dict
from scripts import run
from scripts.benchmarks.reporting import TOP, Row, Table, benchmark_parser

COLUMNS = {
    "text": "{text}",
    "row": "{row}",
    "validation": "{valid_perplexity:.2f}",
    "test": "{perplexity:.2f}",
    "÷ best": "{ratio_to_best:.3f}",
    "mixed": "{mixed_perplexity:.2f}",
    "CPU s": "{cpu_seconds:,.0f}",
    "peak MB": "{peak_bytes:,.0f/1e6}",
}
RECIPE = "recipe"


class Done(NamedTuple):
    """What a process printed and took."""

    stdout: str
    cpu_seconds: float
    seconds: float
    peak_bytes: int


def measured(folder: Path, module: str, *arguments: object) -> Done:
    """Run a Python module in a folder, on one thread.

    Raises:
        UserError: if it fails.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        printed, problem = out.read(), err.read().strip()
    if process.returncode:
        raise UserError(f"{module} {' '.join(map(str, arguments))}: {problem[-500:]}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    cpu_seconds, seconds = usage.ru_utime + usage.ru_stime, time.monotonic() - start
    return Done(printed, cpu_seconds, seconds, peak)


def variations(config: Config) -> dict[str, list[str]]:
    """Five changes of a recipe, by name."""
    model, optim, train = config.model, config.optim, config.train
    length = "max_epochs" if train.max_epochs else "max_steps"
    return {
        "dropout + 0.1": [f"--model.dropout={model.dropout + 0.1:g}"],
        "dropout - 0.1": [f"--model.dropout={max(0.0, model.dropout - 0.1):g}"],
        "half the rate": [f"--optim.lr={optim.lr / 2:g}"],
        "1.5 × the hidden size": [f"--model.hidden={model.hidden * 3 // 2}"],
        "half the length": [f"--train.{length}={getattr(train, length) // 2}"],
    }


def prepare(text: Path, folder: Path) -> tuple[Path, Row]:
    """The recipe of a text with its data prepared in a folder, and the row of the preparation."""
    recipe, row_file = Path(f"{text.stem}.yaml"), folder / "data.json"
    if not row_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        new = measured(folder, "lm", "new", recipe, "--text", text.resolve())
        done = measured(folder, "lm", "prepare", recipe, "--data.prepared_dir=data")
        size = open_prepared(folder / "data")
        row = {
            "row": "prepare",
            "tokens": size.splits["train"].tokens,
            "vocab_size": size.vocab_size,
            "announced": re.findall(r"training takes about .*", new.stdout),
        }
        write_json_atomically(row_file, row | cost(done))
    row = json.loads(row_file.read_text())
    return folder / recipe, row


def train(recipe: Path, name: str, overrides: list[str]) -> Row:
    """The figures of a variation of a recipe, trained and mixed with the n-gram model."""
    folder = recipe.parent
    shared = ["--data.prepared_dir=data", "--train.threads=1"]
    run_dir = digest(load_config(recipe, [*shared, *overrides]))
    row_file = folder / f"{run_dir}.json"
    if not row_file.exists():
        options = [f"--run_dir={run_dir}", *shared, *overrides]
        done = measured(folder, "lm", "train", recipe.name, *options)
        arguments = ["--split=test", "--arpa=kneser_ney.arpa", "--json"]
        figures = json.loads(measured(folder, "lm", "evaluate", run_dir, *arguments).stdout)
        model = json.loads((folder / run_dir / "model.json").read_text())
        found = {
            "valid_perplexity": model["valid_perplexity"],
            "perplexity": figures["perplexity"],
            "mixed_perplexity": figures["mixture"]["perplexity"],
            "share": figures["mixture"]["weight"],
            "ngram_perplexity": figures["mixture"]["perplexity_ngram"],
        }
        write_json_atomically(row_file, found | cost(done))
    row: Row = json.loads(row_file.read_text())
    return {"row": name, "overrides": " ".join(overrides)} | row


def digest(config: Config) -> str:
    """A name for what a run trains, whatever the run is called."""
    values = to_dict(replace(config, name="run", run_dir=None))
    return sha256(json.dumps(values).encode()).hexdigest()[:12]


def estimate_ngrams(folder: Path) -> Row:
    """The cost of the Kneser–Ney model, whose perplexity `lm evaluate` finds."""
    row_file = folder / "kneser_ney.json"
    if not row_file.exists():
        done = measured(
            folder, "scripts.benchmarks.kneser_ney", "data", "kneser_ney.arpa", "--order=5"
        )
        write_json_atomically(row_file, {"row": "Kneser–Ney 5-gram"} | cost(done))
    row: Row = json.loads(row_file.read_text())
    return row


def cost(done: Done) -> Row:
    """Time and memory of a process."""
    names = "cpu_seconds", "seconds", "peak_bytes"
    return {name: getattr(done, name) for name in names}


def main() -> None:
    """Print a table, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("text", type=Path, help="text of one file, as for `lm new`")
    add("folder", type=Path, help="folder for everything that is trained")
    add("--title", help="name of the text (default: that of its file)")
    add("--rows", nargs="*", metavar="NAME", help="names of variations (default: all five)")
    add("--also", nargs="+", default=[], metavar="KEY=VALUE,…", help="further rows, for a search")
    options = parser.parse_args()
    recipe, prepared = prepare(options.text, options.folder)
    ngram = estimate_ngrams(options.folder)
    known = variations(load_config(recipe))
    chosen = {name: known[name] for name in options.rows} if options.rows is not None else known
    chosen |= {each: [f"--{key}" for key in each.split(",")] for each in options.also}
    rows = [train(recipe, RECIPE, [])]
    rows += [train(recipe, name, overrides) for name, overrides in chosen.items()]
    best = min(row["perplexity"] for row in rows)
    ngram["perplexity"] = rows[0]["ngram_perplexity"]
    table = Table(COLUMNS, options.json)
    sizes = {name: prepared[name] for name in ("tokens", "vocab_size")}
    for row in [*rows, ngram, prepared]:
        if "perplexity" in row:
            row["ratio_to_best"] = row["perplexity"] / best
        table.add({"text": options.title or options.text.stem, **sizes, **row})


if __name__ == "__main__":
    run(main)
