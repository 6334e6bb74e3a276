"""Generation: continuations of prompts by a trained model, drawn at random or searched for.

`text` draws the words of many continuations at once, `beam_search` searches for probable ones,
`completion` for words that begin with a text; `items` recommends. `lm generate` and `lm.load` leave
`<unk>` out by default (`TrainedRun.never_drawn`): P is conditioned on that. On request, and by
these functions, it is drawn as any word, and a spelling of it if there is a speller.
"""

from lm.generation.beam_search import Hypothesis, beam_search, search_text
from lm.generation.text import Sample, generate_text
from lm.output import Sampling

__all__ = ["Hypothesis", "Sample", "Sampling", "beam_search", "generate_text", "search_text"]
