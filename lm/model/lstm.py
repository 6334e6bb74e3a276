"""The LSTM backbone: layers of `nn.LSTM` with dropout between them and on the recurrent weights.

    i, f, g, o = σ, σ, tanh, σ of the four blocks of W_ih x_t + b_ih + W_hh h_{t−1} + b_hh    (1)
    c_t = f ⊙ c_{t−1} + i ⊙ g                                                                 (2)
    h_t = o ⊙ tanh(c_t)                                                                       (3)

One `nn.LSTM` per layer, because its own dropout cannot share masks over time. Where masks are not
shared, cuDNN has one call for all layers, as it computes several at the same time. Dropout on the
input vectors and on the last layer's output is the language model's.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_CUDNN_LSTM = 2
"""The number of this kind of layer in `torch._cudnn_rnn`."""
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
"""What `torch.lstm` takes of a layer, in this order."""


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def _scaled(factor: float, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors whose gradients are multiplied by a factor."""
    apply: Callable[..., Tensor] = _Scaled.apply
    return tensors if factor == 1 else tuple(apply(tensor, factor) for tensor in tensors)


def _gradient_scale(inputs: Tensor) -> float:
    """Scale of the gradients within the layers: 1, except under autocast to bf16 on CUDA.

    PyTorch runs cuDNN's LSTM in fp16 there, below whose range fall gradients of a mean over many
    tokens (relative errors of 13 % at 1e-6). A sixteenth of the number of tokens, a power of two,
    keeps sums over tokens in range.
    """
    trains = inputs.is_cuda and torch.is_grad_enabled() and torch.is_autocast_enabled("cuda")
    if not trains or torch.get_autocast_dtype("cuda") != torch.bfloat16:
        return 1.0
    return float(2 ** max(0, round(math.log2(inputs.shape[0] * inputs.shape[1])) - 4))


def _runs_at_once(inputs: Tensor) -> bool:
    """Whether cuDNN computes the layers; not in bf16, which its older versions do not support."""
    has_dtype = inputs.dtype != torch.bfloat16 or torch.is_autocast_enabled("cuda")
    acceptable: bool = torch.backends.cudnn.is_acceptable(inputs)  # type: ignore[no-untyped-call]
    return inputs.is_cuda and has_dtype and acceptable


class Dropout(nn.Module):
    """Zeroes features with probability p in [0, 1) while training, scales the rest by 1 / (1 − p).

    If `variational`, a sequence has one mask for all time steps, dimension 0 (Gal & Ghahramani
    2016, section 4).
    """

    def __init__(self, p: float, variational: bool = False) -> None:
        super().__init__()
        self.p, self.variational = p, variational

    def forward(self, features: Tensor) -> Tensor:
        """Drops from `features` [T, B, H]; the identity in evaluation mode."""
        if not self.training or self.p == 0:
            return features
        if not self.variational:
            return F.dropout(features, self.p)
        return features * F.dropout(torch.ones_like(features[:1]), self.p)


