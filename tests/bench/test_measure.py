"""Ways take turns; spreads and percentiles."""

from bench.kit.measure import in_turns, percentiles, quartiles, ratios, spread


def test_ways_take_turns_in_alternating_order_and_the_warm_up_is_not_returned():
    calls = []
    ways = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    found = in_turns(ways, 2)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [4, 5], "b": [3, 6]}


def test_after_the_limit_no_round_begins_but_the_least():
    found = in_turns({"a": lambda: 0}, 100, least=3, limit_s=0.0)
    assert found == {"a": [0, 0, 0]}


def test_summaries():
    assert spread([3, 1, 2]) == [2, 1, 3]
    assert ratios([2, 3], [4, 1]) == [0.5, 3]
    assert percentiles([1, 2, 3], (50, 100)) == {"p50": 2, "p100": 3}
    assert quartiles([1, 2, 3, 4, 5]) == [2, 3, 4]
