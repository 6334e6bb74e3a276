"""Commands around the application, and its benchmarks."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

from data_prep.errors import UserError

TOP = Path(__file__).resolve().parents[1]


def run(main: Callable[[], None], name: str = "") -> None:
    """Run the `main` of a script that can be continued.

    A user's mistake is a single-line error and exit code 1; a signal one of 128 and its number.
    """
    name = name or Path(sys.argv[0]).stem
    try:
        main()
    except UserError as error:
        sys.exit(f"{name}: {error}")
    except (KeyboardInterrupt, SystemExit) as stop:
        code = stop.code if isinstance(stop, SystemExit) else 128 + signal.SIGINT
        if isinstance(code, int) and code > 128:
            sys.stderr.write(f"{name}: interrupted; the same command continues\n")
        sys.exit(code)
