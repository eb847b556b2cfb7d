"""The catalogue of served models: look-up by name and version, and why others are not served.

A request that names no version gets the one that the model's rules say (``serve.core.versions``);
without rules the newest version that loads. ``rollout`` changes the catalogue, ``model_info``
describes its entries to clients.
"""

import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from serve.core.types import Bytes, Nanos, RunLimits
from serve.core.versions.router import VersionRouter
from serve.errors import ConfigError, NotReady
from serve.estimate.estimator import ASSUMED_OVERHEAD, ModelEstimator, Overhead
from serve.estimate.slowdown import Slowdowns
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec, find, is_version, scan, unknown_names
from serve.server.api import ModelInfo

#: State of a model that is not simply served; the protocol's words.
State = Literal["LOADING", "UNLOADING", "UNAVAILABLE"]


@dataclass(slots=True)
class ModelEntry:
    """One served version of a model. Mutable parts belong to the driver's lock."""

    spec: ModelSpec
    #: Hash of its content, see ``content_hash``.
    digest: str
    #: Unique per content and executor, so that a changed model can be loaded beside the old one.
    key: str
    signature: Signature
    estimator: ModelEstimator
    executor: str
    #: Why calibration chose the executor, for people.
    executor_reason: str
    #: Calibrated for a short time only: its time estimates are rough, and rather too high.
    is_rough: bool = False
    #: Requests accepted and not yet answered.
    inflight: int = 0
    #: True once a successor serves or the model is unloaded: it accepts no request any more.
    retired: bool = False
    #: Set when it is retired and its last request is answered.
    idle: threading.Event = field(default_factory=threading.Event)
    cached_info: ModelInfo | None = None
    #: Those of its runs.
    limits: RunLimits = field(init=False)

    def __post_init__(self) -> None:
        memory_bytes, run_ns = self.spec.max_memory_bytes, self.spec.max_run_ns
        self.limits = RunLimits(
            None if memory_bytes is None else Bytes(memory_bytes),
            None if run_ns is None else Nanos(run_ns),
        )


