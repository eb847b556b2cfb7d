"""Ask a gnnserve server for predictions on graphs: the public name of ``serve.client``.

    import gnnserve

    with gnnserve.Client("127.0.0.1:8001") as client:
        answer = client.infer("gcn", data)

Installed as the package `gnnserve`. A file `serve.py` beside the user's program does not shadow
the library: the package `serve` is found beside this one, not on the path.
"""

import importlib.util
import sys
from pathlib import Path


def _load_library() -> None:
    """Import the installed package `serve`, unless it is imported already."""
    folder = _library_folder()
    known = sys.modules.get("serve")
    if folder is None or (known is not None and hasattr(known, "__path__")):
        return  # an editable install, whose finder knows; or imported before
    spec = importlib.util.spec_from_file_location(
        "serve", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    sys.modules["serve"] = library
    spec.loader.exec_module(library)


def _library_folder() -> Path | None:
    """The package `serve` beside this one, or around it in a checkout; None if it is elsewhere."""
    here = Path(__file__).resolve().parent
    for folder in (here.with_name("serve"), here.parent):
        if (folder / "client" / "__init__.py").exists():
            return folder
    return None


_load_library()

from serve import __version__  # noqa: E402
from serve.client import *  # noqa: E402, F403
from serve.client import __all__ as _names  # noqa: E402

__all__ = ["__version__", *_names]
