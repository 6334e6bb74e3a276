"""HierarchicalSoftmax: the interface of torch's adaptive softmax, the numbers of `functional`."""

import subprocess
import sys

import pytest
import torch

from lm.output import ClassTree, HierarchicalSoftmax, hierarchical_cross_entropy
from lm.output.functional import hierarchical_nll_by_level

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


def test_nll_by_level_splits_the_loss(layer: HierarchicalSoftmax) -> None:
    hidden, target = torch.randn(3, 3, H), torch.randint(0, N, (3, 3))
    target[0, 2] = -100
    levels = layer.nll_by_level(hidden, target)
    args = (hidden, layer.weight, target, layer.tree, layer.bias)
    assert torch.equal(levels, hierarchical_nll_by_level(*args))
    torch.testing.assert_close(levels.sum(0), layer.loss(hidden, target, "none").detach())


def test_tree_is_saved_and_moved_with_the_weights() -> None:
    layer = HierarchicalSoftmax(H, ClassTree.two_level(range(N)))
    state = layer.state_dict()
    tree = {k.removeprefix("tree."): v for k, v in state.items() if k.startswith("tree.")}
    again = HierarchicalSoftmax(H, ClassTree.from_state(tree))
    again.load_state_dict(state)
    hidden, target = torch.randn(7, H), torch.randint(0, N, (7,))
    assert torch.equal(again.loss(hidden, target), layer.loss(hidden, target))
    assert layer.to("meta").tree.row_of_word.device.type == "meta"
    assert layer.tree.row_of_word.dtype == torch.int64


def test_tree_moves_to_the_device_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.device] = []
    tree = ClassTree.full(5)

    def to(device: torch.device) -> ClassTree:
        moved.append(device)
        return tree

    monkeypatch.setattr(tree, "to", to)
    assert HierarchicalSoftmax(3, tree, device="cpu").tree is tree
    assert moved == [torch.device("cpu")]
    on_meta = HierarchicalSoftmax(3, tree, device="meta")  # for weights assigned later
    assert on_meta.tree.row_of_word.tolist() == [0, 1, 2, 3, 4]
    assert len(moved) == 1


def test_hidden_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="hidden_size must be at least 1, got 0"):
        HierarchicalSoftmax(0, ClassTree.full(3))


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


def test_initial_rows_are_uniform_within_one_over_sqrt_h() -> None:
    torch.manual_seed(0)
    layer = HierarchicalSoftmax(64, ClassTree.two_level(torch.arange(900) % 30))
    assert 0.99 / 8 < float(layer.weight.detach().abs().max()) <= 1 / 8
    assert float(layer.weight.detach().std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.02)
    log_prob = layer.log_prob(torch.zeros(1, 64))
    torch.testing.assert_close(log_prob.exp(), torch.full((1, 900), 1 / 900))
