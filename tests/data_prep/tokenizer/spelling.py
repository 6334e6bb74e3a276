"""The definition of a speller, in plain Python: equations (1) and (2) of its module."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import product

OTHER, END = "\0", "\n"
NUM_SCALARS = sum(not chr(i).isspace() for i in range(0x110000) if not 0xD800 <= i < 0xE000)


class Definition:
    """p(w) of word types, with n-grams of up to `order` symbols."""

    def __init__(self, types: Iterable[str], order: int) -> None:
        self.order, types = order, list(types)
        num_types = Counter(letter for word in types for letter in set(word))
        self.alphabet = {letter for letter, number in num_types.items() if number > 1}
        full = Counter[tuple[str, ...]]()
        for symbols in map(self.symbols, types):
            full.update(tuple(symbols[i : i + order]) for i in range(len(symbols) - order + 1))
        self.counts = [full]
        for _ in range(order - 1):
            self.counts.append(Counter(ngram[1:] for ngram in self.counts[-1]))
        self.next: list[dict[tuple[str, ...], Counter[str]]] = []
        self.discount = []
        for counts in self.counts:
            followers: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
            for ngram, number in counts.items():
                followers[ngram[:-1]][ngram[-1]] = number
            once, twice = (list(counts.values()).count(number) for number in (1, 2))
            self.next.append(followers)
            self.discount.append(once / (once + 2 * twice) if once and twice else 0.5)

    def symbols(self, word: str) -> list[str]:
        letters = [letter if letter in self.alphabet else OTHER for letter in word]
        return [""] * (self.order - 1) + letters + [END]

    def symbol_prob(self, ngram: tuple[str, ...]) -> float:
        """Equation (1) of the last of up to `order` symbols."""
        if not ngram:
            return 1 / (len(self.alphabet) + 2)
        level, shorter = self.order - len(ngram), self.symbol_prob(ngram[1:])
        found, discount = self.next[level].get(ngram[:-1]), self.discount[level]
        if not found:
            return shorter
        spared = discount * len(found) * shorter
        return (max(found[ngram[-1]] - discount, 0) + spared) / found.total()

    def prob(self, word: str, *, ends: bool = True) -> float:
        """p(w), or of all words that begin with w; that of an `OTHER` is its whole symbol's."""
        symbols, prob = self.symbols(word), 1.0
        for end in range(self.order, len(symbols) + ends):
            prob *= self.symbol_prob(tuple(symbols[end - self.order : end]))
        return prob

    def others(self, word: str) -> float:
        """How many words have the symbols of this one, which has one character for all others."""
        num_others = NUM_SCALARS - len(self.alphabet)
        return float(num_others) ** sum(letter not in self.alphabet for letter in word)

    def words(self, longest: int) -> list[str]:
        """All words of 1 to `longest` characters, with ~ for those outside the alphabet."""
        letters = [*sorted(self.alphabet), "~"]
        return ["".join(word) for n in range(1, longest + 1) for word in product(letters, repeat=n)]
