"""Singular values of the log-probabilities of trained models, and their rank against its bound.

The matrix A [contexts, N] holds log P(word | context) of positions of the test split, spread evenly
over it, in fp64; every row is centred, because a constant added to the logits of a context changes
no probability (Yang et al. 2018, property 1). Bound: a full softmax of H features has rank ≤ H + 1;
a tree rank ≤ H + L, where L nodes have words as children (`num_word_nodes`; lm/output/TREES.md).

  rank       number of singular values > σ₁ · max(contexts, N) · 2⁻⁵² (Press et al. 2007, 2.6)
  large      number of singular values > σ₁ / 1000
  beyond     root mean square, in nats, of A minus the nearest matrix of rank H + 1: what no full
             softmax of this size can compute
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.config import Config
from lm.evaluation import evaluate_split
from lm.model.reader import read_text
from lm.output import ClassTree, HierarchicalSoftmax
from lm.run import Run
from scripts import run
from scripts.benchmarks.reporting import Table, benchmark_parser, require_positive

COLUMNS = {
    "tree": "{tree}",
    "H": "{hidden_size}",
    "depth": "{depth}",
    "L": "{num_word_nodes:,}",
    "bound": "{bound:,}",
    "rank": "{rank:,}",
    "large": "{num_large:,}",
    "beyond, nats": "{beyond_nats:.3f}",
    "perplexity": "{perplexity:.2f}",
}
LARGE = 1e-3
LOGGED_VALUES = 200


def name_of_tree(config: Config) -> str:
    """The shape of a tree and where its classes are from."""
    tree, classes = config.output.tree, config.needed_classes
    if classes is not None:
        return f"{classes.method} classes, depth {classes.depth or 2}"
    shapes = {"full": "full softmax", "huffman": f"Huffman tree, arity {config.output.arity}"}
    return shapes.get(tree, tree)


@torch.no_grad()
def hidden_vectors(opened: Run, num_contexts: int) -> Tensor:
    """Hidden vectors [contexts, H] fp64 at positions spread evenly over the test split."""
    tokens = opened.prepared.tokens("test")
    chosen = torch.arange(num_contexts) * len(tokens) // num_contexts
    found, before = [], 0
    description = opened.description
    for hidden, *_ in read_text(opened.model, tokens, description.eos_id, description.context):
        flat = hidden.transpose(0, 1).reshape(-1, hidden.shape[-1]).double()
        inside = chosen[(chosen >= before) & (chosen < before + len(flat))]
        found.append(flat[inside - before])
        before += len(flat)
    return torch.cat(found)


def singular_values(log_prob: Tensor) -> NDArray[np.float64]:
    """The singular values of centred log-probabilities, descending."""
    centred = log_prob - log_prob.mean(dim=1, keepdim=True)
    values: NDArray[np.float64] = torch.linalg.svdvals(centred).numpy()
    return values


def figures_of(values: NDArray[np.float64], shape: Sequence[int], size: int) -> dict[str, Any]:
    """Rank, large singular values and distance from rank H + 1 of a matrix of this shape."""
    tolerance = values[0] * max(shape) * np.finfo(np.float64).eps
    beyond = np.sqrt((values[size + 1 :] ** 2).sum() / (shape[0] * shape[1]))
    index = np.unique(np.geomspace(1, len(values), LOGGED_VALUES).round().astype(int)) - 1
    return {
        "rank": int((values > tolerance).sum()),
        "num_large": int((values > LARGE * values[0]).sum()),
        "beyond_nats": float(beyond),
        "index": (index + 1).tolist(),
        "singular_values": [float(f"{value:.4g}") for value in values[index]],
    }


def num_word_nodes(tree: ClassTree) -> int:
    """L, the number of nodes with words among their children, if single children are left out.

    The softmax of a node with a single child is 1, so its child counts as its parent's.
    """
    node = tree.node_of_row[tree.row_of_word]
    for _ in range(tree.depth - 1):
        is_single = (tree.num_children[node] == 1) & (node > 0)
        node = torch.where(is_single, tree.node_of_row[tree.row_of_node[node]], node)
    return int(torch.unique(node).numel())


def bound_on_rank(tree: ClassTree, size: int, num_contexts: int) -> int:
    """Largest rank of the centred log-probabilities of this many contexts."""
    return min(num_contexts, tree.vocab_size - 1, size + num_word_nodes(tree))


def main() -> None:
    """Print a table of trained runs, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folders of trained runs")
    add("--contexts", type=int, default=3000, help="rows of the matrix (default 3000)")
    add("--threads", type=int, default=1)
    options = parser.parse_args()
    require_positive(parser, options, ["contexts", "threads"])
    table = Table(COLUMNS, options.json)
    for folder in options.runs:
        opened = Run.open(folder, device="cpu", threads=options.threads)
        softmax = opened.model.output
        if not isinstance(softmax, HierarchicalSoftmax):
            parser.error(f"{folder} has no tree of softmaxes")
        hidden = hidden_vectors(opened, options.contexts)
        perplexity = evaluate_split(opened, "test", progress=False).perplexity
        tree, size = softmax.tree, hidden.shape[1]
        log_prob = softmax.double().log_prob(hidden).detach()
        row = {
            "tree": name_of_tree(opened.config),
            "hidden_size": size,
            "vocab_size": tree.vocab_size,
            "contexts": len(hidden),
            "depth": tree.depth,
            "num_nodes": tree.num_nodes,
            "num_word_nodes": num_word_nodes(tree),
            "bound": bound_on_rank(tree, size, len(hidden)),
            "perplexity": perplexity,
        }
        table.add(row | figures_of(singular_values(log_prob), log_prob.shape, size))


if __name__ == "__main__":
    run(main)
