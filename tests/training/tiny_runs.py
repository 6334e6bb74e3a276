"""The work that faults interrupt: a tiny corpus, commands on it, and what they must come to."""

import hashlib
import io
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_map_only

from data_prep.errors import UserError
from data_prep.meta import META
from lm.cli import main
from lm.training.checkpoint import load_checkpoint, save_checkpoint
from lm.training.metrics import read_metrics
from tests.conftest import TINY, toy_sentences

OPTIONS = ["--no-progress", "--model.hidden=8", "--model.layers=1", "--train.batch_size=2"]
OPTIONS += ["--train.val_every_steps=4", "--train.checkpoint_every_steps=3", "--log.every_steps=4"]
OPTIONS += ["--train.accelerator=cpu"]
LAST = Path("checkpoints", "last.ckpt")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, and what it printed to stderr."""

    code: int
    message: str

    def names(self, folder: Path) -> bool:
        """Whether it is a user's error, of which one line, the last, names a file in a folder."""
        *_, last = self.message.splitlines() or [""]
        is_clear = last.startswith("lm: ") and "Traceback" not in self.message
        return 2 <= self.code < 128 and is_clear and str(folder) in last


def command(folder: Path) -> Callable[..., list[str]]:
    """`command(folder)(verb, run, *options)`: a command on a tiny corpus in the folder."""
    config = folder / "tiny.yaml"
    config.write_text(TINY.format(corpus=folder))
    for split, num_lines in (("train", 50), ("valid", 8), ("test", 7)):
        (folder / f"{split}.txt").write_text("\n".join(toy_sentences(num_lines, num_lines)) + "\n")
    return lambda verb, run, *options: [verb, str(config), *OPTIONS, f"--run_dir={run}", *options]


def lm(arguments: Sequence[str]) -> Ended:
    """Run a command in this process; an exception is not caught, except `SystemExit`."""
    err = io.StringIO()
    with redirect_stderr(err), redirect_stdout(io.StringIO()):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
    return Ended(code, err.getvalue())


@contextmanager
def noting(note: Callable[[int], None]) -> Iterator[None]:
    """A `with` block in which `note(steps)` is called once a checkpoint is said to be saved.

    Curves are not drawn in it: that takes longer than the rest of a tiny run.
    """

    def noted(checkpoint: dict[str, Any], *paths: Path) -> None:
        save_checkpoint(checkpoint, *paths)
        note(checkpoint["progress"]["batches_done"])

    saves = mock.patch("lm.training.state.save_checkpoint", noted)
    with saves, mock.patch("lm.training.metrics.draw_curves"):
        yield


def damage(path: Path, rng: random.Random) -> bytes:
    """Flip a bit of a file, make 64 bytes zeros or cut it, in place; returns its bytes after."""
    content = bytearray(path.read_bytes())
    first = rng.randrange(len(content))
    kind = rng.randrange(3)
    if kind == 0:
        content[first] ^= 1 << rng.randrange(8)
    elif kind == 1:
        content[first : first + 64] = bytes(len(content[first : first + 64]))
    else:
        del content[first:]
    path.write_bytes(content)
    return bytes(content)


def dataset(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a prepared folder, by name; not those that a killed process left."""
    files = [path for path in sorted(folder.rglob("*")) if not path.name.startswith(".")]
    found = {str(path.relative_to(folder)): _sha256(path.read_bytes()) for path in files}
    record = json.loads((folder / META).read_text())  # its splits may be in another order
    return found | {META: json.dumps(record, sort_keys=True)}


def outcome(run: Path, *, is_whole: bool = True) -> dict[str, Any]:
    """All of a run that must not depend on interruptions, compared by `==`.

    That is the state of the training and, unless it was continued in another folder, the model and
    the lines of `metrics.csv`, without times.
    """
    checkpoint = load_checkpoint(run / LAST)
    for name in [name for name in checkpoint["progress"] if name.endswith("seconds")]:
        del checkpoint["progress"][name]
    found = {"state": _digest(checkpoint)}
    if not is_whole:
        return found
    metrics = [asdict(line) for line in read_metrics(run / "metrics.csv")]
    for line in metrics:
        del line["seconds"], line["tokens_per_second"]
    return found | {
        "model": _sha256((run / "model.safetensors").read_bytes()),
        "description": json.loads((run / "model.json").read_text()),
        "metrics": metrics,
    }


def steps_done(run: Path) -> int:
    """The steps of the last checkpoint that can be read, 0 if there is none."""
    try:
        return int(load_checkpoint(run / LAST)["progress"]["batches_done"])
    except UserError:
        return 0


def _digest(value: Any) -> str:
    """SHA-256 of nested containers of tensors and plain data."""

    def plain(tensor: torch.Tensor) -> object:
        content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return tensor.dtype, tensor.shape, content

    return _sha256(repr(tree_map_only(torch.Tensor, plain, value)).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
