"""The lines of `metrics.csv`, the figures of a run over its steps, and their picture."""

import csv
import io
from dataclasses import MISSING, dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from data_prep.errors import DataError
from data_prep.storage import write_atomically


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """One line of `metrics.csv`."""

    step: int  # optimizer steps done
    epoch: float  # passes over the training split, with a fraction
    tokens: int  # trained on so far, over all devices
    learning_rate: float  # of the last step
    train_perplexity: float  # of the tokens since the previous line; NaN if all were skipped;
    # of independent sequences, in whose batches lengths differ: since the previous validation
    valid_perplexity: float | None  # of the whole validation split; None where it was not measured
    seconds: float  # training time so far, without validation and checkpoints
    tokens_per_second: float  # tokens since the previous line over their training time
    skipped_steps: int = 0  # so far, see `train.skip_nonfinite_steps`
    valid_hit_rate: float | None = None  # HR@10, see `train.keep`
    valid_ndcg: float | None = None  # NDCG@10


def read_metrics(path: Path) -> list[Metrics]:
    """Read the complete lines of a `metrics.csv`; none if there is no file.

    What follows a NUL, or the last line end, was not written completely.

    Raises:
        DataError: if a line is not one of figures.
    """
    if not path.exists():
        return []
    types = {field.name: int if field.type is int else float for field in fields(Metrics)}
    needed = {field.name for field in fields(Metrics) if field.default is MISSING}
    lines = []
    with open(path, newline="", errors="replace") as file:
        written = file.read().partition("\0")[0]
    reader = csv.DictReader(io.StringIO(written[: written.rfind("\n") + 1], newline=""))
    try:
        if absent := needed - {*(reader.fieldnames or needed)}:
            raise ValueError(f"no column {min(absent)}")
        for row in reader:
            values: dict[str, Any] = {"valid_perplexity": None}
            values |= {name: types[name](row[name]) for name in types if row.get(name)}
            if needed <= values.keys():
                lines.append(Metrics(**values))
    except (ValueError, csv.Error) as error:
        raise DataError(
            f"{path}, line {reader.line_num}, is damaged ({error}): delete it to continue"
        ) from error
    return lines


def draw_curves(folder: Path, title: str) -> None:
    """Draw `curves.png` from `metrics.csv`: training and validation perplexity over tokens.

    NDCG@10, if it was measured, has a second panel. Training perplexities of few steps, before a
    validation or at the end, are left out.
    """
    from matplotlib.figure import Figure  # takes a second
    from matplotlib.ticker import EngFormatter

    lines = read_metrics(folder / "metrics.csv")
    figure = Figure(figsize=(8, 5), layout="constrained")
    ndcg = {line.tokens: line.valid_ndcg for line in lines if line.valid_ndcg is not None}
    axes, *others = figure.subplots(1 + bool(ndcg), sharex=True, squeeze=False)[:, 0]
    for below in others:
        best = f"validation, best {max(ndcg.values()):.4f}"
        below.plot(list(ndcg), list(ndcg.values()), "o-", color="C1", label=best)
        below.set(xlabel="tokens trained on", ylabel="NDCG@10")
        below.grid(True, alpha=0.3)
        below.legend()
    num_steps = [after - before for before, after in pairwise([0, *(line.step for line in lines)])]
    drawn = [line for line, num in zip(lines, num_steps, strict=True) if 2 * num >= max(num_steps)]
    perplexities = [line.train_perplexity for line in drawn]
    style: dict[str, Any] = {"linewidth": 1, "marker": "." * (len(drawn) == 1)}
    axes.plot([line.tokens for line in drawn], perplexities, label="training", **style)
    validated = {line.tokens: line.valid_perplexity for line in lines if line.valid_perplexity}
    if validated:
        best = f"validation, best {min(validated.values()):.1f}"
        axes.plot(list(validated), list(validated.values()), "o-", label=best)
    axes.set(xlabel="" if ndcg else "tokens trained on", ylabel="perplexity", yscale="log")
    if font := _font_of(title):
        axes.set_title(title, parse_math=False, font=font)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    save = partial(figure.savefig, format="png", dpi=120)
    write_atomically(folder / "curves.png", save)


def _font_of(title: str) -> Path | None:
    """A font that has all letters of a title, the usual one if it has; None if none has."""
    from matplotlib import font_manager

    usual = font_manager.findfont("DejaVu Sans")
    for path in (usual, *sorted(font.fname for font in font_manager.fontManager.ttflist)):
        if {*map(ord, title)} <= font_manager.get_font(path).get_charmap().keys():
            return Path(path)
    return None
