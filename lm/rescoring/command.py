"""`lm rescore`: which options exclude each other, the files that they name, what is printed."""

import json
import logging
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_prep.corpus.lines import read_text
from data_prep.errors import UserError
from lm.rescoring.nbest import NBest, read_costs, read_nbest, read_references
from lm.rescoring.weights import Arpa, Weights, format_values, rescore
from lm.scoring import Scorer

_WEIGHTS = ("lm_weight", "insertion_penalty", "first_pass_share", "mixture")
_log = logging.getLogger(__name__)


def run(options: Namespace) -> Iterator[str]:
    """What `lm rescore` prints, line by line; weights and word error rates are logged.

    Args:
        options: of the command line; None for those that are not given and have no default.

    Raises:
        UserError: if options exclude each other or are out of range, a file cannot be read, or
            there is no trained model.
    """
    _check(options)
    weights = None if options.tune is not None else _given_weights(options)
    costs = [
        read_costs(read_text(name), name)
        for name in (options.acoustic_costs, options.lm_costs)
        if name is not None
    ]
    nbest = read_nbest(read_text(options.nbest), options.nbest, costs)
    if options.first_pass_share and nbest.scores.shape[1] < 2:
        raise UserError(f"--first-pass-share: {options.nbest} has no scores of the first pass")
    references = development = None
    if options.references is not None:
        references = _references(options.references, nbest)
    if options.tune is not None:
        name, references_name = options.tune
        tuned = read_nbest(read_text(name), name, costs)
        development = tuned, _references(references_name, tuned)
    result = rescore(
        *(nbest, _models(options)),
        weights=weights,
        references=references,
        development=development,
    )
    rows = result.all() if options.all else result.best()
    if options.json:
        yield json.dumps(result.to_dict() | {"hypotheses": rows}, ensure_ascii=False)
        return
    for name, value in result.to_dict().items():
        if value is not None:
            _log.info("%s: %s", name, format_values(value))
    yield from rows


def _check(options: Namespace) -> None:
    """Raise a UserError unless the options go together."""
    if options.tune is not None and any(getattr(options, name) is not None for name in _WEIGHTS):
        raise UserError("--tune finds the weights: give none of them with it")
    if options.tune is None and options.lm_weight is None:
        raise UserError("give --tune LIST REFERENCES, or --lm-weight")
    if not _has_two_models(options) and options.mixture is not None:
        raise UserError("--mixture requires a second model: --with or --arpa")
    if options.lm_costs is not None and options.acoustic_costs is None:
        raise UserError("--lm-costs requires --acoustic-costs")
    if options.arpa is not None and options.vocabulary_size is not None:
        raise UserError("--vocabulary-size does not apply to the words of --arpa: leave one out")
    names = [options.nbest, options.references, options.acoustic_costs, options.lm_costs]
    if [*names, *(options.tune or ())].count("-") > 1:
        raise UserError("stdin (-) can be only one of the files")


def _has_two_models(options: Namespace) -> bool:
    return options.second_run is not None or options.arpa is not None


def _given_weights(options: Namespace) -> Weights:
    num_models = 1 + _has_two_models(options)
    return Weights.given(*(getattr(options, name) for name in _WEIGHTS), num_models=num_models)


def _references(name: str, nbest: NBest) -> list[list[str]]:
    return read_references(read_text(name), name, nbest)


def _models(options: Namespace) -> Sequence[Scorer | Arpa]:
    """The run's model, and the second one if there is one."""
    folders = [options.run_dir] + [options.second_run] * (options.second_run is not None)
    size = options.vocabulary_size
    models: list[Scorer | Arpa] = [
        Scorer.load(Path(folder), vocabulary_size=size) for folder in folders
    ]
    if options.arpa is not None:
        models.append(Arpa(Path(options.arpa)))
    return models
