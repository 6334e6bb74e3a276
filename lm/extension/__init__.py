"""New words in a trained model: `lm extend` adds them alone, `lm train --init-from` then trains.

The new words are those that the training split of newer data has and the model lacks. The network
and all other words remain as they are, but for the biases of classes:

- The class of a new word is argmax_c Σ log P(c | h) over its occurrences, with h the state after
  the known words before each (of a text, with `<unk>` in place of others; of items, without them).
  The bias of a class rises by the log of the growth of its events, so that old words give up the
  share of the new ones. A full softmax has one class, or with `model.input_tree` those of the input
  vectors, whose probabilities are sums over words.
- Then the network reads the new data. The rows w and biases of the new words minimize

      Σ -log P(word | class, h) over all events of their classes, plus λ/2 Σ ‖w - w₀‖²

  where w₀ is the mean of the rows of the class's old words, weighted by events. The problem is
  convex; L-BFGS begins at w₀. Of a text, every old word counts as `rows.PRIOR` events more.
- The input vector of a new word is its row if the run ties them, and else the mean of those of its
  class, to which its pieces (`model.input_pieces`) add theirs.

The probabilities sum to 1 as before, and within a class those of the other words keep their ratios.
Each line of a text is read from `<eos>`.
"""

from lm.extension.begin import begin_from
from lm.extension.extend import extend

__all__ = ["begin_from", "extend"]
