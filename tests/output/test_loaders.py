"""The layer loaded, saved, copied and wrapped by programs that do not know its tree."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.functional import BackendName
from lm.output.tree.arrays import TreeArrays

from .definition import METHODS, TREES, TWO_LEVEL, H, Method, N
from .sharded.processes import in_processes

OTHER = ClassTree.two_level((torch.arange(N) * 7 % 5).roll(1))
"""A tree of the sizes of `TWO_LEVEL`."""
SAVED = dict(OTHER.named_buffers())


def on_meta(tree: ClassTree, backend: BackendName = "auto") -> HierarchicalSoftmax:
    with torch.device("meta"):
        return HierarchicalSoftmax(H, tree, backend=backend)


def figures(layer: HierarchicalSoftmax) -> list[Tensor]:
    """The nll of all words, as a whole and by level, and what the layer decodes."""
    hidden, target = torch.randn(N, H, generator=torch.Generator().manual_seed(0)), torch.arange(N)
    with torch.no_grad():
        word, nll = layer.topk(hidden, 4).word, layer.loss(hidden, target, "none")
        return [nll, layer.log_prob(hidden), word, layer.nll_by_level(hidden, target)]


def from_pretrained(
    layer: HierarchicalSoftmax, state: dict[str, Tensor], fill: Callable[[Tensor], Tensor]
) -> HierarchicalSoftmax:
    """As `from_pretrained` of Hugging Face's transformers 5 loads a module.

    Parameters and buffers are replaced one by one: by those of the state, or by uninitialised ones
    where they are not in it.
    """
    loaded = on_meta(layer.tree, layer.backend)
    for prefix, module in loaded.named_modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in tensors:
            value = state.get(f"{prefix}.{name}".removeprefix("."))
            value = fill(torch.empty_like(tensor, device="cpu")) if value is None else value
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(module, name, nn.Parameter(value) if is_parameter else value)
    return loaded


@pytest.mark.parametrize("fill", [torch.zero_, lambda x: x.random_(-(2**62), 2**62)])
@pytest.mark.parametrize("saved", ["all", "parameters"])
@pytest.mark.parametrize("backend", ["reference", "compiled"])
@pytest.mark.parametrize("shape", TREES)
def test_loaders_that_replace_every_buffer_leave_the_tree_as_it_is(
    shape: str, backend: BackendName, saved: str, fill: Callable[[Tensor], Tensor]
) -> None:
    layer = HierarchicalSoftmax(H, TREES[shape], backend=backend)
    state: dict[str, Tensor] = layer.state_dict()
    if saved == "parameters":
        state = dict(layer.named_parameters())
    loaded = from_pretrained(layer, state, fill)
    assert loaded.tree.path(N - 1) == layer.tree.path(N - 1)
    assert all(map(torch.equal, figures(loaded), figures(layer)))
    torch.testing.assert_close(loaded.state_dict(), layer.state_dict(), rtol=0, atol=0)


LOADS: dict[str, Callable[[ClassTree, str, Tensor], object]] = {
    "replaced": lambda tree, name, value: setattr(tree, name, value.clone()),
    "moved": lambda tree, name, value: setattr(tree.get_buffer(name), "data", value.clone()),
    "written": lambda tree, name, value: tree.get_buffer(name).copy_(value),
}
HIDDEN, WORD = torch.zeros(2, H), torch.tensor([1, 2])
CALLS: dict[str, Method] = METHODS | {
    "compiled": lambda layer, hidden, word: torch.compile(layer, backend="eager")(hidden, word)
}
REFUSED = (ValueError, InternalTorchDynamoError)


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("load", LOADS)
def test_the_arrays_of_another_tree_are_refused_however_they_are_loaded(
    load: str, method: str
) -> None:
    layer = HierarchicalSoftmax(H, TWO_LEVEL)
    CALLS[method](layer, HIDDEN, WORD)
    torch.compiler.reset()
    for name, value in SAVED.items():
        LOADS[load](layer.tree, name, value)
    for _ in range(2):
        with pytest.raises(REFUSED, match="the weights belong to another tree: row_of_word"):
            CALLS[method](layer, HIDDEN, WORD)


@pytest.mark.parametrize("name", [name for name in TreeArrays._fields if name not in SAVED])
def test_writing_to_other_arrays_is_an_error(name: str) -> None:
    layer = HierarchicalSoftmax(H, ClassTree.from_paths([[0, 0], [0, 1], [1]]))
    layer.loss(HIDDEN, WORD)
    getattr(layer.tree, name).fill_(1 << 40)
    for method in CALLS.values():
        with pytest.raises(REFUSED, match="an array of a tree was written to"):
            method(layer, HIDDEN, WORD)


def reloaded(layer: HierarchicalSoftmax, source: HierarchicalSoftmax) -> HierarchicalSoftmax:
    layer.load_state_dict(source.state_dict(), assign=layer.weight.is_meta)
    return layer


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda layer: pickle.loads(pickle.dumps(layer)),
        lambda layer: layer.share_memory(),
        lambda layer: layer.double().float(),
        lambda layer: reloaded(copy.deepcopy(layer).to_empty(device="cpu"), layer),
        lambda layer: reloaded(copy.deepcopy(layer).to("meta").to_empty(device="cpu"), layer),
        lambda layer: reloaded(on_meta(layer.tree).to_empty(device="cpu"), layer),
        lambda layer: reloaded(on_meta(layer.tree), layer),
        lambda layer: reloaded(nn.utils.skip_init(HierarchicalSoftmax, H, layer.tree), layer),  # type: ignore[no-untyped-call]
        lambda layer: torch.inference_mode()(copy.deepcopy)(layer),
    ],
)
def test_copies_have_the_same_tree(copied: Callable[..., HierarchicalSoftmax]) -> None:
    layer = HierarchicalSoftmax(H, TREES["huffman"])
    expected = figures(layer)
    assert all(map(torch.equal, figures(copied(layer)), expected))


@pytest.mark.parametrize("shape", TREES)
def test_saved_layers_hold_every_number_once(shape: str, tmp_path: Path) -> None:
    tree = TREES[shape]
    one, other = HierarchicalSoftmax(H, tree), HierarchicalSoftmax(H, tree)
    layers = nn.ModuleList([one, other])
    save_model(layers, str(tmp_path / "layers.safetensors"))
    loaded = copy.deepcopy(layers)
    for parameter in loaded.parameters():
        nn.init.zeros_(parameter)
    load_model(loaded, str(tmp_path / "layers.safetensors"))
    torch.testing.assert_close(loaded.state_dict(), layers.state_dict(), rtol=0, atol=0)
    num_bytes = sum(each.nbytes for each in layers.state_dict().values())
    assert num_bytes <= (tmp_path / "layers.safetensors").stat().st_size < num_bytes + 1500
    for name, each in layers.state_dict().items():
        assert each.untyped_storage().nbytes() == each.nbytes, name
    assert len({each.arrays.row_of_word.data_ptr() for each in (one.tree, other.tree, tree)}) == 1


class Tied(nn.Module):
    """A model whose input vectors are rows of the output layer."""

    def __init__(self, row_wise: bool) -> None:
        super().__init__()
        self.output = HierarchicalSoftmax(H, TREES["huffman"], row_wise=row_wise)

    def forward(self, word: Tensor) -> Tensor:
        return self.output.loss(self.output.embed(word), word)


@pytest.mark.parametrize("row_wise", [False, True])
def test_averages_of_buffers_leave_input_vectors_and_what_is_saved_alone(row_wise: bool) -> None:
    model, words = Tied(row_wise), torch.arange(N)
    vectors = model.output.weight[model.output.tree.row_of_word[words], :H]
    assert torch.equal(model.output.embed(words[None]), vectors[None])
    for wrong in (-1, N):
        with pytest.raises(IndexError, match=f"words must be 0 … {N - 1}"):
            model.output.embed(torch.tensor([wrong]))
    rule = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    average = AveragedModel(model, multi_avg_fn=rule, use_buffers=True)
    for _ in range(3):  # rounds numbers down
        average.update_parameters(model)
    averaged = cast(Tied, average.module)
    assert not torch.equal(averaged.output.tree.row_of_word, model.output.tree.row_of_word)
    assert torch.equal(averaged.output.embed(words), model.output.embed(words))
    state = averaged.state_dict()
    torch.testing.assert_close(state, model.state_dict())
    model.load_state_dict(state)
    assert torch.equal(average(words), model(words))
    average(words).backward()


def _check_wrapped(rank: int, world_size: int) -> None:
    """DDP, and FSDP2 of a layer that is made without memory, as in one process."""
    whole, share = HierarchicalSoftmax(H, TWO_LEVEL), slice(rank, None, world_size)
    hidden, target = torch.randn(6, H), torch.arange(6)
    expected = whole.loss(hidden, target)
    (gradient,) = torch.autograd.grad(expected, whole.weight)
    replica = nn.parallel.DistributedDataParallel(copy.deepcopy(whole))
    for num_steps in (1, 2):  # buffers are sent before each
        replica(hidden[share], target[share]).loss.backward()
        torch.testing.assert_close(replica.module.weight.grad, num_steps * gradient)

    layer = on_meta(TWO_LEVEL)
    fsdp.fully_shard(layer)
    layer.to_empty(device="cpu")
    for name, parameter in layer.named_parameters():
        local = cast(DTensor, parameter.detach()).to_local()
        first = rank * -(-TWO_LEVEL.num_rows // world_size)
        local.copy_(whole.state_dict()[name][first:][: len(local)])
    for call in (METHODS["loss"], METHODS["topk"], lambda *_: layer.embed(target)):
        with pytest.raises(ValueError, match="register_fsdp_forward_method"):
            call(layer, hidden, target)
    torch.testing.assert_close(layer(hidden, target).loss, expected)
    fsdp.register_fsdp_forward_method(layer, "loss")
    torch.testing.assert_close(layer.loss(hidden, target), expected)


def test_ddp_and_fsdp_wrap_the_layer() -> None:
    in_processes(2, _check_wrapped)
