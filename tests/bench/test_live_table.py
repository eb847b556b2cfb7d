"""The live runs told in docs/measurements/live.md are those of the results."""

from bench.live.live_table import PAGE, table, written_into


def test_the_page_shows_the_results_as_they_are():
    page = PAGE.read_text()
    assert written_into(page) == page


def test_a_row_for_each_system_with_the_range_where_seeds_differ():
    def row(system, rho, live, low, high):
        shares = {"late_server": live, "late_server_range": [low, high]}
        return {"system": system, "rho": rho, **shares, "simulated": 0.05, "missed": 0.5}

    means = [row("slack+preemptive", 0.1, 0.02, 0.01, 0.03), row("default", 0.1, 0.2, 0.2, 0.2)]
    assert table({"means": means}).splitlines() == [
        "| system | ρ 0.1: live (seeds), simulated, client |",
        "|---|---|",
        "| `slack` + `preemptive` | 2.0 % (1.0 % to 3.0 %), 5.0 %, 50.0 % |",
        "| `default` | 20.0 %, 5.0 %, 50.0 % |",
    ]
