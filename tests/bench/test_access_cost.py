"""What a step of ``bench.host.access`` adds is told over several starts of its servers."""

from bench.host.access import STEPS, rows_of

WAYS = ("plain", *STEPS)


def start():
    """One start's latencies and processor times: all alike, and the machine gets slower."""
    drift_us = [100.0 + 7 * number for number in range(9)]
    return {way: list(drift_us) for way in WAYS}, dict.fromkeys(WAYS, 50.0)


def test_how_much_servers_differ_widens_the_interval():
    starts = [start(), start()]
    for times, _ in starts:
        times["TLS"] = [one + 40.0 for one in times["plain"]]
    # A server that happens to be slow in one start.
    starts[1][0]["TLS"] = [one + 60.0 for one in starts[1][0]["TLS"]]
    rows = {row["way"]: row for row in rows_of(starts)}
    assert rows["plain, another server"]["interval_us"] == [0.0, 0.0]
    assert rows["TLS"]["added_us_by_start"] == [40.0, 100.0]
    assert (rows["TLS"]["added_us"], rows["TLS"]["interval_us"]) == (70.0, [40.0, 100.0])
    # The token is compared with the server that encrypts too, in the same start.
    assert rows["TLS and a token"]["added_us_by_start"] == [-40.0, -100.0]
    assert "added_us" not in rows["plain"]
