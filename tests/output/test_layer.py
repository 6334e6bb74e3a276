"""HierarchicalSoftmax: a drop-in for torch's adaptive softmax, on the functional's numbers."""

import subprocess
import sys

import pytest
import torch

from lm.output import ClassTree, HierarchicalSoftmax, hierarchical_cross_entropy

N, H = 23, 6


@pytest.fixture
def layer() -> HierarchicalSoftmax:
    torch.manual_seed(3)
    return HierarchicalSoftmax(H, ClassTree.two_level((torch.arange(N) * 7) % 5, head=3))


def test_output_and_loss_are_those_of_the_adaptive_softmax_interface(
    layer: HierarchicalSoftmax,
) -> None:
    hidden, target = torch.randn(4, 5, H), torch.randint(0, N, (4, 5))
    target[0, 0] = -100
    output, loss = layer(hidden, target)
    each = hierarchical_cross_entropy(
        hidden, layer.weight, target, layer.tree, layer.bias, reduction="none"
    )
    torch.testing.assert_close(output, -each)
    torch.testing.assert_close(loss, each.sum() / 19)
    torch.testing.assert_close(loss, layer.loss(hidden, target))


def test_log_prob_agrees_with_the_loss_of_every_word(layer: HierarchicalSoftmax) -> None:
    hidden = torch.randn(3, H)
    log_prob = layer.log_prob(hidden)
    each = layer.loss(hidden.repeat_interleave(N, 0), torch.arange(N).repeat(3), "none")
    torch.testing.assert_close(log_prob, -each.view(3, N))


def test_predict_is_the_argmax_of_log_prob(layer: HierarchicalSoftmax) -> None:
    hidden = torch.randn(50, H)
    assert torch.equal(layer.predict(hidden), layer.log_prob(hidden).argmax(1))


def test_class_loss_is_the_root_and_the_rest_is_within(layer: HierarchicalSoftmax) -> None:
    hidden, target = torch.randn(9, H), torch.randint(0, N, (9,))
    target[2] = -100
    each = layer.class_loss(hidden, target, "none").detach()
    assert layer.bias is not None
    num_children = int(layer.tree.num_children[0])
    logits = hidden @ layer.weight[:num_children].T + layer.bias[:num_children]
    log_q = logits.log_softmax(1).detach()
    for position, word in enumerate(target.tolist()):
        truth = 0.0 if word < 0 else -float(log_q[position, layer.tree.path(word)[0][1]])
        assert float(each[position]) == pytest.approx(truth, abs=1e-6)


def test_the_tree_is_saved_with_the_weights_and_moves_with_them(
    layer: HierarchicalSoftmax,
) -> None:
    again = HierarchicalSoftmax(
        H,
        ClassTree.from_state(
            {k.removeprefix("tree."): v for k, v in layer.state_dict().items() if "tree" in k}
        ),
    )
    again.load_state_dict(layer.state_dict())
    hidden, target = torch.randn(7, H), torch.randint(0, N, (7,))
    assert torch.equal(again.loss(hidden, target), layer.loss(hidden, target))
    assert layer.to("meta").tree.row_of_word.device.type == "meta"
    assert layer.tree.row_of_word.dtype == torch.int64


def test_the_tree_is_where_the_layer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.device] = []
    tree = ClassTree.full(5)

    def to(device: torch.device) -> ClassTree:
        moved.append(device)
        return tree

    monkeypatch.setattr(tree, "to", to)
    assert HierarchicalSoftmax(3, tree, device="cpu").tree is tree
    assert moved == [torch.device("cpu")]
    on_meta = HierarchicalSoftmax(3, tree, device="meta")  # has a shape, and can be given weights
    assert on_meta.tree.row_of_word.tolist() == [0, 1, 2, 3, 4]
    assert len(moved) == 1


def test_hidden_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="hidden_size must be at least 1, got 0"):
        HierarchicalSoftmax(0, ClassTree.full(3))


def test_the_layer_needs_no_library_but_torch() -> None:
    blocked = ["lightning", "datasets", "pydantic", "wandb", "yaml", "sentencepiece", "scipy"]
    code = (
        f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
        "import torch\nfrom lm.output import ClassTree, HierarchicalSoftmax\n"
        "layer = HierarchicalSoftmax(4, ClassTree.full(3))\n"
        "print(layer.sample(torch.zeros(2, 4)).shape[0], 'triton' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["2", "False"], result.stderr


def test_rows_start_uniform_within_one_over_the_root_of_h() -> None:
    torch.manual_seed(0)
    layer = HierarchicalSoftmax(64, ClassTree.two_level(torch.arange(900) % 30))
    assert 0.99 / 8 < float(layer.weight.detach().abs().max()) <= 1 / 8
    assert float(layer.weight.detach().std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.02)
    log_prob = layer.log_prob(torch.zeros(1, 64))
    torch.testing.assert_close(log_prob.exp(), torch.full((1, 900), 1 / 900))
