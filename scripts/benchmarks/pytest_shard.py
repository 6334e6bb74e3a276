"""A plugin of pytest that runs a part of the tests, for several processes at a time.

`pytest -p scripts.benchmarks.pytest_shard --shard 0/4` runs the first of four parts.
Tests with the same parameters are in the same part, because they compile the same kernels.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --shard."""
    parser.addoption("--shard", default="0/1", metavar="I/N", help="part I of N, from 0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this part."""
    shard, num_shards = map(int, str(config.getoption("shard")).split("/"))
    groups = {item: item.name.partition("[")[2] or item.name for item in items}
    order = {group: i for i, group in enumerate(sorted(set(groups.values())))}
    kept = [item for item in items if order[groups[item]] % num_shards == shard]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
