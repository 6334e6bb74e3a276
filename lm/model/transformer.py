"""The Transformer backbone: pre-norm blocks of causal self-attention and SwiGLU, without biases.

    x ← x + W_out · attention(RMSNorm(x))                               (1)
    x ← x + W_down · (silu(W_gate · RMSNorm(x)) ⊙ W_up · RMSNorm(x))    (2)
    hidden = RMSNorm(x)                                                 (3)

Rotary positions make attention depend on distances only. Every position attends to itself and to
the `context` − 1 positions before it, whether they come in one window, in chunks or token by token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROTARY_BASE = 10_000.0
NORM_EPS = 1e-6
INIT_STD = 0.02

Rotary = tuple[Tensor, Tensor]
"""cos and sin of the rotation angles of T positions, each [T, D/2]."""


class Transformer(nn.Module):
    """A decoder-only Transformer without embedding and output layer, equations (1)–(3).

    Args:
        input_size: E, size of the input embeddings; projected to `hidden_size` if it differs.
        hidden_size: H, size of the residual stream and of the output.
        layers: number of blocks.
        heads: number of attention heads, whose size D = H / heads must be even; None: the largest
            number up to 8 for which it is.
        feedforward: inner size of SwiGLU; None: 8/3 H rounded up to a multiple of 32, about as many
            parameters as the usual 4 H without a gate.
        dropout: probability of zeroing an element of a sublayer's output (residual dropout).
        context: largest number of positions that a position attends to, including itself.

    Raises:
        ValueError: if H / heads is not an even integer.

    Source: Vaswani et al. 2017; pre-norm: Xiong et al. 2020; RMSNorm: Zhang & Sennrich 2019; rotary
    positions: Su et al. 2021, equation 34; SwiGLU: Shazeer 2020, equation 6; initialisation:
    Radford et al. 2019, section 2.3.
    """

    carries_state = False
    """Training and evaluation windows are independent; the state is for steps and long lines."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        layers: int,
        *,
        heads: int | None = None,
        feedforward: int | None = None,
        dropout: float = 0.0,
        context: int,
    ) -> None:
        super().__init__()
        if heads is None:
            fitting = (number for number in range(2, 9) if hidden_size % (2 * number) == 0)
            heads = max(fitting, default=1)
        inner = -(-hidden_size // 12) * 32 if feedforward is None else feedforward
        if hidden_size % (2 * heads):
            raise ValueError(
                "Transformer: hidden_size / heads must be an even integer, "
                f"got {hidden_size} / {heads} = {hidden_size / heads:g}"
            )
        self.hidden_size, self.inner_size = hidden_size, inner
        self.heads, self.context = heads, context
        self.project: nn.Module = nn.Identity()
        if input_size != hidden_size:
            self.project = nn.Linear(input_size, hidden_size, bias=False)
        blocks = (_Block(hidden_size, heads, inner, dropout) for _ in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(hidden_size, NORM_EPS)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # residual projections from N(0, 0.02² / (2 · layers))
                residual = name.endswith(("attention.out.weight", "feedforward.down.weight"))
                scale = (2 * layers) ** -0.5 if residual else 1.0
                nn.init.normal_(weight, std=INIT_STD * scale)

    @property
    def receptive_field(self) -> int:
        """Number of tokens that a hidden vector depends on: each block adds `context` − 1."""
        return 1 + len(self.blocks) * (self.context - 1)

    def init_state(self, batch_size: int) -> tuple[Tensor, ...]:
        """An empty cache: keys and values [layers, B, heads, S = 0, D], next position [] int64."""
        shape = len(self.blocks), batch_size, self.heads, 0, self.hidden_size // self.heads
        empty = self.norm.weight.new_empty(shape)
        return empty, empty.clone(), empty.new_zeros((), dtype=torch.int64)

    def forward(
        self, embedded: Tensor, state: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Runs the blocks over T positions, as every `Backbone`.

        The new state is the cache with these positions, cut to the last `context` − 1.
        """
        num_past = 0 if state is None else state[0].shape[3]
        rotary = self._rotary(embedded, state)
        mask = self._mask(embedded, num_past)
        num_dropped = max(0, num_past + len(embedded) - (self.context - 1))
        keys, values = [], []
        # Under autocast, sublayers compute in lower precision, the residual stream x does not.
        x = self.project(embedded).type_as(self.norm.weight)
        for k, block in enumerate(self.blocks):
            past = (state[0][k], state[1][k]) if state is not None and num_past else None
            x, block_keys, block_values = block(x, rotary, mask, past)
            keys.append(block_keys[:, :, num_dropped:])
            values.append(block_values[:, :, num_dropped:])
        hidden = self.norm(x)
        if state is None:
            return hidden, None
        return hidden, (torch.stack(keys), torch.stack(values), state[2] + len(embedded))

    @staticmethod
    def select_state(state: tuple[Tensor, ...], index: Tensor) -> tuple[Tensor, ...]:
        """The cache of the sequences `index` [B'] int64 of the batch; they may repeat."""
        keys, values, position = state
        return keys.index_select(1, index), values.index_select(1, index), position

    @staticmethod
    def join_states(states: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The cache of a batch of the sequences of several caches, after equally many positions."""
        keys, values, positions = zip(*states, strict=True)
        return torch.cat(keys, dim=1), torch.cat(values, dim=1), positions[0]

    def _rotary(self, embedded: Tensor, state: tuple[Tensor, ...] | None) -> Rotary:
        """Angles position · base^(−2j / D), in at least fp32: bf16 integers are exact to 256."""
        dtype = torch.promote_types(embedded.dtype, torch.float32)
        head_size = self.hidden_size // self.heads
        positions = torch.arange(len(embedded), device=embedded.device)
        if state is not None:
            positions = positions + state[2]
        exponents = torch.arange(0, head_size, 2, device=embedded.device, dtype=dtype) / head_size
        angles = torch.outer(positions.to(dtype), ROTARY_BASE**-exponents)
        return angles.cos(), angles.sin()

    def _mask(self, embedded: Tensor, num_past: int) -> Tensor | None:
        """Keys each query attends to, [T, S + T] bool; None: all up to its own position."""
        num_new = len(embedded)
        fits = num_past + num_new <= self.context
        if fits and (num_past == 0 or num_new == 1):
            return None
        key = torch.arange(num_past + num_new, device=embedded.device)
        query = key[num_past:, None]
        return (key <= query) & (key > query - self.context)


class _Block(nn.Module):
    """Equations (1) and (2) with residual dropout."""

    def __init__(self, hidden_size: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden_size, NORM_EPS)
        self.attention = _Attention(hidden_size, heads)
        self.feedforward_norm = nn.RMSNorm(hidden_size, NORM_EPS)
        self.feedforward = _SwiGLU(hidden_size, inner)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, rotary: Rotary, mask: Tensor | None, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        attended, keys, values = self.attention(self.attention_norm(x), rotary, mask, past)
        x = x + self.dropout(attended)
        x = x + self.dropout(self.feedforward(self.feedforward_norm(x)))
        return x, keys, values


class _Attention(nn.Module):
    """Multi-head self-attention over the past and the new positions."""

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(
        self, x: Tensor, rotary: Rotary, mask: Tensor | None, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sublayer's output [T, B, H], and keys and values [B, heads, S + T, D]."""
        split = self.query_key_value(x).unflatten(2, (3, self.heads, -1))
        queries, keys, values = split.permute(2, 1, 3, 0, 4)  # each [B, heads, T, D]
        queries, keys = _rotate(queries, rotary), _rotate(keys, rotary)
        if past is not None:
            keys = torch.cat([past[0], keys], dim=2)
            values = torch.cat([past[1], values], dim=2)
        is_causal = mask is None and past is None
        attended = F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=is_causal)
        return self.out(attended.permute(2, 0, 1, 3).flatten(2)), keys, values


class _SwiGLU(nn.Module):
    """The feed-forward sublayer of equation (2); W_gate and W_up are stacked in one matrix."""

    def __init__(self, hidden_size: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def _rotate(vectors: Tensor, rotary: Rotary) -> Tensor:
    """Rotates components j and j + D/2 of `vectors` [B, heads, T, D] by angle j; rounds once."""
    cos, sin = rotary
    first, second = vectors.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.type_as(vectors)
