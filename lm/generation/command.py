"""`lm generate`: which options exclude each other, and what is printed."""

import json
import logging
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from data_prep.errors import UserError
from data_prep.storage import sha256_file
from data_prep.tokenizer.files import TOKENIZER, load_tokenizer
from data_prep.tokenizer.tokenizer import Tokenizer
from lm.generation.text import (
    Sample,
    encode_prompt,
    generate_text,
    level_probs,
    search_text,
    stream_text,
    unknown_words,
)
from lm.model.files import load_model
from lm.model.language_model import LanguageModel
from lm.output import Sampling

MAX_WORDS_NAMED = 10
"""Unknown words of the prompts that are named."""
_SAMPLING = tuple(field.name for field in fields(Sampling))
_log = logging.getLogger(__name__)


def run(options: Namespace, prompts: list[str]) -> Iterator[str]:
    """What `lm generate` prints, in pieces.

    One sample of one prompt is printed while it is drawn, unless it is JSON or a table.

    Args:
        options: of the command line; None for those that are not given and have no default.
        prompts: the texts to continue, at least one.

    Raises:
        UserError: if options exclude each other, or there is no trained model.
        ValueError: if an option is out of range.
    """
    _check(options)
    given = {name: getattr(options, name) for name in _SAMPLING}
    sampling = Sampling(**{name: value for name, value in given.items() if value is not None})
    model, tokenizer = _load(Path(options.run_dir))
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


def _load(folder: Path) -> tuple[LanguageModel, Tokenizer]:
    """A model and its tokenizer."""
    model, description = load_model(folder)
    if sha256_file(folder / TOKENIZER) != description.tokenizer_sha256:
        raise UserError(f"{folder}: the tokenizer is not the one that the model was trained with")
    return model, load_tokenizer(folder)


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
