"""Generation: continuations of prompts by a trained model, drawn at random or searched for.

`text` draws the words of many continuations at once, `beam_search` searches for probable ones,
`completion` for words that begin with a text; `items` recommends. `<unk>` is left out of texts
(`TrainedRun.never_drawn`), and P is conditioned on that, unless it is asked for.
"""

from lm.generation.beam_search import Hypothesis, beam_search, search_text
from lm.generation.text import Sample, generate_text
from lm.output import Sampling

__all__ = ["Hypothesis", "Sample", "Sampling", "beam_search", "generate_text", "search_text"]
