"""Paths, options, commands, metrics and messages that the guides name exist."""

import re
from functools import cache
from importlib.util import find_spec
from typing import get_args, get_origin

import msgspec
import pytest
import typer

from bench.gpu.stages import stages
from bench.kit.result import ROOT
from serve.cli import app
from serve.config import Config
from serve.core.disciplines import DISCIPLINES
from serve.core.policies import POLICIES
from serve.errors import (
    InvalidInput,
    Mismatch,
    NotPermitted,
    NotReady,
    QueueFull,
    UnknownName,
    Unsupported,
    VersionReplaced,
)
from serve.models.model_config import ModelConfig
from serve.obs.explanations import CAUSES, REASONS
from serve.server.outcomes import refusal_reason
from tests.docs.pages import PAGES

each_page = pytest.mark.parametrize("page", PAGES)
#: Top-level folders whose paths the pages name.
_FOLDERS = r"(?:serve|loadgen|bench|tests|csrc|configs|docs|protos|\.ci|\.github)"
#: Written by a command, or by the reader of CONTRIBUTING.
WRITTEN = {"configs/gnnserve.db", "serve/core/policies/sjf.py"}
_CODE = re.compile(r"`([^`\n]+)`")


def inline(page: str) -> list[str]:
    """Return what a page sets as code within its sentences and tables."""
    return _CODE.findall(re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.M | re.S))


@each_page
def test_paths_exist(page):
    found = re.findall(rf"(?<![\w/.-]){_FOLDERS}/[\w./*-]+", PAGES[page])
    missing = [path for path in found if not any(ROOT.glob(path.rstrip("./")))]
    missing = [path for path in missing if path not in WRITTEN]
    assert missing == []


@each_page
def test_modules_exist(page):
    found = re.findall(r"python -m ((?:bench|docs|serve|loadgen|tests)[\w.]*)", PAGES[page])
    found += re.findall(r"`((?:bench|serve|loadgen)\.[a-z_.]+)`", PAGES[page])
    missing = []
    for name in found:
        try:
            known = find_spec(name)
        except ModuleNotFoundError:
            known = None
        parent, _, attribute = name.rpartition(".")
        if known is None and not hasattr(__import__(parent, fromlist=[attribute]), attribute):
            missing.append(name)
    assert missing == []


def options() -> set[str]:
    """Return every key of the configuration file, with its section and alone."""
    found = set()
    for section in msgspec.structs.fields(Config):
        kind = section.type
        if get_origin(kind) is tuple:
            kind = get_args(kind)[0]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            names = [field.name for field in msgspec.structs.fields(kind)]
            found |= {section.name, *names, *(f"{section.name}.{name}" for name in names)}
    return found


@each_page
def test_options_exist(page):
    sections = "|".join(field.name for field in msgspec.structs.fields(Config))
    named = [text.partition(" = ")[0] for text in inline(page)]
    pattern = re.compile(rf"(?:{sections})\.(?!toml\b)\w+")  # a file is no key
    known = options() | model_options()
    assert [name for name in named if pattern.fullmatch(name) and name not in known] == []


def test_options_of_the_gpu_are_in_their_sections():
    tables = re.findall(
        r"^\| option under `\[+(\w+)\]+` .*\n\|[-|]+\n((?:\|.*\n)+)", PAGES["docs/cuda.md"], re.M
    )
    assert len(tables) == 2
    for section, rows in tables:
        names = re.findall(r"^\| `(\w+) = ", rows, re.M)
        assert names
        assert {f"{section}.{name}" for name in names} <= options()


def model_options() -> set[str]:
    """Return every key of a model's config.toml with its section."""
    found = set()
    for section in msgspec.structs.fields(ModelConfig):
        if isinstance(section.type, type) and issubclass(section.type, msgspec.Struct):
            fields = msgspec.structs.fields(section.type)
            found |= {f"{section.name}.{field.name}" for field in fields}
    return found


