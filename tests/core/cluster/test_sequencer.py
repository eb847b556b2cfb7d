"""One order of changes, over a network that loses, repeats and delays, among restarts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from serve.core.cluster.follower import (
    SILENT_NS,
    AskChanges,
    ChangeFailed,
    ChangeMade,
    ChangesCame,
    Follower,
    HistoryRefused,
    MakeChange,
)
from serve.core.cluster.sequencer import (
    ABSENT_NS,
    CONFIRM_NS,
    HEARTBEAT_NS,
    ChangeLogged,
    ChangeRefused,
    ChangesAsked,
    ChangeSubmitted,
    ConfirmChange,
    LogChange,
    RefuseHistory,
    RepeatRefusal,
    SendChanges,
    Sequencer,
    TimeToLook,
    chained,
)

BATCH = 2


class Network:
    """A sequencer with its log, and followers; messages are delivered as `draw` says."""

    def __init__(self, draw, followers):
        self.draw = draw
        self.now_ns = 0
        self.log = []
        self.sequencer = Sequencer()
        self.followers = {f"f{n}": Follower() for n in range(followers)}
        self.made = {name: [] for name in self.followers}
        self.confirmed = {}
        self.refused = set()
        #: (to, event), to be delivered in any order.
        self.on_way = []

    def deliver(self, at, keep=False):
        to, event = self.on_way[at] if keep else self.on_way.pop(at)
        self.tell(to, event)

    def tell(self, to, event):
        if to == "sequencer":
            for command in self.sequencer.handle(event, self.now_ns):
                self.carry_out(command)
        else:
            self.follow(to, event)

    def carry_out(self, command):
        match command:
            case LogChange(server, key):
                # A real check depends on the order, as `if_version` does.
                if key.endswith(b"odd") and len(self.log) % 2:
                    self.refused.add(key)
                    self.tell("sequencer", ChangeRefused(server, key))
                else:
                    self.log.append(key)
                    self.tell("sequencer", ChangeLogged(key, key, server))
            case RepeatRefusal():
                pass
            case SendChanges(server, after):
                records = tuple(self.log[after : after + BATCH])
                self.on_way.append((server, ChangesCame(after, len(self.log), records)))
            case RefuseHistory(server, number):
                self.on_way.append((server, HistoryRefused(number)))
            case ConfirmChange(_, key, number):
                self.confirmed[key] = number

    def follow(self, name, event):
        commands = list(self.followers[name].handle(event, self.now_ns))
        while commands:
            match commands.pop(0):
                case AskChanges(number, digest, waits):
                    self.on_way.append(("sequencer", ChangesAsked(name, number, digest, waits)))
                case MakeChange(record):
                    self.made[name].append(record)
                    commands += self.followers[name].handle(ChangeMade(), self.now_ns)

    def restart(self, name):
        if name == "sequencer":
            self.sequencer = Sequencer()
            for key in self.log:
                assert not self.sequencer.handle(ChangeLogged(key, key), self.now_ns)
        else:
            self.followers[name] = Follower()
            self.made[name] = []

    def pass_time(self, by_ns):
        self.now_ns += by_ns
        for name in ("sequencer", *self.followers):
            self.tell(name, TimeToLook())


@settings(deadline=None)
@given(data=st.data(), followers=st.integers(1, 3), steps=st.integers(1, 60))
def test_all_make_the_changes_of_the_log_in_its_order(data, followers, steps):
    network = Network(data.draw, followers)
    names = list(network.followers)
    submitted = []
    for number in range(steps):
        match data.draw(st.sampled_from("ssdddrlpt")):
            case "s":
                kind = b"odd" if data.draw(st.booleans()) else b"any"
                key = b"%d-%s" % (number, kind)
                if submitted and data.draw(st.booleans()):
                    key = data.draw(st.sampled_from(submitted))
                submitted.append(key)
                event = ChangeSubmitted(data.draw(st.sampled_from(names)), key)
                network.on_way.append(("sequencer", event))
            case "t":
                network.restart(data.draw(st.sampled_from(["sequencer", *names])))
            case "p":
                network.pass_time(data.draw(st.integers(0, 3)) * HEARTBEAT_NS)
            case how if network.on_way:
                at = data.draw(st.integers(0, len(network.on_way) - 1))
                if how == "l":
                    network.on_way.pop(at)
                else:
                    network.deliver(at, keep=how == "r")
        for name in names:
            assert network.made[name] == network.log[: network.followers[name].number]
    assert len(set(network.log)) == len(network.log)
    assert all(network.log[number - 1] == key for key, number in network.confirmed.items())
    # Once messages arrive, all have all.
    for _ in range(2 * len(network.log) + 4):
        network.pass_time(2 * HEARTBEAT_NS)
        while network.on_way:
            network.deliver(0)
    for name in names:
        assert network.made[name] == network.log
        assert network.followers[name].caught_up
        assert not network.followers[name].stuck


def asked(sequencer, server, number, now_ns=0, records=(), waits=True):
    digest = b""
    for record in records:
        digest = chained(digest, record)
    return sequencer.handle(ChangesAsked(server, number, digest, waits), now_ns)


def test_a_change_is_confirmed_once_all_who_are_there_made_it():
    sequencer = Sequencer()
    assert asked(sequencer, "a", 0) == asked(sequencer, "b", 0) == []
    assert sequencer.handle(ChangeSubmitted("a", b"k"), 0) == [LogChange("a", b"k")]
    sent = sequencer.handle(ChangeLogged(b"k", b"r", "a"), 0)
    assert sent == [SendChanges("a", 0), SendChanges("b", 0)]
    assert asked(sequencer, "a", 1, 0, [b"r"]) == []
    assert asked(sequencer, "b", 1, 0, [b"r"]) == [ConfirmChange("a", b"k", 1)]
    # Sent again, it is confirmed again and not made again.
    assert sequencer.handle(ChangeSubmitted("a", b"k"), 0) == [ConfirmChange("a", b"k", 1)]


def test_a_change_that_was_refused_is_refused_when_it_comes_again():
    sequencer = Sequencer()
    assert sequencer.handle(ChangeSubmitted("a", b"k"), 0) == [LogChange("a", b"k")]
    assert sequencer.handle(ChangeRefused("a", b"k"), 0) == []
    assert sequencer.handle(ChangeSubmitted("a", b"k"), 0) == [RepeatRefusal("a")]
    assert sequencer.handle(ChangeSubmitted("a", b"l"), 0) == [LogChange("a", b"l")]


def test_who_is_silent_is_waited_for_no_longer_than_a_while():
    sequencer = Sequencer()
    asked(sequencer, "b", 0)
    sequencer.handle(ChangeLogged(b"k", b"r", "a"), 0)
    # It is there, and makes nothing.
    assert asked(sequencer, "b", 0, CONFIRM_NS // 2) == [SendChanges("b", 0)]
    assert sequencer.handle(TimeToLook(), CONFIRM_NS - 1) == []
    assert sequencer.wake_ns == CONFIRM_NS
    assert sequencer.handle(TimeToLook(), CONFIRM_NS) == [ConfirmChange("a", b"k", 1)]
    told = sequencer.handle(ChangeLogged(b"l", b"s", "a"), CONFIRM_NS // 2 + ABSENT_NS)
    assert told == [ConfirmChange("a", b"l", 2)]


def test_who_asks_when_nothing_is_new_hears_so_after_a_while():
    sequencer = Sequencer()
    assert asked(sequencer, "a", 0, waits=False) == [SendChanges("a", 0)]
    asked(sequencer, "a", 0)
    assert sequencer.handle(TimeToLook(), HEARTBEAT_NS - 1) == []
    assert sequencer.handle(TimeToLook(), HEARTBEAT_NS) == [SendChanges("a", 0)]
    assert sequencer.handle(TimeToLook(), 2 * HEARTBEAT_NS) == []


def test_who_made_other_changes_is_told_and_stops():
    sequencer = Sequencer()
    sequencer.handle(ChangeLogged(b"k", b"r"), 0)
    for number, records in ((1, [b"other"]), (2, [b"r", b"s"]), (-1, [])):
        assert asked(sequencer, "a", number, 0, records) == [RefuseHistory("a", number)]
    follower = Follower()
    follower.handle(ChangesCame(0, 1, (b"other",)), 0)
    follower.handle(ChangeMade(), 0)
    assert follower.handle(HistoryRefused(0), 0) == []
    assert not follower.stuck
    follower.handle(HistoryRefused(1), 0)
    assert "made 1 changes that the sequencer does not know of" in follower.stuck
    assert follower.handle(TimeToLook(), 10**12) == []
    assert follower.wake_ns is None


def test_a_follower_that_cannot_make_a_change_makes_none_after_it():
    follower = Follower()
    assert follower.handle(ChangesCame(0, 2, (b"r", b"s")), 0) == [MakeChange(b"r")]
    assert follower.handle(ChangeMade(), 0) == [MakeChange(b"s")]
    assert follower.handle(ChangeFailed("too big"), 0) == []
    assert follower.stuck == "could not make change 2: too big"
    assert not follower.caught_up
    assert (follower.number, follower.behind) == (1, 1)


def test_a_follower_knows_whether_the_sequencer_is_there():
    follower = Follower()
    assert not follower.hears(0)
    assert follower.handle(TimeToLook(), 0) == [AskChanges(0, b"", waits=False)]
    follower.handle(ChangesCame(0, 0, ()), 0)
    assert follower.hears(HEARTBEAT_NS)
    assert follower.caught_up
    assert not follower.hears(SILENT_NS)
