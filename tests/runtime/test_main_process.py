"""The serving process never imports torch: it would cost memory, threads and starting time."""

import subprocess
import sys

CODE = """
import sys
import serve.app, serve.cli, serve.client, serve.obs.cli_report, serve.runtime.engine
heavy = {"torch", "torch_geometric", "pandas", "matplotlib", "scipy"} & sys.modules.keys()
assert not heavy, f"imported: {heavy}"
"""


def test_importing_the_server_imports_no_torch():
    subprocess.run([sys.executable, "-c", CODE], check=True)
