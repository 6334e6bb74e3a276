"""A trained model in a program of the user's: probabilities, scores, states for search, text.

Words are strings, or token ids of the model's tokenizer. A word that the vocabulary lacks is
`<unk>`: `LoadedModel.unknown_words` lists such words of a text, and `State.num_unknown` counts them
on the way to a state. A word that the tokenizer splits has the probability of its tokens one after
another: with SentencePiece, that of the word or of any longer word that begins with it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.evaluation import Evaluation, evaluate_lines, load_with_tokenizer
from lm.generation.sampling import read
from lm.generation.text import Sample, encode_prompt, generate_text, search_text, unknown_words
from lm.output import Sampling
from lm.scoring import LineScore, Scorer

Word = str | int


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """A model after some words. It never changes: a fork is a second reference to it.

    An LSTM's state has (2 layers + 1) H numbers. A Transformer's holds the keys and values of up to
    context - 1 tokens, 2 layers · context · H numbers (4 layers of H = 256, context 128, fp32: 1
    MB), and a step writes a new copy of them. The states of one call of `step_many` share
    memory, which is released with the last of them.
    """

    hidden: Tensor  # [H], from which the next word is predicted
    backbone: tuple[Tensor, ...]  # `lm.model.language_model.State` of one sequence
    num_tokens: int  # read since the start
    num_unknown: int  # of these, `<unk>`


Prefix = str | Sequence[int] | State
"""What comes before a word: text, whose lines are separated by `<eos>`; token ids; or a state."""


class Step(NamedTuple):
    """A word and what follows from it."""

    log_prob: float  # of the word in the state before, in nats
    state: State  # after the word


class LoadedModel:
    """A trained model, made by `lm.load`. Log-probabilities are in nats, in at least fp32.

    The first word of a text is predicted from `<eos>`.

    Attributes:
        model: the network, in evaluation mode; its parameters may be moved or converted.
        description: the content of `model.json`.
        tokenizer: from text to token ids and back.
        vocab_size: N.
        eos_id: token id of the end of a line.
        unk_id: token id of unknown words; None if the tokenizer has none.
    """

    def __init__(self, folder: Path, *, device: str = "cpu") -> None:
        model, self.description, self.tokenizer = load_with_tokenizer(folder)
        self.model = model.to(device)
        self._scorer = Scorer(self.model, self.tokenizer, context=self.description.context)
        self.vocab_size = self.model.vocab_size
        self.eos_id, self.unk_id = self.description.eos_id, self.description.unk_id

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, `<eos>` between its lines (after the last one if it ends in LF)."""
        return encode_prompt(self.tokenizer, text)[1:]

    def unknown_words(self, text: str) -> list[str]:
        """The distinct words of a text that contain something unknown, in their order."""
        return unknown_words(self.tokenizer, [text])

    @torch.no_grad()
    def start(self, prefix: str | Sequence[int] = "") -> State:
        """The state after a text or token ids; by default that before the first word."""
        ids = self.encode(prefix) if isinstance(prefix, str) else list(map(self._checked, prefix))
        tokens = torch.tensor([self.eos_id, *ids], device=self.model.device)[:, None]
        for hidden, state in read(self.model, tokens, self.model.init_state(1)):
            last, backbone = hidden[-1, 0], state
        return State(
            hidden=last,
            backbone=backbone,
            num_tokens=len(ids),
            num_unknown=sum(token == self.unk_id for token in ids),
        )

    def step(self, state: State, word: Word) -> Step:
        """The log-probability of a word, and the state after it; `state` remains valid.

        Raises:
            ValueError: if the word has no token, or the id is not one.
        """
        return self.step_many([state], [word])[0]

    def step_many(self, states: Sequence[State], words: Sequence[Word]) -> list[Step]:
        """`step` of many pairs at once: those that a Transformer's cache fits, equally far on.

        Args:
            states: states, which may repeat.
            words: one word for each state.

        Returns:
            One step for each pair, equal to that of `step` to rounding.

        Raises:
            ValueError: as `step`, or if the numbers of states and words differ.
        """
        if len(states) != len(words):
            raise ValueError(f"expected a word for each state, got {len(states)} and {len(words)}")
        tokens = [self._tokens(word) for word in words]
        steps = [Step(0.0, state) for state in states]
        for place in range(max(map(len, tokens), default=0)):
            groups = defaultdict(list)
            for i, word_tokens in enumerate(tokens):
                if place < len(word_tokens):
                    carries = self.model.backbone.carries_state
                    groups[0 if carries else steps[i].state.num_tokens].append(i)
            for group in groups.values():
                before = [steps[i].state for i in group]
                after = self._advanced(before, [tokens[i][place] for i in group])
                for i, (log_prob, state) in zip(group, after, strict=True):
                    steps[i] = Step(steps[i].log_prob + log_prob, state)
        return steps

    @torch.no_grad()
    def _advanced(self, states: list[State], tokens: list[int]) -> list[Step]:
        """The steps of one token each, from states after equally many tokens."""
        token = torch.tensor(tokens, device=self.model.device)
        hidden = torch.stack([state.hidden for state in states])
        log_probs = (-self.model.output.loss(hidden, token, "none")).tolist()
        backbone = self.model.backbone
        joined = backbone.join_states([state.backbone for state in states])
        hidden, joined = self.model(token[None, :], joined)
        index = torch.arange(len(states), device=token.device)
        return [
            Step(
                log_prob,
                State(
                    hidden=hidden[0, i],
                    backbone=backbone.select_state(joined, index[i : i + 1]),
                    num_tokens=state.num_tokens + 1,
                    num_unknown=state.num_unknown + (tokens[i] == self.unk_id),
                ),
            )
            for i, (log_prob, state) in enumerate(zip(log_probs, states, strict=True))
        ]

    @torch.no_grad()
    def log_prob(self, prefix: Prefix = "") -> Tensor:
        """Log-probabilities [N] of all next tokens."""
        return self.model.output.log_prob(self._state(prefix).hidden)

    @torch.no_grad()
    def candidate_log_prob(self, prefix: Prefix, words: Sequence[Word]) -> Tensor:
        """Log-probabilities [K] of some next words, at the cost of their paths in the tree.

        Words of several tokens cost a step for each token but the last as well.

        Raises:
            ValueError: if a word has no token, or an id is not one.
        """
        state, tokens = self._state(prefix), [self._tokens(word) for word in words]
        if any(len(word_tokens) > 1 for word_tokens in tokens):
            steps = self.step_many([state] * len(words), words)
            return state.hidden.new_tensor([step.log_prob for step in steps])
        word = torch.tensor(tokens, dtype=torch.int64, device=state.hidden.device)
        return self.model.output.candidate_log_prob(state.hidden, word.flatten())

    def score(self, sentences: Iterable[str]) -> list[LineScore]:
        """Scores of independent sentences, as `lm score`; `log_prob.sum()` is that of a sentence.

        `<eos>` is predicted at the end of each. Sentences are computed in batches of similar
        length.
        """
        return list(self._scorer.sentences(sentences))

    def evaluate(self, text: str) -> Evaluation:
        """Every figure of `lm evaluate --text` for a text of one or more lines.

        Raises:
            UserError: if the text is empty.
        """
        lines = text.removesuffix("\n").split("\n") if text else []
        return evaluate_lines(self.model, self.description, self.tokenizer, lines, progress=False)

    def perplexity(self, text: str) -> float:
        """Perplexity of a text as one stream, `<eos>` of every line included; see `evaluate`."""
        return self.evaluate(text).perplexity

    def generate(
        self,
        prompt: str = "",
        *,
        num_tokens: int = 100,
        num_samples: int = 1,
        stop: Sequence[str] = (),
        seed: int = 1,
        **sampling: Any,
    ) -> list[str]:
        """Random continuations of a prompt, without it, as `lm generate`.

        Args:
            prompt: text; empty for the beginning of a text.
            num_tokens: largest number of tokens.
            num_samples: number of continuations.
            stop: a continuation ends before the first occurrence of one of these strings.
            seed: of the random numbers.
            sampling: fields of `lm.output.Sampling`: temperature, top_k, top_p, min_p,
                repetition_penalty.

        Raises:
            ValueError: if an option is out of range.
        """
        (samples,) = generate_text(
            *(self.model, self.tokenizer, [prompt]),
            num_tokens=num_tokens,
            num_samples=num_samples,
            sampling=Sampling(**sampling),
            stop=stop,
            seed=seed,
        )
        return [sample.text for sample in samples]

    def search(
        self,
        prompt: str = "",
        *,
        num_tokens: int = 100,
        num_beams: int = 8,
        length_penalty: float = 1,
    ) -> list[Sample]:
        """Probable continuations of a prompt, to the end of its line, by beam search.

        Arguments and errors are those of `lm.generation.search_text`.
        """
        return search_text(
            *(self.model, self.tokenizer, prompt),
            num_tokens=num_tokens,
            num_beams=num_beams,
            length_penalty=length_penalty,
        )

    def _state(self, prefix: Prefix) -> State:
        return prefix if isinstance(prefix, State) else self.start(prefix)

    def _tokens(self, word: Word) -> list[int]:
        """The token ids of a word, at least one."""
        tokens = self.encode(word) if isinstance(word, str) else [self._checked(word)]
        if not tokens:
            raise ValueError(f"{word!r} has no token")
        return tokens

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        return token
