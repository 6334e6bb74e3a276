"""The process of `lm …` or `python -m lm …`; it imports nothing before it handles Ctrl-C."""


def command() -> None:
    """Run the command line of the process and exit with its code.

    Other signals that end a process do so as Ctrl-C does: unfinished files are deleted.
    """
    import signal
    import sys

    def terminate(number: int, _: object) -> None:
        sys.stderr.write("lm: terminated\n")
        sys.exit(128 + number)

    was_interrupted = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        raise KeyboardInterrupt

    try:
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, interrupt)
        for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGALRM"):
            number = getattr(signal, name)
            if signal.getsignal(number) == signal.SIG_DFL:  # not ignored, as under `nohup`
                signal.signal(number, terminate)
        from lm import check_packages, limit_spinning

        try:
            check_packages()
        except ImportError as error:
            sys.stderr.write(f"lm: {error}\n")
            sys.exit(2)
        limit_spinning()  # before anything imports numpy or torch
        from lm.cli import run_process

        code = run_process()
    except KeyboardInterrupt:
        sys.stderr.write("lm: interrupted\n")
        code = 130
    except ImportError as error:
        message, code = f"too little memory (ulimit -v) to load a library: {error}", 7
        if was_interrupted:  # NumPy's import replaces a KeyboardInterrupt by an ImportError
            message, code = "interrupted", 130
        elif "map segment" not in str(error):
            raise
        sys.stderr.write(f"lm: {message}\n")
    sys.exit(code)


if __name__ == "__main__":
    command()
