"""Late answers over the time of a run: a point a second about the ten seconds before it."""

from loadgen.lateness_series import KEPT_POINTS, WINDOW_S, LateSeries
from loadgen.measure import Sample


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def sample(over=0.5, late_by_server=False, status="OK"):
    return Sample(
        model="m", due_ns=0, lag_ns=0, latency_ns=round(over * 1e6), status=status,
        target_us=1000, late_by_server=late_by_server,
    )  # fmt: skip


def test_a_point_covers_the_last_ten_seconds():
    clock = Clock()
    series = LateSeries(clock)
    assert series.points() == []
    for second in range(25):
        clock.now_s = 100.0 + second
        # All of the seconds from 10 on are late, a quarter of them by the server.
        for number in range(4):
            late = second >= 10
            series.add(sample(3.0 if late else 0.5, late_by_server=late and number == 0))
        series.add(sample(status="UNAVAILABLE"))
    clock.now_s = 125.0
    points = series.points()
    assert [point.at_s for point in points] == list(range(1, 26))
    assert points[9].late == points[9].late_by_server == 0.0
    assert (points[14].late, points[14].late_by_server) == (50.0, 12.5)
    assert (points[-1].late, points[-1].answered) == (100.0, 4 * WINDOW_S)
    assert (points[9].over_p50, points[-1].over_p99) == (0.5, 3.0)
    # Nothing came for long: gaps, and no more points than are kept.
    clock.now_s += 3 * KEPT_POINTS
    points = series.points()
    assert len(points) == KEPT_POINTS
    assert points[-1].late is None
    series.end()
    clock.now_s += 5
    assert series.points() == points
    series.clear()
    assert series.points() == []
