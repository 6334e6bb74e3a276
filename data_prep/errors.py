"""Errors that report a user's mistake or the computer's limits, shared by `data_prep` and `lm`."""


class UserError(ValueError):
    """A mistake that the user can correct, described on a single line.

    Commands print the message without a traceback, and end with the exit code of the class.
    """

    exit_code = 2


class DataError(UserError):
    """A text, a list or prepared data cannot be read, are damaged or do not belong together."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint or model is absent, damaged, or does not fit the configuration."""

    exit_code = 4


class NotFiniteError(UserError):
    """A loss, a gradient or a score is not finite, or the loss is too large."""

    exit_code = 5


class StorageError(UserError):
    """The file system refuses to write: it is full or read-only, or there is no permission."""

    exit_code = 6


class OutOfMemoryError(UserError):
    """The memory does not suffice."""

    exit_code = 7


class BusyError(UserError):
    """Another process writes the same folder."""

    exit_code = 8
