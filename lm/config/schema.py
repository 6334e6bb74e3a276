"""The configuration of a run; `lm config` prints the docstrings below the fields."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from data_prep.settings import (
    ALL_LEVELS,
    ClassesConfig,
    DataConfig,
    Fraction,
    NonNegative,
    Positive,
    Strict,
    TokenizerConfig,
)

MAX_THREADS = 1024
"""Most threads of a process: with many more, the OpenMP library ends the process."""
Size = Annotated[int, Field(gt=0, le=2**20)]
Criterion = Literal["perplexity", "ndcg"]
"""Figure of a validation by which the best model is chosen."""
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
AutoOrOff = Annotated[
    Literal["auto", "off"], BeforeValidator(lambda value: "off" if value is False else value)
]
"""In YAML, `off` is false."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Strict):
    """Input embedding and backbone. Dropouts are probabilities of zeroing an element."""

    backbone: Literal["lstm", "transformer"] = "lstm"
    """Network between the input embedding and the output layer."""
    hidden: Size = 200
    """H: size of the backbone's output and of the output layer's rows."""
    embedding: Size | None = None
    """E: size of the input vectors. Default: `hidden`."""
    layers: Annotated[int, Field(gt=0, le=10_000)] = 2
    """Number of LSTM layers or Transformer blocks."""
    input_embedding: Literal["word", "path_sum"] = "word"
    """Input vector of a word. word: one vector per word. path_sum: the sum of the vectors on the
    word's path in the tree (its classes' and the word's), so that rare words share what their class
    has learned (additive factors: Botha & Blunsom 2014). With `word_table.tied` these vectors are
    the output layer's rows."""
    input_tree: Literal["output", "two_level"] = "output"
    """path_sum: the tree whose paths are summed. output: `output.tree`. two_level: the word classes
    of the section `classes`, which a full or an adaptive softmax then has at its input too (words
    of `classes.shortlist` have none); with `word_table.tied` the vectors of words are the output
    layer's rows, those of classes are not."""
    input_pieces: Annotated[int, Field(ge=8, le=2**20)] | None = None
    """Number of pieces of words, such as stems and endings, that have input vectors: the sum of a
    word's, divided by the root of their number, is added to its input vector, so that rare words
    share what others have learned (Botha & Blunsom 2014; Bojanowski et al. 2017). The pieces are
    found in the vocabulary (unigram model: Kudo 2018), at most 8 of a word. Requires
    `tokenizer.kind: words`. Default: off."""
    count_word_dropout: NonNegativeFloat = 0.0
    """While training, a word that occurs n times in the training split loses its word vector with
    probability count_word_dropout / (count_word_dropout + n) (count-based word dropout: Xie et al.
    2017). With input_embedding: path_sum the vectors of its classes remain, and words without a
    class never lose their vector; with input_embedding: word the input vector is zero. The
    vectors of its pieces remain. Default: off."""
    dropout: Fraction = 0.0
    """Dropout of the input vectors, between layers and of the backbone's output."""
    dropout_weight: Fraction = 0.0
    """lstm: dropout of the recurrent weights (DropConnect; Merity, Keskar & Socher 2018, section
    2)."""
    dropout_variational: bool = False
    """lstm: use one dropout mask for all time steps of a sequence (Gal & Ghahramani 2016)."""
    residual: bool = False
    """lstm: add the input vectors, after dropout, to the backbone's output (residual connection: He
    et al. 2016). With `word_table.tied`, words like the last one are then probable from the start,
    before the backbone has learned anything. Requires model.embedding = model.hidden."""
    heads: Positive | None = None
    """transformer: number of attention heads; H / heads must be an even integer. Default: the
    largest number up to 8 for which it is."""
    feedforward: Size | None = None
    """transformer: inner size of SwiGLU. Default: 8/3 H, rounded up to a multiple of 32."""
    init_range: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Initialize the parameters of embedding, LSTM and output layer uniformly in ±init_range.
    Default: each module's initialization."""


TREES = ("full", "two_level", "multi_level", "balanced", "huffman", "adaptive")
"""Names of `output.tree`; another one is a file."""


