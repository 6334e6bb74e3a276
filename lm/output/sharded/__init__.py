"""The output layer split over processes, by word or by class."""

from lm.output.sharded.layer import ShardedSoftmax
from lm.output.sharded.placement import PlacementName
from lm.output.sharded.rows import DealtRows

__all__ = ["DealtRows", "PlacementName", "ShardedSoftmax"]
