from serve.server.quarantine import Quarantine

SECOND_NS = 1_000_000_000


def test_several_lost_lanes_in_a_row_put_a_model_aside_and_time_brings_it_back():
    found = Quarantine()
    assert [found.lane_lost(0) for _ in range(5)] == [False] * 4 + [True]
    assert found.left_s(0) == 30
    assert found.reason(SECOND_NS // 2) == "its runs ended 5 lanes; it is not run for another 30 s"
    assert found.left_s(29 * SECOND_NS + 1) == 1
    assert found.reason(30 * SECOND_NS) == ""


def test_afterwards_one_more_is_enough_and_lasts_twice_as_long():
    found = Quarantine()
    for _ in range(5):
        found.lane_lost(0)
    now_ns, lengths = 30 * SECOND_NS, []
    for _ in range(6):
        assert found.lane_lost(now_ns)
        lengths.append(found.left_s(now_ns))
        now_ns += lengths[-1] * SECOND_NS
    assert lengths == [60, 120, 240, 480, 600, 600]


def test_runs_that_end_as_they_should_outweigh_a_bad_request_now_and_then():
    found = Quarantine()
    for _ in range(100):
        assert not any([found.lane_lost(0), found.lane_lost(0)])
        for _ in range(4):
            found.ran()
    assert found.lanes_lost == 200
    assert not found.left_s(0)


def test_a_model_that_is_well_again_starts_anew():
    found = Quarantine()
    for _ in range(5):
        found.lane_lost(0)
    for _ in range(8):
        found.ran()
    now_ns = 100 * SECOND_NS
    assert [found.lane_lost(now_ns) for _ in range(5)] == [False] * 4 + [True]
    assert found.left_s(now_ns) == 30


def test_lanes_lost_meanwhile_by_runs_that_were_under_way_do_not_make_it_longer():
    found = Quarantine()
    for _ in range(5):
        found.lane_lost(0)
    assert not found.lane_lost(SECOND_NS)
    assert found.left_s(SECOND_NS) == 29
