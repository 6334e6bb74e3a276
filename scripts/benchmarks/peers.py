"""The peers that `output_layer` compares with this project's layer, with the memory they need.

A peer is written as its users write it, with one exception for fairness: where autograd would fill
a full gradient with zeros for every slice of a parameter, each slice is a parameter. All peers have
biases except `adaptive`, which has none by default.
"""

import importlib
import importlib.util
from collections.abc import Callable
from itertools import chain, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.benchmarks import methods
from scripts.benchmarks.methods import Loss, Method, Problem

LOOP_POSITIONS = 256
"""Positions that the loop over positions is timed on; its time is proportional to their number."""
GROUPS = 1023
"""Most matrices that one call of `grouped_mm` accepts on a GPU."""
CHUNK_BYTES = 1 << 30
CHUNK_POSITIONS = 16
"""Where `chunked` would take fewer positions at a time, it forms logits of `CHUNK_BYTES`."""
CUTOFFS = {
    10_000: [2_000],
    33_278: [2_800, 10_000],
    267_735: [20_000, 40_000, 200_000],
    800_000: [60_000, 100_000, 640_000],
    10_000_000: [60_000, 600_000, 3_000_000],
}
"""Cutoffs of `adaptive`: published (WikiText-103, One Billion Word), and similar elsewhere."""

CrossEntropy = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From hidden [P, H], weight [N, H], bias [N] and target [P] to the mean loss."""


def full_softmax(
    problem: Problem,
    name: str,
    load: Callable[[], CrossEntropy],
    temporary_bytes: int,
    refused: str | None = None,
    exact: bool = True,
) -> Method:
    """A full softmax by the function that `load` returns; temporaries come with the gradients."""
    vocab_size = problem.vocab_size

    def build() -> tuple[Loss, list[Tensor]]:
        weight, bias = problem.parameters(0, vocab_size)
        cross_entropy = load()
        return lambda hidden, target: cross_entropy(hidden, weight, bias, target), [weight, bias]

    return Method(
        name=name,
        problem=problem,
        build=build,
        needed_bytes=problem.gradient_bytes(vocab_size) + temporary_bytes,
        tree=problem.trees["tree_full"],
        exact=exact,
        slow=True,
        refused=refused,
    )


def full(problem: Problem) -> Method:
    """Linear + cross_entropy of torch: holds logits, log-probabilities and their gradient."""

    def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight, bias), target)

    logits = problem.num_positions * problem.vocab_size * problem.element_bytes
    return full_softmax(problem, "full", lambda: cross_entropy, 3 * logits)


def chunked(problem: Problem) -> Method:
    """linear_cross_entropy of torch; its chunks, or `CHUNK_BYTES` where those are too small."""
    num_rows, size = problem.vocab_size, problem.hidden_size
    per_chunk = -(-problem.num_positions * size // num_rows)
    explicit = None
    if per_chunk < CHUNK_POSITIONS:
        fitting = max(1, CHUNK_BYTES // (num_rows * problem.element_bytes))
        per_chunk = explicit = min(problem.num_positions, fitting)

    def load() -> CrossEntropy:
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=explicit)
        return lambda hidden, weight, bias, target: F.linear_cross_entropy(
            hidden, weight, target, linear_bias=bias, options=options
        )

    half = problem.hidden.dtype != torch.float32
    copies = 8 if half and not problem.hidden.is_cuda else 1  # of the weight in fp32, as measured
    temporary_bytes = 4 * num_rows * (2 * per_chunk + copies * size)
    missing = not hasattr(nn, "LinearCrossEntropyOptions")
    refused = f"not in torch {torch.__version__}" if missing else None
    return full_softmax(problem, "chunked", load, temporary_bytes, refused, exact=not half)


def cut_cross_entropy(problem: Problem) -> Method:
    """Apple's cut-cross-entropy: the full softmax without logits in memory."""

    def load() -> CrossEntropy:
        function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        return lambda hidden, weight, bias, target: function(hidden, weight, target, bias=bias)

    missing = _obstacle(problem, "cut_cross_entropy")
    return full_softmax(problem, "cce", load, 16 * problem.num_positions, missing)


