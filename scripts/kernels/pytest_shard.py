"""A plugin of pytest that runs a part of the tests, for several processes at a time.

`pytest -p scripts.kernels.pytest_shard --shard 0/4` runs the first of four parts.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --shard."""
    parser.addoption("--shard", default="0/1", metavar="I/N", help="part I of N, from 0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this part."""
    chosen = part([item.name for item in items], str(config.getoption("shard")))
    config.hook.pytest_deselected(items=[item for item in items if item.name not in chosen])
    items[:] = [item for item in items if item.name in chosen]


def part(names: list[str], shard: str) -> set[str]:
    """The names of the tests in part "I/N".

    Tests with the same parameters are in the same part, because they compile the same kernels.
    """
    index, num_shards = map(int, shard.split("/"))
    groups = {name: name.partition("[")[2] or name for name in names}
    mine = sorted(set(groups.values()))[index::num_shards]
    return {name for name, group in groups.items() if group in mine}
