"""`lm rescore`: which options exclude each other, the files that they name, what is printed."""

import argparse
import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.errors import UserError
from lm.commands.arguments import (
    COMPUTING,
    COUNT,
    FILE,
    JSON,
    NGRAM,
    NUMBER,
    OPEN_VOCABULARY,
    RUN,
    SWITCH,
    VOCABULARY_SIZE,
    Options,
    open_run,
)
from lm.rescoring.formats import NON_WORDS
from lm.run import TrainedRun

if TYPE_CHECKING:
    from lm.loaded import LoadedModel
    from lm.rescoring.lattice_search import WordModel
    from lm.rescoring.models import ArpaScores
    from lm.rescoring.nbest import NBest
    from lm.rescoring.utterances import Utterances
    from lm.rescoring.weights import ScoredList

NUM_BEAMS = 16
HELP = "choose from n-best lists or lattices of a speech recogniser"
OPTIONS: Options = (
    RUN
    | {
        "nbest": {
            "metavar": "NBEST|LATTICES",
            "help": "id TAB scores TAB hypothesis, or Kaldi's layout; lattices: Kaldi's text, SLF"
            " file, folder of these",
        },
        "--tune": {
            "nargs": 2,
            "metavar": ("LIST", "REFERENCES"),
            "help": "find the weights on another n-best list, or other lattices",
        },
        "--lm-weight": NUMBER | {"help": "weight of the language model's log-probability"},
        "--insertion-penalty": NUMBER
        | {"help": "penalty for each word, or character without spaces (default 0)"},
        "--first-pass-share": NUMBER | {"help": "share of the first pass's model (default 0)"},
        "--mixture": NUMBER | {"help": "share of RUN in each word's probability (default 0.5)"},
        "--references": FILE | {"help": "id and words of each utterance, for word error rates"},
        "--non-words": {
            "metavar": "REGEX",
            "default": NON_WORDS,
            "help": "labels neither scored nor printed, as they are no words; '' for none"
            " (default: silence, noise, ends, all labels in brackets: %(default)s)",
        },
        "--acoustic-costs": FILE
        | {"help": "lines `utterance-N cost` of all Kaldi hypotheses, also those of --tune"},
        "--lm-costs": FILE | {"help": "likewise, of the first pass's language model"},
        "--with": {"dest": "second_run", "metavar": "RUN", "help": "other run to interpolate with"},
        "--arpa": FILE | {"help": "ARPA model to interpolate with"},
        "--ngram": NGRAM["--ngram"],
        "--beam": COUNT
        | {"help": f"largest number of hypotheses at a node of a lattice (default {NUM_BEAMS})"},
    }
    | {
        "--vocabulary-size": VOCABULARY_SIZE["--vocabulary-size"]
        | {
            "help": "divide P(<unk>) equally among unknown words, of V words with <eos>; with RUN's"
            " own size, each gets all of P(<unk>) (default: a million more than the models know, or"
            " what the lists require)"
        }
    }
    | OPEN_VOCABULARY
    | {"--all": SWITCH | {"help": "print all hypotheses with their scores, best first"}}
    | COMPUTING
    | JSON
)
EXCLUSIVE = ("--with", "--arpa")
_WEIGHTS = ("lm_weight", "insertion_penalty", "first_pass_share", "mixture")
_log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> None:
    """Print the chosen hypotheses; weights and figures are logged, or part of the JSON."""
    given = {
        name: getattr(options, name) for name in _WEIGHTS if getattr(options, name) is not None
    }
    _check(options, given)
    from lm.rescoring.models import unknown_counts
    from lm.rescoring.weights import Weights, check_separate, tune

    second = options.second_run or options.arpa
    weights = None
    if not options.tune:
        weights = Weights(**{"mixture": 0.5 if second else 1.0} | given)
    utterances, tuned = _read(options)
    nbest = utterances.nbest
    if options.first_pass_share and nbest.scores.shape[1] < 2:
        raise UserError(f"--first-pass-share: {options.nbest} has no scores of the first pass")
    if tuned is not None:
        check_separate(tuned.nbest, nbest)
        nbest = replace(nbest, characters=tuned.nbest.characters)  # of the penalty
        utterances = replace(utterances, nbest=nbest)
    runs, arpa, rules = _models(options, [utterances] if tuned is None else [utterances, tuned])
    models: list[WordModel] = [*runs, *arpa]
    figures: dict[str, Any] = {"development": None, "unused": None}
    if tuned is not None and tuned.errors is not None:
        scored = _scored(tuned.nbest, runs, arpa)
        weights = tune(scored, tuned.errors)
        best = scored.choose(scored.totals(weights))
        figures["development"] = tuned.errors.report(tuned.nbest, best)
        figures["unused"] = weights.unused(
            run=options.run_dir, second=second, has_first_pass=nbest.scores.shape[1] > 1
        )
    assert weights is not None
    if utterances.lattices:
        utterances = utterances.searched(weights, models, options.beam or NUM_BEAMS)
    nbest, errors = utterances.nbest, utterances.errors
    scored = _scored(nbest, runs, arpa)
    chosen = scored.choose(scored.totals(weights))
    figures["weights"] = asdict(weights)
    pairs = zip(rules, runs, strict=True)
    figures["unknown"] = [
        rule | unknown_counts(each.tokenizer, nbest, chosen, errors) for rule, each in pairs
    ]
    figures["report"] = errors and errors.report(nbest, chosen)
    lines = scored.all_lines(weights) if options.all else scored.best_lines(chosen)
    if options.json:
        print(json.dumps(figures | {"hypotheses": lines}, ensure_ascii=False))
        return
    _log_figures(figures)
    if options.all:
        _log.info("columns: utterance, acoustic score, log-probability by the models (nats), words")
    print("\n".join(lines))


