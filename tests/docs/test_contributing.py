"""The first change of CONTRIBUTING.md works: its policy passes its test."""

import re

from bench.kit.result import ROOT
from serve.core.named_choices import NamedChoices
from serve.core.policies import base
from tests.builders import MS, task
from tests.core import test_policies
from tests.docs.pages import PAGES, texts

PAGE = "CONTRIBUTING.md"


def test_the_policy_passes_the_test(monkeypatch):
    (policy,) = texts(PAGE, "python", "policy")
    (test,) = texts(PAGE, "python", "test")
    known = NamedChoices("policy")
    monkeypatch.setattr(base, "register_policy", known.register)
    exec(compile(policy, "sjf.py", "exec"), {"__name__": "sjf"})
    monkeypatch.setattr(test_policies, "get_policy", known.get_named)
    names = {"task": task, "MS": MS, "order": test_policies.order}
    exec(compile(test, "test_sjf.py", "exec"), names)
    names["test_sjf_orders_by_run_time"]()


def test_its_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.M))
    named = {
        target
        for line in re.findall(r"(?:^|`)make ([a-z -]+?)(?:`|$)", PAGES[PAGE], re.M)
        for target in line.split()
    }
    assert len(named) > 8
    assert named - {"help"} <= targets
