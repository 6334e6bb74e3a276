"""Log-probabilities of an exported model, by torch and safetensors alone (pieces: sentencepiece).

    model = Model("folder")
    model.score("it was late")  # log P in nats of each token given those before it, and of <eos>
    hidden, state = model.read(model.encode("it was"))  # states never change: fork them freely
    model.log_prob(hidden[-1])  # [N], of every next word; `model.read(ids, state)` goes on

`python score.py folder < text` prints the log-probability of each line. The softmaxes are a tree:
row r of the weight is of a child, word or node, of node node_of_row[r], whose row comes before.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

LOGITS = 1 << 24  # at once, of which each takes 30 bytes of memory


class Model(torch.nn.Module):
    """A language model, whose buffers have the names of the file's tensors, with _ for dots."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        names = ("model.json", "tokenizer.json", "manifest.json")
        about, self.tokens, self.rules = (json.loads(Path(folder, n).read_bytes()) for n in names)
        self.config, self.context = about["model"], about["context"]
        self.eos_id, self.unk_id = about["eos_id"], about["unk_id"]
        for name, value in load_file(Path(folder, "model.safetensors")).items():
            value = value.float() if value.is_floating_point() else value.long()
            self.register_buffer(name.replace(".", "_"), value)
        self.is_wide = self["output_weight"].shape[1] > self.config["hidden"]
        self.num_children, above = self["output_tree_num_children"], self["output_tree_row_of_node"]
        nodes = torch.arange(len(self.num_children)).repeat_interleave(self.num_children)
        rows, path = self["output_tree_row_of_word"], list[Tensor]()
        while bool((rows >= 0).any()):  # the row of each word, of the node above it, and so on
            path.append(rows)
            rows = torch.where(rows >= 0, above[nodes[rows.clamp(min=0)]], -1)
        self.node_of_row, self.path = nodes, torch.stack(path, 1)
        if self.tokens["kind"] == "sentencepiece":
            from sentencepiece import SentencePieceProcessor

            self.pieces = SentencePieceProcessor(model_file=str(Path(folder, "tokenizer.model")))
        else:
            lines = Path(folder, "vocab.txt").read_bytes().decode().split("\n")[:-1]
            self.ids = {line.rpartition("\t")[0]: id for id, line in enumerate(lines)}

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name, None)

    def encode(self, line: str) -> list[int]:
        """Token ids of a line, without <eos>."""
        if self.tokens["kind"] == "sentencepiece":
            return self._encode_pieces(f" {line}" if line else "")
        line = line.replace("\u0130", "i").lower() if self.tokens["lowercase"] else line
        words, marks = line.split(), self.rules["marks"]
        if self.tokens["split_punctuation"]:  # runs of marks are found at once
            found = re.findall(self.rules["pattern"], line)
            words = [part for word in found for part in (word if word[-1] in marks else [word])]
        ids = [self.ids.get(word, self.unk_id) for word in words]
        return [id for id in ids if id != self.unk_id or not self.rules["leaves_out_unknown"]]

    def _encode_pieces(self, text: str) -> list[int]:
        ids, number = list[int](), self.pieces.piece_to_id
        for place, part in enumerate(re.split("( ?<unk>|\u2581)", text)):
            if place % 2 == 0:
                ids += self.pieces.encode(part)
            elif "<unk>" in part or number("<0x00>") == self.unk_id:
                ids.append(self.unk_id)
            else:
                ids += [number(f"<0x{byte:02X}>") for byte in part.encode()]
        return ids

    def embed(self, ids: Tensor) -> Tensor:
        """Input vectors [..., E] of words [...]."""
        own, path = self["embedding_weight"], self.path[ids]
        table = self["output_weight"] if own is None else own  # tied: the rows of the output
        vectors: Tensor
        if self.config["input_embedding"] == "path_sum":
            vectors = (table[path.clamp(min=0)] * (path >= 0)[..., None]).sum(-2)
        else:
            vectors = table[path[..., 0] if own is None else ids]
        vectors = vectors[..., : self.config["embedding"] or self.config["hidden"]]
        if self["input_pieces_pieces"] is None:
            return vectors
        pieces = self["input_pieces_pieces"][ids]
        each: Tensor = self["input_pieces_weight"][pieces.clamp(min=0)] * (pieces >= 0)[..., None]
        return vectors.add(each.sum(-2) * (pieces >= 0).sum(-1, True).clamp(min=1).rsqrt())

    def forward(self, ids: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Hidden vectors [T, B, H] of words [T, B], which predict the next, and the state."""
        x = self.embed(ids)
        run = self._lstm if self.config["backbone"] == "lstm" else self._transformer
        hidden, state = run(x, state)
        return (hidden + x if self.config["residual"] else hidden), state

    def _lstm(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        zeros, ends = x.new_zeros(1, x.shape[1], self.config["hidden"]), []
        for k in range(self.config["layers"]):
            names = (f"{kind}_{of}" for kind in ("weight", "bias") for of in ("ih", "hh"))
            weights = [self[f"backbone_layers_{k}_{name}_l0"] for name in names]
            start = [part[k : k + 1] for part in state] if state else [zeros, zeros]
            x, *end = torch.lstm(x, start, weights, True, 1, 0.0, False, False, False)
            ends.append(end)
        return x, tuple(map(torch.cat, zip(*ends, strict=True)))

    def _transformer(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        (past, begin), length = (state[0].shape[4], state[1]) if state else (0, 0), x.shape[0]
        heads, half = self.rules["heads"], self.config["hidden"] // self.rules["heads"] // 2
        angle = (begin + torch.arange(length))[:, None] * 1e4 ** -(torch.arange(half) / half)
        key, cos, sin, kept = torch.arange(past + length), angle.cos(), angle.sin(), []
        mask = (key <= key[past:, None]) & (key > key[past:, None] - self.context)

        def linear(x: Tensor, name: str) -> Tensor:
            return F.linear(x, self[f"backbone_{name}_weight"])

        def norm(x: Tensor, name: str) -> Tensor:
            x = x * x.square().mean(-1, True).add(1e-6).rsqrt()
            return x.mul(self[f"backbone_{name}_weight"])

        def turned(v: Tensor) -> Tensor:
            a, b = v.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        x = x if self["backbone_project_weight"] is None else linear(x, "project")
        for k in range(self.config["layers"]):
            at = f"blocks_{k}_"
            split = linear(norm(x, at + "attention_norm"), at + "attention_query_key_value")
            query, new, value = split.view(*x.shape[:2], 3, heads, 2 * half).permute(2, 1, 3, 0, 4)
            pair = torch.stack([turned(new), value])
            pair = torch.cat([state[0][k], pair], 3) if state else pair
            kept.append(pair[:, :, :, max(0, past + length - self.context + 1) :])
            seen = F.scaled_dot_product_attention(turned(query), pair[0], pair[1], mask)
            x = x + linear(seen.permute(2, 0, 1, 3).flatten(2), at + "attention_out")
            both = linear(norm(x, at + "feedforward_norm"), at + "feedforward_gate_up").chunk(2, 2)
            x = x + linear(F.silu(both[0]) * both[1], at + "feedforward_down")
        return norm(x, "norm"), (torch.stack(kept), begin + length)

    def log_prob(self, hidden: Tensor, words: Tensor | None = None) -> Tensor:
        """Log-probabilities in nats after hidden vectors [..., H]: all [..., N], or of words [...].

        It forms the logits of all rows of the weight.
        """
        weight, size = self["output_weight"], self.config["hidden"]
        weight = weight[:, :size] if self.is_wide else weight
        rows = F.linear(hidden.reshape(-1, size), weight, self["output_bias"])
        rows = rows.view(*hidden.shape[:-1], -1)
        node = self.node_of_row.expand_as(rows)
        top = rows.new_full((*rows.shape[:-1], len(self.num_children)), -torch.inf)
        top = top.scatter_reduce(-1, node, rows, "amax")
        total = torch.zeros_like(top).scatter_add(-1, node, (rows - top.gather(-1, node)).exp())
        rows = rows - (top + total.log()).gather(-1, node)
        path = self.path if words is None else self.path[words]
        inside = path.clamp(min=0)
        each = rows[..., inside] if words is None else rows.gather(-1, inside)
        return (each * (path >= 0)).sum(-1)

    @torch.no_grad()
    def read(self, ids: list[int], state: Any = None) -> tuple[Tensor, Any]:
        """Hidden vectors [T, H] of words and the state after them; <eos> comes before a text."""
        if state and not ids:
            return torch.zeros(0, self.config["hidden"]), state
        hidden, state = self(torch.tensor(ids if state else [self.eos_id, *ids])[:, None], state)
        return hidden[:, 0], state

    @torch.no_grad()
    def score(self, line: str) -> Tensor:
        """Log-probabilities in nats [T + 1] of the tokens of a line and of <eos>."""
        ids = self.encode(line)
        hidden, words = self.read(ids)[0], torch.tensor([*ids, self.eos_id])
        size = max(1, LOGITS // len(self.node_of_row))
        parts = zip(torch.split(hidden, size), torch.split(words, size), strict=True)
        return torch.cat([self.log_prob(*part) for part in parts])


if __name__ == "__main__":
    model = Model(sys.argv[1])
    with open(0, encoding="utf-8") as lines:  # between LF, CR or CRLF
        for text in lines:
            line = text.removesuffix("\n").removeprefix("\ufeff")
            print(f"{float(model.score(line).double().sum()):.6f}")
