"""`lm train --init-from`: a run that begins from the weights of another, on another text."""

import logging
import os

from data_prep.errors import DataError, UserError
from data_prep.meta import META
from data_prep.prepare import prepare_with
from data_prep.prepared import Prepared
from data_prep.storage import locked, make_folder, write_json_atomically
from lm.config import Config, describe_differences, differences
from lm.device import launch
from lm.evaluation import evaluate_prepared
from lm.extension.words import check_extensible, extended
from lm.model.files import load_model
from lm.model.language_model import LanguageModel
from lm.run import Run, TrainedRun
from lm.training.checkpoint import LAST, save_first_checkpoint
from lm.training.run_folder import checkpoint_to_resume

INIT = "init.json"
"""File of a run that names the run it began from."""
LOCK = ".init.lock"
_FREE = (
    *("name", "seed", "run_dir", "data.", "optim.", "train.", "log."),
    *("tokenizer.min_count", "tokenizer.vocab_size"),
    *("model.dropout", "model.count_word_dropout", "model.init_range"),
    *("output.backend", "output.num_samples"),
    *("word_table.gradients", "word_table.optimizer", "word_table.lr"),
)
"""Keys, or prefixes of keys, that may differ from those of the run which weights are taken from."""
_log = logging.getLogger(__name__)


def begin_from(
    trained: TrainedRun, run: Run, resume: str | None = None, *, progress: bool = True
) -> Run:
    """Prepare a run, and write the checkpoint it starts with: the weights of a trained model.

    The words are those of the trained model and the new ones of the training split; SentencePiece
    pieces are those of the model. A run that has begun remains as it is, if `resume` or several
    processes of one command allow that.

    Raises:
        UserError: the run cannot begin, by `checkpoint_to_resume` or `prepare`, or another model.
    """
    config = run.config
    is_further = os.environ.get("LOCAL_RANK", "0") != "0"  # started by the first one, in `train`
    resume = "auto" if launch() or is_further else resume
    if checkpoint_to_resume(config, resume) is None:
        _check(trained, config)
    make_folder(run.folder)
    with locked(run.folder / LOCK):
        if checkpoint_to_resume(config, resume) is not None:
            return run.prepare(keep=True, progress=progress)
        found = extended(trained, config, progress=progress)
        prepared = prepare_with(*config.preparation, found.given, progress=progress)
        num_kept = trained.tokenizer.vocab_size
        _log.info("%s: %d words kept, %d new", trained.folder, num_kept, found.num_new)
        model, _ = load_model(trained.folder, trained.description, found.state)
        _report(trained, config, prepared, model.to(trained.device))
        content = {"run": str(trained.folder.absolute()), "weights_sha256": found.given.origin}
        write_json_atomically(run.folder / INIT, content)
        sha256 = prepared.splits["train"].sha256
        save_first_checkpoint(found.state, sha256, run.folder / "checkpoints" / LAST)
    return Run.of(config, prepared=prepared)


def _check(trained: TrainedRun, config: Config) -> None:
    """Raises UserError if the model of a configuration is not that of a run."""
    check_extensible(trained)
    others = differences(trained.config, config, _FREE)
    before, after = trained.config, config
    if before.tokenizer.kind == "sentencepiece":
        sizes = before.tokenizer.vocab_size, after.tokenizer.vocab_size
        others |= {"tokenizer.vocab_size": sizes} if sizes[0] != sizes[1] else {}
    if before.data.sequences != after.data.sequences:
        others["data.sequences"] = before.data.sequences, after.data.sequences
    if _stored(before) != _stored(after):
        others["train.precision"] = before.train.precision, after.train.precision
    if others:
        changes = describe_differences(others)
        same = f"lm train {trained.folder} --init-from {trained.folder} --name=NAME"
        raise UserError(
            f"--init-from {trained.folder} has another model ({changes}): set these as there, or"
            f" take its configuration, {same} --data.files.train=FILE --data.files.valid=FILE"
        )
    folder = config.prepared_path
    if config.data.prepared_dir is not None and (folder / META).exists():
        problem = "has data already, and --init-from prepares others"
        raise DataError(
            f"data.prepared_dir: {folder} {problem}: leave it out, or delete the folder"
        )


def _stored(config: Config) -> str:
    """The type of the parameters."""
    kind, _, is_true = config.train.precision.partition("-")
    return kind if is_true == "true" else "32"


def _report(trained: TrainedRun, config: Config, prepared: Prepared, model: LanguageModel) -> None:
    """Log the perplexities before training: of the text, and of the one that was trained on."""
    texts = {"this text": prepared}
    try:
        texts[f"the text of {trained.folder}"] = trained.prepared
    except UserError as error:
        _log.info("perplexity on the text of %s is not known: %s", trained.folder, error)
    for name, data in texts.items():
        if "valid" not in data.splits:
            continue
        result = evaluate_prepared(model, data, "valid", config.train.seq_len)
        before, figure = "", trained.description.valid_perplexity
        if data is not prepared and figure is not None:
            before = f" (without the new words {figure:,.2f})"
        text = "before training: validation perplexity %s on %s%s"
        _log.info(text, f"{result.perplexity:,.2f}", name, before)
