"""Generation: continuations of prompts by a trained model, drawn at random or searched for.

`text` draws the words of many continuations at once, `beam_search` searches for probable ones.
`lm generate` and `lm.load` leave `<unk>` out by default (`TrainedRun.never_drawn`), as invented
words are seldom what a reader expects: P is conditioned on it. On request, and by these functions,
`<unk>` is drawn as any word, and then a spelling of it.
"""

from lm.generation.beam_search import Hypothesis, beam_search, search_text
from lm.generation.text import Sample, generate_text
from lm.output import Sampling

__all__ = ["Hypothesis", "Sample", "Sampling", "beam_search", "generate_text", "search_text"]
