"""The ranks of `lm evaluate --ranking --ranks`: a table with a row for each prediction."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet

from data_prep.corpus.events import user_lines
from data_prep.errors import DataError, UserError
from data_prep.sequences import Sequences
from data_prep.storage import write_atomically
from lm.evaluation import encode_text
from lm.generation.items import Catalogue
from lm.run import TrainedRun
from lm.scoring.ranking_figures import Predictions

COLUMNS = ["user", "position", "item", "rank", "probability"]


def check_ranks(path: Path) -> None:
    """Raise UserError if there is a file that `write_ranks` has not written."""
    found = list[str]()
    if path.is_file():
        with suppress(OSError, ValueError):  # another file
            found = parquet.read_schema(path).names
    if path.exists() and found != COLUMNS:
        raise UserError(f"--ranks {path}: this is no table of ranks, and would be replaced")


def write_ranks(
    path: Path, run: TrainedRun, split: str, found: Predictions, sequences: Sequences
) -> None:
    """Write a parquet file: user, position, item, rank and probability of predictions of a split.

    Positions count all items of a user's sequence from 1. One outside the catalogue has no item,
    rank and probability.

    Raises:
        DataError: if the table of users is not the one that was prepared.
    """
    users, catalogue = _users(run, split, len(sequences.begin)), Catalogue(run)
    items = pyarrow.array([catalogue.item(id) for id in range(run.prepared.vocab_size)])
    tokens = run.prepared.tokens(split)
    end = np.flatnonzero(tokens == run.prepared.eos_id)
    is_lost = tokens == run.prepared.unk_id
    found_places = np.flatnonzero(~is_lost)[sequences.begin[found.sequence] + found.place]
    # Of the items that a sequence lacks, the last ones are to be predicted.
    lost_places = np.flatnonzero(is_lost)
    lost = np.searchsorted(end, lost_places)
    num_lost = np.bincount(lost, minlength=len(end))
    number_from_end = np.cumsum(num_lost)[lost] - np.arange(len(lost))
    is_predicted = number_from_end <= sequences.num_left_out[lost]
    rank, probability = np.full((2, len(tokens)), np.nan)
    rank[found_places], probability[found_places] = found.rank, found.probability
    places = np.sort(np.append(found_places, lost_places[is_predicted]))
    sequence = np.searchsorted(end, places)
    begin = np.append(0, end[:-1] + 1)
    whole = pyarrow.int64()
    rank = rank[places]
    table = pyarrow.table(
        {
            "user": users.take(pyarrow.array(sequence)),
            "position": pyarrow.array(places - begin[sequence] + 1, whole),
            "item": items.take(pyarrow.array(tokens[places], mask=is_lost[places])),
            "rank": pyarrow.array(rank, whole, mask=~np.isfinite(rank)),
            "probability": pyarrow.array(probability[places], from_pandas=True),
        }
    )
    write_atomically(path, lambda file: parquet.write_table(table, file))


def _users(run: TrainedRun, split: str, num_sequences: int) -> pyarrow.Array:
    """The name of the user of each sequence of a split; without a table its number, from 1."""
    if run.config.data.user_field is None:
        return pyarrow.array(range(1, num_sequences + 1))
    names, lines = zip(*user_lines(run.config.data, split), strict=True)
    tokens, _ = encode_text(run, lines)
    if not np.array_equal(tokens, run.prepared.tokens(split)):
        raise DataError(f"{split}: the events in {run.config.data.dir} are not those prepared")
    return pyarrow.array(names)
