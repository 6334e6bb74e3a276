"""The language model: input embedding → backbone (LSTM or Transformer) → output layer."""
