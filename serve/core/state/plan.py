"""The plan: groups in launch order, as far as they have not been launched yet.

Groups are loose or pinned. Loose ones are thrown away and made anew at every planning that
replans; pinned ones keep their members and their place: a started group under a discipline that
holds groups, a task handed over by a lost lane, one that has waited too long, and every group of
a fixed window.
"""

from serve.core.state.record import PlannedGroup, Record
from serve.core.types import ZERO_NS, Nanos


class Plan:
    """Groups in launch order, counted."""

    __slots__ = ("_holds_groups", "cleared_ns", "count", "groups", "loose")

    def __init__(self, holds_groups: bool) -> None:
        #: Whether a started group stays until all of it has ended.
        self._holds_groups = holds_groups
        #: No group is empty, except a held one whose members are all on lanes.
        self.groups: list[PlannedGroup] = []
        #: Members of all groups.
        self.count = 0
        #: Members of loose groups.
        self.loose = 0
        #: When the last held group ended: nothing behind it could start before.
        self.cleared_ns = ZERO_NS

    def drop_loose(self) -> None:
        """Forget the loose groups; their members are planned anew."""
        if not self.loose:
            return
        kept = []
        for group in self.groups:
            if group.pinned:
                kept.append(group)
            else:
                for record in group.members:
                    record.group = None
        self.groups = kept
        self.count -= self.loose
        self.loose = 0

    def append(self, members: list[Record], pinned: bool) -> None:
        """Append a group behind all others."""
        group = PlannedGroup(members, len(members), pinned)
        for record in members:
            record.group = group
        self.groups.append(group)
        self.count += len(members)
        if not pinned:
            self.loose += len(members)

    def put_first(self, record: Record) -> None:
        """Plan the record by itself, behind groups pinned already and before all others."""
        group = PlannedGroup([record], 1, True)
        record.group = group
        at = 0
        while at < len(self.groups) and self.groups[at].pinned:
            at += 1
        self.groups.insert(at, group)
        self.count += 1

    def pin(self, group: PlannedGroup) -> None:
        """Keep the group as it is from now on."""
        group.pinned = True
        self.loose -= len(group.members)

    def remove(self, record: Record, now_ns: Nanos) -> None:
        """Remove the planned record, which runs elsewhere or not at all."""
        group = self._take(record)
        record.group = None
        self._drop_if_over(group, now_ns)

    def launch(self, record: Record) -> PlannedGroup:
        """Take the planned record, which goes onto a lane, off the plan; return its group."""
        group = self._take(record)
        group.active += 1
        if not group.members and not self._holds_groups:
            self.groups.remove(group)
        return group

    def end(self, record: Record, now_ns: Nanos) -> None:
        """Note that the record left its lane for good."""
        group = record.group
        assert group is not None
        group.active -= 1
        record.group = None
        if self._holds_groups and not group.let_go:
            self._drop_if_over(group, now_ns)

    def let_go(self, record: Record, now_ns: Nanos) -> None:
        """Have its held group no longer wait for the record, which stays on its lane."""
        group = record.group
        if not self._holds_groups or group is None or group.let_go:
            return
        group.active -= 1
        record.group = PlannedGroup([], 1, True, group.group_id, 1, let_go=True)
        self._drop_if_over(group, now_ns)

    def hand_over(self, record: Record) -> None:
        """Plan the record again, which left its lane: first of its held group, or of the plan."""
        group = record.group
        assert group is not None
        group.active -= 1
        if group.let_go:
            self.put_first(record)
            return
        if self._holds_groups:
            group.members.insert(0, record)
        else:
            record.group = PlannedGroup([record], 1, True)
            self.groups.insert(0, record.group)
        self.count += 1

    def _take(self, record: Record) -> PlannedGroup:
        group = record.group
        assert group is not None
        group.members.remove(record)
        self.count -= 1
        if not group.pinned:
            self.loose -= 1
        return group

    def _drop_if_over(self, group: PlannedGroup, now_ns: Nanos) -> None:
        if group.members or (self._holds_groups and group.active):
            return
        self.groups.remove(group)
        if group.group_id is not None:
            self.cleared_ns = now_ns
