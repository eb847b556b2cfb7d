"""Rules for the versions of models: changed by operators, kept on disk, and watched for canaries.

The rules themselves are decided in ``serve.core.versions``; this holds the lock, writes the file
(``serve.models.version_file``) and logs.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from serve.core.types import FailReason, RejectReason
from serve.core.versions.canary import CanaryTakenBack, RequestEnd
from serve.core.versions.rules import VersionRules
from serve.errors import InvalidInput, Mismatch
from serve.models.repository import scan_model
from serve.models.version_file import KeptRules, read_rules, write_rules
from serve.obs.record import RequestRecord
from serve.server.catalogue import ModelCatalogue
from serve.server.version_facts import ShadowCounts, VersionChange, VersionFacts
from serve.threads import Thread

_log = logging.getLogger(__name__)

#: Reasons for an end without an answer that lie in the model.
_FAILURES = frozenset(
    reason.value
    for reason in (
        FailReason.MODEL_ERROR,
        FailReason.OUT_OF_MEMORY,
        FailReason.NONFINITE,
        FailReason.LANE_LOST,
        FailReason.QUARANTINED,
        FailReason.TIME_LIMIT,
        RejectReason.QUARANTINED,
    )
)
_DEADLINE = "deadline"


class ModelVersions:
    """Changes the rules that a catalogue's router follows. Any thread."""

    def __init__(self, catalogue: ModelCatalogue) -> None:
        self._catalogue = catalogue
        self._router = catalogue.router
        self._lock = threading.Lock()
        #: Held while a file is written, so that the newest rules are written last.
        self._writing = threading.Lock()
        self._previous: dict[str, VersionRules | None] = {}
        #: What each model's file holds, as far as it was read or written.
        self._on_disk: dict[str, KeptRules] = {}
        self._taken_back: dict[str, str] = {}
        self._not_kept: dict[str, str] = {}
        #: Canaries taken back since the start, by (model, version).
        self.taken_back_count: Counter[tuple[str, str]] = Counter()
        #: Tells how a shadow compared, by model and version.
        self.shadow_counts: Callable[[str, int], ShadowCounts] = lambda name, version: (
            ShadowCounts()
        )
        #: Called when a canary was taken back; on the thread of the request's end.
        self.on_event: Callable[[CanaryTakenBack], None] = lambda event: None

    def read(self, name: str) -> None:
        """Follow the model's file, if it holds other rules than were read or written last.

        Raises ConfigError for a broken file.
        """
        with self._writing:
            kept = read_rules(self._catalogue.root / name)
            with self._lock:
                if self._on_disk.get(name, KeptRules()) == kept:
                    return
                self._on_disk[name] = kept
                self._not_kept.pop(name, None)
                self._previous[name] = kept.previous
                self._set(name, kept.now)
        _log.info("model %s: versions: %s", name, told(kept.now))

    def change(self, name: str, change: VersionChange) -> VersionFacts:
        """Change the rules of a model, from the next request on, and write them to its file.

        Where the file cannot be written the rules hold until the server ends, and the answer says
        so. Raises UnknownName for an unknown model or version, NotReady for a version that is not
        served, InvalidInput for rules that make no sense, Mismatch when there is nothing to go back
        to.
        """
        scan_model(self._catalogue.root, name)  # raises UnknownName
        with self._lock:
            before = self._router.rules(name)
            after = self._changed(name, before, change)
            for version in {*dict(after.shares), after.shadow} - {None}:
                if not change.roll_back:
                    self._catalogue.get(name, str(version))
            self._previous[name] = before
            self._taken_back.pop(name, None)
            self._set(name, after)
        _log.info("model %s: versions: %s", name, told(after))
        self._keep(name)
        return self.facts(name)[0]

    def facts(self, name: str = "") -> tuple[VersionFacts, ...]:
        """Return the rules of one model, or of all that are served; raises UnknownName."""
        catalogue = self._catalogue
        if name:
            scan_model(catalogue.root, name)
            names = [name]
        else:
            names = sorted({entry.spec.name for entry in catalogue.entries})
        with self._lock:
            return tuple(map(self._facts, names))

    def ended(self, record: RequestRecord) -> None:
        """Count the end of a request that named no version, for the model's canary. Any thread."""
        name = record.model
        if not self._router.watches(name):
            return
        failed = record.reason in _FAILURES or record.nonfinite_values > 0
        late = record.violated or record.reason == _DEADLINE
        if record.status != "OK" and not failed and not late:
            return  # the client's doing, or the server's as a whole
        with self._lock:
            before = self._router.rules(name)
            event = self._router.ended(name, RequestEnd(int(record.version), late, failed))
            if event is None:
                return
            self._previous[name] = before
            self._taken_back[name] = f"version {event.version}: {event.reason}"
            self.taken_back_count[name, str(event.version)] += 1
            after = self._router.rules(name)
        _log.warning(
            "model %s: the canary, version %d, is taken back: %s; versions: %s",
            name, event.version, event.reason, told(after),
        )  # fmt: skip
        self.on_event(event)
        # This thread may be the one that drives everything: it waits for no disk.
        try:
            Thread(target=self._keep, args=(name,), name="rules").start()
        except RuntimeError as error:
            self._keeps_not(name, f"no thread writes versions.toml: {error}")

    def _changed(self, name: str, before: VersionRules, change: VersionChange) -> VersionRules:
        given = [change.split is not None, change.shadow is not None, change.roll_back]
        if sum(given) != 1:
            raise InvalidInput("give one of split, shadow and roll_back")
        try:
            if change.split is not None:
                shares = tuple(sorted(change.split.items()))
                return replace(before, shares=shares, canary=change.canary)
            if change.canary is not None:
                raise InvalidInput("canary: it is given with the split that it is in")
            if change.shadow is not None:
                percent = change.shadow_percent if change.shadow else 100.0
                return replace(before, shadow=change.shadow or None, shadow_percent=percent)
        except ValueError as error:
            raise InvalidInput(str(error)) from error
        previous = self._previous.get(name)
        if previous is None:
            raise Mismatch(f"model '{name}': its versions have no rules before these to go back to")
        return previous

    def _set(self, name: str, rules: VersionRules) -> None:
        self._router.set_rules(name, rules)
        self._catalogue.rules_changed()

    def _facts(self, name: str) -> VersionFacts:
        catalogue, rules = self._catalogue, self._router.rules(name)
        served = catalogue.versions(name)
        main = rules.main(served.__contains__) if rules.shares else None
        if not rules.shares:
            main = next((v for v in served if (entry := catalogue.version(name, v)) is not None
                         and catalogue.is_default(entry)), None)  # fmt: skip
        return VersionFacts(
            name,
            rules,
            self._previous.get(name),
            main,
            tuple(sorted(served)),
            self._taken_back.get(name, ""),
            self._not_kept.get(name, ""),
            None if rules.shadow is None else self.shadow_counts(name, rules.shadow),
        )

    def _keep(self, name: str) -> None:
        """Write the rules as they are now to the model's file."""
        with self._writing:
            with self._lock:
                kept = KeptRules(self._router.rules(name), self._previous.get(name))
            try:
                write_rules(self._catalogue.root / name, kept)
            except OSError as error:
                self._keeps_not(name, f"versions.toml cannot be written: {error.strerror}")
                return
            with self._lock:
                self._not_kept[name] = ""
                self._on_disk[name] = kept

    def _keeps_not(self, name: str, reason: str) -> None:
        _log.warning("model %s: %s; the rules end with the server", name, reason)
        with self._lock:
            self._not_kept[name] = reason


def told(rules: VersionRules) -> str:
    """Return the rules in one line for people."""
    parts = [rules.told or "the newest that loads"]
    if rules.canary is not None:
        parts.append(f"canary {rules.canary}")
    if rules.shadow is not None:
        parts.append(f"shadow {rules.shadow} of {rules.shadow_percent:g} %")
    return ", ".join(parts)
