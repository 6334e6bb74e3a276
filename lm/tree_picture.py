"""The picture of a tree: boxes whose heights are shares of the tokens, a column for each level."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from data_prep.storage import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

    from lm.output import ClassTree

HEIGHT, WIDTH = 11.0, 14.0  # inches
LEAST_HEIGHT = 0.03
"""Inches of the smallest box of a single node or word."""
LINE, LETTER = 0.115, 0.062
"""Inches of a line of a label and of a letter."""


class Box(NamedTuple):
    """A node or a word."""

    level: int  # of its parent, plus 1; 0 for the root
    bottom: float
    height: float  # share of the tokens
    branch: int  # which child of the root it is or is below; -1 for the root
    item: int  # the word, or ~node
    num_others: int = 0  # children of the node `item` that are too small for boxes of their own


def fonts_of(text: str) -> tuple[list[str], set[str]]:
    """The installed fonts that have the characters of a text, and the characters that none has."""
    from matplotlib.font_manager import fontManager, get_font

    families, missing = list[str](), {letter for letter in text if not letter.isspace()}
    for font in sorted(fontManager.ttflist, key=lambda font: font.name != "DejaVu Sans"):
        if missing and "Last Resort" not in font.name:  # whose glyphs are boxes
            available = set(map(chr, get_font(font.fname).get_charmap()))
            if available & missing:
                families.append(font.name)
                missing -= available
    return families, missing


def boxes_of(tree: "ClassTree", counts: "Tensor", least: float) -> list[Box]:
    """The nodes and words with at least this share of the tokens, parents first.

    Children are stacked by falling share, from the bottom of their parent's box; the smaller ones
    are together in one box.
    """
    from lm.output.sharded.placement import visits_of_nodes

    mass = np.empty(tree.num_rows)
    mass[tree.row_of_word.numpy()] = counts.numpy()
    mass[tree.row_of_node[1:].numpy()] = visits_of_nodes(tree, counts)[1:].numpy()
    mass /= float(counts.sum())
    items, first_row = tree.item_of_row.numpy(), tree.first_row.numpy()
    boxes = [Box(0, 0.0, 1.0, -1, ~0)]
    for box in boxes:  # which grows meanwhile
        if box.item >= 0 or box.num_others:
            continue
        first = int(first_row[~box.item])
        rows = np.arange(first, first + int(tree.num_children[~box.item]))
        rows = rows[np.argsort(-mass[rows], kind="stable")]
        level, bottom = box.level + 1, box.bottom
        shown = rows[mass[rows] >= least].tolist()
        for row in shown:
            branch = row if box.branch < 0 else box.branch
            boxes.append(Box(level, bottom, float(mass[row]), branch, int(items[row])))
            bottom += float(mass[row])
        if num_others := len(rows) - len(shown):
            others = float(mass[rows[len(shown) :]].sum())
            boxes.append(Box(level, bottom, others, box.branch, box.item, num_others))
    return boxes


def draw_tree(tree: "ClassTree", counts: "Tensor", token: Callable[[int], str], path: Path) -> None:
    """Draw a tree of softmaxes to a file whose name ends in a format of pictures.

    Args:
        tree: on the CPU.
        counts: [N], occurrences of each word.
        token: the word of an id.
        path: the file.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

    boxes = boxes_of(tree, counts, LEAST_HEIGHT / HEIGHT)[1:]  # without the root
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    corners = [
        [(box.level + x, box.bottom + y * box.height) for x, y in ((0, 0), (1, 0), (1, 1), (0, 1))]
        for box in boxes
    ]
    colors = [_color(box) for box in boxes]
    edges = [0.5 if box.height * HEIGHT > LINE / 4 else 0.0 for box in boxes]
    axes.add_collection(PolyCollection(corners, facecolors=colors, edgecolors="white", lw=edges))
    _label(axes, tree, counts, token, boxes)
    levels = range(1, boxes[-1].level + 1)  # those with a box
    axes.set(xlim=(1, levels[-1] + 1), ylim=(1, 0), xlabel="level", ylabel="% of the tokens")
    axes.set_xticks([level + 0.5 for level in levels], list(map(str, levels)))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}")
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"{tree.num_nodes:,} nodes over {tree.vocab_size:,} words, depth {tree.depth}; height:"
        " share of the tokens; grey: words; white: too small to draw"
    )
    name = path.suffix[1:].lower()
    write_atomically(path, lambda file: figure.savefig(file, format=name, dpi=120))


def _color(box: Box) -> tuple[float, float, float]:
    from matplotlib.colors import hsv_to_rgb

    if box.num_others:
        return (1.0, 1.0, 1.0)
    if box.item >= 0:
        return (0.88, 0.88, 0.88)
    hue = box.branch * 0.618 % 1  # neighbouring branches differ
    red, green, blue = hsv_to_rgb((hue, 0.35 * (box.branch >= 0), 0.95 - 0.03 * (box.level % 2)))
    return float(red), float(green), float(blue)


def _label(
    axes: "Axes",
    tree: "ClassTree",
    counts: "Tensor",
    token: Callable[[int], str],
    boxes: list[Box],
) -> None:
    """Write the most frequent words below each node into its box, as many as it has space for."""
    from lm.tree_report import top_words_below

    letters = int(WIDTH / boxes[-1].level / LETTER) - 1
    labelled = [box for box in boxes if box.height * HEIGHT >= LINE]
    nodes = [~box.item for box in labelled if box.item < 0 and not box.num_others]
    below = dict(zip(nodes, top_words_below(tree, counts, nodes, letters), strict=True))
    labels = []
    for box in labelled:
        if box.num_others:
            labels.append(f"{box.num_others:,} smaller"[:letters])
            continue
        words = map(token, below[~box.item] if box.item < 0 else (box.item,))
        text = next(words)[:letters]
        for word in words:
            if len(text) + 1 + len(word) > letters:
                break
            text += f" {word}"
        labels.append(text)
    families, missing = fonts_of("".join(labels))
    for box, text in zip(labelled, labels, strict=True):
        shown = "".join("?" if letter in missing else letter for letter in text)
        where = (box.level + 0.03, box.bottom + box.height / 2)
        axes.text(*where, shown, fontsize=7, va="center", family=families or None, parse_math=False)