class ModelCatalogue:
    """The models of one server. Any thread; each model is changed by one thread at a time."""

    def __init__(self, root: Path, qos_factor: float) -> None:
        """`root` is the model repository, `qos_factor` that of models which set none."""
        self.root = root
        #: QoS target ÷ solo time of models which set none.
        self.qos_factor = qos_factor
        self._entries: dict[tuple[str, int], ModelEntry] = {}
        #: Newest version that loads, by name.
        self._default: dict[str, ModelEntry] = {}
        self._by_key: dict[str, ModelEntry] = {}
        self._states: dict[str, tuple[State, str]] = {}
        #: Rules of models; changed by ``versions``.
        self.router = VersionRouter()
        #: Why a version did not load when it was tried last.
        self._failures: dict[tuple[str, int], str] = {}
        #: Numbers of requests without an id.
        self._drawn = itertools.count()
        #: Called when what is served has changed.
        self.changed: Callable[[], None] = lambda: None
        #: Held for every change, and while `changed` is told of it. Look-ups need no lock.
        self._changing = threading.Lock()
        self._in_root = re.compile(
            rf"(?<![\w./-])(?:{re.escape(str(root.absolute()))}|"
            rf"{re.escape(str(root.resolve()))})(/|\b)"
        )
        #: Estimates of what the server adds to a run, shared by all models.
        self.overhead = Overhead(*ASSUMED_OVERHEAD)
        self.slowdown = Slowdowns()

    # --- look-up ------------------------------------------------------------------------

    @property
    def entries(self) -> tuple[ModelEntry, ...]:
        """Everything served now."""
        return tuple(self._entries.values())

    def get(self, name: str, version: str = "", request_id: str | None = None) -> ModelEntry:
        """Return the served version, or for no version the one for a request of that id.

        An empty id is drawn; for None it is the version with the greatest share. Raises UnknownName
        for a name or version that the repository does not have, NotReady for one that is not
        served.
        """
        entry = self._default.get(name)
        number = int(version) if is_version(version) else None
        if entry is not None and not version and (rules := self.router.rules(name)).shares:
            serves = partial(self._serves, name)
            if request_id is None:
                number = rules.main(serves)
            else:
                # No client can send this one.
                drawn = request_id or f"\0{next(self._drawn)}"
                number = rules.choose(name, drawn, serves)
            entry = None if number is None else self._entries.get((name, number))
            if entry is None:
                raise NotReady(f"model '{name}': no version with a share serves: {rules.told}")
            return entry
        if entry is not None and version not in ("", str(entry.spec.version)):
            entry = None if number is None else self._entries.get((name, number))
        if entry is not None:
            return entry
        state: str
        state, reason = self._states.get(name, ("", ""))
        failure = "" if number is None else self.failure(name, number)
        if failure and state in ("", "UNAVAILABLE"):
            state, reason = "UNAVAILABLE", failure
        if not state or (version and number is None):
            state, reason = "UNAVAILABLE", "not loaded"
            try:
                find(self.root, name, version)
            except ConfigError as error:
                reason = self.told(str(error))
            version = "" if number is None else version
        wanted = f"version {version} of model '{name}'" if version else f"model '{name}'"
        raise NotReady(f"{wanted} is {state}" + (f": {reason}" if reason else ""))

    def _serves(self, name: str, version: int) -> bool:
        return (name, version) in self._entries

    def version(self, name: str, version: int) -> ModelEntry | None:
        """Return that version if it is served, else None."""
        return self._entries.get((name, version))

    def versions(self, name: str) -> set[int]:
        """Return the served versions of the model."""
        return {version for key, version in tuple(self._entries) if key == name}

    def by_key(self, key: str) -> ModelEntry | None:
        """Return the model of that key while lanes hold it, else None."""
        return self._by_key.get(key)

    def serves(self, name: str) -> bool:
        """Return True when some version of the model is served."""
        return name in self._default

    def is_default(self, entry: ModelEntry) -> bool:
        """Return True when requests that name no version get this one, or most of them do."""
        name = entry.spec.name
        if name in self._default and (rules := self.router.rules(name)).shares:
            return rules.main(partial(self._serves, name)) == entry.spec.version
        return self._default.get(name) is entry

    def factor_of(self, entry: ModelEntry) -> float:
        """Return the model's QoS target ÷ its solo time."""
        return entry.spec.qos_factor or self.qos_factor

    def state(self, name: str) -> tuple[State, str]:
        """Return state and reason of a model's versions that are not served."""
        return self._states.get(name, ("UNAVAILABLE", "not loaded"))

    def failure(self, name: str, version: int) -> str:
        """Return why the version did not load when it was tried last; empty when it did."""
        return self._failures.get((name, version), "")

    @property
    def failing(self) -> tuple[tuple[str, int], ...]:
        """Name and number of the versions that did not load when they were tried last."""
        return tuple(self._failures)

    def told(self, text: str) -> str:
        """Return a text for clients: with paths relative to the repository."""
        return self._in_root.sub(lambda found: "" if found[1] else "the repository", text)

    def names_to_load(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """Return `wanted`, or all models of the repository; raises ConfigError for unknown ones."""
        if wrong := unknown_names(self.root, wanted):
            raise ConfigError("\n".join(wrong))
        return wanted or tuple(dict.fromkeys(found.name for found in scan(self.root)))

    # --- change, for ``rollout`` and ``versions`` -----------------------------------------

    def serve(self, entry: ModelEntry, replaced: ModelEntry | None) -> None:
        """Give requests `entry` from now on, in place of `replaced`."""
        spec = entry.spec
        with self._changing:
            self._entries[spec.name, spec.version] = self._by_key[entry.key] = entry
            if replaced is not None and self._default[spec.name] is replaced:
                self._default[spec.name] = entry
            self.changed()

    def set_default(self, name: str, version: int) -> ModelEntry:
        """Make a served version the one for requests that name none; return it."""
        with self._changing:
            entry = self._default[name] = self._entries[name, version]
            self.changed()
        return entry

    def withdraw(self, name: str) -> bool:
        """Give no request the model any more; return False when it was not served."""
        with self._changing:
            found = self._default.pop(name, None) is not None
            self.changed()
        return found

    def remove(self, name: str, version: int) -> ModelEntry:
        """Take a version out; its key is known until `forget`, for its last requests."""
        with self._changing:
            entry = self._entries.pop((name, version))
            self.changed()
        return entry

    def forget(self, key: str) -> None:
        """Forget the key of a model that no request waits for."""
        self._by_key.pop(key, None)

    def rules_changed(self) -> None:
        """Tell that other versions answer requests from now on."""
        with self._changing:
            self.changed()

    def set_state(self, name: str, state: State, reason: str = "") -> None:
        """Set what is told of versions that are not served."""
        self._states[name] = state, reason

    def clear_state(self, name: str) -> None:
        """Let versions that are not served be told as not loaded."""
        self._states.pop(name, None)

    def set_failure(self, name: str, version: int, reason: str) -> None:
        """Take note of why a version does not load."""
        with self._changing:
            self._failures[name, version] = reason

    def clear_failures(self, name: str) -> None:
        """Forget why versions of the model did not load."""
        with self._changing:
            self._failures = {key: told for key, told in self._failures.items() if key[0] != name}
