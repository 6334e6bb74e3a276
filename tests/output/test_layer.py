"""HierarchicalSoftmax: the interface of torch's adaptive softmax, the numbers of `functional`."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lm.output import ClassTree, HierarchicalSoftmax, hierarchical_cross_entropy
from lm.output.decoding import compiled
from lm.output.rowwise import RowAdagrad

from .definition import METHODS, TREES, H, N

TREE = TREES["shortlist"]


@pytest.fixture
def layer() -> HierarchicalSoftmax:
    return HierarchicalSoftmax(H, TREE)


def test_forward_gives_log_probabilities_and_the_mean_loss(layer: HierarchicalSoftmax) -> None:
    hidden, target = torch.randn(4, 5, H), torch.randint(0, N, (4, 5))
    target[0, 0] = -100
    output, loss = layer(hidden, target)
    args = (hidden, layer.weight, target, layer.tree, layer.bias)
    nll = hierarchical_cross_entropy(*args, reduction="none")
    torch.testing.assert_close(output, -nll)
    torch.testing.assert_close(loss, nll.sum() / 19)
    torch.testing.assert_close(loss, layer.loss(hidden, target))


def on_meta() -> HierarchicalSoftmax:
    with torch.device("meta"):
        return HierarchicalSoftmax(H, TREE)


def test_layers_of_one_tree_move_independently(layer: HierarchicalSoftmax) -> None:
    before, other = layer.state_dict(), HierarchicalSoftmax(H, TREE)
    other.tree.row_of_word.data = torch.zeros(N).long()  # as FSDP moves buffers
    assert torch.equal(layer.tree.row_of_word, TREE.row_of_word)
    assert torch.equal(before["tree.row_of_word"], TREE.row_of_word)
    assert len({id(tree) for tree in (TREE, layer.tree, other.tree)}) == 3


def test_a_layer_on_the_meta_device_computes_shapes() -> None:
    layer = on_meta()
    loss = layer.loss(torch.empty(2, 3, H, device="meta"), torch.empty(2, 3, device="meta").long())
    assert (loss.device.type, loss.shape) == ("meta", ())


@pytest.mark.parametrize("backend", ["reference", "compiled"], indirect=True)
def test_nothing_depends_on_the_default_device_and_dtype(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Methods; a step of training with dense gradients, and one with those of rows."""
    if backend == "reference":
        monkeypatch.setattr(compiled, "has_numba", lambda: False)
    found: list[list[Any]] = []
    for device, dtype in (("cpu", torch.float32), ("meta", torch.float64)):
        torch.manual_seed(0)
        layers = [HierarchicalSoftmax(H, TREE, row_wise=each) for each in (False, True)]
        hidden, word, before = torch.randn(9, H), torch.arange(9), torch.get_default_dtype()
        layers += [HierarchicalSoftmax(H, TREE, row_wise=True, dtype=torch.bfloat16)]
        try:
            torch.set_default_dtype(dtype)
            with torch.device(device):
                found.append([method(layers[0], hidden, word) for method in METHODS.values()])
                for layer in layers:
                    optimizer = (RowAdagrad if layer.row_wise else torch.optim.SGD)(
                        layer.parameters(), lr=0.1
                    )
                    layer.loss(hidden, word).backward()  # type: ignore[no-untyped-call]
                    torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
                    optimizer.step()
        finally:
            torch.set_default_dtype(before)
        found[-1] += [parameter for layer in layers for parameter in layer.parameters()]
    torch.testing.assert_close(*found, rtol=0, atol=0)


layer_of: Any = HierarchicalSoftmax
candidates: Any = HierarchicalSoftmax(H, TREE).candidate_log_prob
sample: Any = partial(HierarchicalSoftmax(H, TREE).sample, repetition_penalty=2.0)
two_level: Any = ClassTree.two_level


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (partial(layer_of, size, TREE), f"hidden_size must be .* ≥ 1, got {size!r}")
            for size in (0, -3, 3.5, "8")
        ),
        (partial(layer_of, H, 100_000), "tree must be a ClassTree, .* got 100000"),
        (partial(two_level, 100_000), "word_class must be integers, .* got 100000"),
        (partial(layer_of, H, TREE, backend="cuda"), "reference, triton, got 'cuda'"),
        (lambda: layer_of(H, TREE).sample(torch.zeros(2, H), "top"), "a Sampling, got"),
        (lambda: sample(torch.zeros(H), temprature=2), "sample has no argument temprature; its"),
        (lambda: layer_of(H, TREE).loss([[0.0] * H], None), "a tensor, got list"),
        (lambda: candidates(torch.zeros(1, H), [[3]]), "candidates must be a tensor, got list"),
        (lambda: sample(torch.zeros(H), previous=[3]), "previous must be a tensor, got list"),
        (lambda: sample(torch.zeros(H), previous=torch.tensor(3)), r"\[L\] int64, got \[\]"),
        (lambda: layer_of(H, TREE).sample(torch.zeros(H), seeds=3), "seeds must be a tensor"),
    ],
)
def test_mistakes_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_layer_imports_no_library_but_torch() -> None:
    blocked = ["lightning", "datasets", "pydantic", "wandb", "yaml", "sentencepiece", "scipy"]
    code = (
        f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
        "import torch\nfrom lm.output import ClassTree, HierarchicalSoftmax\n"
        "layer = HierarchicalSoftmax(4, ClassTree.full(3))\n"
        "print(layer.sample(torch.zeros(2, 4)).shape[0], 'triton' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["2", "False"], result.stderr
