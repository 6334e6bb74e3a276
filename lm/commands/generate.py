"""`lm generate`: which options exclude each other, the prompts, and what is printed."""

import argparse
import json
import logging
import sys
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from data_prep.errors import UserError
from lm.commands.arguments import add_computing, add_json, add_run, at_least_one
from lm.run import Run

if TYPE_CHECKING:
    from data_prep.tokenizer.tokenizer import Tokenizer
    from lm.generation import Sample

HELP = "draw text from a trained model"
MAX_WORDS_NAMED = 10
"""Unknown words of the prompts that are named."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    add_run(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT|-", help="text to continue (- reads stdin)")
    prompt.add_argument("--prompts", metavar="FILE|-", help="texts to continue, one per line")
    for name, default, text in (
        ("tokens", 100, "number of tokens to generate (default 100)"),
        ("samples", 1, "number of continuations (default 1)"),
        ("beams", None, "search for the best text, to the end of the line, with BEAMS beams"),
        ("top-k", None, "draw from the TOP_K most probable words"),
    ):
        parser.add_argument(f"--{name}", type=at_least_one, default=default, help=text)
    for name, metavar, text in (
        ("temperature", None, "0 is greedy (default 1)"),
        ("top-p", None, "draw from the most probable words with mass TOP_P"),
        ("min-p", None, "draw from words with P of at least MIN_P times the largest"),
        (
            "repetition-penalty",
            "R",
            "words that occurred before have P^R instead of P, R ≥ 1 (default 1)",
        ),
        ("length-penalty", "A", "the best text has the largest log P / length^A (default 1)"),
    ):
        parser.add_argument(f"--{name}", type=float, metavar=metavar, help=text)
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help=r"end before this text; \n is a line end; may be repeated",
    )
    parser.add_argument("--seed", type=int, help="seed of the random numbers, 64 bits (default 1)")
    parser.add_argument(
        "--show-classes",
        action="store_true",
        help="table of words with P(class) and P(word | class)",
    )
    add_computing(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> None:
    """Print the continuations; one sample of one prompt while it is drawn.

    Raises:
        UserError: if options exclude each other or are out of range, there is no prompt, or there
            is no trained model.
    """
    _check(options)
    prompts = _prompts(options)
    try:
        _generate(options, prompts)
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(f"generate: {error}") from error


def _check(options: argparse.Namespace) -> None:
    """Raise a UserError unless the options go together."""
    if options.beams is None:
        if options.length_penalty is not None:
            raise UserError("--length-penalty requires --beams")
        return
    for name in (*_SAMPLING, "stop", "seed"):
        if getattr(options, name) is not None:
            raise UserError(
                f"--{name.replace('_', '-')} cannot be combined with --beams, which does not draw"
                " words at random and ends at the end of the line"
            )
    if options.samples > options.beams:
        raise UserError(f"--samples {options.samples} requires as many --beams")


def _prompts(options: argparse.Namespace) -> list[str]:
    """The texts to continue, at least one."""
    from data_prep.corpus.lines import read_text

    if options.prompts is not None:
        if not (prompts := list(read_text(options.prompts))):
            raise UserError(f"{options.prompts}: no prompts")
        return prompts
    if options.prompt != "-":
        return [options.prompt or ""]
    try:
        return [sys.stdin.read().removesuffix("\n")]
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt -: invalid UTF-8: {error.reason}") from error


def _generate(options: argparse.Namespace, prompts: list[str]) -> None:
    """Print the continuations of the prompts."""
    from lm.generation import Sampling, generate_text, search_text

    given = {name: getattr(options, name) for name in _SAMPLING}
    sampling = Sampling(**{name: value for name, value in given.items() if value is not None})
    run = Run.open(options.run_dir, device=options.device, threads=options.threads)
    model, tokenizer, num_tokens = run.model, run.tokenizer, options.tokens
    _report_unknown_words(tokenizer, prompts)
    is_text = not (options.json or options.show_classes)
    streams = is_text and options.beams is None and options.samples == len(prompts) == 1
    results: Iterable[list[Sample]]
    if options.beams is None:
        results = generate_text(
            model,
            tokenizer,
            prompts,
            num_tokens=num_tokens,
            num_samples=options.samples,
            sampling=sampling,
            stop=[text.replace("\\n", "\n") for text in options.stop or ()],
            seed=1 if options.seed is None else options.seed,
            on_piece=partial(print, end="", flush=True) if streams else None,
        )
    else:
        searched = {"num_tokens": num_tokens, "num_beams": options.beams}
        penalty = 1.0 if options.length_penalty is None else options.length_penalty
        results = (
            search_text(model, tokenizer, prompt, **searched, length_penalty=penalty)
            for prompt in prompts
        )
    if streams:
        print(prompts[0], end="", flush=True)
    for number, (prompt, found) in enumerate(zip(prompts, results, strict=True), 1):
        samples = found[: options.samples]
        if streams:
            print()
        elif options.json:
            values = _values(options, run, prompt, samples)
            print(json.dumps(values, ensure_ascii=False), flush=True)
        elif options.show_classes:
            _print_table(run, number, prompt, samples)
        else:
            print(*(prompt + sample.text for sample in samples), sep="\n", flush=True)


def _report_unknown_words(tokenizer: "Tokenizer", prompts: list[str]) -> None:
    """Log the words of the prompts that the model does not know, as one line."""
    from lm.generation.text import unknown_words

    words = unknown_words(tokenizer, prompts)
    if words:
        rest = len(words) - MAX_WORDS_NAMED
        shown = [word if word.isprintable() else repr(word) for word in words[:MAX_WORDS_NAMED]]
        named = ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")
        _log.warning("unknown words of the prompt, read as <unk>: %s", named)


def _values(
    options: argparse.Namespace, run: Run, prompt: str, samples: "list[Sample]"
) -> dict[str, object]:
    """The JSON object of a prompt."""
    values: dict[str, object] = {"prompt": prompt, "samples": [sample.text for sample in samples]}
    if options.beams is not None:
        values["log_probs"] = [sample.log_prob for sample in samples]
    if options.show_classes:
        values["steps"] = [
            [{"word": word, "probabilities": probs} for word, probs in _steps(run, prompt, sample)]
            for sample in samples
        ]
    return values


def _print_table(run: Run, number: int, prompt: str, samples: "list[Sample]") -> None:
    """Print lines with tabs: numbers of prompt and sample, the probability at each level, word."""
    for index, sample in enumerate(samples, 1):
        steps = _steps(run, prompt, sample)
        if number == index == 1:
            print("prompt", "sample", *_level_names(len(steps[0][1])), "word", sep="\t")
        for word, probs in steps:
            print(number, index, *(f"{p:.6f}" for p in probs), word, sep="\t")


def _level_names(depth: int) -> list[str]:
    """The names of the columns of a tree's levels."""
    if depth <= 2:
        return [["P(word)"], ["P(class)", "P(word | class)"]][depth - 1]
    return [f"P(level {level} | above)" for level in range(1, depth + 1)]


def _steps(run: Run, prompt: str, sample: "Sample") -> list[tuple[str, list[float]]]:
    """The words of a sample with the probability at each level."""
    from lm.generation.text import encode_prompt, level_probs

    probs = level_probs(run.model, encode_prompt(run.tokenizer, prompt), sample.tokens)
    return list(zip(map(run.tokenizer.token, sample.tokens), probs, strict=True))
