import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.core.state.ordered import SortedKeys


@given(
    values=st.lists(st.integers(0, 40), max_size=80),
    removed=st.sets(st.integers(0, 79)),
    count=st.integers(0, 12),
    bound=st.integers(-1, 41),
)
@settings(max_examples=80)
def test_behaves_as_a_sorted_list(monkeypatch_buckets, values, removed, count, bound):
    keys, model = SortedKeys(), []
    for index, value in enumerate(values):
        keys.add((value, index))
        model.append((value, index))
    for index in sorted(removed & set(range(len(values)))):
        keys.remove((values[index], index))
        model.remove((values[index], index))
    model.sort()
    assert len(keys) == len(model)
    assert keys.first() == (model[0] if model else None)
    assert keys.head(count) == model[:count]
    assert keys.tail(count) == model[len(model) - min(count, len(model)) :]
    assert keys.since((bound,), count) == [key for key in model if key >= (bound,)][:count]


@pytest.fixture(scope="module")
def monkeypatch_buckets():
    """Buckets of three, so that splits and empties happen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve.core.state.ordered._BUCKET", 3)
        yield


def test_removing_what_is_not_there():
    keys = SortedKeys()
    with pytest.raises(KeyError):
        keys.remove((1, 1))
    keys.add((1, 1))
    with pytest.raises(KeyError):
        keys.remove((1, 2))
    with pytest.raises(KeyError):
        keys.remove((0, 1))
