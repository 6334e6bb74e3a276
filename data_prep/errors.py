"""The error that reports a user's mistake, shared by `data_prep` and `lm`."""


class UserError(ValueError):
    """A mistake that the user can correct, described on a single line.

    Commands print the message without a traceback.
    """
