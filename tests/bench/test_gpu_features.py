"""`bench.gpu.features`: every way answers alike, and overlap is judged beside what lanes do."""

import pytest

from bench.gpu.features import WAYS, Request, is_worth, overlap
from bench.gpu.kit import Rig


@pytest.fixture(scope="module")
def request_by_id():
    made = Request(Rig.open(0, dry=True), 64, 1 << 16)
    yield made
    made.close()


def test_every_way_gives_the_models_answer(request_by_id):
    made = request_by_id
    (lane,) = made.rig.lanes(1)
    expected = made.model(made.table[made.ids], made.edges)
    for way in WAYS:
        made.place.zero_()
        lane.call(made.once, lane, way, made.place)
        assert made.place.allclose(expected, atol=1e-6), way
    made.place.zero_()
    lane.call(made.ahead, lane, made.rig.queue(), 3)
    assert made.place.allclose(expected, atol=1e-6)


def test_overlap_tells_each_ways_gain(request_by_id):
    found = overlap(request_by_id, request_by_id.rig.queue(), 2, 1)
    assert found["share"] > 0
    assert set(found["overlap"]) == {"ahead", "lanes_2", "lanes_4"}


@pytest.mark.parametrize(
    ("ahead", "lanes_4", "worth"), [(1.2, 1.1, True), (1.04, 1.0, False), (1.3, 1.4, False)]
)
def test_overlap_in_a_lane_is_worth_it_where_lanes_do_not_give_as_much(ahead, lanes_4, worth):
    assert is_worth({"ahead": ahead, "lanes_2": 1.0, "lanes_4": lanes_4}) is worth
