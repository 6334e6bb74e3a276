"""Faults while a model is trained, tried many times: is everything still there, and the same?

Processes prepare data, train, save checkpoints and write models, all tiny. Each try ends in one of

    survived    the command completes, repeated if necessary, with the bits of an undisturbed one
    refused     a single-line error names the file, and nothing is lost
    unclear     it ends in another way: a traceback, another exit code, no file's name
    lost        a checkpoint that was said to be saved is gone, or the command cannot be repeated
    undetected  it completes with other bits

Power loss is simulated, see `disk`. A full and a read-only disk are file systems that are mounted,
for which the program must run as root, or under `unshare --user --map-root-user --mount`. The exit
code is 1 if a try was unclear, lost or undetected.
"""

import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from scripts import run
from scripts.benchmarks.faults.tries import Tries, Verdict
from scripts.benchmarks.reporting import Table, benchmark_parser, require_positive

VERDICTS: tuple[Verdict, ...] = ("survived", "refused", "unclear", "lost", "undetected")
PLACES = (".", "checkpoints", "data")
COLUMNS = {"fault": "{fault}", "tries": "{tries}"} | {name: f"{{{name}}}" for name in VERDICTS}
FAULTS: dict[str, tuple[int, Callable[[Tries, int, int], Verdict]]] = {
    "kill -9 at a random time": (100, lambda t, *_: t.signalled(signal.SIGKILL)),
    "kill -9 before a change of a file": (100, lambda t, *_: t.killed()),
    "SIGTERM": (50, lambda t, *_: t.signalled(signal.SIGTERM)),
    "SIGUSR1": (20, lambda t, *_: t.signalled(signal.SIGUSR1)),
    "power loss": (100, lambda t, *_: t.without_power()),
    "full disk": (40, lambda t, number, of: t.on_a_full_disk(number / of)),
    "read-only folder": (12, lambda t, number, _: t.on_a_read_only_disk(PLACES[number % 3])),
    "corrupted bytes": (200, lambda t, *_: t.damaged()),
}
"""Number of tries, and a function of its number and theirs."""


def main() -> None:
    """Print the table."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--share", type=float, default=1.0, help="of the tries")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    require_positive(parser, options, ["share"])
    torch.set_num_threads(1)  # threads do not survive a fork
    tqdm.monitor_interval = 0
    table = Table(COLUMNS, options.json)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        tries = Tries(folder, options.seed)
        for name in options.only:
            num_tries, one = FAULTS[name]
            num_tries = max(1, round(options.share * num_tries))
            found = Counter(one(tries, number, num_tries) for number in range(num_tries))
            table.add({"fault": name, "tries": num_tries} | {v: found[v] for v in VERDICTS})
    finally:
        shutil.rmtree(folder)
    if any(row[verdict] for row in table.rows for verdict in VERDICTS[2:]):
        sys.exit(1)


if __name__ == "__main__":
    run(main, "faults")
