"""HierarchicalSoftmax: the interface of torch's adaptive softmax, the numbers of `functional`."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lm.output import ClassTree, HierarchicalSoftmax, hierarchical_cross_entropy

N, H = 23, 6
TREE = ClassTree.two_level((torch.arange(N) * 7) % 5, shortlist=3)


@pytest.fixture
def layer() -> HierarchicalSoftmax:
    torch.manual_seed(3)
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


def test_predict_is_the_argmax_of_log_prob(layer: HierarchicalSoftmax) -> None:
    hidden = torch.randn(50, H)
    assert torch.equal(layer.predict(hidden), layer.log_prob(hidden).argmax(1))


def on_meta() -> HierarchicalSoftmax:
    with torch.device("meta"):
        return HierarchicalSoftmax(H, TREE)


@pytest.mark.parametrize(
    "make",
    [
        lambda: on_meta().to_empty(device="cpu"),
        lambda: torch.nn.utils.skip_init(HierarchicalSoftmax, H, TREE),  # type: ignore[no-untyped-call]
        lambda: HierarchicalSoftmax(H, TREE).to("meta").to_empty(device="cpu"),
        lambda: HierarchicalSoftmax(H, TREE).to_empty(device="cpu"),
        on_meta,
    ],
)
def test_weights_are_loaded_into_a_layer_without_any(
    layer: HierarchicalSoftmax, make: Callable[[], HierarchicalSoftmax]
) -> None:
    other = make()
    other.load_state_dict(layer.state_dict(), assign=other.weight.is_meta)
    hidden, target = torch.randn(7, H), torch.randint(0, N, (7,))
    assert torch.equal(other.loss(hidden, target), layer.loss(hidden, target))
    assert torch.equal(other.log_prob(hidden), layer.log_prob(hidden))


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


@pytest.mark.parametrize("hidden_size", [0, -3, 3.5, "8"])
def test_hidden_size_must_be_a_positive_integer(hidden_size: Any) -> None:
    with pytest.raises(
        ValueError, match=f"hidden_size must be an integer ≥ 1, got {hidden_size!r}"
    ):
        HierarchicalSoftmax(hidden_size, TREE)


def test_what_is_not_a_sampling_or_a_tensor_is_named() -> None:
    layer = HierarchicalSoftmax(H, TREE)
    with pytest.raises(ValueError, match="sampling must be a Sampling, got 'top'"):
        layer.sample(torch.zeros(2, H), "top")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hidden must be a tensor, got list"):
        layer.loss([[0.0] * H], torch.zeros(1).long())  # type: ignore[arg-type]


def test_a_number_in_place_of_a_tree_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tree must be a ClassTree, such as .*, got 100000"):
        HierarchicalSoftmax(H, 100_000)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"word_class must be integers, .* got 100000"):
        ClassTree.two_level(100_000)  # type: ignore[arg-type]


def test_a_wrong_backend_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="one of compiled, reference, triton, got 'cuda'"):
        HierarchicalSoftmax(H, TREE, backend="cuda")  # type: ignore[arg-type]


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
