"""`lm generate`: which options exclude each other, the prompts, and what is printed."""

import argparse
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from data_prep.errors import DataError, UserError
from data_prep.sequences import word_item
from lm.commands.arguments import (
    BY_LINE,
    COMPUTING,
    COUNT,
    JSON,
    NUMBER,
    RUN,
    SWITCH,
    Options,
    open_run,
)
from lm.run import TrainedRun

if TYPE_CHECKING:
    from lm.generation import Sample

HELP = "draw text from a trained model"
MAX_WORDS_NAMED = 10
"""Unknown words of the prompts that are named."""
_CHOICE: Options = {
    "--prompt": {"metavar": "TEXT|-", "help": "text to continue (- reads stdin)"},
    "--prompts": {"metavar": "FILE|-", "help": "texts to continue, one per line"},
    "--tokens": COUNT | {"default": 100, "help": "number of tokens to generate (default 100)"},
    "--samples": COUNT
    | {"default": 1}
    | {"help": "number of continuations (default 1); a line --- ends each of several lines"},
    "--beams": COUNT
    | {"help": "search for the best text, to the end of the line, with BEAMS beams"},
    "--top-k": COUNT | {"help": "draw from the TOP_K most probable words"},
    "--temperature": NUMBER | {"help": "0 is greedy (default 1)"},
    "--top-p": NUMBER | {"help": "draw from the most probable words with mass TOP_P"},
    "--min-p": NUMBER | {"help": "draw from words with P of at least MIN_P times the largest"},
    "--repetition-penalty": NUMBER
    | {
        "metavar": "R",
        "help": "words that occurred before have P^R instead of P, R ≥ 1 (default 1)",
    },
    "--length-penalty": NUMBER
    | {"metavar": "A", "help": "the best text has the largest log P / length^A (default 1)"},
    "--stop": {
        "action": "append",
        "metavar": "TEXT",
        "help": r"end before this text; \n is a line end; may be repeated",
    },
    "--allow-unk": SWITCH | {"help": "also draw <unk>, the token of unknown words"},
    "--spell-unk": SWITCH | {"help": "also draw <unk>, and for each a spelling"},
    "--seed": {"type": int, "help": "seed of the random numbers, 64 bits (default 1)"},
}
OPTIONS = RUN | _CHOICE | BY_LINE | COMPUTING | JSON
EXCLUSIVE = ("--prompt", "--prompts")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> None:
    """Print the continuations; one sample of one prompt while it is drawn."""
    _check(options)
    prompts = _prompts(options)
    run = open_run(options)
    try:
        has_prompts = False
        for each in prompts:
            has_prompts = True
            _generate(options, run, each)
        if not has_prompts:
            raise DataError(f"{options.prompts}: no prompts")
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(f"generate: {error}") from error


def _check(options: argparse.Namespace) -> None:
    """Raise a UserError unless the options go together."""
    if options.line_buffered and options.prompts is None:
        raise UserError("--line-buffered requires --prompts, such as --prompts -")
    if options.beams is None:
        if options.length_penalty is not None:
            raise UserError("--length-penalty requires --beams")
        if options.allow_unk and options.spell_unk:
            raise UserError("--allow-unk and --spell-unk exclude each other")
        return
    for name in (*_SAMPLING, "stop", "seed", "spell_unk"):
        if (value := getattr(options, name)) is not None and value is not False:
            raise UserError(
                f"--{name.replace('_', '-')} cannot be combined with --beams, which does not draw"
                " words at random and ends at the end of the line"
            )
    if options.samples > options.beams:
        raise UserError(f"--samples {options.samples} requires as many --beams")


def _prompts(options: argparse.Namespace) -> Iterable[list[str]]:
    """The texts to continue, in the lists that are answered before the next one is read."""
    from data_prep.corpus.lines import read_text

    if options.prompts is not None:
        lines = read_text(options.prompts)
        if options.line_buffered:
            return ([line] for line in lines)
        return [prompts] if (prompts := list(lines)) else []
    return [["\n".join(read_text("-")) if options.prompt == "-" else options.prompt or ""]]


