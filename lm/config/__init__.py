"""The typed configuration of a run."""

from lm.config.schema import *  # noqa: F403
