"""`lm score`: which options exclude each other, and what is printed."""

import logging
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from data_prep.corpus.lines import read_text
from data_prep.errors import UserError
from lm.scoring.layouts import Layout, score_text
from lm.scoring.scorer import Scorer

_log = logging.getLogger(__name__)


def run(options: Namespace) -> Iterator[str]:
    """What `lm score` prints, line by line.

    Args:
        options: of the command line; None for those that are not given and have no default.

    Raises:
        UserError: if options exclude each other, there is no trained model, or a line of the text
            cannot be scored.
    """
    if options.details and (options.format == "kenlm" or options.level != "word"):
        raise UserError("--details requires --level word and --format tsv or json")
    folder, size = Path(options.run_dir), options.vocabulary_size
    scorer = Scorer.load(folder, vocabulary_size=size, details=options.details)
    layout = Layout(
        level=options.level,
        name=options.format,
        unit=options.unit,
        has_ids=options.ids,
        one_rank_per_word=scorer.has_one_token_per_word,
    )
    rule = "one stream: all lines are one text" if options.stream else "independent sentences"
    _log.info("%s, <eos> before the first word; log-probabilities in %s", rule, options.unit)
    return score_text(scorer, read_text(options.text or "-"), layout, stream=options.stream)
