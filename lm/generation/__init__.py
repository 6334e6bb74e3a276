"""Generation: continuations of prompts by a trained model, drawn at random or searched for.

`sampling` and `beam_search` continue token ids, `text` continues text, `command` is `lm generate`.
"""

from lm.generation.beam_search import Hypothesis, beam_search
from lm.generation.sampling import Sampler, generate
from lm.generation.text import Sample, generate_text, search_text, stream_text
from lm.output import Sampling

__all__ = [
    "Hypothesis",
    "Sample",
    "Sampler",
    "Sampling",
    "beam_search",
    "generate",
    "generate_text",
    "search_text",
    "stream_text",
]
