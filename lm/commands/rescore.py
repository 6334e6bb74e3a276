"""`lm rescore`: which options exclude each other, the files that they name, what is printed."""

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.errors import UserError
from lm.commands.arguments import add_computing, add_json, add_run
from lm.commands.score import add_vocabulary_size
from lm.run import Run

if TYPE_CHECKING:
    from lm.rescoring.weights import Arpa, Weights
    from lm.scoring import Scorer

HELP = "choose from n-best lists of a speech recogniser"
_WEIGHTS = {
    "lm_weight": "weight of the language model's log-probability",
    "insertion_penalty": "subtracted for each word (default 0)",
    "first_pass_share": "share of the first pass's model (default 0)",
    "mixture": "share of RUN in each word's probability (default 0.5)",
}
_log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    add_run(parser)
    parser.add_argument(
        "nbest", metavar="NBEST", help="id TAB scores TAB hypothesis, or Kaldi's layout"
    )
    parser.add_argument(
        "--references", metavar="FILE", help="id and words of each utterance, for word error rates"
    )
    parser.add_argument(
        "--tune",
        nargs=2,
        metavar=("LIST", "REFERENCES"),
        help="find the weights on another n-best list",
    )
    for name, text in _WEIGHTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, help=text)
    second = parser.add_mutually_exclusive_group()
    second.add_argument(
        "--with", dest="second_run", metavar="RUN", help="second run to interpolate with"
    )
    second.add_argument("--arpa", metavar="FILE", help="ARPA or KenLM model to interpolate with")
    parser.add_argument(
        "--acoustic-costs", metavar="FILE", help="lines `utterance-N cost` of all Kaldi hypotheses"
    )
    parser.add_argument(
        "--lm-costs", metavar="FILE", help="likewise, of the first pass's language model"
    )
    add_vocabulary_size(parser)
    parser.add_argument(
        "--all", action="store_true", help="print all hypotheses with their scores, best first"
    )
    add_computing(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> None:
    """Print the chosen hypotheses; weights and word error rates are logged, or part of the JSON.

    Raises:
        UserError: if options exclude each other or are out of range, a file cannot be read, or
            there is no trained model.
    """
    _check(options)
    from data_prep.corpus.lines import read_text
    from lm.rescoring.nbest import read_costs, read_nbest, read_references
    from lm.rescoring.weights import format_values, rescore

    weights = None if options.tune else _given_weights(options)
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
        references = read_references(read_text(options.references), options.references, nbest)
    if options.tune is not None:
        name, references_name = options.tune
        tuned = read_nbest(read_text(name), name, costs)
        development = tuned, read_references(read_text(references_name), references_name, tuned)
    result = rescore(
        nbest,
        _open_models(options),
        weights=weights,
        references=references,
        development=development,
    )
    rows = result.all() if options.all else result.best()
    if options.json:
        print(json.dumps(result.to_dict() | {"hypotheses": rows}, ensure_ascii=False))
        return
    for name, value in result.to_dict().items():
        if value is not None:
            _log.info("%s: %s", name, format_values(value))
    print("\n".join(rows))


def _check(options: argparse.Namespace) -> None:
    """Raise a UserError unless the options go together."""
    if options.tune is not None and any(getattr(options, name) is not None for name in _WEIGHTS):
        raise UserError("--tune finds the weights: give none of them with it")
    if options.tune is None and options.lm_weight is None:
        raise UserError("give --tune LIST REFERENCES, or --lm-weight")
    if options.mixture is not None and not (options.second_run or options.arpa):
        raise UserError("--mixture requires a second model: --with or --arpa")
    if options.lm_costs is not None and options.acoustic_costs is None:
        raise UserError("--lm-costs requires --acoustic-costs")
    if options.arpa is not None and options.vocabulary_size is not None:
        raise UserError("--vocabulary-size does not apply to the words of --arpa: leave one out")
    names = [options.nbest, options.references, options.acoustic_costs, options.lm_costs]
    if [*names, *(options.tune or ())].count("-") > 1:
        raise UserError("stdin (-) can be only one of the files")


def _given_weights(options: argparse.Namespace) -> "Weights":
    """The weights that were given; two models have equal shares unless --mixture is."""
    from lm.rescoring.weights import Weights

    default = 0.5 if options.second_run or options.arpa else 1.0
    given = {name: getattr(options, name) for name in _WEIGHTS}
    weights = {name: value for name, value in given.items() if value is not None}
    return Weights(**{"mixture": default} | weights)


def _open_models(options: argparse.Namespace) -> "list[Scorer | Arpa]":
    """The run's model, and the second one if there is one."""
    from lm.rescoring.weights import Arpa
    from lm.scoring import Scorer

    runs = [Run.open(options.run_dir, device=options.device, threads=options.threads)]
    if options.second_run is not None:
        runs.append(Run(Path(options.second_run), device=options.device))
    models: list[Scorer | Arpa] = [
        Scorer(
            run.model,
            run.tokenizer,
            context=run.description.context,
            vocabulary_size=options.vocabulary_size,
        )
        for run in runs
    ]
    if options.arpa is not None:
        models.append(Arpa(Path(options.arpa)))
    return models
