"""The peers that `bench_output_layer` compares with ours, each with the memory that it will need.

A peer is written as its users write it, but spared what would be unfair to it: where autograd would
fill a full gradient with zeros for every slice of a parameter, the slices are parameters of their
own. All have biases but `adaptive`, which has none by default. Times nothing.
"""

import importlib
import importlib.util
from collections.abc import Callable
from itertools import chain, pairwise

import torch
from bench_method import Loss, Method, Problem, parameter
from torch import Tensor, nn
from torch.nn import functional as F

LOOP_POSITIONS = 256
"""As many are timed of the loop over positions, whose time grows with their number alone."""
GROUPS = 1023
"""Most matrices that one call of `grouped_mm` takes on a GPU."""
CHUNK_BYTES = 1 << 30
"""Logits that `chunked` forms at once where it would choose fewer than `CHUNK_POSITIONS` itself."""
CHUNK_POSITIONS = 16
CUTOFFS = {
    10_000: [2_000],
    33_278: [2_800, 10_000],
    267_735: [20_000, 40_000, 200_000],
    800_000: [60_000, 100_000, 640_000],
    10_000_000: [60_000, 600_000, 3_000_000],
}
"""Of `adaptive`: published ones (WikiText-103, One Billion Word) and their like for other sizes."""

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
    """A peer that computes the full softmax by the function that `load` returns."""
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
    """torch: linear + cross_entropy. Holds logits, log-probabilities and their gradient at once."""

    def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight, bias), target)

    logits = problem.num_positions * problem.vocab_size * problem.element_bytes
    return full_softmax(problem, "full", lambda: cross_entropy, 3 * logits)


def chunked(problem: Problem) -> Method:
    """torch: linear_cross_entropy in chunks as it chooses them itself; where that would be a few
    positions at a time, in chunks of `CHUNK_BYTES`.
    """
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

    missing = _missing(problem, "cut_cross_entropy")
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
    missing = _missing(problem, "liger_kernel")
    return full_softmax(problem, "liger", load, chunk_bytes + product_bytes, missing)


def _missing(problem: Problem, package: str) -> str | None:
    if not problem.hidden.is_cuda:
        return "CUDA only"
    return None if importlib.util.find_spec(package) else "not installed"


