"""A plan of calls for a client in any language, and what became of them.

A client takes the port as its argument and reads a call from each line: `op path file count
deadline_ms`. `op` is `unary`, `gzip` (the message compressed), `cancel` (after `count`
milliseconds), `stream` (the message `count` times on one bidirectional call) or `many` (`count`
calls at once). It writes the first answer to `file.answer` and prints, for each line, the status
code, the number of answers and the status text's UTF-8 in hexadecimal.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.kit.waiting import PATIENCE_S

CLIENTS = Path(__file__).parent / "clients"
#: Where `.ci/packages` has npm install what is needed.
NODE_MODULES = Path(__file__).parents[2] / "build" / "interop" / "node_modules"
GO_PATH = Path("/usr/share/gocode")
#: What the client in Java needs, of Debian's packages.
JARS = Path("/usr/share/java")
JAR_NAMES = (
    *(f"grpc-{part}" for part in ("api", "context", "core", "netty", "stub")),
    *(f"netty-{part}" for part in ("buffer", "codec", "codec-http", "codec-http2", "common")),
    *(f"netty-{part}" for part in ("handler", "handler-proxy", "resolver", "transport")),
    "netty-codec-socks", "netty-transport-native-unix-common", "guava",
    "opencensus-api", "perfmark-api",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of a planned call."""

    code: int
    answers: int
    text: str
    #: First answer; None without one.
    answer: bytes | None


def needs(*programs: str) -> None:
    """Skip the test when a program is missing."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


def _run(command: list[str], **options: str) -> None:
    subprocess.run(
        command, check=True, timeout=PATIENCE_S, capture_output=True, env={**os.environ, **options}
    )


def node(folder: Path) -> list[str]:
    """Return the command of the client on grpc-js."""
    needs("node")
    if not (NODE_MODULES / "@grpc" / "grpc-js").is_dir():
        pytest.skip("@grpc/grpc-js is not installed")
    return ["env", f"NODE_PATH={NODE_MODULES}", "node", str(CLIENTS / "client.cjs")]


def go(folder: Path) -> list[str]:
    """Build the client on grpc-go, and return its command."""
    needs("go")
    if not (GO_PATH / "src" / "google.golang.org" / "grpc").is_dir():
        pytest.skip("golang-google-grpc-dev is not installed")
    program = str(folder / "go-client")
    _run(
        ["go", "build", "-o", program, str(CLIENTS / "client.go")],
        GO111MODULE="off",
        GOPATH=str(GO_PATH),
        GOFLAGS="",
    )
    return [program]


def cpp(folder: Path) -> list[str]:
    """Build the client on gRPC C++, and return its command."""
    needs("g++", "pkg-config")
    found = subprocess.run(["pkg-config", "--cflags", "--libs", "grpc++"], capture_output=True)
    if found.returncode:
        pytest.skip("libgrpc++-dev is not installed")
    program = str(folder / "cpp-client")
    source = str(CLIENTS / "client.cpp")
    _run(["g++", "-std=c++17", source, "-o", program, *found.stdout.decode().split()])
    return [program]


def java(folder: Path) -> list[str]:
    """Compile the client on grpc-java, and return its command."""
    needs("java", "javac")
    path = ":".join(str(JARS / f"{name}.jar") for name in JAR_NAMES)
    if missing := [name for name in JAR_NAMES if not (JARS / f"{name}.jar").exists()]:
        pytest.skip(f"{', '.join(missing)} of libgrpc-java and its libraries is not installed")
    _run(["javac", "-cp", path, "-d", str(folder), str(CLIENTS / "Client.java")])
    return ["java", "-XX:+UseSerialGC", "-cp", f"{path}:{folder}", "Client"]


#: What makes the command of each client; it skips the test where something is missing.
LANGUAGES: dict[str, Callable[[Path], list[str]]] = {
    "grpc-js": node,
    "grpc-go": go,
    "grpc-c++": cpp,
    "grpc-java": java,
}


class Plan:
    """Calls that a client makes one after the other."""

    def __init__(self, command: list[str], port: int, folder: Path) -> None:
        """`folder` takes the messages and the answers."""
        self._command, self._port, self._folder = command, port, folder
        self._lines: list[str] = []
        self._files: list[Path] = []

    def add(self, op: str, path: str, message: bytes, count: int = 1, deadline_s: float = 0) -> int:
        """Plan a call, and return its place among the outcomes."""
        place = len(self._lines)
        file = self._folder / f"message-{place}"
        file.write_bytes(message)
        deadline_ms = int(1000 * (deadline_s or PATIENCE_S))
        self._lines.append(f"{op} {path} {file} {count} {deadline_ms}\n")
        self._files.append(file)
        return place

    def run(self) -> list[Outcome]:
        """Make the calls."""
        done = subprocess.run(
            [*self._command, str(self._port)],
            input="".join(self._lines),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        outcomes = []
        for file, line in zip(self._files, done.stdout.splitlines(), strict=True):
            code, answers, text = line.split(" ")
            answer = file.with_name(file.name + ".answer")
            outcomes.append(
                Outcome(
                    int(code),
                    int(answers),
                    bytes.fromhex(text).decode(),
                    answer.read_bytes() if answer.exists() else None,
                )
            )
        return outcomes
