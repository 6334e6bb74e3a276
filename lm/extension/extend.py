"""`lm extend`: a run with the new words of newer data, without training."""

import logging
from dataclasses import replace
from pathlib import Path

from data_prep.corpus.hints import find_text
from data_prep.errors import UserError
from data_prep.prepare import Given, prepare_with
from data_prep.sequences import word_item
from data_prep.settings import DataConfig, SplitFiles
from data_prep.storage import new_folder, write_hashed
from data_prep.tokenizer.serialization import load_counts
from data_prep.tokenizer.speller import SPELLER
from data_prep.tokenizer.tokenizer import WordTokenizer
from lm.config import Config, describe_differences, differences, to_yaml
from lm.extension.words import extended
from lm.model.files import save_model
from lm.run import Run, TrainedRun
from lm.training.run_folder import write_run_metadata

_OF_DATA = ("data.", "name", "run_dir")
"""Keys, or prefixes of keys, that may differ from those of the run."""
_NUM_NAMED = 5
"""New words that the log names."""
_log = logging.getLogger(__name__)


def with_text(config: Config, text: Path, field: str | None, min_count: int) -> Config:
    """The configuration of a run whose training split is another text.

    Words that occur less often than `min_count` there are not new.
    """
    if config.data.sequences == "independent":
        raise UserError("--text is for a model of a text: new items are in --data.files.train=FILE")
    file = str(text.absolute())
    if file != file.encode(errors="replace").decode():
        raise UserError(f"--text={file!r}: not UTF-8")
    (_, form, column), keeps = find_text(text, field), config.data.keep_empty_lines
    data = DataConfig(dir=config.data.dir, files=SplitFiles(train=file), keep_empty_lines=keeps)
    data = replace(data, format=form, text_field=column)  # type: ignore[arg-type]
    tokenizer = replace(config.tokenizer, min_count=min_count, vocab_size=None)
    return replace(config, data=data, tokenizer=tokenizer)


def extend(
    trained: TrainedRun,
    config: Config,
    *,
    text: Path | None = None,
    text_field: str | None = None,
    min_count: int = 1,
    progress: bool = True,
) -> None:
    """Write a run with the new words of other data to `config.run_path`; log their number.

    Args:
        trained: the run, which remains as it is.
        config: that of the run, with other data or another folder.
        text: a file of text, or of `text_field` (None: it is found), in place of the data.
        min_count: number of times that a new word of `text` occurs at least.
        progress: whether progress bars are shown on stderr.

    Raises:
        UserError: the data has no new word, another key differs, the run is not one of words in
            classes, or a file cannot be read or written.
    """
    config = replace(config, data=replace(config.data, prepared_dir=None))
    _check(trained, config)
    config = config if text is None else with_text(config, text, text_field, min_count)
    found = extended(trained, config, progress=progress)
    given, tokenizer = found.given, found.given.tokenizer
    what = "items" if trained.is_independent else "words"
    if not found.num_new:
        where = f"{text} (--min-count {min_count})" if text else "the training split of the data"
        moved = "; those from data.valid_from on are not in it" * (config.data.split == "time")
        raise UserError(f"{trained.folder} has all {what} of {where}{moved}")
    if trained.is_independent:
        _compare_events(trained, given)
    with new_folder(config.run_path) as folder:
        sections = config.data, config.tokenizer, config.needed_classes
        if (trained.folder / SPELLER).exists() and isinstance(tokenizer, WordTokenizer):
            given = given._replace(speller=trained.speller.outside(tokenizer.words))
        prepared = prepare_with(*sections, folder / "data", given, progress=progress)
        write_run_metadata(Run.of(replace(config, run_dir=str(folder)), prepared=prepared))
        write_hashed(folder / "config.yaml", [to_yaml(config).encode()])
        sha256 = prepared.tokenizer_sha256
        description = replace(trained.description, valid_perplexity=None, valid_ndcg=None)
        description = replace(description, tokenizer_sha256=sha256)
        save_model(folder, found.state, description)
    num_old, num_special = trained.tokenizer.vocab_size, 2 * trained.is_independent
    new = [tokenizer.token(num_old + k) for k in range(min(found.num_new, _NUM_NAMED))]
    new = [*map(word_item, new)] if config.data.user_field else new
    named = ", ".join(new) + ", …" * (found.num_new > _NUM_NAMED)
    line = "%s: %d new %s (%s), %d in all"
    _log.info(line, config.run_path, found.num_new, what, named, tokenizer.vocab_size - num_special)


def _compare_events(trained: TrainedRun, given: Given) -> None:
    """Warn of data that has fewer items than the run was trained with."""
    assert given.counts is not None
    counts, tokenizer = load_counts(trained.folder), trained.tokenizer
    before = counts.sum() - counts[[tokenizer.eos_id, tokenizer.unk_id]].sum()
    if given.counts.sum() < before:
        text = "the training split has %d events, that of %s had %d: all so far should be in it"
        _log.warning(text, given.counts.sum(), trained.folder, before)


def _check(trained: TrainedRun, config: Config) -> None:
    """Raises UserError if the run cannot be extended so."""
    name = trained.folder
    if trained.tokenizer.kind != "words":
        raise UserError(f"{name}: lm extend requires tokenizer.kind: words; pieces spell new words")
    if others := differences(trained.config, config, _OF_DATA):
        raise UserError(f"lm extend changes the data alone, not {describe_differences(others)}")