class LSTM(nn.Module):
    """Several LSTM layers over a window of T time steps, equations (1)–(3).

    Args:
        input_size: E, size of the input vectors.
        hidden_size: H, size of every layer's output.
        layers: number of layers.
        dropout: probability of zeroing a layer's output on its way to the next.
        dropout_weight: probability of zeroing an entry of the recurrent weights W_hh, one mask per
            call for all time steps (DropConnect; Merity, Keskar & Socher 2018, section 2).
        dropout_variational: whether `dropout` uses one mask per sequence.

    Source: Hochreiter & Schmidhuber 1997, with the forget gate of Gers, Schmidhuber & Cummins 2000.
    """

    carries_state = True
    """The state after one window is the start of the next one."""
    receptive_field = None

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
        self.hidden_size, self.dropout_weight = hidden_size, dropout_weight
        self.dropout = Dropout(dropout, dropout_variational)
        sizes = [input_size] + [hidden_size] * (layers - 1)
        self.layers = nn.ModuleList(nn.LSTM(size, hidden_size) for size in sizes)
        self.noise: Tensor | None = None
        """The state of cuDNN's random numbers, which every call with dropout advances in place."""

    def init_state(self, batch_size: int) -> tuple[Tensor, ...]:
        """The state before the first token: h and c of zeros, each [layers, B, H]."""
        zeros = next(self.parameters()).new_zeros(len(self.layers), batch_size, self.hidden_size)
        return zeros, zeros.clone()

    def forward(
        self, embedded: Tensor, state: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Runs the layers over a window, as every `Backbone`."""
        scale = _gradient_scale(embedded)
        outputs, *parts = _scaled(1 / scale, embedded, *(state or ()))
        if _runs_at_once(embedded) and not (self.training and self.dropout.variational):
            outputs, (h, c) = self._run_at_once([*self.layers], outputs, tuple(parts), scale)
        else:
            ends: list[tuple[Tensor, Tensor]] = []
            for k, layer in enumerate(self.layers):
                if k:
                    outputs = self.dropout(outputs)
                start = tuple(part[k : k + 1] for part in parts)
                if (self.training and self.dropout_weight) or scale != 1:
                    outputs, end = self._run_at_once([layer], outputs, start, scale)
                else:
                    outputs, end = layer(outputs, start or None)
                ends.append(end)
            h, c = (torch.cat(each) for each in zip(*ends, strict=True))
        if scale != 1:
            outputs, h, c = outputs.bfloat16(), h.float(), c.float()
        outputs, h, c = _scaled(scale, outputs, h, c)
        return outputs, (h, c)

    def _run_at_once(
        self, layers: list[nn.Module], inputs: Tensor, state: tuple[Tensor, ...], scale: float
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The output of the last of some layers, and the ends of all, by one call."""
        zeros = inputs.new_zeros(len(layers), inputs.shape[1], self.hidden_size)
        h, c = state or (zeros, zeros)
        weights = [weight for layer in layers for weight in self._weights(layer, scale)]
        p, device = self.dropout.p if self.training and len(layers) > 1 else 0.0, inputs.device
        if p and self.noise is None:
            seed = int(torch.randint(1 << 62, (), device=device))
            options: Any = {"dtype": torch.uint8, "device": device}
            self.noise = torch._cudnn_init_dropout_state(p, True, seed, **options)
        with warnings.catch_warnings():  # of weights in pieces, which cuDNN copies into one
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single")
            if p:
                shape = (len(WEIGHTS), None, h, c, _CUDNN_LSTM, self.hidden_size, 0, len(layers))
                options = (False, p, True, False, (), self.noise)  # in training, in one direction
                outputs, h, c, *_ = torch._cudnn_rnn(inputs, weights, *shape, *options)
            else:
                options = (True, len(layers), 0.0, torch.is_grad_enabled(), False, False)
                outputs, h, c = torch.lstm(inputs, (h, c), weights, *options)
        return outputs, (h, c)

    def _weights(self, layer: nn.Module, scale: float) -> list[Tensor]:
        """A layer's weights, with a mask on W_hh; their gradients are divided by `scale`.

        Not by `functional_call`, which moves weights that a CUDA graph reads at their addresses.
        """
        weights: list[Tensor] = [layer.get_parameter(f"{name}_l0") for name in WEIGHTS]
        if self.training and self.dropout_weight:
            weights[1] = F.dropout(weights[1], self.dropout_weight)
        return list(_scaled(1 / scale, *weights))

    @staticmethod
    def select_state(state: tuple[Tensor, ...], index: Tensor) -> tuple[Tensor, ...]:
        """The state of the sequences `index` [B'] of the batch, in that order; they may repeat."""
        return tuple(part.index_select(1, index) for part in state)

    @staticmethod
    def join_states(states: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The state of a batch of the sequences of several states, in their order."""
        return tuple(torch.cat(parts, dim=1) for parts in zip(*states, strict=True))
