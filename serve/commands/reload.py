"""The configuration of a running server, read again at SIGHUP."""

import logging
from collections.abc import Callable

from serve.config import Config
from serve.config_changes import changes, with_reloadable
from serve.errors import ConfigError

_log = logging.getLogger(__name__)


class ConfigReload:
    """Reads a configuration again and hands on what a running server can take of it."""

    def __init__(
        self, running: Config, read: Callable[[], Config], take: Callable[[Config], None]
    ) -> None:
        """Read nothing yet.

        Args:
            running: The configuration in force.
            read: Reads it again; raises ConfigError.
            take: Puts a configuration into force that differs in reloadable keys only.
        """
        self._running = running
        self._read = read
        self._take = take

    def again(self) -> None:
        """Read it again; one line of the log for each key that differs from what is in force.

        A configuration with a mistake changes nothing, which is logged with every mistake.
        """
        try:
            fresh = self._read()
        except ConfigError as error:
            _log.error("the configuration stays as it was: %s", error)
            return
        found = changes(self._running, fresh)
        running = with_reloadable(self._running, fresh)
        if running != self._running:
            self._take(running)
            self._running = running
        for change in found:
            if change.reloadable:
                _log.info("configuration changed: %s", change)
            else:
                _log.warning("configuration needs a restart: %s", change)
        if not found:
            _log.info("the configuration is as it was")
