"""Counts of operator matching agree with the paper's examples."""

import pytest

from bench.papers.turbomgnn import MIXES, row_of


@pytest.fixture(scope="module")
def rows():
    return {mix.figure: row_of(mix, 500) for mix in MIXES}


def test_figure_1_four_and_three_layers(rows):
    once = row_of(MIXES[0], 1)
    assert (once["operators"], once["aligned"], once["matched"]) == (14, 8, 8)
    assert once["ends_aligned"] == [8, 7]
    assert once["ends_matched"] == [8, 6]
    assert rows["1"]["ends_aligned"] == [4000, 3999]
    assert rows["1"]["ends_matched"] == [4000, 3000]


def test_figure_8_shallow_tasks_end_sooner_by_what_the_paper_measures(rows):
    row = rows["8"]
    assert (row["operators"], row["matched"]) == (22, 8)
    assert (row["end_aligned"], row["end_matched"]) == (3998.75, 2750)
    assert row["sooner"] == pytest.approx(1.454, abs=5e-4)
    assert row["sooner"] == pytest.approx(1.9 / 1.30, rel=0.01)


def test_of_ten_tasks_groups_fuse_fewer_operators_at_once(rows):
    row = rows["9"]
    assert row["most_members"] == 10
    assert sorted(row["groups"]) == [2, 4, 4]
    # As few as GAT alone has, whose operators hold those of the others in order.
    assert row["matched"] == 16
    assert row["in_groups"] == 4 + 4 + 16
    # Of 4, 4 and 16. Two side by side run at 1 / 1.4 of their speed.
    assert row["in_turn"] == pytest.approx((4 + 8 + 24) / 3)
    assert row["side_by_side"] == pytest.approx((8.4 + 8.4 + 8.4 + 12) / 3)
    assert row["by_contention"] == pytest.approx((5.6 + 5.6 + 5.6 + 16) / 3)
    assert row["sets"] == [2, 1]
    assert row["operators"] == 8 * 4 + 2 * 16
