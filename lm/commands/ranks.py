"""The ranks of `lm evaluate --ranking --ranks`: a table with a row for each prediction."""

from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet

from data_prep.corpus.events import user_lines
from data_prep.errors import DataError
from data_prep.sequences import Sequences
from data_prep.storage import write_atomically
from lm.evaluation import encode_text
from lm.generation.items import Catalogue
from lm.run import TrainedRun
from lm.scoring.ranking_figures import Predictions


def write_ranks(
    path: Path, run: TrainedRun, split: str, found: Predictions, sequences: Sequences
) -> None:
    """Write a parquet file: user, position, item, rank and probability of predictions of a split.

    An item outside the catalogue has a row with its user alone, after those of the user's others.

    Raises:
        DataError: if the table of users is not the one that was prepared.
    """
    users, catalogue = _users(run, split, len(sequences.begin)), Catalogue(run)
    items = pyarrow.array([catalogue.item(id) for id in range(run.prepared.vocab_size)])
    lost = np.repeat(np.arange(len(sequences.begin)), sequences.num_left_out)
    sequence = np.concatenate([found.sequence, lost])
    order = np.lexsort((np.append(found.place, lost * 0 + found.place.max() + 1), sequence))
    num_lost = np.full(len(lost), np.nan)
    position, target, rank, probability = (
        np.concatenate([each, num_lost])[order]
        for each in (found.place + 1, found.target, found.rank, found.probability)
    )
    whole = pyarrow.int64()
    target = pyarrow.array(target, whole, from_pandas=True)
    table = pyarrow.table(
        {
            "user": users.take(pyarrow.array(sequence[order])),
            "position": pyarrow.array(position, whole, from_pandas=True),
            "item": items.take(target),
            "rank": pyarrow.array(rank, whole, mask=~np.isfinite(rank)),
            "probability": pyarrow.array(probability, from_pandas=True),
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
