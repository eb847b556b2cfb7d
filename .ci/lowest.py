"""Print constraints that hold gnnserve's dependencies at the lowest version pyproject.toml allows.

Covers the client and the extras `server` and `load`. A lower bound must name a release: pip finds
none for `==5.29` where 5.29.1 was the first. torch is left out: an old one brings gigabytes of CUDA
libraries.
"""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for requirement in map(Requirement, project["dependencies"] + extras["server"] + extras["load"]):
    (lowest,) = (bound.version for bound in requirement.specifier if bound.operator == ">=")
    if requirement.name != "torch":
        print(f"{requirement.name}=={lowest}")
