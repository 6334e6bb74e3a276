"""`lm score`: log-probabilities of sentences and words."""

import argparse
import logging

from data_prep.errors import UserError
from lm.commands.arguments import (
    ADAPTATION,
    BY_LINE,
    COMPUTING,
    NGRAM,
    OPEN_VOCABULARY,
    RUN,
    SWITCH,
    VOCABULARY_SIZE,
    Options,
    open_run,
)

HELP = "log-probabilities of sentences and words"
_CHOICES = {
    "--level": (
        ("sentence", "summary", "word", "token"),
        "what to print; perplexities excluding OOVs leave out words, in TSV and JSON <unk> tokens",
    ),
    "--format": (
        ("kenlm", "tsv", "json"),
        "layout of KenLM's query, TSV quoted as CSV (lm/scoring/README.md: pandas), or JSON lines",
    ),
    "--unit": (("log10", "nats", "bits"), "unit of log-probabilities"),
}
OPTIONS: Options = (
    RUN
    | {"file": {"metavar": "FILE|-", "nargs": "?", "help": "one sentence per line (default stdin)"}}
    | {
        name: {"choices": choices, "help": f"{text} (default: {choices[0]})"}
        for name, (choices, text) in _CHOICES.items()
    }
    | {
        "--stream": SWITCH | {"help": "all lines are one text (default: independent sentences)"},
        "--stream-by-id": SWITCH | {"help": "lines with the same id, in sequence, are one text"},
        "--details": SWITCH
        | {"help": "rank and class of each word, entropy of its distribution; as words, TSV"},
        "--ids": SWITCH
        | {"help": "each line begins with an id and a tab, or a space if there is no tab"},
    }
    | BY_LINE
    | VOCABULARY_SIZE
    | OPEN_VOCABULARY
    | ADAPTATION
    | NGRAM
    | COMPUTING
)
EXCLUSIVE = (*VOCABULARY_SIZE, *OPEN_VOCABULARY)
_OF_SCORER = ("vocabulary_size", "open_vocabulary", "cache", "dynamic", "ngram")
_RULES = {
    "line": "independent sentences",
    "all": "one stream: all lines are one text",
    "id": "streams: the lines of each id are one text",
}
_log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> None:
    """Print the scores, line by line."""
    _check(options)
    from data_prep.corpus.lines import read_text
    from data_prep.tokenizer.token_file import counted_literals, log_literals
    from lm.device import return_freed_memory
    from lm.figures import ITEM, perplexity_rule, token_unit
    from lm.scoring import Scorer
    from lm.scoring.layouts import Layout

    return_freed_memory()
    run = open_run(options)
    run.check_end()
    if options.text != "line":
        run.check_text("--stream")
    scorer = Scorer(run, **{name: getattr(options, name) for name in _OF_SCORER})
    file = options.file or "-"
    layout = Layout(
        scorer=scorer,
        source=file,
        level=options.level,
        name=options.format,
        unit=options.unit,
        has_ids=options.ids,
        text=options.text,
        details=options.details,
        at_once=1 if options.line_buffered else 256 if options.details else None,  # which is slow
        keep_empty_lines=run.keeps_empty_lines,
    )
    if options.line_buffered and options.text != "line" and not run.model.backbone.carries_state:
        raise UserError("--line-buffered: the windows of a Transformer's text depend on its length")
    read = _RULES[options.text]
    if options.text != "line" and not run.keeps_empty_lines:
        read += ", empty lines left out as in training"
    unit = "word" if options.format == "kenlm" else token_unit(run.tokenizer)
    if run.is_independent and options.vocabulary_size is None:
        unit, read = ITEM, f"{read}, unknown items left out"
    counted = perplexity_rule(unit, options.open_vocabulary)
    if options.vocabulary_size is not None:
        counted = counted.replace("counted as <unk>", "by their shares of P(<unk>)")
    literals = dict.fromkeys(run.tokenizer.literals, 0)
    lines = counted_literals(read_text(file), literals)
    for number, row in enumerate(layout.rows(lines)):
        if number == 0:  # the text can be read
            _log.info(
                "%s, <eos> before the first word; log-probabilities in %s; perplexity %s",
                read,
                options.unit,
                counted,
            )
        print(row, flush=options.line_buffered)
    log_literals("text", literals)


def _check(options: argparse.Namespace) -> None:
    """Fill in options that are not given; refuse those that exclude each other."""
    defaults = {"level": "word", "format": "tsv"} if options.details else {}
    for name, (choices, _) in _CHOICES.items():
        if getattr(options, name[2:]) is None:
            setattr(options, name[2:], defaults.get(name[2:], choices[0]))
    has_columns = options.format != "kenlm" and options.level in ("word", "token")
    if options.details and not has_columns:
        raise UserError("--details requires --level word or token, and --format tsv or json")
    if options.level == "token" and not has_columns:
        raise UserError("--level token requires --format tsv or json")
    if options.stream and options.stream_by_id:
        raise UserError("--stream and --stream-by-id exclude each other")
    if options.line_buffered and options.dynamic:
        raise UserError(
            "--line-buffered excludes --dynamic, which learns from several lines at once"
        )
    if (options.cache or options.dynamic) and not options.stream:
        raise UserError("--cache and --dynamic require --stream: they adapt to one text")
    if options.cache and options.details:
        raise UserError("--cache excludes --details: the cache has no classes")
    if options.ngram and (options.details or options.cache or options.dynamic):
        raise UserError("--ngram excludes --details, --cache and --dynamic")
    options.ids |= options.stream_by_id
    options.text = "id" if options.stream_by_id else "all" if options.stream else "line"