@dataclass(frozen=True, kw_only=True)
class OutputConfig(Strict):
    """The output layer: its tree of softmaxes and its implementation."""

    tree: str = "two_level"
    """full | two_level | multi_level | balanced | huffman, or a file of paths (one line per word:
    the word, then child numbers), of which a run keeps a copy; adaptive is PyTorch's adaptive
    softmax, for comparison. two_level (classes of words) and multi_level (classes of classes) use
    the section `classes`."""
    branching: Annotated[int, Field(ge=2)] | None = None
    """balanced: largest number of children of a node. Default: ⌈√N⌉ for a vocabulary of N words."""
    arity: Annotated[int, Field(ge=2)] = 2
    """huffman: number of children of a node."""
    num_samples: Positive | None = None
    """full: compare a target with this many words only, drawn by frequency for each batch, while
    training (sampled softmax; for comparison). Evaluation computes all. Default: off."""
    cutoffs: list[Positive] | None = None
    """adaptive: frequency ranks at which its clusters begin. Default: N / 10 and N / 3."""
    tail_dropout: Fraction = 0.0
    """adaptive: dropout of the hidden vector within clusters, besides `model.dropout` (Baevski &
    Auli 2019)."""
    backend: Literal["auto", "compiled", "reference", "triton"] = "auto"
    """Implementation of the layer; auto chooses by device."""


@dataclass(frozen=True, kw_only=True)
class WordTableConfig(Strict):
    """The table of words, which is the output layer's rows together with the input vectors."""

    tied: bool = False
    """Use a word's output row as its input vector too (requires model.embedding = model.hidden)."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the elements. bf16 halves the memory; updates are rounded stochastically, which
    requires row-wise gradients."""
    gradients: Literal["auto", "row_wise", "dense"] = "auto"
    """row_wise: gradients hold only the rows that a batch visits, so that the cost of a step does
    not depend on N. dense: gradients have the size of the table. auto: row_wise if the optimizer
    skips rows without a gradient (`word_table.optimizer`, or sgd without momentum and weight
    decay), there is one device or train.strategy: shard_output, and the table has at least 2^22
    elements (with such an sgd on a GPU, 2^28); in bf16 always; never with an adaptive or a full
    softmax, unless it is sampled, or with precision: 16-mixed."""
    optimizer: Literal["sgd", "adagrad", "adam"] | None = None
    """Row-wise optimizer of the table: sgd, adagrad (one number of state per row) or adam (row-wise
    gradients: updates visited rows only). Default: `optim.optimizer`, which with row-wise gradients
    is plain sgd."""
    lr: PositiveFloat | None = None
    """Peak learning rate of `word_table.optimizer`. Default: `optim.lr`."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Strict):
    """The optimizer and the learning rate schedule."""

    optimizer: Literal["sgd", "adamw"] = "adamw"
    """Optimizer of all parameters, except the table of words if `word_table.optimizer` is set."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate, for the mean loss per token."""
    momentum: Fraction = 0.0
    """sgd: momentum."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """adamw, and word_table.optimizer: adam: decay rates of the moment estimates."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices (not of biases and gains, nor of a table of words that has
    `word_table.optimizer`). adamw: decoupled; sgd: L2."""
    clip: NonNegativeFloat = 1.0
    """Largest L2 norm of the whole gradient; 0 disables clipping."""
    schedule: Literal["constant", "cosine", "step", "plateau"] = "constant"
    """cosine: decrease to lr × min_lr_factor over the training run. step: multiply by `decay`
    after each epoch from `decay_after_epochs` on. plateau: multiply by `decay` whenever a
    validation has not improved (`train.keep`)."""
    warmup_steps: NonNegative = 0
    """Number of first steps over which the learning rate rises linearly to `lr`."""
    min_lr_factor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """cosine: final learning rate as a fraction of `lr`."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.5
    """step, plateau: factor of the learning rate."""
    decay_after_epochs: NonNegative = 0
    """step: number of first epochs at the full learning rate, at least one."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Strict):
    """Length, batches, precision and devices of the training run."""

    max_epochs: Positive | None = None
    """Number of passes over the training split. This, `max_steps` or `max_minutes` is required;
    training ends at the limit that is reached first."""
    max_steps: Positive | None = None
    """Number of optimizer steps."""
    max_minutes: PositiveFloat | None = None
    """Minutes of training, validations and checkpoints included (not the preparation of the data);
    a continued run keeps counting. The last validation begins early enough to end in time, as far
    as the one before it tells. schedule: cosine reaches its final rate by then; step and plateau,
    which do not know the time, are refused. With several devices the clock of the first decides."""
    batch_size: Positive = 20
    """B: number of parallel sequences per batch, over all devices together."""
    seq_len: Positive = 35
    """T: number of tokens of each sequence per batch (truncated back-propagation for the LSTM,
    context for the Transformer)."""
    accumulate: Positive = 1
    """Number of batches of one optimizer step, whose loss is the mean over all their tokens. The
    last step of an epoch has the batches that are left."""
    precision: Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true"] = "32-true"
    """Type of the parameters (-true), or of the computation with fp32 parameters (-mixed)."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of fp32 matrix products while training and validating: high allows TF32 on a GPU;
    medium allows bf16 products with fp32 sums (on CPUs as well, faster with AMX)."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Kind of device; auto is the GPU if there is one."""
    cuda_graph: AutoOrOff = "auto"
    """auto: on one GPU, record the work of a training step once, and then launch it as a whole (a
    CUDA graph), so that the GPU does not wait for the host. Steps that cannot be recorded run as
    without it; the log says so. off: never."""
    devices: Positive | Literal["auto"] | None = None
    """Number of devices of each machine. Default: as many as torchrun or SLURM has started
    processes there, without them 1. auto: without them all devices."""
    strategy: Literal["auto", "ddp", "shard_output"] = "auto"
    """How several devices share the work; auto is ddp for more than one device. ddp: every device
    has the whole model. shard_output: the rows of the table of words are dealt to the devices, each
    of which does the same work whatever the targets are; the backbone is as with ddp. A checkpoint
    of shard_output continues on any number of devices."""
    shard_by: Literal["auto", "word", "class"] = "auto"
    """How shard_output deals the rows. word: those of every class to all devices, which all compute
    a part for every position. class: whole classes, by their tokens in the training split, so that
    positions are sent to the owner of their class only. auto: word."""
    val_every_steps: Positive | None = None
    """Number of steps between validations. Default: validate at the end of each epoch."""
    keep: Criterion | None = None
    """Figure of a validation by which the best model is kept. ndcg: NDCG@10 of independent
    sequences over the whole catalogue, without the items that a user has had unless training
    repeats these; of up to 4,000 users, the same each time. It is not measured with output.tree:
    adaptive or strategy: shard_output. Default: ndcg where it is measured, else perplexity."""
    patience: Positive | None = None
    """Number of validations in a row without a better figure (`keep`) after which the run ends.
    Default: never."""
    checkpoint_every_steps: Positive | None = None
    """Number of steps between writes of last.ckpt. Default: write it after each validation only."""
    keep_checkpoints: NonNegative = 0
    """Number of the newest checkpoints that are kept as step-N.ckpt, next to last.ckpt and
    best.ckpt, each as large as last.ckpt. --resume auto continues from the newest one that is not
    damaged."""
    skip_nonfinite_steps: NonNegative = 0
    """Number of steps of the run whose gradient may be infinite or not a number: they change no
    parameter. The next one ends the run before it does. On a GPU with 0, the run ends where losses
    are read next, before anything is logged or saved; otherwise the host waits for every step. Not
    with precision: 16-mixed, which skips such steps itself."""
    threads: Annotated[int, Field(gt=0, le=MAX_THREADS)] | None = None
    """Number of CPU threads, for training and by default for the commands that use the model.
    Default: PyTorch's choice."""


