"""A trained model in decoders of speech that fuse a language model: of pyctcdecode, of flashlight.

    from pyctcdecode import BeamSearchDecoderCTC, Alphabet
    fused = FusedModel(lm.load("runs/mine"), alpha=0.5, beta=1.5)
    decoder = BeamSearchDecoderCTC(Alphabet.build_alphabet(labels), fused)

    from torchaudio.models.decoder import CTCDecoderLM, CTCDecoderLMState, ctc_decoder
    words = [line.split()[0] for line in open("words.txt")]  # one per line, in this order
    flashlight = flashlight_class(CTCDecoderLM, CTCDecoderLMState)(lm.load("runs/mine"), words)
    decoder = ctc_decoder("lexicon.txt", "tokens.txt", flashlight, "words.txt", lm_weight=0.8)

Log-probabilities are in nats. Give `lm.load` a `vocabulary_size` or `open_vocabulary`: without, any
word that the model lacks has all of P(`<unk>`). Where torchaudio does not load (2.11 with torch
2.13), flashlight-text has the two classes: `LM` and `LMState` of `flashlight.lib.text.decoder`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lm.loaded import LoadedModel
from lm.states import State


@dataclass(frozen=True)
class DecoderState:
    """The state after some words of a hypothesis; equal to another after the same words."""

    words: tuple[str, ...]
    state: State = field(compare=False)


@dataclass
class FusedModel:
    """The methods of pyctcdecode's `AbstractLanguageModel`, and `score_many` for other decoders.

    Args:
        model: a model of words.
        alpha: weight of log-probabilities.
        beta: added for each word.
        unk_score_offset: added for a part of a word that no word of the vocabulary begins with.
        order: hypotheses that end in the same order - 1 words, which pyctcdecode merges; by default
            all words, since the model reads all of them.
    """

    model: LoadedModel
    alpha: float = 0.5
    beta: float = 1.5
    unk_score_offset: float = -10.0
    order: int = 1 << 30

    def reset_params(self, **params: float | None) -> None:
        """Set fields, such as alpha and beta, to values that are not None."""
        for name, value in params.items():
            if name in vars(self) and value is not None:
                setattr(self, name, value)

    def get_start_state(self) -> DecoderState:
        """The state before the first word."""
        return DecoderState((), self.model.start())

    def score_partial_token(self, partial_token: str) -> float:
        """Score of the part of a word that is not complete."""
        return 0.0 if self.model.has_beginning(partial_token) else self.unk_score_offset

    def score(
        self, prev_state: DecoderState, word: str, is_last_word: bool = False
    ) -> tuple[float, DecoderState]:
        """Score of a word after a state, with that of `<eos>` if it is the last, and its state."""
        return self.score_many([prev_state], [word], is_last_word)[0]

    def score_many(
        self, states: Sequence[DecoderState], words: Sequence[str], are_last: bool = False
    ) -> list[tuple[float, DecoderState]]:
        """`score` of many pairs at once. The word may be empty, which leaves the state as it is."""
        after = [(0.0, state) for state in states]
        given = [i for i, word in enumerate(words) if word]
        steps = self.model.step_many([states[i].state for i in given], [words[i] for i in given])
        for i, step in zip(given, steps, strict=True):
            score = self.alpha * step.log_prob + self.beta
            after[i] = score, DecoderState((*states[i].words, words[i]), step.state)
        if not are_last:
            return after
        all_states = [state.state for _, state in after]
        end = self.model.candidate_log_probs(all_states, [self.model.eos_id])[:, 0].tolist()
        return [(s + self.alpha * e, state) for (s, state), e in zip(after, end, strict=True)]


def flashlight_class(base: Any, state_class: Any) -> Any:
    """A subclass of a decoder's `LM` that is made from a model and the decoder's words [K].

    The decoder owns the tree of hypotheses and names word k by its index k. The model's state of
    each is kept until the next utterance.

    Args:
        base: `CTCDecoderLM`.
        state_class: `CTCDecoderLMState`.
    """

    class FlashlightModel(base):  # type: ignore[misc]
        def __init__(self, model: LoadedModel, words: Sequence[str]) -> None:
            base.__init__(self)
            self.model, self.words = model, words
            self.steps: dict[Any, tuple[float, State]] = {}

        def start(self, start_with_nothing: bool) -> Any:
            """The state before the first word; those of the utterance before are released."""
            root = state_class()
            self.steps = {root: (0.0, self.model.start())}
            return root

        def score(self, state: Any, index: int) -> tuple[Any, float]:
            """The state after word `index`, and the word's log-probability in nats."""
            child = state.child(index)
            if child not in self.steps:
                self.steps[child] = self.model.step(self.steps[state][1], self.words[index])
            return child, self.steps[child][0]

        def finish(self, state: Any) -> tuple[Any, float]:
            """The state, and the log-probability of `<eos>`."""
            log_prob = self.model.candidate_log_prob(self.steps[state][1], [self.model.eos_id])
            return state, float(log_prob)

    return FlashlightModel
