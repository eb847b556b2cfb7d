"""Work beside a block begins with it, ends with it, and its error is the block's."""

import pytest

from bench.kit.beside import beside


def test_it_ends_with_the_block():
    seen = []

    def work(over):
        seen.append(over.is_set())
        over.wait()
        seen.append(over.is_set())

    with beside(work):
        pass
    assert seen == [False, True]


def test_its_error_is_raised_at_the_end_of_the_block():
    reached = []
    with pytest.raises(ZeroDivisionError), beside(lambda over: 1 / 0):
        reached.append(True)
    assert reached


def test_an_error_of_the_block_comes_first():
    with pytest.raises(KeyError), beside(lambda over: 1 / 0):
        raise KeyError
