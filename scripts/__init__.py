"""Commands around the application, and its benchmarks."""

import sys
from collections.abc import Callable
from pathlib import Path

from data_prep.errors import UserError


def run(main: Callable[[], None], name: str = "") -> None:
    """Run the `main` of a script; a user's mistake is a single-line error and exit code 1."""
    try:
        main()
    except UserError as error:
        sys.exit(f"{name or Path(sys.argv[0]).stem}: {error}")
