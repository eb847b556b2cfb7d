"""`import gnnserve` is the client, also where the user's program has a `serve.py` beside it."""

import subprocess
import sys

import serve.client


def test_a_users_own_serve_py_does_not_shadow_the_library(tmp_path):
    (tmp_path / "serve.py").write_text("raise SystemExit('this is the file of the user')")
    program = tmp_path / "program.py"
    program.write_text("import gnnserve; print(gnnserve.Client.__name__, gnnserve.__version__)")
    found = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=300, check=True
    )
    assert found.stdout.split() == ["Client", serve.__version__]


def test_every_name_of_the_client_is_there():
    import gnnserve

    assert set(serve.client.__all__) <= set(gnnserve.__all__)
    assert gnnserve.Client is serve.client.Client
