"""`lm rescore`: which options exclude each other, the files that they name, what is printed."""

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.errors import UserError
from lm.commands.arguments import (
    COMPUTING,
    FILE,
    JSON,
    NUMBER,
    RUN,
    SWITCH,
    VOCABULARY_SIZE,
    Options,
)
from lm.run import Run

if TYPE_CHECKING:
    from lm.rescoring.nbest import Floats
    from lm.rescoring.weights import WordScores

HELP = "choose from n-best lists of a speech recogniser"
OPTIONS: Options = (
    RUN
    | {
        "nbest": {"metavar": "NBEST", "help": "id TAB scores TAB hypothesis, or Kaldi's layout"},
        "--tune": {
            "nargs": 2,
            "metavar": ("LIST", "REFERENCES"),
            "help": "find the weights on another n-best list",
        },
        "--lm-weight": NUMBER | {"help": "weight of the language model's log-probability"},
        "--insertion-penalty": NUMBER | {"help": "penalty subtracted for each word (default 0)"},
        "--first-pass-share": NUMBER | {"help": "share of the first pass's model (default 0)"},
        "--mixture": NUMBER | {"help": "share of RUN in each word's probability (default 0.5)"},
        "--references": FILE | {"help": "id and words of each utterance, for word error rates"},
        "--acoustic-costs": FILE | {"help": "lines `utterance-N cost` of all Kaldi hypotheses"},
        "--lm-costs": FILE | {"help": "likewise, of the first pass's language model"},
        "--with": {"dest": "second_run", "metavar": "RUN", "help": "other run to interpolate with"},
        "--arpa": FILE | {"type": Path, "help": "ARPA or KenLM model to interpolate with"},
    }
    | VOCABULARY_SIZE
    | {"--all": SWITCH | {"help": "print all hypotheses with their scores, best first"}}
    | COMPUTING
    | JSON
)
EXCLUSIVE = ("--with", "--arpa")
_WEIGHTS = ("lm_weight", "insertion_penalty", "first_pass_share", "mixture")
_log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> None:
    """Print the chosen hypotheses; weights and word error rates are logged, or part of the JSON."""
    given = {
        name: getattr(options, name) for name in _WEIGHTS if getattr(options, name) is not None
    }
    _check(options, given)
    from lm.rescoring.nbest import WordErrors, read_costs, read_nbest
    from lm.rescoring.weights import ScoredList, Weights, arpa_scores, check_separate, tune

    has_second = options.second_run or options.arpa
    weights = None
    if not options.tune:
        weights = Weights(**{"mixture": 0.5 if has_second else 1.0} | given)
    costs = [read_costs(name) for name in (options.acoustic_costs, options.lm_costs) if name]
    nbest = read_nbest(options.nbest, costs)
    if options.first_pass_share and nbest.scores.shape[1] < 2:
        raise UserError(f"--first-pass-share: {options.nbest} has no scores of the first pass")
    errors = WordErrors.read(options.references, nbest) if options.references else None
    if options.tune:
        tuned = read_nbest(options.tune[0], costs)
        tuned_errors = WordErrors.read(options.tune[1], tuned)
        check_separate(tuned, nbest)
    runs = [Run.open(options.run_dir, device=options.device, threads=options.threads)]
    if options.second_run is not None:
        runs.append(Run(Path(options.second_run), device=options.device))
    models: list[WordScores] = [partial(_score, run, options.vocabulary_size) for run in runs]
    if options.arpa is not None:
        models.append(arpa_scores(options.arpa))
    development = None
    if weights is None:
        scored = ScoredList(tuned, models)
        weights = tune(scored, tuned_errors)
        development = tuned_errors.report(tuned, scored.choose(scored.totals(weights)))
    scored = ScoredList(nbest, models)
    report = errors and errors.report(nbest, scored.choose(scored.totals(weights)))
    figures = {"weights": asdict(weights), "development": development, "report": report}
    lines = scored.all_lines(weights) if options.all else scored.best_lines(weights)
    if options.json:
        print(json.dumps(figures | {"hypotheses": lines}, ensure_ascii=False))
        return
    for title, values in figures.items():
        shown = [
            f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}"
            for name, value in (values or {}).items()
            if value is not None
        ]
        if shown:
            _log.info("%s: %s", title, ", ".join(shown))
    print("\n".join(lines))


def _check(options: argparse.Namespace, given: dict[str, float]) -> None:
    """Raise a UserError unless the options and the given weights go together."""
    files = [options.nbest, options.references, options.acoustic_costs, options.lm_costs]
    problems = {
        "--tune finds the weights: give none of them with it": options.tune and given,
        "give --tune LIST REFERENCES, or --lm-weight": not (options.tune or "lm_weight" in given),
        "--mixture requires a second model: --with or --arpa": (
            "mixture" in given and not (options.second_run or options.arpa)
        ),
        "--lm-costs requires --acoustic-costs": options.lm_costs and not options.acoustic_costs,
        "--vocabulary-size does not apply to the words of --arpa: leave one out": (
            options.arpa and options.vocabulary_size
        ),
        "stdin (-) can be only one of the files": [*files, *(options.tune or ())].count("-") > 1,
    }
    for problem, applies in problems.items():
        if applies:
            raise UserError(problem)


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