def usual_cutoffs(vocab_size: int) -> list[int]:
    """Of `adaptive` for a vocabulary, unless others are asked for."""
    return CUTOFFS.get(vocab_size) or [max(1, vocab_size // 10), vocab_size // 3]


def adaptive(problem: Problem) -> Method:
    """torch: AdaptiveLogSoftmaxWithLoss, projections divided by 4 from one cluster to the next."""
    size, cutoffs = problem.hidden_size, problem.cutoffs
    divisor = min(4, int(size ** (1 / len(cutoffs))))

    def build() -> tuple[Loss, list[Tensor]]:
        like = {"device": problem.hidden.device, "dtype": problem.hidden.dtype}
        layer = nn.AdaptiveLogSoftmaxWithLoss(
            size, problem.vocab_size, cutoffs, div_value=divisor, **like
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
    """The two levels of `random`, as the gather-based, the grouped and the looping peer see them.

    Attributes:
        num: C.
        num_children: [C], words of each class.
        widest: words of the largest.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.tree = problem, problem.trees["random"]
        self.num = int(self.tree.num_children[0])
        self.num_children = self.tree.num_children[1:]
        self.widest = int(self.num_children.max())

    def find(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Class of each target and place in it, [P] each."""
        row = self.tree.row_of_word[target]
        node = self.tree.node_of_row[row]
        return node - 1, row - self.tree.first_row[node]

    def root(self) -> tuple[Tensor, Tensor]:
        """Rows and biases of the classes, as parameters."""
        return self.problem.parameters(0, self.num)

    def table(self, width: int) -> tuple[Tensor, Tensor]:
        """Row of each place in each class [C, width], and whether there is a word."""
        place = torch.arange(width, device=self.num_children.device)
        inside = place < self.num_children[:, None]
        last = self.num_children[:, None] - 1
        return self.tree.first_row[1:, None] + torch.minimum(place, last), inside

    def padded_bias(self, width: int) -> Tensor:
        """Biases of each class's words, [C, width], a parameter; -inf where there is no word."""
        rows, inside = self.table(width)
        return parameter(torch.where(inside, self.problem.bias[rows], -torch.inf))


def gather(problem: Problem) -> Method:
    """Two levels, the rows of each position's class copied: positions × √N × H numbers, and a
    gradient as large.
    """
    classes = Classes(problem)
    width, num_rows = classes.widest, classes.tree.num_rows

    def build() -> tuple[Loss, list[Tensor]]:
        root, padded_bias = classes.root(), classes.padded_bias(width)
        words, _ = problem.parameters(classes.num, num_rows)
        rows = classes.table(width)[0] - classes.num

        def loss(hidden: Tensor, target: Tensor) -> Tensor:
            own, place = classes.find(target)
            copies = F.embedding(rows[own], words)  # [P, width, H]
            logits = torch.bmm(copies, hidden[:, :, None]).squeeze(2)
            of_class = F.cross_entropy(F.linear(hidden, *root), own)
            return of_class + F.cross_entropy(logits + F.embedding(own, padded_bias), place)

        return loss, [*root, words, padded_bias]

    row_bytes = 2 * problem.hidden_size * problem.element_bytes + 3 * 8  # with their indices
    copy_bytes = problem.num_positions * width * row_bytes
    return Method(
        name="gather",
        problem=problem,
        build=build,
        needed_bytes=problem.gradient_bytes(num_rows) + copy_bytes,
        tree=classes.tree,
        slow=True,
    )


def grouped(problem: Problem) -> Method:
    """Two levels, the classes' products by grouped_mm: positions sorted by class, classes padded to
    one size and to 16 bytes, logits in memory.
    """
    classes, unit = Classes(problem), 16 // problem.element_bytes
    width, size = (-(-n // unit) * unit for n in (classes.widest, problem.hidden_size))

    def build() -> tuple[Loss, list[Tensor]]:
        root, bias = classes.root(), classes.padded_bias(width)
        rows, inside = classes.table(width)
        padded = problem.weight.new_zeros(classes.num, width, size)
        padded[:, :, : problem.hidden_size][inside] = problem.weight[rows[inside]]
        parts = [parameter(part) for part in padded.split(GROUPS)]

        def loss(hidden: Tensor, target: Tensor) -> Tensor:
            own, place = classes.find(target)
            own, order = own.sort()
            hidden = hidden.index_select(0, order)
            of_class = F.cross_entropy(F.linear(hidden, *root), own)
            ends = torch.searchsorted(own, torch.arange(classes.num, device=own.device), right=True)
            logits = _grouped_products(F.pad(hidden, (0, size - hidden.shape[1])), parts, ends)
            return of_class + F.cross_entropy(logits + F.embedding(own, bias), place[order])

        return loss, [*root, *parts, bias]

    weights = classes.num * width * (size + 1)
    temporaries = problem.num_positions * (3 * size + 5 * width + 3 * classes.num)
    wants_bf16 = problem.hidden.is_cuda and problem.hidden.dtype != torch.bfloat16
    return Method(
        name="grouped",
        problem=problem,
        build=build,
        needed_bytes=problem.gradient_bytes(classes.num)
        + (2 * weights + temporaries) * problem.element_bytes,
        tree=classes.tree,
        refused="grouped_mm wants bf16 on CUDA" if wants_bf16 else None,
    )


def _grouped_products(hidden: Tensor, parts: list[Tensor], ends: Tensor) -> Tensor:
    """Products of each position with the matrix of its class, [P, width].

    Args:
        hidden: [P, size], sorted by class.
        parts: the matrices of all classes in order, [≤ GROUPS, width, size] each.
        ends: [C], where the positions of each class end.
    """
    if len(parts) == 1:
        return F.grouped_mm(hidden, parts[0].transpose(1, 2), offs=ends.to(torch.int32))
    ends_of_part = ends.split(GROUPS)
    bounds = [0, *torch.stack([own[-1] for own in ends_of_part]).tolist()]
    positions = hidden.split([stop - start for start, stop in pairwise(bounds)])
    return torch.cat(
        [
            F.grouped_mm(some, part.transpose(1, 2), offs=(own - start).to(torch.int32))
            for some, part, own, start in zip(
                positions, parts, ends_of_part, bounds[:-1], strict=True
            )
            if some.shape[0]
        ]
    )


def loop(problem: Problem) -> Method:
    """Two levels, one position after the other; each class is a parameter of its own."""
    classes = Classes(problem)
    num_positions = min(LOOP_POSITIONS, problem.num_positions)

    def build() -> tuple[Loss, list[Tensor]]:
        root = classes.root()
        first, width = classes.tree.first_row[1:].tolist(), classes.num_children.tolist()
        words = [problem.parameters(f, f + w) for f, w in zip(first, width, strict=True)]

        def loss(hidden: Tensor, target: Tensor) -> Tensor:
            own, place = classes.find(target)
            nll = []
            for h, c, w in zip(hidden.split(1), own.split(1), place.split(1), strict=True):
                nll.append(F.cross_entropy(F.linear(h, *root), c))
                nll.append(F.cross_entropy(F.linear(h, *words[int(c)]), w))
            return torch.stack(nll).float().sum() / len(hidden)

        return loss, [*root, *chain.from_iterable(words)]

    logits = 4 * num_positions * (classes.num + classes.widest)
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
