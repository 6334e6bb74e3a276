"""The LSTM backbone: layers of `nn.LSTM` with dropout between them and on the recurrent weights.

    i, f, g, o = σ, σ, tanh, σ of the four blocks of W_ih x_t + b_ih + W_hh h_{t−1} + b_hh    (1)
    c_t = f ⊙ c_{t−1} + i ⊙ g                                                                 (2)
    h_t = o ⊙ tanh(c_t)                                                                       (3)

One `nn.LSTM` per layer, because its own dropout cannot share masks over time; on CPU separate
layers are as fast as one call for all of them. Dropout on the input vectors and on the last
layer's output is the language model's.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F


class Dropout(nn.Dropout):
    """Dropout of [T, B, H]; `variational` uses one mask per sequence for all its time steps.

    Source: Gal & Ghahramani 2016, section 4 (variational).
    """

    def __init__(self, p: float, variational: bool = False) -> None:
        super().__init__(p)
        self.variational = variational

    def forward(self, input: Tensor) -> Tensor:
        """Drops elements while training and scales the rest by 1 / (1 − p)."""
        if not self.variational or not self.training or self.p == 0:
            return super().forward(input)
        return input * super().forward(torch.ones_like(input[:1]))


class LSTM(nn.Module):
    """Several LSTM layers over a window of T time steps, equations (1)–(3).

    Dropout zeroes a layer's output on its way to the next. Weight dropout zeroes entries of the
    recurrent weights W_hh, with one mask per call for all time steps (DropConnect; Merity, Keskar &
    Socher 2018, section 2).

    Source: Hochreiter & Schmidhuber 1997, with the forget gate of Gers, Schmidhuber & Cummins 2000.
    """

    carries_state = True  # the state after one window is the start of the next one

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        layers: int,
        *,
        dropout: float = 0.0,
        dropout_weight: float = 0.0,
        dropout_variational: bool = False,
    ) -> None:
        super().__init__()
        self.dropout_weight = dropout_weight
        self.dropout = Dropout(dropout, dropout_variational)
        sizes = [input_size] + [hidden_size] * (layers - 1)
        self.layers = nn.ModuleList(nn.LSTM(size, hidden_size) for size in sizes)

    def init_state(self, batch_size: int) -> tuple[Tensor, ...]:
        """The state before the first token: h and c of zeros, each [layers, B, H].

        A plain tuple, so that `torch.load(weights_only=True)` reads it back.
        """
        weight = self.layers[0].get_parameter("weight_hh_l0")  # [4 H, H]
        zeros = weight.new_zeros(len(self.layers), batch_size, weight.shape[1])
        return zeros, zeros.clone()

    def forward(
        self, embedded: Tensor, state: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The last layer's h [T, B, H] for [T ≥ 1, B, E], and the state; None starts from zeros."""
        outputs, ends = embedded, []
        for k, layer in enumerate(self.layers):
            if k > 0:
                outputs = self.dropout(outputs)
            start = None if state is None else (state[0][k : k + 1], state[1][k : k + 1])
            outputs, end = self._run(layer, outputs, start)
            ends.append(end)
        return outputs, (torch.cat([h for h, _ in ends]), torch.cat([c for _, c in ends]))

    @staticmethod
    def detach_state(state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Cuts the state from the graph that made it: truncated back-propagation through time."""
        return tuple(part.detach() for part in state)

    def _run(
        self, layer: nn.Module, inputs: Tensor, start: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Runs one layer, with a dropped copy of its recurrent weights while training."""
        if not self.training or self.dropout_weight == 0:
            return layer(inputs, start)  # type: ignore[no-any-return]
        dropped = F.dropout(layer.get_parameter("weight_hh_l0"), self.dropout_weight)
        return functional_call(layer, {"weight_hh_l0": dropped}, (inputs, start))  # type: ignore[no-any-return]
