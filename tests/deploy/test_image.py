"""The steps of the Containerfile, run in a changed root: the server is not root and writes little.

Where tests run there is no builder of images. So the steps are run over this machine's own root, a
Debian too, on a layer of their own, of which nothing stays. Packages are looked up and not
installed, and the checkout's environment stands for what the first stage builds.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path

import pytest

from bench.kit.servers import ROOT, free_ports
from bench.kit.waiting import PATIENCE_S, wait_for

TEXT = (ROOT / "Containerfile").read_text()
VENV = Path(sys.prefix)


def instructions(stage):
    """Name and argument of each instruction of a stage, the first is 0."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.M))
    found = [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]
    ends = [number for number, (name, _) in enumerate(found) if name == "FROM"][1:]
    stages = [found[begin:end] for begin, end in pairwise([0, *ends, len(found)])]
    return stages[stage]


def argument(name):
    """The argument of the only instruction of that name in the last stage."""
    (found,) = (value for key, value in instructions(-1) if key == name)
    return found


def test_the_file_keeps_the_rules_of_images():
    known = {"FROM", "RUN", "COPY", "ARG", "WORKDIR", "ENV", "USER", "EXPOSE", "STOPSIGNAL",
             "ENTRYPOINT", "CMD"}  # fmt: skip
    for stage in (0, 1):
        for name, value in instructions(stage):
            assert name in known
            if name == "FROM":
                assert re.search(r":[\w.-]+( AS \w+)?$", value), "a base needs a tag"
            if name == "RUN" and "apt-get install" in value:
                assert value.startswith("apt-get update ")
                assert "--no-install-recommends" in value
                assert "rm -rf /var/lib/apt/lists/*" in value
            if name == "RUN" and "pip install" in value:
                assert "--no-cache-dir" in value
                assert "-c constraints.txt" in value
    # Signals reach the server: no shell is between.
    assert json.loads(argument("ENTRYPOINT")) == ["gnnserve"]
    assert json.loads(argument("CMD"))[0] == "serve"
    assert argument("STOPSIGNAL") == "SIGTERM"
    assert [name for name, _ in instructions(-1)][-3:] == ["STOPSIGNAL", "ENTRYPOINT", "CMD"]


def environment():
    return dict(word.split("=", 1) for word in shlex.split(argument("ENV")))


def run_of(value):
    """A RUN as it is run here: with packages looked up in place of installed."""
    packages = re.search(r"apt-get install -y --no-install-recommends ([\w\s.+-]+?)\s*&&", value)
    return value if packages is None else f"apt-cache show {packages[1]} > /dev/null"


def script(folder):
    """What makes the root, takes the steps of the last stage and becomes the server."""
    root = f"{folder}/root"
    uid, gid = argument("USER").split(":")
    steps = [run_of(value) for name, value in instructions(-1) if name == "RUN"]
    places = ["/tmp", "/var/lib/gnnserve", "/var/cache/gnnserve"]
    command = [*json.loads(argument("ENTRYPOINT")), *json.loads(argument("CMD"))]
    reached = {*Path(sys.executable).resolve().parents, *ROOT.parents, ROOT} - {Path("/")}
    lines = [
        f"mount -t tmpfs tmpfs {folder}",
        f"mkdir -m 755 {folder}/up {folder}/work {root}",
        f"mount -t overlay overlay -o lowerdir=/,upperdir={folder}/up,workdir={folder}/work {root}",
        *(f"mount --rbind /{name} {root}/{name}" for name in ("proc", "sys", "dev")),
        # COPY --from=build
        f"mkdir -p {root}/opt/gnnserve",
        f"mount --bind {shlex.quote(str(VENV))} {root}/opt/gnnserve",
        *(f"chroot {root} sh -ec {shlex.quote(step)}" for step in steps),
        f"mount --bind {ROOT}/configs/models {root}/models",
        # Python and the checkout may be in a folder of root.
        *(f"chmod a+rx {root}{folder}" for folder in reached),
        # What a pod has: a root that cannot be written, and volumes as Kubernetes makes them.
        *(f"mount -t tmpfs -o mode=2777,gid={gid} tmpfs {root}{place}" for place in places),
        f"mount -o remount,bind,ro {root}",
        f"exec chroot {root} setpriv --reuid {uid} --regid {gid} --clear-groups "
        f"--bounding-set=-all --no-new-privs {shlex.join(command)}",
    ]
    return "\n".join(["set -e", *lines])


def lacks(folder):
    """Say why the steps cannot be run here; empty where they can."""
    if Path("/tmp") in ROOT.resolve().parents:
        return "the checkout is in /tmp, and the image has a /tmp of its own"
    layers = f"lowerdir=/,upperdir={folder}/up,workdir={folder}/work"
    tried = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-ec",
         f"mount -t tmpfs tmpfs {folder}; mkdir {folder}/up {folder}/work {folder}/root; "
         f"mount -t overlay overlay -o {layers} {folder}/root; chroot {folder}/root true"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return tried.stderr.strip() if tried.returncode else ""


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as found:
            return found.status == 200
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the root")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_its_steps_make_a_server_that_is_not_root_and_writes_to_its_volumes_only(tmp_path):
    if reason := lacks(tmp_path):
        pytest.skip(reason)
    grpc_port, http_port = free_ports(2)
    variables = environment()
    variables["PATH"] = "/opt/gnnserve/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    more = {
        "GNNSERVE__SERVER__GRPC_PORT": str(grpc_port),
        "GNNSERVE__SERVER__HTTP_PORT": str(http_port),
        "GNNSERVE__MODELS__LOAD": '["gcn"]',
        "GNNSERVE__MODELS__CALIBRATION_S": "1",
        "GNNSERVE__DEVICE__MEMORY_BUDGET": "1 GiB",
    }
    folder = tmp_path / "image"
    folder.mkdir()
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script(folder)],
            env=variables | more, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        ready = f"http://127.0.0.1:{http_port}/v2/health/ready"
        wait_for(lambda: answers(ready) or process.poll() is not None, "the server")
        assert process.poll() is None, log.read_text()
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert re.search(r"^Uid:\s+10001\s+10001\s+10001", status, re.M)
        assert re.search(r"^CapEff:\s+0+$", status, re.M)
        inside = Path(f"/proc/{process.pid}/root")
        assert (inside / "var/lib/gnnserve/gnnserve.db").stat().st_uid == 10001
        assert list((inside / "var/cache/gnnserve/calibrations").iterdir())
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert not Path("/opt/gnnserve").exists()
