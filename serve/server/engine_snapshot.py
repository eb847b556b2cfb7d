"""The state of the engine at one moment, for metrics."""

from serve.obs.scraped import EngineSnapshot
from serve.server import clock
from serve.server.assembly import EngineParts


def take_snapshot(parts: EngineParts, rows_dropped: int) -> EngineSnapshot:
    """Return the state now; `rows_dropped` are the report's lost rows."""
    driver, pool, catalogue = parts.driver, parts.pool, parts.catalogue
    pending: dict[tuple[str, str], int] = {}
    entries = catalogue.entries
    served = [(entry.spec.name, str(entry.spec.version)) for entry in entries]
    broken = [(name, str(version)) for name, version in catalogue.failing]
    # Read from the system, before the lock that requests need.
    lane_bytes = {int(lane): size for lane, size in pool.memory_bytes().items()}
    with parts.lock:
        for ticket in driver.requests.tickets():
            spec = ticket.entry.spec
            key = spec.name, str(spec.version)
            pending[key] = pending.get(key, 0) + (ticket.run is None)
        return EngineSnapshot(
            pending=pending,
            quarantined=tuple(
                sorted({e.spec.name for e in entries if driver.quarantine_reason(e.key)})
            ),
            lanes_up=driver.lanes.ready_count,
            running_ns={
                int(lane): ns for lane, ns in driver.lanes.running_ns(clock.now_ns()).items()
            },
            lane_restarts=pool.restarts,
            unconfined=bool(pool.unconfined),
            lanes_recycled={str(why): n for why, n in driver.lanes.recycled.items()},
            settings_restored=dict(driver.lanes.restored),
            lane_bytes=lane_bytes,
            memory_bytes=tuple(
                (one.budget_bytes, one.reserved_bytes) for one in driver.scheduler.devices
            ),
            pool_used_bytes=parts.shared.used_bytes,
            rows_dropped=rows_dropped,
            executors={(e.spec.name, str(e.spec.version)): e.executor for e in entries},
            version_states=tuple(
                [(*key, "READY") for key in served]
                + [(*key, "UNAVAILABLE") for key in broken if key not in served]
            ),
            version_shares={
                (name, str(version)): percent
                for name in dict.fromkeys(name for name, _ in served)
                for version, percent in catalogue.router.rules(name).shares
            },
            shadow_runs={
                (name, str(version), outcome): count
                for (name, version), counts in parts.shadows.all_counts().items()
                for outcome, count in (
                    ("same", counts.compared - counts.different),
                    ("different", counts.different),
                    ("failed", counts.failed),
                    ("skipped", counts.skipped),
                )
            },
            canaries_taken_back=dict(parts.versions.taken_back_count),
            gathered_rows=parts.graphs.tables.gathered_rows(),
            training_jobs=parts.trainer.counts(),
            training_steps=parts.trainer.steps,
            training_paused_ns=parts.trainer.paused_ns,
        )
