"""The error that `data_prep` and `lm` share."""


class UserError(ValueError):
    """A mistake that the user can correct. Its text is one complete line; commands print it without
    a traceback.
    """
