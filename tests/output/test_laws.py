"""Every way to compute the output layer on a CPU obeys the laws; the kernels in the interpreter."""

from functools import partial
from itertools import product

import pytest
import torch

from lm.output import ClassTree

from .definition import TREES, TWO_LEVEL, N, definition_by_level, layer_of, two_level
from .laws import FORMS, LAWS, SETTINGS, Case, Law, Way, equals_the_definition, problem_of

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
SMALL, UNEQUAL = "tiles", "unequal tiles"
VARIOUS = {"reference": ["blocks", ""], "compiled": ["", "three parts", "errors are not saved"]}
DTYPES = (FP64, FP32, BF16, FP16)
PAIRS = [
    (
        Way(backend, [*FORMS][(5 * i + j) % len(FORMS)], settings[(i + j) % len(settings)]),
        Case(tree, dtype=dtype, further=(0, 5, 2)[(i + j // 2) % 3], bias=(i + j) % 4 < 3),
    )
    for backend, settings in VARIOUS.items()
    for i, tree in enumerate(TREES.values())
    for j, dtype in enumerate(DTYPES)
]
"""Every tree in every dtype, by all forms and settings in turn."""
SHORTLIST = ClassTree.two_level(torch.arange(90) % 9, 20)
KERNELS: list[tuple[str, str, Case]] = [
    # form, setting, problem
    ("dense", SMALL, Case(two_level(50, 7), 1, 20)),  # everything is light
    ("dense", SMALL, Case(two_level(50, 7), 17, 20, bias=False)),  # the root is light: 16 visits
    ("row-wise", SMALL, Case(two_level(50, 7), 18, 20)),  # the root is heavy: 17
    ("op", SMALL, Case(two_level(50, 7), 55, 20)),  # several tiles, the last one ragged
    ("dense", SMALL, Case(two_level(50, 7), 40, 3, further=5)),  # H below a block
    ("row-wise", SMALL, Case(two_level(50, 7), 40, 36, FP32)),  # 4 divides H, 16 does not
    ("dense", SMALL, Case(two_level(50, 7), 40, 33, FP16, further=7)),
    ("dense", UNEQUAL, Case(two_level(200, 10), 60, 40)),
    ("strided", SMALL, Case(two_level(256, 16), 60, 16)),  # children that fill blocks exactly
    ("dense", "tiles, 2 splits", Case(two_level(200, 40), 30, 20)),
    ("row-wise", "tiles, 5 splits", Case(two_level(20, 4), 40, 20, bias=False)),  # > blocks
    ("dense", "tiles, 2 splits", Case(ClassTree.full(200), 40, 20, FP16)),
    ("dense", SMALL, Case(two_level(6, 6), 40, 20)),  # classes of one word
    ("checkpointed", SMALL, Case(SHORTLIST, 40, 20, FP32)),
    ("dense", "tiles, 2 splits", Case(two_level(60, 3), 110, 20, bias=False)),  # sums of chunks
    ("dense", SMALL, Case(ClassTree.balanced(64, 4), 40, 20)),  # levels heavy and light
    ("row-wise", "tiles, 2 splits", Case(ClassTree.huffman(torch.arange(9) ** 3 + 1), 25, 9)),
    ("torch.compile", SMALL, Case(TREES["paths"], 36, further=2)),
    ("dense", "parts of the batch", Case(two_level(60, 6), 60, 20)),
    ("row-wise", "parts of the batch", Case(two_level(60, 6), 60, 20)),
    ("dense", "", Case(two_level(60, 8), 40, 32, FP16, rows=FP32)),
]
PAIRS += [(Way("triton", form, setting), case) for form, setting, case in KERNELS]
WAYS = [
    Way("reference", "dense", "blocks"), Way("reference", "row-wise"), Way("compiled"),
    Way("compiled", "row-wise"), Way("triton", "dense", SMALL),
]  # fmt: skip
LEVELS = [*product((WAYS[0], WAYS[2]), TREES), *product([WAYS[4]], ["shortlist", "paths"])]


@pytest.mark.parametrize(("way", "case"), PAIRS, ids=str)
def test_loss_and_gradients_are_those_of_the_definition(way: Way, case: Case) -> None:
    equals_the_definition(way, case, *problem_of(case))


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of lanes that store nothing
@pytest.mark.filterwarnings("ignore:overflow encountered")  # in expm1's series, then not used
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(law: Law, way: Way) -> None:
    dtype, rows = LAWS[law]
    law(way, Case(TWO_LEVEL, 20, dtype=dtype, rows=rows))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradients_pass_gradcheck(way: Way) -> None:
    """Through the kernels along random directions."""
    (*tensors, target), _ = problem_of(case := Case(TREES["shortlist"], 3))
    with SETTINGS[way.setting]():
        leaves, fast = [each.requires_grad_() for each in tensors], way.backend == "triton"
        nll = partial(way.nll, case.tree)
        assert torch.autograd.gradcheck(lambda *of: nll(*of, target), leaves, fast_mode=fast)


@pytest.mark.parametrize(("way", "tree"), LEVELS, ids=str)
def test_terms_of_levels_are_those_of_the_definition(way: Way, tree: str) -> None:
    (hidden, weight, bias, target), _ = problem_of(Case(TREES[tree], 36))
    layer = layer_of(weight, TREES[tree], bias, backend=way.backend)
    with SETTINGS[way.setting]():
        found = layer.nll_by_level(hidden, target)
        assert layer.nll_by_level(hidden[:0], target[:0]).shape == (layer.tree.depth, 0)
        assert not layer.nll_by_level(hidden, target.clamp(max=-100)).any()
        with pytest.raises(IndexError, match=f"target {N} is out of bounds for {N} words"):
            layer.nll_by_level(hidden, target.clamp(min=N))
    expected = definition_by_level(hidden, weight, bias, target, layer.tree)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
