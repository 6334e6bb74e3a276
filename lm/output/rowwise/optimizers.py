"""Optimizers of tables of rows, whose step touches only the rows with a gradient.

A backend applies the gradient of a batch that it has computed: `CompiledFactors.update` in
`backends/compiled/row_updates.py`, `TritonFactors.update` in `backends/triton/rows.py`, times the
factor by which clipping has multiplied it. Any other is applied here, in blocks that are formed and
discarded: a sum of several batches, one of the reference backend, or of a table that is not
contiguous. Rows without a gradient retain their values and state: the moments of `RowAdam` decay
only where there is one, corrected by the number of steps. There is no weight decay.

Where `lr` is a tensor on the device of a table, a step reads it there: a CUDA graph that contains
the step follows what is written to it.

Rows in bf16 are rounded up or down at random in proportion to the distance, so that updates smaller
than half the last place are applied correctly on average (Gupta et al. 2015), each backend by its
own random numbers. State is in at least fp32.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lm.output.inputs import compute_dtype
from lm.output.rowwise.factors import Block, Rule, as_rows, on_host
from lm.output.rowwise.row_gradient import RowGradient

_UPPER_HALF = 1 if sys.byteorder == "little" else 0
"""Which half of an fp32 number is its bf16 part."""


class RowOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer of rows; a subclass defines the update of a block by `_rule` and `_change`.

    Backends change rows by themselves for the rules in `KINDS`, with the numbers of `_rule`.

    Its `params` are tables [R, H] and vectors [R], whose gradients are `RowGradient` or ordinary;
    `defaults` are its settings, `lr` among them, the step size: a number or a tensor.
    """

    def __init__(self, params: Iterable[Tensor], defaults: dict[str, Any]) -> None:
        for name in ("lr", "eps"):
            if not defaults.get(name, 1) > 0:
                raise ValueError(f"{name} must be positive, got {defaults[name]}")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every row that has a gradient; `closure` evaluates the loss and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor) and on_host(group["lr"]):
                group = group | {"lr": float(group["lr"])}
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As for any optimizer, except that the state of rows remains in at least fp32."""
        loaded: dict[str, Any] = {}  # what other hooks leave
        before = self.register_load_state_dict_pre_hook(lambda _, given: loaded.update(given))
        after = self.register_load_state_dict_post_hook(
            lambda _: self._restore_precision(loaded), prepend=True
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _restore_precision(self, loaded: dict[str, Any]) -> None:
        """Replace the loaded state, which has the dtype of the tables."""
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in loaded["param_groups"] for number in group["params"]]
        for param, number in zip(params, numbers, strict=True):
            for name, value in loaded["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    dtype = compute_dtype(param.dtype) if value.dim() else value.dtype
                    self.state[param][name] = value.to(param.device, dtype)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        table = as_rows(param)
        rule = self._rule(param, table, group)
        blocks: Iterable[Block]
        if not isinstance(grad, RowGradient):
            dense = as_rows(grad).to(compute_dtype(table.dtype))
            blocks = [Block(slice(0, len(table)), dense)]
        elif table.is_contiguous():
            blocks = grad.factors.update(table, rule)  # of the backend: none if it did it all
            torch.autograd.graph.increment_version(param)  # which PyTorch's operations do
        else:
            blocks = grad.factors.blocks(table)
        for block in blocks:
            stored = table[block.rows]  # a view, if the rows are a slice
            rows = stored.to(compute_dtype(table.dtype), memory_format=torch.contiguous_format)
            self._change(rows, block, rule)
            if table.dtype == torch.bfloat16:
                _round_stochastically(stored, rows)
            elif rows is not stored:
                stored.copy_(rows)
            if not isinstance(block.rows, slice):
                table[block.rows] = stored if block.source is None else stored[block.source]
        if table.data_ptr() != param.data_ptr():  # a copy
            param.copy_(table.view(param.shape))

    @abstractmethod
    def _rule(self, param: Tensor, table: Tensor, group: dict[str, Any]) -> Rule:
        """What `_change`, or a kernel in its place, needs for `param` as a table of rows."""

    @abstractmethod
    def _change(self, rows: Tensor, block: Block, rule: Rule) -> None:
        """Update the rows [K, H] of a block, given in at least fp32."""


class RowSGD(RowOptimizer):
    """Gradient descent, row -= lr · gradient: `torch.optim.SGD` without momentum and decay."""

    def __init__(self, params: Iterable[Tensor], lr: float | Tensor) -> None:
        super().__init__(params, {"lr": lr})

    def _rule(self, param: Tensor, table: Tensor, group: dict[str, Any]) -> Rule:
        return Rule("sgd", (group["lr"],), {})

    def _change(self, rows: Tensor, block: Block, rule: Rule) -> None:
        block.add_into(rows, -rule.numbers[0])


class RowAdagrad(RowOptimizer):
    """Adagrad with one sum per row, of the means of its squared gradients.

        total_r += ‖g_r‖² / W
        row_r -= lr · g_r / (√total_r + eps)

    The state is one number per row, 1 / W of that of Adagrad. W counts the zeros after a row of a
    `HierarchicalSoftmax` too: 4 zeros after 300 numbers lower total_r by 1.3 %. For vectors, this
    is Adagrad.

    Source: Duchi et al. 2011; row-wise: Mudigere et al. 2022, section 4.1.4.
    """

    def __init__(self, params: Iterable[Tensor], lr: float | Tensor, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    def _rule(self, param: Tensor, table: Tensor, group: dict[str, Any]) -> Rule:
        state = self.state[param]
        if not state:
            state["sum"] = table.new_zeros(len(table), dtype=compute_dtype(table.dtype))
        return Rule("adagrad", (group["lr"], group["eps"]), {"total": state["sum"]})

    def _change(self, rows: Tensor, block: Block, rule: Rule) -> None:
        (lr, eps), total = rule.numbers, rule.state["total"]
        new = total[block.rows] + block.square_norms() / rows.shape[1]
        total[block.rows] = new
        block.add_into(rows, -lr / (new.sqrt() + eps))


class RowAdam(RowOptimizer):
    """Adam whose moments change only where there is a gradient, as `torch.optim.SparseAdam`.

    The state is two values per entry of the table, so that it suits smaller tables.
    `betas` are the decay rates of the two moments; `eps` is added to the root of the second.

    Source: Kingma & Ba 2015.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be within [0, 1), got {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def _rule(self, param: Tensor, table: Tensor, group: dict[str, Any]) -> Rule:
        """1 - β1, β2, 1 - β2, lr / (1 - β1^t), √(1 - β2^t) and eps, in step t, which it counts."""
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["mean"] = table.new_zeros(table.shape, dtype=compute_dtype(table.dtype))
            state["square"] = torch.zeros_like(state["mean"])
        step, counts_here = state["step"], on_host(table)
        if counts_here == isinstance(step, Tensor):  # a new or loaded state
            double = torch.float64
            state["step"] = int(step) if counts_here else table.new_full((), step, dtype=double)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        correction1, correction2 = (1 - beta ** state["step"] for beta in (beta1, beta2))
        decay = (1 - beta1, beta2, 1 - beta2)
        numbers = (*decay, group["lr"] / correction1, correction2**0.5, group["eps"])
        return Rule("adam", numbers, {name: state[name] for name in ("mean", "square")})

    def _change(self, rows: Tensor, block: Block, rule: Rule) -> None:
        one_less_beta1, beta2, one_less_beta2, step_size, root_correction, eps = rule.numbers
        means, squares, grad = rule.state["mean"], rule.state["square"], block.values()
        mean = means[block.rows].lerp(grad, one_less_beta1)
        square = (squares[block.rows] * beta2).addcmul_(grad, grad, value=one_less_beta2)
        means[block.rows], squares[block.rows] = mean, square
        root = square.sqrt_().div_(root_correction).add_(eps)
        if isinstance(step_size, Tensor):
            rows.sub_(mean.mul_(step_size).div_(root))
        else:
            rows.addcdiv_(mean, root, value=-step_size)


def _round_stochastically(out: Tensor, rows: Tensor) -> None:
    """Round rows [K, H] fp32, which are overwritten, into `out` bf16; non-finite remains so."""
    rows.masked_fill_(rows.isnan(), torch.nan)  # one whose bits do not overflow
    bits = rows.view(torch.int32)
    noise = torch.empty(-(-rows.numel() // 4), dtype=torch.int64, device=rows.device)
    noise.random_(-(1 << 63), None)  # 16 bits for each number
    bits += noise.view(torch.int16)[: rows.numel()].view_as(bits)
    bits += 1 << 15
    out.view(torch.int16).copy_(bits.view(torch.int16)[:, _UPPER_HALF::2])
