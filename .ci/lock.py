"""Write the hashes of everything that `make setup` and CI install: `locks/*.txt`.

    python .ci/lock.py          write them, by `uv`, which asks the package index
    python .ci/lock.py --check  do they fit pyproject.toml and constraints.txt? needs neither

A lock has the hashes of all files of a release, so one serves every processor and Python. torch has
locks of its own, one for the ordinary build and one for that of processors alone, as which one is
installed is the user's choice. What only CUDA builds of torch need is left out.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
TORCH = ("locks/torch.in", "--constraints", "constraints.txt", "--no-deps")
#: Where the builds for processors alone are.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: Locks, and what each is made from, as arguments of uv.
LOCKS = {
    ROOT / "locks" / "dev.txt": ("pyproject.toml", "--extra", "dev"),
    ROOT / "locks" / "cluster.txt": ("locks/cluster.in", "--constraints", "constraints.txt"),
    ROOT / "locks" / "sbom.txt": ("locks/sbom.in",),
    ROOT / "locks" / "torch.txt": TORCH,
    ROOT / "locks" / "torch-cpu.txt": (*TORCH, "--default-index", CPU_INDEX),
}
_HEAD = "# Written by `make lock` from {source}. pip takes only files with these hashes.\n"
_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==(\S+)", re.M)


def normal(name: str) -> str:
    """Return a package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Return the version of each package."""
    return {normal(name): version for name, version in _PIN.findall(text)}


def blocks(text: str) -> list[str]:
    """Return the lines of each package: its version and its hashes."""
    return re.findall(r"^\S+==.*(?:\n +--hash.*)*\n", text, re.M)


def required(extra: str) -> Iterator[Requirement]:
    """Yield what an extra of gnnserve asks for itself, and by the extras that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    yield from map(Requirement, project["dependencies"])
    waiting = [extra]
    while waiting:
        for requirement in map(Requirement, extras[waiting.pop()]):
            if requirement.name == project["name"]:
                waiting += requirement.extras
            else:
                yield requirement


def made(sources: tuple[str, ...]) -> str:
    """Return a lock; raises CalledProcessError when uv fails."""
    ours = sources[0] == "pyproject.toml"
    known = pins(CONSTRAINTS.read_text())
    said = subprocess.run(
        ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11",
         "--generate-hashes", "--no-annotate", "--no-header", *sources,
         *(("--constraints", str(CONSTRAINTS)) if ours else ())],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    kept = [
        block
        for block in blocks(said)
        if not ours or (known.keys() - {"torch"}) & pins(block).keys()
    ]
    return _HEAD.format(source=sources[0]) + "".join(kept)


def wrong(lock: Path, sources: tuple[str, ...]) -> list[str]:
    """Return what is wrong with a lock, as far as can be told without an index."""
    text = lock.read_text()
    said = [f"{lock.name}: {block.split()[0]} has no hash"
            for block in blocks(text) if "--hash=sha256:" not in block]  # fmt: skip
    ours = sources[0] == "pyproject.toml"
    if not ours and CONSTRAINTS.name not in sources:
        return said
    known, locked = pins(CONSTRAINTS.read_text()), pins(text)
    said += [
        f"{lock.name}: {name}=={version} is not what constraints.txt says"
        for name, version in locked.items()
        # A build's own part of a version, as in 2.13.0+cpu, is not in constraints.txt.
        if known.get(name, None if ours else version) != version.partition("+")[0]
    ]
    if not ours:
        return said
    return said + [
        f"{lock.name}: it has no {requirement}, which pyproject.toml asks for; make lock"
        for requirement in required(sources[-1])
        if requirement.name != "torch"
        and not requirement.specifier.contains(locked.get(normal(requirement.name), "0.dev0"), True)
    ]


def main() -> int:
    """Return 0, or with --check the number of mistakes."""
    if "--check" in sys.argv[1:]:
        found = [one for lock, sources in LOCKS.items() for one in wrong(lock, sources)]
        print(*found, sep="\n" if found else "", file=sys.stderr)
        return len(found)
    for lock, sources in LOCKS.items():
        text = made(sources)
        lock.parent.mkdir(exist_ok=True)
        lock.write_text(text)
        print(f"{lock.relative_to(ROOT)}: {len(blocks(text))} packages")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