def _read(options: argparse.Namespace) -> "tuple[Utterances, Utterances | None]":
    """The utterances to choose from, and those to tune on."""
    from lm.rescoring.formats import NonWords
    from lm.rescoring.models import num_unknown_types
    from lm.rescoring.nbest import read_costs
    from lm.rescoring.utterances import Utterances

    names = [options.acoustic_costs, options.lm_costs]
    costs = [read_costs(name) for name in names if name]
    run = TrainedRun(Path(options.run_dir))
    non_words = NonWords(
        options.non_words, lambda words: num_unknown_types(run.tokenizer, words) == 0
    )
    utterances = Utterances.read(options.nbest, options.references, costs, non_words=non_words)
    if options.beam and not utterances.lattices:
        raise UserError(f"--beam applies to lattices: {options.nbest} is an n-best list")
    if not options.tune:
        return utterances, None
    name, references = options.tune
    return utterances, Utterances.read(name, references, costs, non_words=non_words)


def _scored(nbest: "NBest", runs: "list[LoadedModel]", arpa: "list[ArpaScores]") -> "ScoredList":
    """A list with the log-probabilities of its words by each model."""
    from lm.rescoring.weights import ScoredList

    by_run = [[score.log_prob for score in run.score(nbest.texts)] for run in runs]
    return ScoredList(nbest, [*by_run, *(model(nbest.texts) for model in arpa)])


def _models(
    options: argparse.Namespace, lists: "list[Utterances]"
) -> "tuple[list[LoadedModel], list[ArpaScores], list[dict[str, Any]]]":
    """The runs, an ARPA model if there is one, and the rules of the runs for unknown words.

    How unknown words are scored and why they are many is logged.
    """
    from data_prep.tokenizer.token_file import log_literals
    from lm.loaded import LoadedModel
    from lm.mixed import MixedModel
    from lm.rescoring.models import ArpaScores, common_vocabulary_size, num_unknown_types
    from lm.scoring.arpa import ArpaModel
    from lm.scoring.unknown import UnknownWords

    hypotheses = [text for each in lists for text in each.texts]
    references = [text for each in lists if each.errors for text in each.errors.references]
    opened = [open_run(options)]
    if options.second_run is not None:
        opened.append(TrainedRun(Path(options.second_run), options.device))
    for run in opened:
        run.check_end()
    words = {word for run in opened for word in run.tokenizer.literals}
    literals = {word: sum(text.count(word) for text in hypotheses) for word in sorted(words)}
    log_literals("hypotheses", literals)
    ngram = None if options.arpa is None else ArpaModel(Path(options.arpa))
    common, is_open = options.vocabulary_size, options.open_vocabulary
    unknown = [(run.tokenizer, num_unknown_types(run.tokenizer, hypotheses)) for run in opened]
    if common is None and not is_open:
        common = common_vocabulary_size(unknown, ngram, hypotheses)
    runs, rules = [], []
    for run, (_, types) in zip(opened, unknown, strict=True):
        size = common if types is not None or options.vocabulary_size is not None else None
        settings = {"vocabulary_size": size, "open_vocabulary": is_open}
        kind = MixedModel if options.ngram and run is opened[0] else LoadedModel
        runs.append(kind(run, **settings, warn_of_unknown=False))  # but of all at once
        rules.append({"run": str(run.folder), "vocabulary_size": size, "types": types})
        _log.info("%s", runs[-1].unknown.sentence(run.folder, types or 0))
        for what, texts in (("hypotheses", hypotheses), ("references", references)):
            if warning := UnknownWords(run.tokenizer, texts).warning(what):
                _log.warning("%s: %s", run.folder, warning)
    if ngram is None:
        return runs, [], rules
    arpa = ArpaScores(ngram, common, opened[0].speller if is_open else None)
    _log.info("%s", arpa.rule(hypotheses))
    return runs, [arpa], rules


def _log_figures(figures: dict[str, Any]) -> None:
    """A line for each kind of figures; models without a weight are named."""
    titled = [("weights", figures["weights"])]
    titled += [(f"unknown to {each.pop('run')}", each) for each in figures["unknown"]]
    titled += [(title, figures[title] or {}) for title in ("development", "report")]
    for title, values in titled:
        shown = [
            f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}"
            for name, value in values.items()
            if value is not None
        ]
        if shown:
            _log.info("%s: %s", title, ", ".join(shown))
        if title == "weights":
            for name in figures["unused"] or ():
                _log.info("the tuned weight of %s is 0: it is not used", name)


def _check(options: argparse.Namespace, given: dict[str, float]) -> None:
    """Raise a UserError unless the options and the given weights go together."""
    files = [options.nbest, options.references, options.acoustic_costs, options.lm_costs]
    has_second = options.second_run or options.arpa
    problems = {
        "--tune finds the weights: give none of them with it": options.tune and given,
        "give --tune LIST REFERENCES, or --lm-weight": not (options.tune or "lm_weight" in given),
        "--mixture requires a second model: --with or --arpa": (
            "mixture" in given and not has_second
        ),
        "--lm-costs requires --acoustic-costs": options.lm_costs and not options.acoustic_costs,
        "stdin (-) can be only one of the files": [*files, *(options.tune or ())].count("-") > 1,
    }
    for problem, applies in problems.items():
        if applies:
            raise UserError(problem)
