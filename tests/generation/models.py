"""Random models of four words."""

import torch

from lm.model.language_model import LanguageModel
from lm.model.lstm import LSTM
from lm.model.transformer import Transformer
from lm.output import ClassTree, HierarchicalSoftmax

TREES = {
    "full": ClassTree.full(4),
    "two_level": ClassTree.two_level([0, 1, 1, 0]),
    "huffman": ClassTree.huffman([5, 3, 1, 1]),
}


def random_model(tree: str, backbone: str = "lstm") -> LanguageModel:
    softmax = HierarchicalSoftmax(8, TREES[tree])
    layers: LSTM | Transformer = LSTM(8, 8, 1)
    if backbone == "transformer":
        layers = Transformer(8, 8, 1, heads=2, context=5)
    model = LanguageModel(layers, softmax, embedding_size=8).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.9)
    return model
