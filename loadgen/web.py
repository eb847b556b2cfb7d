"""`gnnserve load --web`: Locust's web UI with the options that were given as those of its form."""

import sys
from pathlib import Path

from loadgen.options import LoadOptions
from serve.errors import ConfigError

#: Names of options in Locust's form that differ from those of the fields.
_NAMES = {
    "target": "host",
    "rate_hz": "rate",
    "duration_s": "duration",
    "profile": "rate-profile",
    "token_files": "token-file",
    "timeout_s": "timeout",
}
_POOL = ("scale", "max_nodes", "max_edges")


def locust_command(options: LoadOptions, *, native: bool, host: str, port: int) -> list[str]:
    """Return the command that starts Locust's web UI at `host` and `port`.

    Raises ConfigError for an option that the form lacks.
    """
    if options.save_trace is not None:
        raise ConfigError("--web has no --save-trace: leave out one of them")
    file = Path(__file__).with_name("locustfile.py")
    command = [sys.executable, "-m", "locust", "-f", str(file)]
    command += [f"--web-host={host}", f"--web-port={port}"]
    plain = LoadOptions(options.target)
    for field in LoadOptions.__dataclass_fields__:
        value = getattr(options, field)
        if field == "target" or (field != "pool" and value != getattr(plain, field)):
            name = _NAMES.get(field, field.replace("_", "-"))
            command += _flag(name, value)
    for field in _POOL:
        command += _flag(field.replace("_", "-"), getattr(options.pool, field))
    return [*command, "--native"] if native else command


def _flag(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return [f"--{name}={text}"]
