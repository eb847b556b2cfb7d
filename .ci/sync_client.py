"""Write the client for threads from the one for asyncio, or check that it is up to date.

    python .ci/sync_client.py [--check]

The two clients are the same code, awaited or not, so only one of them is written by hand.
"""

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).resolve().parents[1] / "serve" / "client"
#: What is written by hand -> what is made from it.
FILES = {
    "aio.py": "sync.py",
    "aio_connection.py": "sync_connection.py",
    "aio_cluster.py": "sync_cluster.py",
    "aio_inference.py": "sync_inference.py",
    "aio_jobs.py": "sync_jobs.py",
    "aio_versions.py": "sync_versions.py",
}
SUMMARY = "The client for threads, made from ``aio``: edit that, then `make client`"
INFERENCE = "Sending of requests by a client for threads, made from ``aio_inference``"
VERSIONS = "Versions of models for a client for threads, made from ``aio_versions``"
JOBS = "Training of models for a client for threads, made from ``aio_jobs``"
CONNECTION = "The connection of a client for threads, made from ``aio_connection``"
CLUSTER = "The connections of a client for threads to several servers, made from ``aio_cluster``"
#: Pattern in the asyncio client -> what the client for threads has there, in this order.
RULES = [
    (r"The client for asyncio, from which.*?`make client`", SUMMARY),
    (r"The connection of an asyncio client.*?generated\.", f"{CONNECTION}."),
    (r"The connections of an asyncio client to several.*?generated\.", f"{CLUSTER}."),
    (r"Sending of requests by an asyncio client.*?generated\.", f"{INFERENCE}."),
    (r"Versions of models for an asyncio client.*?generated\.", f"{VERSIONS}."),
    (r"Training of models for an asyncio client.*?generated\.", f"{JOBS}."),
    (r"serve\.client\.aio_", "serve.client.sync_"),
    (r"Calls one server from one event loop\.", "Calls one server; may be shared by threads."),
    (r"; to be made inside a running event loop", ""),
    (r"the server can take them\.", "the server can take them, in a thread of their own."),
    (r"\n\nasync def _each\(.*", ""),
    (r"_each\((\w+)\)", r"iter(\1)"),
    (r"Iterable\[Request\] \| AsyncIterable\[Request\]", "Iterable[Request]"),
    (r"Awaitable\[(\w+)\]", r"\1"),
    (r"\bAwaitable, ", ""),
    (r"\n    Async(Iterable|Iterator),(?=.*\n    \1,)", ""),
    (r"__a(enter|exit)__", r"__\1__"),
    (
        r"\bAsync(Background|Bell|Calls|Channel|Client|ClusterTransport|Iterable|Iterator|Jobs|Question|Requester|Transport|Turns|Unary|Versions)\b",
        r"\1",
    ),
    (r"\b(?:async|await) ", ""),
    (r"asyncio\.sleep", "time.sleep"),
    (r"asynccontextmanager", "contextmanager"),
    (r"import asyncio", "import threading\nimport time"),
    (r"\basyncio\b", "threading"),
    (r"grpc\.aio\.", "grpc."),
    (r"for outcome in (.*?):\s+yield outcome", r"yield from \1"),
]


def made(source: str) -> str:
    """The client for threads from the text of the one for asyncio, formatted."""
    for pattern, replacement in RULES:
        source = re.sub(pattern, replacement, source, flags=re.DOTALL)
    return _ruff(_ruff(source, "check", "--fix", "--select", "I,F401"), "format")


def _ruff(source: str, *command: str) -> str:
    ruff = [sys.executable, "-m", "ruff", *command, "--quiet"]
    ruff += ["--stdin-filename", str(CLIENT / "sync.py"), "-"]
    return subprocess.run(ruff, input=source, capture_output=True, text=True, check=True).stdout


def main() -> int:
    stale = 0
    for source, name in FILES.items():
        target = CLIENT / name
        text = made((CLIENT / source).read_text(encoding="utf-8"))
        if "--check" not in sys.argv:
            target.write_text(text, encoding="utf-8")
        elif target.read_text(encoding="utf-8") != text:
            print(f"{target} is not what {source} makes: run `make client`")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
