"""`lm generate`: which options exclude each other, the prompts, and what is printed."""

import json
import logging
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from data_prep.corpus.lines import read_text
from data_prep.errors import UserError
from data_prep.tokenizer.tokenizer import Tokenizer
from lm.evaluation import load_with_tokenizer
from lm.generation.text import (
    Sample,
    encode_prompt,
    generate_text,
    level_probs,
    search_text,
    stream_text,
    unknown_words,
)
from lm.model.language_model import LanguageModel
from lm.output import Sampling

MAX_WORDS_NAMED = 10
"""Unknown words of the prompts that are named."""
_SAMPLING = tuple(field.name for field in fields(Sampling))
_log = logging.getLogger(__name__)


def run(options: Namespace) -> Iterator[str]:
    """What `lm generate` prints, in pieces.

    One sample of one prompt is printed while it is drawn, unless it is JSON or a table.

    Args:
        options: of the command line; None for those that are not given and have no default.

    Raises:
        UserError: if options exclude each other or are out of range, there is no prompt, or there
            is no trained model.
    """
    _check(options)
    try:
        yield from _pieces(options, _prompts(options))
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(f"generate: {error}") from error


def _prompts(options: Namespace) -> list[str]:
    """The texts to continue, at least one."""
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


def _pieces(options: Namespace, prompts: list[str]) -> Iterator[str]:
    """The continuations of the prompts, in pieces."""
    given = {name: getattr(options, name) for name in _SAMPLING}
    sampling = Sampling(**{name: value for name, value in given.items() if value is not None})
    model, _, tokenizer = load_with_tokenizer(Path(options.run_dir))
    _report_unknown_words(tokenizer, prompts)
    stop = [text.replace("\\n", "\n") for text in options.stop or ()]
    seed = 1 if options.seed is None else options.seed
    drawn = {"num_tokens": options.tokens, "sampling": sampling, "stop": stop, "seed": seed}
    formatted = options.json or options.show_classes
    if not formatted and options.beams is None and options.samples == len(prompts) == 1:
        yield prompts[0]
        yield from stream_text(model, tokenizer, prompts[0], **drawn)
        yield "\n"
        return
    results: Iterable[list[Sample]]
    if options.beams is None:
        results = generate_text(model, tokenizer, prompts, num_samples=options.samples, **drawn)
    else:
        results = (_search(options, model, tokenizer, prompt) for prompt in prompts)
    if not formatted:
        for prompt, samples in zip(prompts, results, strict=True):
            yield from (f"{prompt}{sample.text}\n" for sample in samples)
    elif options.json:
        for prompt, samples in zip(prompts, results, strict=True):
            values = _values(options, model, tokenizer, prompt, samples)
            yield json.dumps(values, ensure_ascii=False) + "\n"
    else:
        yield from _table(model, tokenizer, prompts, results)


def _check(options: Namespace) -> None:
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


def _report_unknown_words(tokenizer: Tokenizer, prompts: list[str]) -> None:
    """Log the words of the prompts that the model does not know, as one line."""
    words = unknown_words(tokenizer, prompts)
    if words:
        rest = len(words) - MAX_WORDS_NAMED
        named = ", ".join(words[:MAX_WORDS_NAMED]) + (f" and {rest} more" if rest > 0 else "")
        _log.warning("unknown words of the prompt, read as <unk>: %s", named)


def _search(
    options: Namespace, model: LanguageModel, tokenizer: Tokenizer, prompt: str
) -> list[Sample]:
    """The best continuations of a prompt, as many as samples are asked for."""
    found = search_text(
        *(model, tokenizer, prompt),
        num_tokens=options.tokens,
        num_beams=options.beams,
        length_penalty=1.0 if options.length_penalty is None else options.length_penalty,
    )
    return found[: options.samples]


def _values(
    options: Namespace,
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    samples: list[Sample],
) -> dict[str, object]:
    """The JSON object of a prompt."""
    values: dict[str, object] = {"prompt": prompt, "samples": [sample.text for sample in samples]}
    if options.beams is not None:
        values["log_probs"] = [sample.log_prob for sample in samples]
    if options.show_classes:
        values["steps"] = [
            [
                {"word": tokenizer.token(token), "probabilities": probs}
                for token, probs in _steps(model, tokenizer, prompt, sample)
            ]
            for sample in samples
        ]
    return values


def _table(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: list[str],
    results: Iterable[list[Sample]],
) -> Iterator[str]:
    """Lines with tabs, one for each word: prompt, sample, the probability at each level, word."""
    header = False
    for number, (prompt, samples) in enumerate(zip(prompts, results, strict=True), 1):
        for index, sample in enumerate(samples, 1):
            for token, probs in _steps(model, tokenizer, prompt, sample):
                if not header:
                    yield "\t".join(["prompt", "sample", *_level_names(len(probs)), "word"]) + "\n"
                    header = True
                columns = (number, index, *(f"{p:.6f}" for p in probs), tokenizer.token(token))
                yield "\t".join(map(str, columns)) + "\n"


def _level_names(depth: int) -> list[str]:
    """The names of the columns of a tree's levels."""
    if depth <= 2:
        return [["P(word)"], ["P(class)", "P(word | class)"]][depth - 1]
    return [f"P(level {level} | above)" for level in range(1, depth + 1)]


def _steps(
    model: LanguageModel, tokenizer: Tokenizer, prompt: str, sample: Sample
) -> Iterator[tuple[int, list[float]]]:
    """The tokens of a sample with the probability at each level."""
    probs = level_probs(model, encode_prompt(tokenizer, prompt), sample.tokens)
    return zip(sample.tokens, probs, strict=True)
