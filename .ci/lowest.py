"""Print constraints that hold gnnserve's dependencies at the lowest version pyproject.toml allows.

A bound counts as tried only if it names a release: pip finds none for `==5.29` where 5.29.1 was the
first. torch is left out: an old one brings gigabytes of CUDA libraries.
"""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
for requirement in map(Requirement, project["dependencies"]):
    (lowest,) = (bound.version for bound in requirement.specifier if bound.operator == ">=")
    if requirement.name != "torch":
        print(f"{requirement.name}=={lowest}")
