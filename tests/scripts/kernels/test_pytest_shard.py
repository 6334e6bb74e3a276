"""Parts of the tests together are all tests, and tests with the same parameters are in one part."""

from scripts.kernels.pytest_shard import part


def test_parts_are_disjoint_and_complete() -> None:
    names = ["test_c", *(f"test_{test}[{x}]" for test in "ab" for x in range(5))]
    parts = [part(names, f"{i}/3") for i in range(3)]
    assert sorted(name for each in parts for name in each) == sorted(names)
    assert all(("test_a[1]" in each) == ("test_b[1]" in each) for each in parts)
    assert all(len(each) >= 2 for each in parts)
