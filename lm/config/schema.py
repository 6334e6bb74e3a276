"""The typed configuration of a run: one YAML file, one dataclass per section, overrides as
`--section.key=value`.

Decides what a valid configuration is and says plainly what is wrong with an invalid one. Builds
nothing.
"""

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from data_prep.errors import UserError
from data_prep.settings import (
    STRICT,
    ClassesConfig,
    DataConfig,
    Fraction,
    NonNegative,
    Positive,
    SplitFiles,
    TokenizerConfig,
)

SPARSE_ELEMENTS = 1 << 24
"""Numbers in a table of words from which on its gradients are sparse, where nothing is against it:
below, a dense gradient of 64 MB costs no more than going row by row.
"""
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Embedding and backbone. Sizes are numbers of units; dropouts are probabilities of zeroing."""

    __pydantic_config__ = STRICT

    backbone: Literal["lstm", "transformer"] = "lstm"
    hidden: Positive = 200
    """H: size of the backbone's output and of the output layer's rows."""
    embedding: Positive | None = None
    """Size of the input vectors; default `hidden`."""
    layers: Positive = 2
    tied: bool = False
    """One vector per word serves as its input vector and its output row (wants embedding =
    hidden).
    """
    input: Literal["word", "path"] = "word"
    """A word's input vector: its own, or the sum of those on its path in the tree, its classes' and
    its own, so that rare words are read by what their class has taught (additive factors: Botha &
    Blunsom 2014). Tied, the path's vectors are its output rows.
    """
    input_backoff: NonNegativeFloat = 0.0
    """While training, a word seen n times is read without its own vector with probability
    input_backoff / (input_backoff + n) (noise by count: Xie et al. 2017). With input: path its
    classes' vectors are left, and words on the root, which have no class, are always read whole;
    with input: word it is read as zero.
    """
    dropout: Fraction = 0.0
    """On the input vectors, between layers and on the backbone's output."""
    dropout_weight: Fraction = 0.0
    """LSTM: on the recurrent weights (DropConnect; Merity, Keskar & Socher 2018, section 2)."""
    dropout_variational: bool = False
    """LSTM: one mask for all time steps of a sequence (Gal & Ghahramani 2016)."""
    heads: Positive = 8
    """Transformer: attention heads; divides `hidden` into an even head size."""
    feedforward: Positive | None = None
    """Transformer: inner size of SwiGLU; default 8/3 `hidden`, rounded up to a multiple of 32."""
    init_range: PositiveFloat | None = None
    """Start the parameters of embedding, LSTM and output layer uniformly in ±init_range; default
    each module's own way.
    """


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """The output layer: which tree of softmaxes, and how it is computed."""

    __pydantic_config__ = STRICT

    tree: str = "two_level"
    """full | two_level | balanced | huffman, or the name of a file of paths (one line a word: the
    word, then child numbers); adaptive is torch's adaptive softmax, to compare with.
    """
    branching: Annotated[int, Field(ge=2)] | None = None
    """balanced: most children of a node; default ⌈√N⌉."""
    arity: Annotated[int, Field(ge=2)] = 2
    """huffman: children of a node."""
    cutoffs: list[Positive] | None = None
    """adaptive: the ranks at which its clusters begin, by count; default N / 10 and N / 3."""
    bias: bool = True
    backend: Literal["auto", "reference", "triton"] = "auto"
    """Which implementation of the layer runs; `auto` chooses by device."""
    sparse: bool | None = None
    """Whether the table of words (output rows and input vectors) gets gradients of the rows that a
    batch visits alone, so that a step costs what it visits. Default: where the optimizer allows it
    (`optim.table`, or sgd without momentum and weight decay), on one device, and the table has
    2^24 numbers or more.
    """
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the table of words. bf16 is half the memory; its updates are rounded at random, which
    wants `sparse`.
    """


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and the learning rate over time."""

    __pydantic_config__ = STRICT

    optimizer: Literal["sgd", "adamw"] = "adamw"
    lr: PositiveFloat = 1e-3
    """Highest learning rate, for the mean loss per token."""
    momentum: Fraction = 0.0
    """sgd only."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """adamw only."""
    weight_decay: NonNegativeFloat = 0.0
    """adamw: decoupled; sgd: L2. Matrices alone decay, not biases or gains."""
    table: Literal["sgd", "adagrad", "adam"] | None = None
    """Optimizer of the table of words, by rows: sgd, adagrad (one number of state a row) or adam
    (of the rows with a gradient: where gradients are dense, of all); default `optimizer`."""
    table_lr: PositiveFloat | None = None
    """Highest learning rate of `table`; default `lr`."""
    clip: NonNegativeFloat = 1.0
    """Largest L2 norm of the whole gradient; 0 leaves it alone."""
    schedule: Literal["constant", "cosine", "step", "plateau"] = "constant"
    """cosine: down towards `min_lr_factor`, which the step after the last would have;
    step: times `decay` each epoch after the first `decay_after_epochs`;
    plateau: times `decay` whenever the validation perplexity has not improved."""
    warmup_steps: NonNegative = 0
    """The rate rises linearly over this many steps first."""
    min_lr_factor: Annotated[float, Field(ge=0, le=1)] = 0.1
    decay: Annotated[float, Field(gt=0, le=1)] = 0.5
    decay_after_epochs: NonNegative = 0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, on what, in which portions."""

    __pydantic_config__ = STRICT

    max_epochs: Positive | None = None
    max_steps: Positive | None = None
    """Optimizer steps. Whichever of the two limits comes first ends the training; one must be
    given.
    """
    batch_size: Positive = 20
    """B: parallel sequences per step over all devices together."""
    seq_len: Positive = 35
    """T: tokens of each sequence per step (truncated back-propagation for the LSTM, context for the
    Transformer).
    """
    accumulate: Positive = 1
    """Batches whose gradients are added up before a step."""
    precision: Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true"] = "32-true"
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """How fp32 matrices are multiplied while training, validation included: high allows TF32 on a
    GPU, medium bf16 products with fp32 sums (on a CPU too, which is faster for large matrices where
    it has AMX).
    """
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: Positive | Literal["auto"] = 1
    strategy: Literal["auto", "ddp"] = "auto"
    val_every_steps: Positive | None = None
    """Validate after this many steps; default at the end of each epoch."""
    checkpoint_every_steps: Positive | None = None
    """Write last.ckpt after this many steps as well as after each validation."""
    threads: Positive | None = None
    """CPU threads; default PyTorch's choice."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written down while training; metrics.csv always is."""

    __pydantic_config__ = STRICT

    every_steps: Positive = 50
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: str = "sqrtlm"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that determines a run."""

    __pydantic_config__ = STRICT

    name: str
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    run_dir: str | None = None
    """Folder of everything the run writes; default `runs/<name>`."""
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    classes: ClassesConfig = field(default_factory=ClassesConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def run_path(self) -> Path:
        """Folder of the run."""
        return Path(self.run_dir or f"runs/{self.name}")

    @property
    def prepared_path(self) -> Path:
        """Folder of the prepared data."""
        return Path(self.data.prepared_dir) if self.data.prepared_dir else self.run_path / "data"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file and apply overrides.

    Args:
        path: YAML file.
        overrides: `--section.key=value`, values in YAML; later ones win.

    Raises:
        UserError: naming the file and the key, if the file is not there or not YAML, if a key is
            unknown (with the nearest valid one) or given twice, or if a value has the wrong type or
            is out of range.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read the configuration: {_reason(error)}") from error
    values = _parse(text, str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected sections with keys, got {type(values).__name__}")
    for override in overrides:
        _apply(values, override)
    return validate(values, str(path))


def load_run_config(folder: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration that a run was started with, its folder being where it is now.

    Raises:
        UserError: as `load_config`.
    """
    return replace(load_config(folder / "config.yaml", overrides), run_dir=str(folder))


