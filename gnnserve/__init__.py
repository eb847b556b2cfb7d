"""The client of a gnnserve server: the public name of ``serve.client``.

    import gnnserve

    with gnnserve.Client("127.0.0.1:8001") as client:
        answer = client.infer("gcn", data)

A file `serve.py` beside the user's program does not shadow the library: this package imports the
package `serve` that lies beside it, not the first of that name on the path.
"""

import importlib.util
import sys
from pathlib import Path


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

from serve import __version__  # noqa: E402
from serve.client import *  # noqa: E402, F403
from serve.client import __all__ as _names  # noqa: E402

__all__ = ["__version__", *_names]