def _generate(options: argparse.Namespace, run: TrainedRun, prompts: list[str]) -> None:
    from lm.generation import Sampling, generate_text, search_text
    from lm.generation.text import checked_text
    from lm.scoring.unknown import UnknownWords

    prompts = list(map(checked_text, prompts))
    given = {name: getattr(options, name) for name in _SAMPLING}
    sampling = Sampling(**{name: value for name, value in given.items() if value is not None})
    has_items = run.is_independent and run.config.data.user_field is not None
    if run.is_independent:
        what = "items of the prompt that are not in the catalogue, left out"
        prompts, unknown = _known_items(run, prompts)
    else:
        what = "unknown words of the prompt, read as <unk>"
        unknown = UnknownWords(run.tokenizer, prompts).types
    if unknown:
        first = [word[:40] for word in unknown[:MAX_WORDS_NAMED]]
        shown = [word if word.isprintable() else repr(word) for word in first]
        rest = f" and {len(unknown) - len(shown)} more" if len(unknown) > len(shown) else ""
        _log.warning("%s: %s%s", what, ", ".join(shown), rest)
    streams = not options.json and options.beams is None and options.samples == len(prompts) == 1
    streams &= not has_items and not options.line_buffered
    results: Iterable[list[Sample]]
    both: dict[str, Any] = {"num_tokens": options.tokens, "allow_unk": options.allow_unk}
    if options.beams is None:
        results = generate_text(
            run,
            prompts,
            num_samples=options.samples,
            sampling=sampling,
            stop=[text.replace("\\n", "\n") for text in options.stop or ()],
            seed=1 if options.seed is None else options.seed,
            spell_unk=options.spell_unk,
            on_piece=partial(print, end="", flush=True) if streams else None,
            **both,
        )
    else:
        penalty = 1.0 if options.length_penalty is None else options.length_penalty
        search = partial(search_text, run, num_beams=options.beams, length_penalty=penalty, **both)
        results = map(search, prompts)
    if streams:
        print(prompts[0], end="", flush=True)
    with _on_new_lines() if streams and sys.stdout.isatty() else nullcontext():
        _print(options, prompts, results, streams=streams, has_items=has_items)


def _print(
    options: argparse.Namespace,
    prompts: list[str],
    results: "Iterable[list[Sample]]",
    *,
    streams: bool,
    has_items: bool,
) -> None:
    """Print the continuations of each prompt; of items, as JSON lists."""
    for prompt, found in zip(prompts, results, strict=True):
        samples = found[: options.samples]
        if has_items and not options.json:
            for sample in samples:
                items = _items_of_words(f"{prompt} {sample.text}")
                print(json.dumps(items, ensure_ascii=False), flush=True)
            continue
        if streams:
            print()
        elif options.json:
            form = _items_of_words if has_items else str
            texts = [form(sample.text) for sample in samples]
            values: dict[str, object] = {"prompt": form(prompt), "samples": texts}
            if options.beams is not None:
                values["log_probs"] = [sample.log_prob for sample in samples]
            print(json.dumps(values, ensure_ascii=False), flush=True)
        else:
            texts = [prompt + sample.text for sample in samples]
            for text in texts:
                is_single = len(prompts) * len(texts) == 1 and not options.line_buffered
                is_separated = "\n" in text and not is_single
                print(text, *["---"] * is_separated, sep="\n", flush=True)


def _known_items(run: TrainedRun, prompts: list[str]) -> tuple[list[str], list[str]]:
    """The words of items of prompts, and unknown items; those of tables as `--history` has them."""
    from lm.generation.items import Catalogue, parse_items

    catalogue, unknown, known = Catalogue(run), dict[str, None](), list[str]()
    for prompt in prompts:
        lists: list[list[Any]] = [line.split() for line in prompt.split("\n")]
        if run.config.data.user_field is not None:
            lists = [parse_items(prompt, "the prompt")]
        found = [catalogue.find(items) for items in lists]
        known.append("\n".join(" ".join(map(run.tokenizer.token, ids)) for ids, _ in found))
        unknown.update(dict.fromkeys(str(item) for _, lost in found for item in lost))
    return known, list(unknown)


def _items_of_words(text: str) -> list[str]:
    return list(map(word_item, text.split()))


@contextmanager
def _on_new_lines() -> Iterator[None]:
    """A line that is logged ends that of the text which is being printed to the terminal."""

    def end_line(_: logging.LogRecord) -> bool:
        print(flush=True)
        return True

    log = logging.getLogger("lm.output.backends.verify")
    log.addFilter(end_line)
    try:
        yield
    finally:
        log.removeFilter(end_line)