def validate(values: dict[str, Any], source: str) -> Config:
    """Make a `Config` of plain values; nothing is coerced.

    Raises:
        UserError: as `load_config`; `source` opens the message.
    """
    try:
        config = _ADAPTER.validate_json(json.dumps(values))
    except ValidationError as error:
        raise UserError(f"{source}: {_first_problem(error)}") from error
    except TypeError as error:
        raise UserError(f"{source}: a value is neither a number nor text: {error}") from error
    _check_consistency(config, source)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain values, defaults included: what `validate` takes."""
    values: dict[str, Any] = json.loads(_ADAPTER.dump_json(config))
    return values


def to_yaml(config: Config) -> str:
    """The configuration as a YAML file, defaults included."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ: `section.key` → (old, new)."""
    before, after = _flatten(to_dict(old)), _flatten(to_dict(new))
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-3 is a number, and a key given twice is an error."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for i, key in enumerate(keys):
        if key in keys[:i]:
            raise yaml.MarkedYAMLError(
                problem=f"key {key!r} given twice", problem_mark=node.start_mark
            )
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)
_ADAPTER = TypeAdapter(Config)


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not valid YAML: {_one_line(str(error))}") from error


def _apply(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.removeprefix("--").partition("=")
    if not override.startswith("--") or not equals or not name:
        raise UserError(f"expected an override --section.key=value, got {override!r}")
    *sections, key = name.split(".")
    for section in sections:
        inner = values.get(section)
        values[section] = inner = {} if inner is None else inner
        if not isinstance(inner, dict):
            raise UserError(f"--{name}: {section} is not a section")
        values = inner
    values[key] = _parse(text, f"--{name}")


def _check_consistency(config: Config, source: str) -> None:
    """What no single field can tell."""
    model, train = config.model, config.train
    problem = None
    if train.max_epochs is None and train.max_steps is None:
        problem = "give train.max_epochs or train.max_steps"
    elif model.backbone == "transformer" and model.hidden % (2 * model.heads):
        problem = (
            f"model.hidden = {model.hidden} must be a multiple of twice model.heads = {model.heads}"
        )
    elif model.tied and model.embedding not in (None, model.hidden):
        problem = (
            f"model.tied wants model.embedding = model.hidden = {model.hidden},"
            f" got {model.embedding}"
        )
    elif model.tied and config.output.tree == "adaptive":
        problem = "model.tied: output.tree: adaptive has no vector for each word to share"
    elif config.tokenizer.kind == "sentencepiece" and config.tokenizer.vocab_size is None:
        problem = "tokenizer.kind: sentencepiece wants tokenizer.vocab_size"
    elif config.classes.method == "file" and config.classes.file is None:
        problem = "classes.method: file wants classes.file"
    elif config.classes.method != "file" and config.classes.file is not None:
        problem = f"classes.file wants classes.method: file, got {config.classes.method}"
    elif config.data.hub is not None and config.data.files != SplitFiles():
        problem = (
            "data.hub and data.files are both given: leave out the files, or set data.hub to null"
        )
    elif config.output.backend == "triton" and train.precision == "64-true":
        problem = "output.backend: triton does not go with train.precision: 64-true"
    elif train.seq_len < 2 and model.backbone == "transformer":
        problem = "train.seq_len must be at least 2 for a transformer"
    elif not config.name or "/" in config.name or config.name.startswith("."):
        problem = f"name must be a plain file name, got {config.name!r}"
    problem = problem or _table_problem(config)
    if problem:
        raise UserError(f"{source}: {problem}")


def _table_problem(config: Config) -> str | None:
    """What does not go together with how the table of words is kept and updated."""
    output, optim, train = config.output, config.optim, config.train
    if optim.table_lr is not None and optim.table is None:
        return "optim.table_lr wants optim.table"
    if output.dtype == "bf16" and (output.sparse is False or not _steps_by_rows(config)):
        return "output.dtype: bf16 wants output.sparse and optim.table: sgd, adagrad or adam"
    if output.dtype == "bf16" and train.precision in ("bf16-true", "64-true"):
        return f"output.dtype: bf16 does not go with train.precision: {train.precision}"
    if not output.sparse and output.dtype != "bf16":
        return None
    if not _steps_by_rows(config):
        return (
            "output.sparse wants an optimizer that leaves rows without a gradient alone:"
            " optim.table, or sgd without momentum and weight_decay"
        )
    if obstacle := _sparse_obstacle(config):
        return f"output.sparse does not go with {obstacle}"
    return None


def _steps_by_rows(config: Config) -> bool:
    """Whether the table's optimizer leaves rows without a gradient alone."""
    optim = config.optim
    plain = optim.optimizer == "sgd" and optim.momentum == 0 and optim.weight_decay == 0
    return optim.table is not None or plain


def _sparse_obstacle(config: Config) -> str | None:
    if config.train.devices != 1:
        return f"train.devices: {config.train.devices}"
    if config.train.strategy != "auto":
        return f"train.strategy: {config.train.strategy}"
    if config.train.precision == "16-mixed":
        return "train.precision: 16-mixed"
    if config.output.tree == "adaptive":
        return "output.tree: adaptive"
    return None


def has_sparse_table(config: Config, num_rows: int) -> bool:
    """Whether the gradients of a table of so many rows are of visited rows alone: `output.sparse`,
    or its default.
    """
    output = config.output
    if output.sparse is not None or output.dtype == "bf16":
        return output.sparse is not False
    if output.tree == "full":  # every row is visited
        return False
    large = num_rows * config.model.hidden >= SPARSE_ELEMENTS
    return large and _steps_by_rows(config) and _sparse_obstacle(config) is None


def _first_problem(error: ValidationError) -> str:
    """One line for the first thing pydantic found."""
    problem = error.errors()[0]
    place = [str(part) for part in problem["loc"] if part not in _UNION_BRANCHES]
    key = ".".join(place)
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _known_keys()
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        last = [name for name in known if name.split(".")[-1] == place[-1]]
        hint = (last or near or [""])[0]
        return f"unknown key {key}" + (f"; did you mean {hint}?" if hint else "")
    if problem["type"] in ("missing", "missing_argument"):
        return f"{key} is missing"
    got = problem["input"]
    return f"{key}: {_one_line(problem['msg'])}, got {got!r}"


_UNION_BRANCHES = {"str", "list[str]", "int", "float", "constrained-int", "constrained-float"} | {
    "literal['auto']"
}


def _known_keys() -> list[str]:
    blank = to_dict(Config(name="name"))
    return sorted({*_flatten(blank), *blank})


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else _one_line(str(error))
