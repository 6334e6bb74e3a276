"""The memory that a training run needs and what is available, before any is allocated."""

from dataclasses import astuple, dataclass
from itertools import pairwise
from operator import mul

import torch

from data_prep.errors import OutOfMemoryError, UserError
from lm.config import changed
from lm.model.adaptive import AdaptiveSoftmax
from lm.model.transformer import Transformer
from lm.output.backends import choose_backend, saved_bytes
from lm.output.backends.base import Problem
from lm.run import Run
from lm.training.cuda_graph import why_eager

LIBRARY_BYTES = 750 << 20
"""Memory of Python and the libraries, of which compiling the output layer takes 120 MB."""
CUDA_LIBRARY_BYTES = 300 << 20
"""Memory that a build of torch for CUDA needs in addition where it computes on the CPU."""
TOLERANCE = 0.1
"""A run is refused if its estimate exceeds the available memory by more than this fraction: less is
within the accuracy of the estimate, and within what other programs take and return.
"""
_LIGHTER = (
    ["--word_table.optimizer=adagrad"],
    ["--word_table.tied=true"],
    ["--word_table.dtype=bf16", "--train.precision=bf16-mixed"],
)
"""Settings that save memory, the smallest change first."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory at the peak of a training step, in bytes: of one GPU, or of all processes on a CPU."""

    weights: int
    gradients: int  # dense ones
    optimizer: int
    batch: int  # what the forward pass of a batch saves, including row-wise gradients
    graph: int  # of eager steps next to the memory of a CUDA graph
    other: int  # the trees, the pieces, the vocabulary and the libraries

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(astuple(self))


def estimate_memory(run: Run) -> MemoryEstimate:
    """Estimate the memory that a training run needs.

    Gradients and `batch` of a step that is recorded as a CUDA graph stay in the graph's memory, and
    the eager step of an LSTM with the shorter last batch of an epoch, or of fewer batches than are
    accumulated, allocates its own next to it:

        graph = batch + gradients

    It is 0 where no step is recorded, and for a Transformer without accumulation, whose batches
    have one shape. On a CPU, dense gradients of the table take the memory of one more: two of a
    tied table are summed, freed ones leave gaps, and sums of batches are next to those of a batch.
    What an evaluation allocates, 1,280 positions without gradients, is not counted.
    """
    config, word_table, model = run.config, run.word_table, run.model_without_weights
    element = {"bf16-true": 2, "64-true": 8}.get(config.train.precision, 4)
    table_element = 2 if word_table.dtype == "bf16" else element
    sizes = [parameter.numel() for parameter in model.table]
    others = sum(parameter.numel() for parameter in model.parameters()) - sum(sizes)
    share = run.world_size if config.train.strategy == "shard_output" else 1
    table, num_rows = sum(sizes) // share, sum(map(len, model.table)) // share
    held = table if run.on_gpu else min(config.train.accumulate, 2) * table + max(sizes) // share
    num_moments = 2 if config.optim.optimizer == "adamw" else int(config.optim.momentum > 0)
    table_state = {
        None: num_moments * table * element,
        "sgd": 0,
        "adagrad": num_rows * max(element, 4),
        "adam": 2 * table * max(element, 4),
    }[word_table.optimizer]
    gradients = others * element + (0 if word_table.row_wise else held * table_element)
    gradients *= 1 if run.world_size == 1 else 2  # a copy is summed
    trees = [tree for tree in (run.tree, run.input_tree) if tree is not None]
    constants = [array for tree in trees for array in tree.arrays] + list(model.buffers())
    cuda = CUDA_LIBRARY_BYTES if torch.version.cuda and not run.on_gpu else 0
    other = LIBRARY_BYTES + cuda + sum(array.nbytes for array in constants)
    parts = {
        "weights": table * table_element + others * element,
        "gradients": gradients,
        "optimizer": num_moments * others * element + table_state,
        "batch": _batch_bytes(run),
        "other": other + 12 * model.vocab_size,
    }
    records = why_eager(config.train, run.world_size, on_gpu=run.on_gpu) is None
    has_shorter = config.model.backbone == "lstm" or config.train.accumulate > 1
    parts["graph"] = parts["batch"] + parts["gradients"] if records and has_shorter else 0
    num_processes = 1 if run.on_gpu else run.num_devices
    parts = {name: num_processes * size for name, size in parts.items()}
    if share > 1 and not run.on_gpu:  # the first process gathers the table for a checkpoint
        parts["other"] += share * (table * table_element + table_state)
    return MemoryEstimate(**parts)


