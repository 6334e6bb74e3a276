"""Example: a trained model as the language model of torchaudio's CTC decoder.

    from torchaudio.models.decoder import CTCDecoderLM, CTCDecoderLMState, ctc_decoder

    lm_class = decoder_lm(CTCDecoderLM, CTCDecoderLMState)
    words = [line.split()[0] for line in open("words.txt")]  # one per line, in this order
    language_model = lm_class(lm.load("runs/mine"), words)
    decoder = ctc_decoder("lexicon.txt", "tokens.txt", language_model, "words.txt", lm_weight=0.8)

The decoder owns the tree of hypotheses; the model's state of each is kept until the next utterance.
Log-probabilities are in nats (torchaudio's KenLM: log10). Words that the model lacks are `<unk>`,
and each has all of its probability unless `lm.load` is given a `vocabulary_size`, such as N + the
number of these words in the lexicon. torchaudio 2.11 does not load with torch 2.13;
flashlight-text, whose decoder it wraps, has the same two classes: `flashlight.lib.text.decoder.LM`
and `LMState`.
"""

from collections.abc import Sequence
from typing import Any

from lm.loaded import LoadedModel
from lm.states import State


def decoder_lm(base: Any, state_class: Any) -> Any:
    """The class of the adapter.

    Args:
        base: `CTCDecoderLM`.
        state_class: `CTCDecoderLMState`.

    Returns:
        A subclass of `base` that is made from a model and the decoder's words [K]; the decoder
        names word k by its index k.
    """

    class DecoderLM(base):  # type: ignore[misc]
        def __init__(self, model: LoadedModel, words: Sequence[str]) -> None:
            base.__init__(self)
            self.model, self.words = model, words
            self.states: dict[Any, State] = {}
            self.scores: dict[Any, float] = {}

        def start(self, start_with_nothing: bool) -> Any:
            """The state before the first word; those of the utterance before are released."""
            root = state_class()
            self.states, self.scores = {root: self.model.start()}, {}
            return root

        def score(self, state: Any, index: int) -> tuple[Any, float]:
            """The state after word `index`, and the word's log-probability in nats."""
            child = state.child(index)
            if child not in self.states:
                step = self.model.step(self.states[state], self.words[index])
                self.states[child], self.scores[child] = step.state, step.log_prob
            return child, self.scores[child]

        def finish(self, state: Any) -> tuple[Any, float]:
            """The state, and the log-probability of `<eos>`."""
            log_prob = self.model.candidate_log_prob(self.states[state], [self.model.eos_id])
            return state, float(log_prob)

    return DecoderLM
