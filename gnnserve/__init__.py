"""The client of a gnnserve server: the public name of ``serve.client``.

    import gnnserve

    with gnnserve.Client("127.0.0.1:8001") as client:
        answer = client.infer("gcn", data)

A file `serve.py` beside the user's program does not shadow the library: this package imports the
package `serve` that lies beside it, not the first of that name on the path.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any


def _load_library() -> None:
    """Import the package `serve` beside this one, unless it is imported already."""
    folder = Path(__file__).resolve().parents[1] / "serve"
    if hasattr(sys.modules.get("serve"), "__path__"):
        return
    spec = importlib.util.spec_from_file_location(
        "serve", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    sys.modules["serve"] = library
    spec.loader.exec_module(library)


_load_library()

from serve import __version__ as __version__  # noqa: E402

if TYPE_CHECKING:
    from serve.client import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import the client when it is first used: the command sets grpc up before its import."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'gnnserve' has no attribute '{name}'")
    client = importlib.import_module("serve.client")
    if name == "__all__":
        return ["__version__", *client.__all__]
    if name not in client.__all__:
        raise AttributeError(f"module 'gnnserve' has no attribute '{name}'")
    return getattr(client, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