def check_memory(run: Run) -> None:
    """Refuse a run whose estimate exceeds the available memory by more than `TOLERANCE`."""
    estimate, available = estimate_memory(run), run.available_bytes
    if available is None or estimate.total <= (limit := (1 + TOLERANCE) * available):
        return
    graph = f" a CUDA graph {_gb(estimate.graph)}," if estimate.graph else ""
    raise OutOfMemoryError(
        f"training {run.config.name} needs {_gb(estimate.total)} of memory (weights"
        f" {_gb(estimate.weights)}, gradients {_gb(estimate.gradients)}, optimizer"
        f" {_gb(estimate.optimizer)}, a batch {_gb(estimate.batch)},{graph}"
        f" other {_gb(estimate.other)}), {_gb(available)} are available:"
        f" {_what_fits(run, estimate.total, limit)}"
    )


def _batch_bytes(run: Run) -> int:
    """Hidden vectors of all layers and the output layer's saved state, with their gradients.

    The factors are those of measured peaks.
    """
    train, output = run.config.train, run.config.output
    num_positions = train.batch_size // run.world_size * train.seq_len
    element = 8 if train.precision == "64-true" else 4
    vectors = element * num_positions * _num_features(run)
    if isinstance(layer := run.model_without_weights.output, AdaptiveSoftmax):
        sizes = [end - begin for begin, end in pairwise([0, *layer.softmax.cutoffs])]
        counts = torch.tensor(run.prepared.counts()).double().sort(descending=True).values
        shares = [float(part.sum() / counts.sum()) for part in torch.split(counts, sizes)]
        columns = sizes[0] + sum(map(mul, sizes[1:], shares[1:]))
        return vectors + int(3 * element * num_positions * columns)
    if output.num_samples is not None:
        return vectors + 9 * element * num_positions * output.num_samples
    assert run.tree is not None  # unless the softmax is adaptive
    dtypes = {"64-true": torch.float64, "32-true": torch.float32}
    dtype = dtypes.get(train.precision, torch.bfloat16)
    problem = Problem.without_values(num_positions, run.config.model.hidden, run.tree, dtype)
    backend: str = output.backend
    if backend == "auto":
        device = torch.device("cuda" if run.on_gpu else "cpu")
        backend = choose_backend(backend, problem, device, verify=False)
    if backend == "reference" and run.word_table.row_wise:  # gradients hold errors or rows
        vectors += element * min(problem.num_columns, problem.weight.numel())
    return vectors + 2 * saved_bytes(backend, problem, row_wise=run.word_table.row_wise)


def _num_features(run: Run) -> int:
    """Numbers of a position in the vectors of the model, with their gradients."""
    model, backbone = run.config.model, run.model_without_weights.backbone
    hidden, layers, embedding = model.hidden, model.layers, model.embedding or model.hidden
    if isinstance(backbone, Transformer):
        inner, of_input = backbone.inner_size, 2
        is_lower = run.on_gpu or run.config.train.precision.startswith("bf16")
        of_hidden, of_inner = (13, 4) if is_lower else (15, 6)
        num = layers * (of_hidden * hidden + of_inner * inner) + 3 * inner
    else:
        of_input, has_masks = 8, model.dropout and not (model.dropout_variational or run.on_gpu)
        num = hidden * (12 * layers + (4 * (layers + 1) if has_masks else 0))
    num_others = 4 if model.input_pieces is None else 6
    return num + num_others * hidden + of_input * (embedding - hidden)


def _what_fits(run: Run, need: int, limit: float) -> str:
    """The first of the lighter settings, each with those before it, that fits."""
    changes, even = "", ""
    for settings in _LIGHTER:
        try:
            lighter = changed(run.config, settings)
        except UserError:  # the settings cannot be combined
            continue
        if lighter == run.config:
            continue
        run = run.changed(lighter)
        changes += "".join(f"{override} " for override in settings)
        estimate = estimate_memory(run)
        if estimate.total <= limit:
            return f"{changes}would fit, with {_gb(estimate.total)}"
        if estimate.total < 0.99 * need:
            even = f"even {changes}would need {_gb(estimate.total)}; "
    return f"{even}use fewer words or a smaller model.hidden or model.layers"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