@dataclass(frozen=True, kw_only=True)
class LogConfig(Strict):
    """What is logged while training. metrics.csv is always written."""

    every_steps: Positive = 50
    """Number of steps between lines of metrics.csv."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Mode of Weights & Biases."""
    wandb_project: str = "sqrtlm"
    """Project of the run in Weights & Biases."""


@dataclass(frozen=True, kw_only=True)
class Config(Strict):
    """Everything that determines a training run."""

    name: str
    """Name of the run, a plain file name."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Seed of initialization, batches and dropout."""
    run_dir: str | None = None
    """Folder of everything that the run writes. Default: runs/NAME."""
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    classes: ClassesConfig = field(default_factory=ClassesConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    word_table: WordTableConfig = field(default_factory=WordTableConfig)
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

    @property
    def needed_classes(self) -> ClassesConfig | None:
        """The section `classes` if a tree of the model has word classes, else None."""
        if self.output.tree == "multi_level":
            default = ALL_LEVELS if self.classes.method == "file" else 3
            return replace(self.classes, depth=self.classes.depth or default)
        return self.classes if self.output.tree == "two_level" or self.has_input_tree else None

    @property
    def ranks_items(self) -> bool:
        """Whether a validation ranks items: of independent sequences, by a layer that searches."""
        searches = self.output.tree != "adaptive" and self.train.strategy != "shard_output"
        return self.data.sequences == "independent" and searches

    @property
    def criterion(self) -> Criterion:
        """The figure of a validation by which the best model is chosen."""
        return self.train.keep or ("ndcg" if self.ranks_items else "perplexity")

    @property
    def tree_is_file(self) -> bool:
        """Whether `output.tree` names a file."""
        return self.output.tree not in TREES

    @property
    def has_input_tree(self) -> bool:
        """Whether input vectors are sums over the paths of another tree than `output.tree`."""
        model = self.model
        is_named = model.input_embedding == "path_sum" and model.input_tree == "two_level"
        return is_named and self.output.tree != "two_level"

    @property
    def preparation(self) -> tuple[DataConfig, TokenizerConfig, ClassesConfig | None, Path]:
        """The arguments of `data_prep.prepare.prepare`."""
        return self.data, self.tokenizer, self.needed_classes, self.prepared_path
