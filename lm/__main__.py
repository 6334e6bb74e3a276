"""The process of `lm …` or `python -m lm …`; it imports nothing before it handles Ctrl-C."""


def command() -> None:
    """Run the command line of the process and exit with its code.

    SIGTERM ends it as Ctrl-C does: unfinished files are deleted.
    """
    import signal
    import sys

    def terminate(*_: object) -> None:
        sys.stderr.write("lm: terminated\n")
        sys.exit(143)

    try:
        signal.signal(signal.SIGTERM, terminate)
        from lm.openmp import limit_spinning

        limit_spinning()  # before anything imports numpy or torch
        from lm.cli import run_process

        code = run_process()
    except KeyboardInterrupt:
        sys.stderr.write("lm: interrupted\n")
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    command()
