"""Ways take turns; spreads and percentiles."""

from collections import Counter
from itertools import pairwise, product

from bench.kit.measure import in_turns, percentiles, quartiles, ratios, spread


def test_ways_take_turns_and_the_warm_up_is_not_returned():
    calls = []
    ways = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    found = in_turns(ways, 2)
    assert [sorted(calls[at : at + 2]) for at in (0, 2, 4)] == [["a", "b"]] * 3
    assert {name: [calls[at - 1] for at in at_calls] for name, at_calls in found.items()} == {
        "a": ["a", "a"],
        "b": ["b", "b"],
    }
    assert min(min(numbers) for numbers in found.values()) == 3


def test_each_way_follows_each_other_about_as_often():
    calls = []
    in_turns({name: lambda name=name: calls.append(name) for name in "abcd"}, 400)
    pairs = Counter(pairwise(calls))
    assert min(pairs[pair] for pair in product("abcd", repeat=2)) > 0
    before = {way: sum(pairs[other, way] for other in "abcd" if other != way) for way in "abcd"}
    assert max(before.values()) < 1.1 * min(before.values())


def test_after_the_limit_no_round_begins_but_the_least():
    found = in_turns({"a": lambda: 0}, 100, least=3, limit_s=0.0)
    assert found == {"a": [0, 0, 0]}


def test_summaries():
    assert spread([3, 1, 2]) == [2, 1, 3]
    assert ratios([2, 3], [4, 1]) == [0.5, 3]
    assert percentiles([1, 2, 3], (50, 100)) == {"p50": 2, "p100": 3}
    assert quartiles([1, 2, 3, 4, 5]) == [2, 3, 4]