def test_the_table_of_the_model_has_every_option():
    page = PAGES["docs/serve-your-own-model.md"]
    table = page[page.index("| key | meaning |") : page.index("What `inputs` may name")]
    assert set(re.findall(r"^\| `([\w.]+)`", table, re.M)) == model_options()


@each_page
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", PAGES[page], re.M)) <= targets


@each_page
def test_command_options_exist(page):
    """Each `gnnserve COMMAND --option`, in a block or in a sentence."""
    commands = typer.main.get_command(app).commands
    wrong = []
    for name, rest in re.findall(r"gnnserve ([a-z]+)((?: [^\s`|]+)*)", PAGES[page]):
        if name == "load" or name not in commands:  # Locust reads its options itself
            wrong += [name] if name != "load" and rest.lstrip().startswith("--") else []
            continue
        command = commands[name]
        subcommands = getattr(command, "commands", None)
        if subcommands and rest.split():
            command = subcommands[rest.split()[0]]
        known = {option for param in command.params for option in param.opts}
        wrong += [
            f"{name} {o}" for o in re.findall(r"--[a-z-]+", rest) if o not in known | {"--help"}
        ]
    assert wrong == []


def test_policies_and_disciplines_are_those_of_the_table():
    page = PAGES["docs/scheduling.md"]
    table = page[page.index("| name | order |") : page.index("How they differ")]
    told = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| ([^|]+) \|", table, re.M))))
    assert told == set(POLICIES)
    assert set(re.findall(r"^\*\*`(\w+)`\*\*", page, re.M)) == set(DISCIPLINES)


@cache
def sources() -> str:
    """Return the text of the package, with strings that span lines joined."""
    text = "\n".join(path.read_text() for path in (ROOT / "serve").rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize(
    "message",
    re.findall(
        r"^\| `([^`]+)`",
        PAGES["docs/serve-your-own-model.md"].partition("## When something is refused")[2],
        re.M,
    ),
)
def test_messages_are_said_by_the_package(message):
    """The words of a message between its names, numbers and types."""
    varying = (
        r"\ba tuple\b|"
        r"'[^']*'|\[[^]]*\]|\([^)]*\)|…|\b[\w.]*[._][\w.]*\b|\b[A-Z]\w*\d\w*\b|\b\d+\b|[:;?,=]"
    )
    fixed = [part.strip() for part in re.split(varying, message)]
    fixed = [part for part in fixed if len(part) > 3]
    assert fixed
    assert [part for part in fixed if part not in sources()] == []


def test_causes_and_reasons_are_those_that_the_server_records():
    page = PAGES["docs/operators.md"]
    table = page[page.index("| cause |") : page.index("## Health")]
    assert set(re.findall(r"^\| `(\w+)`", table, re.M)) == set(CAUSES)
    table = page[page.index("| reason | meaning |") : page.index("Clients with short deadlines")]
    assert set(re.findall(r"^\| `(\w+)`", table, re.M)) == set(REASONS)


@pytest.mark.parametrize(
    "error",
    [
        InvalidInput(""),
        UnknownName(""),
        Mismatch(""),
        NotPermitted(""),
        Unsupported(""),
        QueueFull("", 0),
        NotReady(""),
        VersionReplaced(""),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_refusal_has_a_reason_that_the_report_explains(error):
    assert refusal_reason(error) in REASONS


def test_stages_of_the_gpu_check_exist():
    page = PAGES["docs/measurements/gpu.md"]
    known = {stage.name for stage in stages("")}
    shown = page[page.index("| stage | shows |") : page.index("## Aims")]
    cells = re.findall(r"^\| (`.*?) \|", shown, re.M)
    cells += re.findall(r"^\| \d+ \|.*\| (.*?) \|$", page, re.M)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named - known == set()
    # The first three build and look around; they show nothing of their own.
    assert known - named == {"extension", "libraries", "machine"}
