"""A trained model in a user's program: probabilities, scores, states for search, and text.

Words are strings, or token ids of the model's tokenizer; `LoadedModel.id` and `LoadedModel.word`
convert between them. A word that the tokenizer splits has the probability of its sequence of
tokens: with SentencePiece, that of all words that begin with it.

A word outside the vocabulary is `<unk>`. By default it has the probability of all such words
together, which may exceed that of a known word: the first such step or candidate gives a warning.
Sums include it, as in KenLM; to leave it out, use `LineScore.is_oov`, `LoadedModel.unknown_words`
and `State.num_unknown`.

With `vocabulary_size` V, the V - (N - 1) words outside the vocabulary of N words share P(`<unk>`)
equally. `score`, `step`, `step_many`, `candidate_log_prob`, `candidate_log_probs` and `log_prob`
then give `<unk>` the probability of one such word, so that the probabilities of all V words add up
to 1. `evaluate`, `perplexity`, `generate` and `search` treat `<unk>` as one word for any V.

With `open_vocabulary`, every string has a probability: in these methods, `evaluate` and
`perplexity`, a word w outside the vocabulary has P(`<unk>`) P(w | `<unk>`), by the model's speller.
The token id of `<unk>` has P(`<unk>`), with a warning.

In a model of independent sequences, strings and integers are items. Those outside the catalogue are
left out; without V, their log-probability is -∞, and the state stays the same.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lm.evaluation import evaluate_text
from lm.figures import Evaluation
from lm.generation import Sample, Sampling, generate_text, search_text
from lm.generation.text import checked_text, encode_prompt, encode_text
from lm.model.reader import read_prefix
from lm.probabilities import Probabilities
from lm.run import TrainedRun
from lm.scoring import LineScore, Scorer
from lm.scoring.unknown import UnknownWords
from lm.states import Prefix, State, Step, checked_ids, listed, warn_of

Word = str | int


class LoadedModel(Probabilities):
    """A trained model, made by `lm.load`. Log-probabilities are in nats, in at least fp32.

    The first word of a text is predicted from `<eos>`. Arguments of a wrong type or out of range
    raise a ValueError, as do words without a token. A fork of a process that has computed with
    several threads hangs, as always with torch: load the model in each process instead.

    Attributes:
        model: the network, in evaluation mode; its parameters may be moved or converted.
        description: the content of `model.json`.
        tokenizer: converts text to token ids and back.
        vocab_size: N.
        eos_id: token id of the end of a line.
        unk_id: token id of unknown words.
        unknown: the probability of each unknown word given `<unk>`.
    """

    def __init__(
        self,
        run: TrainedRun,
        *,
        open_vocabulary: bool = False,
        warn_of_unknown: bool = True,
        **settings: Any,  # of `Scorer`
    ) -> None:
        self._run = run
        self.model, self.description, self.tokenizer = run.model, run.description, run.tokenizer
        self._scorer = Scorer(run, open_vocabulary=open_vocabulary, **settings)
        self._open_vocabulary, self._warns = open_vocabulary, warn_of_unknown
        self._sha256 = self.description.weights_sha256
        self.unknown = self._scorer.unknown
        self.vocab_size = self.model.vocab_size
        self.eos_id, self.unk_id = run.tokenizer.eos_id, run.tokenizer.unk_id

    def __repr__(self) -> str:
        backbone = self.description.model.backbone
        return f"LoadedModel({str(self._run.folder)!r}, {backbone}, {self.vocab_size:,} words)"

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, `<eos>` between its lines (after the last one if it ends in LF)."""
        return encode_text(self.tokenizer, self._known(text))[1:]

    def id(self, word: Word) -> int:
        """The token id of a word or item, `<unk>`'s if unknown; see `encode` for one of several."""
        ids = self._encode(word)
        if len(ids) != 1:
            raise ValueError(f"{word!r} has {len(ids)} tokens, not one")
        return ids[0]

    def word(self, id: int) -> str:
        """The word, or piece of one, of a token id; an item as its table has it."""
        return self._name(*checked_ids([id], self.vocab_size))

    def unknown_words(self, text: str) -> list[str]:
        """The distinct words of a text that contain something unknown, in their order."""
        return UnknownWords(self.tokenizer, [checked_text(text)]).types

    def start(self, prefix: str | Sequence[Word] = "") -> State:
        """The state after a text, token ids or items; by default that before the first word."""
        return self._start(self._read(prefix))

    def _read(self, prefix: str | Sequence[Word]) -> list[int]:
        """Token ids of a text without a last space, or of token ids or items."""
        if not isinstance(prefix, str):
            return self._item_ids(prefix)
        return encode_prompt(self.tokenizer, self._known(prefix))[1:]

    def _known(self, text: str) -> str:
        return self._catalogue.known(text) if self._catalogue else text

    def _start(self, ids: list[int]) -> State:
        """The state after token ids."""
        tokens = torch.tensor([self.eos_id, *ids], device=self.model.device)[:, None]
        hidden, backbone = read_prefix(self.model, tokens, self.model.init_state(1))
        return State(
            hidden=hidden[0],
            backbone=backbone,
            num_tokens=len(ids),
            num_unknown=sum(token == self.unk_id for token in ids),
            model_sha256=self._sha256,
        )

    def step(self, state: State, word: Word) -> Step:
        """The log-probability of a word or text, and the state after it; `state` remains valid."""
        return self.step_many([state], [word])[0]

    def step_many(self, states: Sequence[State], words: Sequence[Word]) -> list[Step]:
        """`step` of many pairs of a state and a word at once, equal to single ones up to rounding.

        States may repeat. A Transformer computes those with equal `num_tokens` together.
        """
        (tokens, of_unknown), states = self._tokens_of_all(words), self._all(states)
        if len(states) != len(tokens):
            raise ValueError(f"expected a word for each state, got {len(states)} and {len(tokens)}")
        steps = list(map(Step, of_unknown, states))
        if self.unknown.leaves_out:
            tokens = [[] if each == [self.unk_id] else each for each in tokens]
        carries = self.model.backbone.carries_state
        for place in range(max(map(len, tokens), default=0)):
            groups = defaultdict(list)
            for i, word_tokens in enumerate(tokens):
                if place < len(word_tokens):
                    groups[0 if carries else steps[i].state.num_tokens].append(i)
            for group in groups.values():
                after = self._advanced([steps[i] for i in group], [tokens[i][place] for i in group])
                for i, step in zip(group, after, strict=True):
                    steps[i] = step
        return steps

    @torch.no_grad()
    def _advanced(self, steps: list[Step], tokens: list[int]) -> list[Step]:
        """Each step with one token more, from states that can be computed together."""
        token = torch.tensor(tokens, device=self.model.device)
        hidden = torch.stack([step.state.hidden for step in steps])
        log_probs = (-self.model.output.loss(hidden, token, "none")).tolist()
        backbone = self.model.backbone
        joined = backbone.join_states([step.state.backbone for step in steps])
        hidden, joined = self.model(token[None, :], joined)
        place = torch.arange(len(steps), device=token.device)
        after = []
        for i, (before, state) in enumerate(steps):
            state = replace(
                state,
                hidden=hidden[0, i],
                backbone=backbone.select_state(joined, place[i : i + 1]),
                num_tokens=state.num_tokens + 1,
                num_unknown=state.num_unknown + (tokens[i] == self.unk_id),
            )
            after.append(Step(before + log_probs[i], state))
        return after

    @torch.no_grad()
    def log_prob(self, prefix: Prefix = "") -> Tensor:
        """Log-probabilities [N] of all next tokens."""
        log_prob = self.model.output.log_prob(self._state(prefix).hidden)
        if self.unknown.is_shared:
            log_prob[self.unk_id] += self.unknown.log_share
        return log_prob

    @torch.no_grad()
    def topk(
        self,
        prefix: Prefix = "",
        k: int = 10,
        *,
        exclude: Literal["nothing", "seen"] | Sequence[Word] = "nothing",
    ) -> list[tuple[str, float]]:
        """The k most probable next tokens but `<unk>`, with their log-probabilities, best first.

        They are exact; a tree computes only the classes that may hold one. `id` has their ids.

        In a model of independent sequences `<eos>` is no item, and text is not divided into items.

        Args:
            exclude: tokens or items that are left out; `seen`: those of `prefix`, which then must
                not be a state. The log-probabilities of the others are as they are.

        Raises:
            ValueError: if k is not within 1 … N less the tokens left out, or if text is given to a
                model of independent sequences.
        """
        special, excluded = self._run.never_drawn(), list[int]()
        if self._catalogue is not None:
            special = self._catalogue.special
            if isinstance(prefix, str) and prefix:
                raise ValueError(f"expected a list of items, got {prefix!r}")
        ids = [] if isinstance(prefix, State) else self._read(prefix)
        if not isinstance(exclude, str):
            excluded = self._item_ids(exclude)
        elif exclude == "seen":
            if isinstance(prefix, State):
                raise ValueError("exclude: a state does not have the tokens that it has read")
            excluded = ids
        elif exclude != "nothing":
            raise ValueError(f"exclude must be nothing, seen or a list, got {exclude!r}")
        state = self._own(prefix) if isinstance(prefix, State) else self._start(ids)
        log_prob, word = self._topk(state, k, excluded=[*special, *excluded])
        return list(zip(map(self._name, word.tolist()), log_prob.tolist(), strict=True))

    def candidate_log_prob(self, prefix: Prefix, words: Sequence[Word]) -> Tensor:
        """Log-probabilities [K] of some next words, at the cost of their paths in the tree.

        Words of several tokens, and phrases, cost a step for each token as well.
        """
        return self.candidate_log_probs([self._state(prefix)], words)[0]

    @torch.no_grad()
    def candidate_log_probs(self, states: Sequence[State], words: Sequence[Word]) -> Tensor:
        """Log-probabilities [S, K] of K next words after each of S states, in one batch.

        `candidate_log_prob` of each state: no state is made, and only the paths of the words in the
        tree are computed. Words of several tokens cost a step of each state for each token.
        """
        words = listed("words", words)
        (tokens, of_unknown), states = self._tokens_of_all(words), self._all(states)
        if not states:
            return torch.zeros(0, len(words), device=self.model.device)
        hidden = states[0].hidden
        if any(len(word_tokens) > 1 for word_tokens in tokens):
            pairs = [(state, word) for state in states for word in words]
            steps = self.step_many([state for state, _ in pairs], [word for _, word in pairs])
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            found = [step.log_prob for step in steps]
            return hidden.new_tensor(found, dtype=dtype).view(len(states), -1)
        tensor = torch.tensor(tokens, dtype=torch.int64, device=hidden.device)
        log_prob = self._candidates(states, tensor.view(1, -1))
        return log_prob + log_prob.new_tensor(of_unknown)

    def score(
        self, sentences: Iterable[str], *, stream: bool = False, details: bool = False
    ) -> list[LineScore]:
        """Scores of lines and of the `<eos>` after each, as `lm score` with these options."""
        lines = self._lines(sentences)
        self._run.check_end()
        if stream:
            self._run.check_text("stream")
        score = self._scorer.stream if stream else self._scorer.sentences
        return list(score(lines, details=details))

    def evaluate(self, text: str) -> Evaluation:
        """Every figure of `lm evaluate --text` for a text; UserError if it is empty."""
        lines = text.removesuffix("\n").split("\n") if checked_text(text) else []
        open_vocabulary = self._open_vocabulary
        return evaluate_text(self._run, lines, progress=False, open_vocabulary=open_vocabulary)

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
        allow_unk: bool = False,
        spell_unk: bool = False,
        **sampling: Any,
    ) -> list[str]:
        """Random continuations of a prompt, without it, as `lm generate`.

        They have no `<unk>` unless `allow_unk`; with `spell_unk`, one is drawn as any word, and
        then its spelling by the model's speller. Independent sequences end at a predicted `<eos>`.
        Other arguments are the fields of `lm.generation.Sampling`, as temperature.
        """
        others = "prompt, num_tokens, num_samples, stop, seed, allow_unk, spell_unk"
        (samples,) = generate_text(
            self._run,
            [self._known(prompt)],
            num_tokens=num_tokens,
            num_samples=num_samples,
            sampling=Sampling().changed(sampling, "generate", others),
            stop=stop,
            seed=seed,
            allow_unk=allow_unk,
            spell_unk=spell_unk,
        )
        return [sample.text for sample in samples]

    def search(
        self,
        prompt: str = "",
        *,
        num_tokens: int = 100,
        num_beams: int = 8,
        length_penalty: float = 1,
        allow_unk: bool = False,
    ) -> list[Sample]:
        """Probable continuations of a prompt, to the end of its line, by beam search.

        They have no `<unk>` unless `allow_unk`. Otherwise see `lm.generation.search_text`.
        """
        return search_text(
            self._run,
            self._known(prompt),
            num_tokens=num_tokens,
            num_beams=num_beams,
            length_penalty=length_penalty,
            allow_unk=allow_unk,
        )

    def _encode(self, word: Word) -> list[int]:
        """Token ids of a word, which may be one itself, or that of an item."""
        if self._catalogue is not None:
            return self._catalogue.find([word])[0] or [self.unk_id]
        return self.encode(word) if isinstance(word, str) else checked_ids([word], self.vocab_size)

    def _item_ids(self, words: Sequence[Word]) -> list[int]:
        """Token ids of words or items; items that are not in the catalogue are left out."""
        words = listed("tokens or items", words)
        if self._catalogue is None:
            ids = [self.id(word) if isinstance(word, str) else word for word in words]
            return checked_ids(ids, self.vocab_size)
        return self._catalogue.ids(words)

    def _state(self, prefix: Prefix) -> State:
        return self._own(prefix) if isinstance(prefix, State) else self.start(prefix)

    def _own(self, state: State) -> State:
        """A state, if it is one of this model."""
        if not isinstance(state, State) or state.model_sha256 != self._sha256:
            raise ValueError(f"expected a state of this model, got {state!r}")
        return state

    def _all(self, states: Iterable[State]) -> list[State]:
        """States, if they are of this model."""
        return [self._own(state) for state in listed("states", states)]

    def _tokens_of_all(self, words: Sequence[Word]) -> tuple[list[list[int]], list[float]]:
        """The token ids of each word, at least one, and Σ log P(word | `<unk>`) of unknown ones."""
        words = listed("words", words)
        tokens = [self._encode(word) for word in words]
        for word, word_tokens in zip(words, tokens, strict=True):
            if not word_tokens:
                raise ValueError(f"{word!r} has no token")
        texts = [word for word in words if isinstance(word, str)]
        num_unknown = [sum(token == self.unk_id for token in each) for each in tokens]
        for i, word in enumerate(words):
            has_no_spelling = self._open_vocabulary and not isinstance(word, str)
            is_any_word = has_no_spelling or not self.unknown.tells_apart
            if self._warns and num_unknown[i] and is_any_word:
                warn_of(word, is_left_out=self.unknown.leaves_out)
                self._warns = False
            num_unknown[i] *= not has_no_spelling
        log_prob = self._scorer.unknown_log_prob(texts, sum(num_unknown))
        word_of = np.repeat(np.arange(len(words)), num_unknown)
        return tokens, np.bincount(word_of, log_prob, len(words)).tolist()
