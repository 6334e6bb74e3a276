"""`lm new`: a recipe for a text or a table of events of the user's."""

import argparse
from pathlib import Path

from data_prep.errors import UserError
from lm.commands.arguments import FILE, TEXT_FIELD, Options

HELP = "write a recipe for your own text, or table of events"
_PATH = FILE | {"type": Path}
OPTIONS: Options = {
    "config": {"metavar": "CONFIG", "type": Path, "help": "YAML file to write"},
    "--text": _PATH | {"required": True, "help": "training text, one file"},
    "--valid": _PATH | {"help": "validation text (default: taken from the text)"},
    "--test": _PATH | {"help": "test text (default: taken from the text)"},
    "--model.backbone": {"choices": ("lstm", "transformer"), "default": "lstm", "dest": "backbone"}
    | {"help": "network of the model, with the optimizer that it needs (default: lstm)"},
    "--text-field": TEXT_FIELD,
    "--items": {
        "nargs": "+",
        "metavar": "NAME",
        "help": "a table of events, for sequences of items: the columns of the user, the item and"
        " the time, if there is one (default: user, item and time if these are columns)",
    },
    "--split-by": {
        "choices": ("lines", "documents"),
        "help": "documents are between empty lines; those of a table are its rows (default there)",
    },
}


def run(options: argparse.Namespace) -> None:
    """Write the recipe and the splits; print what was chosen."""
    from lm.device import set_num_threads
    from lm.recipe.items import COLUMNS, has_events, new_item_recipe
    from lm.recipe.texts import new_recipe

    set_num_threads(None)  # as training will have them
    files = {"valid": options.valid, "test": options.test}
    chosen = {"unit": options.split_by, "backbone": options.backbone}
    others = [options.text_field, options.split_by, *files.values()]
    columns = options.items
    if columns is None and not any(others) and has_events(options.text):
        columns = COLUMNS
    if columns is not None:
        if any(others):
            raise UserError("--items excludes --text-field, --split-by, --valid and --test")
        print(new_item_recipe(options.config, options.text, columns, options.backbone))
        return
    print(
        new_recipe(options.config, options.text, text_field=options.text_field, **files, **chosen)
    )
