"""The typed configuration of a run."""

from lm.config.load import (
    changed,
    describe_differences,
    differences,
    load_config,
    load_run_config,
    to_dict,
    to_yaml,
    validate,
)
from lm.config.schema import (
    Config,
    Criterion,
    ModelConfig,
    OptimConfig,
    OutputConfig,
    TrainConfig,
    WordTableConfig,
)
from lm.config.word_table import WordTable, resolve_word_table

__all__ = [
    "Config",
    "Criterion",
    "ModelConfig",
    "OptimConfig",
    "OutputConfig",
    "TrainConfig",
    "WordTable",
    "WordTableConfig",
    "changed",
    "describe_differences",
    "differences",
    "load_config",
    "load_run_config",
    "resolve_word_table",
    "to_dict",
    "to_yaml",
    "validate",
]
