"""Each test that fails is named when it does: half an hour of tests is long to wait for a name."""

import pytest


class FailuresAtOnce:
    """Writes a line for each failure among the dots."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)  # after its letter
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write(f"\nFAILED {report.nodeid} ({report.when})\n", red=True)


@pytest.hookimpl(trylast=True)  # after pytest's own, which makes the reporter
def pytest_configure(config: pytest.Config) -> None:
    """Have failures named, unless each test is named anyway; workers of xdist write nothing."""
    if config.get_verbosity() < 1 and not hasattr(config, "workerinput"):
        terminal = config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            config.pluginmanager.register(FailuresAtOnce(terminal))
