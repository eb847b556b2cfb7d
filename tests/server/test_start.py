"""An engine that does not start."""

import pytest

from serve.commands.configured import calibration_cache, device_of
from serve.config import load_config
from serve.errors import NotReady
from serve.server.engine import Engine
from tests.server.test_engine import CONFIG


def test_an_error_counts_the_lanes_that_started_in_time(trouble, tmp_path):
    path = tmp_path / "server.toml"
    path.write_text(CONFIG.format(repository=trouble.root).replace("600.0", "1e-6"))
    config = load_config(path)
    device = device_of(config)
    engine = Engine(config, device, [].append, calibration_cache(config, device))
    try:
        with pytest.raises(NotReady, match=r"0 of 1 lanes .* server\.start_timeout_s = 1e-06"):
            engine.start()
    finally:
        engine.stop()
