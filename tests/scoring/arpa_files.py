"""ARPA files for tests, and the definition of their probabilities."""

from pathlib import Path

NGrams = dict[tuple[str, ...], tuple[float, float]]
"""log10 P and back-off weight of each n-gram."""
THE_CAT: NGrams = {
    **{("<s>",): (-99.0, 0.0), ("</s>",): (-0.7, 0.0), ("<unk>",): (-1.0, 0.0)},
    **{("the",): (-0.5, -0.25), ("cat",): (-0.9, 0.0), ("the", "cat"): (-0.2, 0.0)},
}


def write(path: Path, ngrams: NGrams, order: int) -> Path:
    rows = ["a comment", "\\data\\"]
    by_order = [[words for words in ngrams if len(words) == n] for n in range(1, order + 1)]
    rows += [f"ngram {n}={len(each)}" for n, each in enumerate(by_order, 1)]
    for n, each in enumerate(by_order, 1):
        rows += ["", f"\\{n}-grams:"]
        for words in each:
            value, backoff = ngrams[words]
            tail = f"\t{backoff!r}" if backoff else ""
            rows.append(f"{value!r}\t{' '.join(words)}{tail}")
    path.write_text("\n".join([*rows, "", "\\end\\", ""]))
    return path


def definition(ngrams: NGrams, line: list[str], order: int) -> list[float]:
    """Equation (1) of `ngram_tree.py` for the words of a line and its end, log10."""
    known = [w if (w,) in ngrams and w not in ("<s>", "</s>") else "<unk>" for w in line]
    text, values = ["<s>", *known, "</s>"], []
    for place in range(1, len(text)):
        value, history = 0.0, tuple(text[max(0, place - order + 1) : place])
        while (*history, text[place]) not in ngrams:
            if not history:
                value -= 100
                break
            value += ngrams.get(history, (0.0, 0.0))[1]
            history = history[1:]
        else:
            value += ngrams[*history, text[place]][0]
        values.append(value)
    return values
