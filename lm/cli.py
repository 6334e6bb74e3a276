"""The command `lm`: verbs → functions. Results on stdout, progress on stderr."""

import codecs
import json
import logging
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.errors import UserError
from lm.config import Config, load_config, load_run_config
from lm.config.reference import describe_keys, write_reference
from lm.openmp import limit_spinning
from lm.options import parse

logger = logging.getLogger("lm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of the process.

    Returns:
        The exit code: 0; 2 after a user's mistake, which is one line on stderr; 130 after Ctrl-C;
        141 if the reader of stdout has closed it.
    """
    limit_spinning()  # before torch is imported
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    for package, level in (("lm", "INFO"), ("data_prep", "INFO"), ("matplotlib", "ERROR")):
        logging.getLogger(package).setLevel(level)
    # Lightning 2.6 calls a function that torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.")
    try:
        options, overrides = parse(arguments)
        _FUNCTIONS[options.verb](options, overrides)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UserError, OSError) as error:
        if os.environ.get("LM_TRACEBACK"):
            raise
        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {error.strerror}"
        print("lm: " + " ".join(text.split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lm: interrupted", file=sys.stderr)
        return 130
    return 0


def command() -> None:
    r"""Run the command line of the process: the console script.

    Characters that stdout's encoding lacks are written as JSON writes them, for instance `\u00e9`.
    """
    codecs.register_error("json", _escape)
    sys.stdout.reconfigure(errors="json")  # type: ignore[union-attr]
    sys.exit(main())


def _escape(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _new(options: Namespace, _: list[str]) -> None:
    from lm.recipe import new_recipe

    valid, test = (Path(name) if name else None for name in (options.valid, options.test))
    unit = options.split_by
    print(new_recipe(Path(options.config), Path(options.text), valid=valid, test=test, unit=unit))


def _prepare(options: Namespace, overrides: list[str]) -> None:
    from data_prep.prepare import prepare

    config = load_config(options.config, overrides)
    prepare(*config.preparation, progress=not options.no_progress)


def _train(options: Namespace, overrides: list[str]) -> None:
    config = load_config(options.config, overrides)
    # Imported after the configuration is known to be valid: torch takes seconds.
    from data_prep.prepare import prepare
    from lm.training.loggers import check_wandb
    from lm.training.loop import train
    from lm.training.run_folder import check_folder

    check_wandb(config)
    checkpoint = check_folder(config, options.resume)
    progress = not options.no_progress
    prepare(*config.preparation, keep=checkpoint is not None, progress=progress)
    print(train(config, resume=options.resume, progress=progress))


def _evaluate(options: Namespace, _: list[str]) -> None:
    from data_prep.corpus.lines import read_text
    from lm.evaluation import evaluate_run, evaluate_text
    from lm.report import evaluation_table

    folder, progress = Path(options.run_dir), not options.no_progress
    _set_threads(folder, options.threads)
    if options.text is None:
        result = evaluate_run(folder, options.split, progress=progress)
    else:
        result = evaluate_text(folder, read_text(options.text), progress=progress)
    title = options.text or options.split
    print(json.dumps(result.to_dict()) if options.json else evaluation_table(result, title))


def _set_threads(folder: Path, num_threads: int | None) -> None:
    """Set torch's CPU threads: as given, or as the run in `folder` was trained with."""
    import torch

    if num_threads is None and (folder / "config.yaml").exists():
        num_threads = load_run_config(folder).train.threads
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _generate(options: Namespace, _: list[str]) -> None:
    from data_prep.corpus.lines import read_text
    from lm.generation.command import run

    _set_threads(Path(options.run_dir), options.threads)
    if options.prompts is None:
        prompts = [_prompt(options.prompt)]
    elif not (prompts := list(read_text(options.prompts))):
        raise UserError(f"{options.prompts}: no prompts")
    try:
        for piece in run(options, prompts):
            print(piece, end="", flush=True)
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(f"generate: {error}") from error


def _score(options: Namespace, _: list[str]) -> None:
    from data_prep.corpus.lines import read_text
    from lm.score_layouts import Layout, score_text
    from lm.scoring import Scorer

    folder, details = Path(options.run_dir), options.details
    if details and (options.format == "kenlm" or options.level != "word"):
        raise UserError("--details requires --level word and --format tsv or json")
    _set_threads(folder, options.threads)
    scorer = Scorer.load(folder, vocabulary_size=options.vocabulary_size, details=details)
    layout = Layout(
        level=options.level,
        name=options.format,
        unit=options.unit,
        has_ids=options.ids,
        one_rank_per_word=scorer.has_one_token_per_word,
    )
    rule = "one stream: all lines are one text" if options.stream else "independent sentences"
    logger.info("%s, <eos> before the first word; log-probabilities in %s", rule, options.unit)
    for row in score_text(scorer, read_text(options.text or "-"), layout, stream=options.stream):
        print(row)


def _rescore(options: Namespace, _: list[str]) -> None:
    from data_prep.corpus.lines import read_text
    from lm.nbest import read_costs, read_nbest, read_references
    from lm.rescoring import Arpa, Weights, format_values, rescore
    from lm.scoring import Scorer

    given = [options.lm_weight, options.insertion_penalty, options.first_pass_share]
    given += [options.mixture]
    if options.tune is not None and any(value is not None for value in given):
        raise UserError("--tune finds the weights: give none of them with it")
    if options.tune is None and options.lm_weight is None:
        raise UserError("give --tune LIST REFERENCES, or --lm-weight")
    if options.second_run is None and options.arpa is None and options.mixture is not None:
        raise UserError("--mixture requires a second model: --with or --arpa")
    _set_threads(Path(options.run_dir), options.threads)
    costs = [
        read_costs(read_text(name), name)
        for name in (options.acoustic_costs, options.lm_costs)
        if name is not None
    ]
    if options.lm_costs is not None and len(costs) == 1:
        raise UserError("--lm-costs requires --acoustic-costs")
    nbest = read_nbest(read_text(options.nbest), options.nbest, costs)
    references = development = weights = None
    if options.references is not None:
        name = options.references
        references = read_references(read_text(name), name, nbest)
    if options.tune is not None:
        name, references_name = options.tune
        tuned = read_nbest(read_text(name), name, costs)
        lines = read_text(references_name)
        development = tuned, read_references(lines, references_name, tuned)
    else:
        num_models = 1 if options.second_run is None and options.arpa is None else 2
        weights = Weights.given(*given, num_models=num_models)
    size = options.vocabulary_size
    models: list[Any] = [Scorer.load(Path(options.run_dir), vocabulary_size=size)]
    if options.second_run is not None:
        models.append(Scorer.load(Path(options.second_run), vocabulary_size=size))
    if options.arpa is not None:
        models.append(Arpa(Path(options.arpa)))
    result = rescore(nbest, models, weights=weights, references=references, development=development)
    rows = result.all() if options.all else result.best()
    if options.json:
        print(json.dumps(result.to_dict() | {"hypotheses": rows}, ensure_ascii=False))
        return
    for name, value in result.to_dict().items():
        if value is not None:
            logger.info("%s: %s", name, format_values(value))
    for row in rows:
        print(row)


def _prompt(given: str | None) -> str:
    """The text to continue; `-` reads stdin."""
    if given != "-":
        return given or ""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt -: invalid UTF-8: {error.reason}") from error


def _classes(options: Namespace, overrides: list[str]) -> None:
    from data_prep.classes.report import class_report
    from lm.report import classes_json, classes_table, draw_classes

    config = _load(options.source, overrides)
    if config.needed_classes is None:
        raise UserError(f"output.tree: {config.output.tree} has no word classes to report on")
    prepared = _open(options.source, config)
    report = class_report(
        *(prepared.counts(), prepared.word_class(), prepared.tokens("train")),
        shortlist=prepared.shortlist,
        num_top_words=options.words,
    )
    if options.plot:
        draw_classes(report, prepared, Path(options.plot))
    if options.json:
        print(json.dumps(classes_json(report, prepared), ensure_ascii=False))
    else:
        print(classes_table(report, prepared))


def _info(options: Namespace, overrides: list[str]) -> None:
    from lm.report import describe

    config = _load(options.source, overrides)
    values = describe(config, _open(options.source, config))
    if options.json:
        print(json.dumps(values))
        return
    width = max(map(len, values))
    for key, value in values.items():
        print(f"{key:<{width}} ", f"{value:,}" if type(value) is int else value)


def _load(source: str, overrides: list[str]) -> Config:
    """The configuration of a run's folder or of a file."""
    load = load_run_config if Path(source).is_dir() else load_config
    return load(Path(source), overrides)


def _open(source: str, config: Config) -> Any:
    """The prepared data of a configuration, which must have been prepared with it."""
    from data_prep.prepare import open_made_by
    from lm.report import check_same_classes

    prepared = open_made_by(*config.preparation)
    if config.needed_classes is not None and Path(source).is_dir():
        check_same_classes(Path(source), prepared)
    return prepared


def _config(options: Namespace, _: list[str]) -> None:
    if options.markdown:
        write_reference(Path(options.markdown))
    else:
        print(describe_keys(options.key))


_FUNCTIONS = {
    "new": _new,
    "prepare": _prepare,
    "train": _train,
    "evaluate": _evaluate,
    "generate": _generate,
    "score": _score,
    "rescore": _rescore,
    "classes": _classes,
    "info": _info,
    "config": _config,
}

if __name__ == "__main__":
    command()
