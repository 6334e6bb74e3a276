"""`lm rescore`: which options exclude each other, the files that they name, what is printed."""

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.errors import UserError
from lm.commands.arguments import add_computing, add_json, add_run
from lm.commands.score import add_vocabulary_size
from lm.run import Run

if TYPE_CHECKING:
    from lm.rescoring.nbest import Floats, NBest, WordErrors
    from lm.rescoring.weights import Weights, WordScores

HELP = "choose from n-best lists of a speech recogniser"
_WEIGHTS = {
    "lm_weight": "weight of the language model's log-probability",
    "insertion_penalty": "penalty subtracted for each word (default 0)",
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
        "--tune",
        nargs=2,
        metavar=("LIST", "REFERENCES"),
        help="find the weights on another n-best list",
    )
    for name, text in _WEIGHTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, help=text)
    for name, text in (
        ("references", "id and words of each utterance, for word error rates"),
        ("acoustic-costs", "lines `utterance-N cost` of all Kaldi hypotheses"),
        ("lm-costs", "likewise, of the first pass's language model"),
    ):
        parser.add_argument(f"--{name}", metavar="FILE", help=text)
    second = parser.add_mutually_exclusive_group()
    second.add_argument(
        "--with", dest="second_run", metavar="RUN", help="second run to interpolate with"
    )
    second.add_argument("--arpa", metavar="FILE", help="ARPA or KenLM model to interpolate with")
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
    from lm.rescoring.nbest import read_costs, read_nbest
    from lm.rescoring.weights import ScoredList, check_separate, tune

    weights = None if options.tune else _given_weights(options)
    costs = [
        read_costs(read_text(name), name)
        for name in (options.acoustic_costs, options.lm_costs)
        if name is not None
    ]
    nbest = read_nbest(read_text(options.nbest), options.nbest, costs)
    if options.first_pass_share and nbest.scores.shape[1] < 2:
        raise UserError(f"--first-pass-share: {options.nbest} has no scores of the first pass")
    errors = _read_errors(options.references, nbest) if options.references else None
    if options.tune:
        tuned = read_nbest(read_text(options.tune[0]), options.tune[0], costs)
        tuned_errors = _read_errors(options.tune[1], tuned)
        check_separate(tuned, nbest)
    models = _open_models(options)
    development = None
    if weights is None:
        scored = ScoredList(tuned, models)
        weights = tune(scored, tuned_errors)
        development = tuned_errors.report(tuned, scored.choose(scored.totals(weights)))
    scored = ScoredList(nbest, models)
    chosen = scored.choose(scored.totals(weights))
    report = None if errors is None else errors.report(nbest, chosen)
    figures = {"weights": asdict(weights), "development": development, "report": report}
    lines = scored.all_lines(weights) if options.all else scored.best_lines(weights)
    if options.json:
        print(json.dumps(figures | {"hypotheses": lines}, ensure_ascii=False))
        return
    for name, values in figures.items():
        if values is not None:
            _log.info("%s: %s", name, _format(values))
    print("\n".join(lines))


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

    mixture = 0.5 if options.second_run or options.arpa else 1.0
    given = {name: getattr(options, name) for name in _WEIGHTS}
    given = {name: value for name, value in given.items() if value is not None}
    return Weights(**{"mixture": mixture} | given)


def _read_errors(name: str, nbest: "NBest") -> "WordErrors":
    """The word errors of an n-best list with regard to references."""
    from data_prep.corpus.lines import read_text
    from lm.rescoring.nbest import WordErrors, read_references

    return WordErrors.of(nbest, read_references(read_text(name), name, nbest))


def _open_models(options: argparse.Namespace) -> "list[WordScores]":
    """The run's model, and the second one if there is one."""
    from lm.rescoring.weights import Arpa

    runs = [Run.open(options.run_dir, device=options.device, threads=options.threads)]
    if options.second_run is not None:
        runs.append(Run(Path(options.second_run), device=options.device))
    models: list[WordScores] = [partial(_score, run, options.vocabulary_size) for run in runs]
    if options.arpa is not None:
        models.append(Arpa(Path(options.arpa)).word_scores)
    return models


def _score(run: Run, vocabulary_size: int | None, texts: Sequence[str]) -> "list[Floats]":
    """Log-probabilities of words by a run; how many are out of its vocabulary is logged."""
    from lm.scoring import Scorer

    context = run.description.context
    scorer = Scorer(run.model, run.tokenizer, context=context, vocabulary_size=vocabulary_size)
    scores = list(scorer.sentences(texts))
    num_words, num_oov = (sum(len(s.words) for s in scores), sum(s.is_oov.sum() for s in scores))
    if num_oov:
        _log.info("%s: %d of %d words are out of vocabulary", run.folder, num_oov, num_words)
    return [score.log_prob for score in scores]


def _format(figures: dict[str, Any]) -> str:
    """One line of weights or word error rates."""
    return ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}"
        for name, value in figures.items()
        if value is not None
    )
