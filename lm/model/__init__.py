"""The language model: embedding → backbone (LSTM or Transformer) → output layer."""
