"""The folder of bundled configurations and models: in the wheel, or in the checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def configs_path() -> Path:
    """Return the folder `configs`, with the demo's models in `configs/models`."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"
