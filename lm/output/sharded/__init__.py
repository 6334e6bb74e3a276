"""The output layer split over processes: the same work on each, whatever the targets are."""

from lm.output.sharded.layer import ShardedSoftmax
from lm.output.sharded.rows import DealtRows

__all__ = ["DealtRows", "ShardedSoftmax"]
