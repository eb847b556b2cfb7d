"""No search for garbage while modules are imported, nor among them later."""

import gc

import pytest

from serve.collector import imports_uncollected


@pytest.fixture(autouse=True)
def unfrozen():
    yield
    gc.unfreeze()


@pytest.mark.parametrize("fails", [False, True])
def test_it_is_paused_and_goes_on_whatever_the_imports_come_to(fails):
    gc.unfreeze()
    try:
        with imports_uncollected():
            assert not gc.isenabled()
            if fails:
                raise ImportError
    except ImportError:
        assert fails
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