def liger(problem: Problem) -> Method:
    """Liger's fused linear cross-entropy: the full softmax in chunks of positions."""

    def load() -> CrossEntropy:
        package = importlib.import_module("liger_kernel.transformers")
        layer = package.LigerFusedLinearCrossEntropyLoss()
        return lambda hidden, weight, bias, target: layer(weight, hidden, target, bias)

    num_rows, size = problem.vocab_size, problem.hidden_size
    per_chunk = 2 * -(-problem.num_positions * size // num_rows)
    chunk_bytes = 3 * per_chunk * num_rows * problem.element_bytes
    product_bytes = num_rows * size * (4 + problem.element_bytes)
    missing = _obstacle(problem, "liger_kernel")
    return full_softmax(problem, "liger", load, chunk_bytes + product_bytes, missing)


def _obstacle(problem: Problem, package: str) -> str | None:
    if not problem.hidden.is_cuda:
        return "CUDA only"
    return None if importlib.util.find_spec(package) else "not installed"


def usual_cutoffs(vocab_size: int) -> list[int]:
    """Default cutoffs of `adaptive` for a vocabulary."""
    return CUTOFFS.get(vocab_size) or [max(1, vocab_size // 10), vocab_size // 3]


def adaptive(problem: Problem) -> Method:
    """AdaptiveLogSoftmaxWithLoss of torch; each cluster's projection is 4 times narrower."""
    size, cutoffs = problem.hidden_size, problem.cutoffs
    divisor = min(4, int(size ** (1 / len(cutoffs))))

    def build() -> tuple[Loss, list[Tensor]]:
        layer = nn.AdaptiveLogSoftmaxWithLoss(
            size,
            problem.vocab_size,
            cutoffs,
            div_value=divisor,
            device=problem.hidden.device,
            dtype=problem.hidden.dtype,
        )
        return lambda hidden, target: layer(hidden, target).loss, list(layer.parameters())

    head = cutoffs[0] + len(cutoffs)
    weights, logits = head * size, problem.num_positions * head
    for cluster, (first, stop) in enumerate(pairwise([*cutoffs, problem.vocab_size]), 1):
        inside = (problem.target >= first) & (problem.target < stop)
        weights += size // divisor**cluster * (size + stop - first)
        logits += int(inside.sum()) * (stop - first)
    return Method(
        name="adaptive",
        problem=problem,
        build=build,
        needed_bytes=(2 * weights + problem.hidden.numel() + 3 * logits) * problem.element_bytes,
    )


class Classes:
    """The two levels of the tree `random`, as the peers `gather`, `grouped` and `loop` use them."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.tree = problem, problem.trees["random"]
        self.num_word_classes = int(self.tree.num_children[0])
        self.num_children = self.tree.num_children[1:]  # [C], words of each class
        self.widest = int(self.num_children.max())  # words of the largest class

    def root(self) -> tuple[Tensor, Tensor]:
        """Rows and biases of the classes, as parameters."""
        return self.problem.parameters(0, self.num_word_classes)


def gather(problem: Problem) -> Method:
    """Two levels with the rows of each position's class copied."""
    classes = Classes(problem)
    num_rows = classes.tree.num_rows

    def build() -> tuple[Loss, list[Tensor]]:
        root = classes.root()
        words = problem.parameters(classes.num_word_classes, num_rows)
        return methods.gather_loss(classes.tree, root, words), [*root, *words]

    row_bytes = 2 * problem.hidden_size * problem.element_bytes + 3 * 8  # with their indices
    copy_bytes = problem.num_positions * classes.widest * row_bytes
    return Method(
        name="gather",
        problem=problem,
        build=build,
        needed_bytes=problem.gradient_bytes(num_rows) + copy_bytes,
        tree=classes.tree,
        slow=True,
    )


def grouped(problem: Problem) -> Method:
    """Two levels with the products of all classes by grouped_mm.

    Positions are sorted by class, classes padded to one size and to 16 bytes, logits in memory.
    """
    classes, unit = Classes(problem), 16 // problem.element_bytes
    width, size = (-(-n // unit) * unit for n in (classes.widest, problem.hidden_size))

    def build() -> tuple[Loss, list[Tensor]]:
        root, last = classes.root(), classes.num_children[:, None] - 1
        place = torch.arange(width, device=last.device)
        inside = place <= last  # [C, width], whether a word is there
        rows = classes.tree.first_row[1:, None] + torch.minimum(place, last)
        bias = methods.parameter(torch.where(inside, problem.bias[rows], -torch.inf))
        padded = problem.weight.new_zeros(classes.num_word_classes, width, size)
        padded[:, :, : problem.hidden_size][inside] = problem.weight[rows[inside]]
        matrices = [methods.parameter(some) for some in torch.split(padded, GROUPS)]

        def loss(hidden: Tensor, target: Tensor) -> Tensor:
            word_class, place = methods.class_and_place(classes.tree, target)
            word_class, order = word_class.sort()
            hidden = hidden.index_select(0, order)
            class_nll = F.cross_entropy(F.linear(hidden, *root), word_class)
            every_class = torch.arange(classes.num_word_classes, device=hidden.device)
            ends = torch.searchsorted(word_class, every_class, right=True)
            logits = _grouped_products(F.pad(hidden, (0, size - hidden.shape[1])), matrices, ends)
            logits = logits + F.embedding(word_class, bias)
            return class_nll + F.cross_entropy(logits, place[order])

        return loss, [*root, *matrices, bias]

    weights = classes.num_word_classes * width * (size + 1)
    temporaries = problem.num_positions * (3 * size + 5 * width + 3 * classes.num_word_classes)
    needs_bf16 = problem.hidden.is_cuda and problem.hidden.dtype != torch.bfloat16
    return Method(
        name="grouped",
        problem=problem,
        build=build,
        needed_bytes=problem.gradient_bytes(classes.num_word_classes)
        + (2 * weights + temporaries) * problem.element_bytes,
        tree=classes.tree,
        refused="grouped_mm requires bf16 on CUDA" if needs_bf16 else None,
    )


def _grouped_products(hidden: Tensor, matrices: list[Tensor], ends: Tensor) -> Tensor:
    """Products [P, width] of each position with the matrix of its class.

    hidden [P, size] is sorted by class, whose positions end at ends [C]; the classes' matrices are
    in groups [≤ GROUPS, width, size].
    """
    if len(matrices) == 1:
        return F.grouped_mm(hidden, matrices[0].transpose(1, 2), offs=ends.to(torch.int32))
    ends_of_group = torch.split(ends, GROUPS)
    bounds = [0, *torch.stack([group[-1] for group in ends_of_group]).tolist()]
    products = []
    for group, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            offsets = (ends_of_group[group] - start).to(torch.int32)
            matrix = matrices[group].transpose(1, 2)
            products.append(F.grouped_mm(hidden[start:stop], matrix, offs=offsets))
    return torch.cat(products)


def loop(problem: Problem) -> Method:
    """Two levels, one position after the other; each class is a separate parameter."""
    classes = Classes(problem)
    num_positions = min(LOOP_POSITIONS, problem.num_positions)

    def build() -> tuple[Loss, list[Tensor]]:
        root = classes.root()
        first, width = classes.tree.first_row[1:].tolist(), classes.num_children.tolist()
        words = [problem.parameters(f, f + w) for f, w in zip(first, width, strict=True)]
        return methods.loop_loss(classes.tree, root, words), [*root, *chain.from_iterable(words)]

    logits = 4 * num_positions * (classes.num_word_classes + classes.widest)
    return Method(
        name="loop",
        problem=problem,
        build=build,
        needed_bytes=problem.gradient_bytes(classes.tree.num_rows) + logits * problem.element_bytes,
        tree=classes.tree,
        slow=True,
        num_positions=num_positions,
    )


PEERS: dict[str, Callable[[Problem], Method]] = {
    "full": full,
    "chunked": chunked,
    "cce": cut_cross_entropy,
    "liger": liger,
    "adaptive": adaptive,
    "gather": gather,
    "grouped": grouped,
    "loop": loop,
}
"""Peers by name in `--methods`."""
