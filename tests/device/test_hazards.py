"""The order checker: vector clocks against reachability in a graph of what comes first."""

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.device.hazards import HOST, CheckedEvent, HazardError, StreamOrder
from nanovllm.device.stream import Event, Span

SLOT, OTHER_SLOT = Span("slot", 0, 1), Span("slot", 1, 1)


@pytest.fixture
def order():
    """Three streams, and a slot that `a` has written."""
    order = StreamOrder()
    order.access("a", writes=[SLOT])
    return order


def wait_all(order, waiter, *streams):
    for stream in streams:
        order.wait(waiter, order.record(stream))


def test_a_stream_is_in_order_with_itself(order):
    order.access("a", reads=[SLOT])
    order.access("a", writes=[SLOT])
    order.access("a", reads=[SLOT], writes=[SLOT])


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("reader", ["b", HOST])
def test_read_after_write(order, reader, waits):
    if waits:
        wait_all(order, reader, "a")
        order.access(reader, reads=[SLOT])
    else:
        with pytest.raises(HazardError, match=f"{reader} reads slot 0 .* until a has written it"):
            order.access(reader, reads=[SLOT])


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("writer", ["b", HOST])
def test_write_after_write(order, writer, waits):
    if waits:
        wait_all(order, writer, "a")
        order.access(writer, writes=[SLOT])
    else:
        with pytest.raises(HazardError, match=f"{writer} writes slot 0 .* until a has written it"):
            order.access(writer, writes=[SLOT])


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("reader", ["b", HOST])
def test_write_after_read(order, reader, waits):
    """The host's reads need no wait: it has done them before it launches anything later."""
    wait_all(order, reader, "a")
    order.access(reader, reads=[SLOT])
    if waits:
        wait_all(order, "a", reader)
    if waits or reader == HOST:
        order.access("a", writes=[SLOT])
    else:
        with pytest.raises(HazardError, match=r"a writes slot 0 .* until b has read it"):
            order.access("a", writes=[SLOT])


@pytest.mark.parametrize("forgotten", [None, "b", "c"])
def test_a_write_comes_after_all_readers(order, forgotten):
    wait_all(order, "b", "a")
    wait_all(order, "c", "a")
    order.access("b", reads=[SLOT])
    order.access("c", reads=[SLOT])
    wait_all(order, "a", *({"b", "c"} - {forgotten}))
    if forgotten is None:
        order.access("a", writes=[SLOT])
    else:
        with pytest.raises(HazardError, match=f"until {forgotten} has read it"):
            order.access("a", writes=[SLOT])


def test_readers_need_not_wait_for_each_other(order):
    for reader in ("b", "c", HOST):
        wait_all(order, reader, "a")
        order.access(reader, reads=[SLOT])


def test_buffers_have_nothing_to_do_with_each_other(order):
    order.access("b", writes=[OTHER_SLOT, Span("staging", 0, 2), Span(("host", 0), 0, 1)])
    order.access("c", writes=[Span(("host", 1), 0, 1)])


def test_a_span_is_all_of_its_buffers(order):
    with pytest.raises(HazardError, match="slot 0"):
        order.access("b", writes=[Span("slot", 0, 2)])
    order.access("c", writes=[Span("slot", 2, 3)])
    for place in (2, 3, 4):
        with pytest.raises(HazardError, match=f"slot {place}"):
            order.access("b", reads=[Span("slot", place, 1)])
    order.access("b", writes=[Span("slot", 5, 1)])


def test_what_was_never_written_holds_nothing():
    with pytest.raises(HazardError, match="a reads slot 0, which holds nothing"):
        StreamOrder().access("a", reads=[SLOT])


def test_waits_are_transitive(order):
    wait_all(order, "b", "a")
    wait_all(order, "c", "b")
    order.access("c", reads=[SLOT])


def test_a_point_knows_nothing_that_came_after_it(order):
    early = order.record("b")
    wait_all(order, "b", "a")
    order.wait("c", early)
    with pytest.raises(HazardError):
        order.access("c", reads=[SLOT])


def test_a_point_does_not_cover_later_work(order):
    point = order.record("a")
    order.access("a", writes=[SLOT])
    order.wait("b", point)
    with pytest.raises(HazardError):
        order.access("b", reads=[SLOT])


def test_what_the_host_has_waited_for_all_later_work_knows(order):
    wait_all(order, HOST, "a")
    order.access("b", reads=[SLOT])
    order.access("c", reads=[SLOT])


def test_work_launched_before_the_host_waited_does_not_know(order):
    early = order.record("b")
    wait_all(order, HOST, "a")
    order.access("a", writes=[SLOT])
    order.wait("c", early)
    with pytest.raises(HazardError):
        order.access("c", reads=[SLOT])


class Point(Event):
    """A point that is passed when the test says so."""

    done = False

    def is_done(self):
        return self.done

    def synchronize(self):
        self.done = True

    def ms_since(self, start):
        return 7.0


def test_synchronize_orders_the_host(order):
    event = CheckedEvent(Point(), order.record("a"), order)
    event.synchronize()
    order.access(HOST, reads=[SLOT])


@pytest.mark.parametrize("done", [True, False])
def test_a_point_that_was_seen_passed_orders_the_host(order, done):
    event = CheckedEvent(Point(), order.record("a"), order)
    event.event.done = done
    assert event.is_done() == done
    if done:
        order.access(HOST, reads=[SLOT])
    else:
        with pytest.raises(HazardError):
            order.access(HOST, reads=[SLOT])


def test_events_measure_through_the_check(order):
    start, end = (CheckedEvent(Point(), order.record("a"), order) for _ in range(2))
    assert end.ms_since(start) == end.ms_since(start.event) == 7.0


# Random programs. An operation is launched by the host, in the order of the program.


class Record(NamedTuple):
    stream: str


class Wait(NamedTuple):
    waiter: str
    """A stream, or the host, which then waits at once."""
    place: int
    """Which of the points recorded so far, counted from the last."""


class Access(NamedTuple):
    user: str
    writes: bool
    span: Span
    reckless: bool
    """Whether it is done though it races; else a program leaves a racing access out."""


STREAMS = ["a", "b", "c"]
USERS = [*STREAMS, HOST]
SPANS = [Span("slot", 0, 1), Span("slot", 1, 1), Span("slot", 0, 2), Span("staging", 0, 1)]
OPS = st.one_of(
    st.builds(Record, st.sampled_from(STREAMS)),
    st.builds(Wait, st.sampled_from(USERS), st.integers(0, 3)),
    st.builds(
        Access,
        st.sampled_from(USERS),
        st.booleans(),
        st.sampled_from(SPANS),
        st.sampled_from([True, *[False] * 9]),
    ),
)


@dataclass
class Use:
    node: int
    writes: bool


class HappensBefore:
    """Operations as nodes of a graph, with an edge from what must be over to what begins then.

    Each has a node where the host launches it, all of which follow each other, and one where it is
    done: the same for the host's own operations.
    """

    def __init__(self):
        self.before = []  # for each node those with an edge to it
        self.last_launch = None
        self.last_work = {}
        self.points = []
        self.uses = {}

    def add(self, user, *after):
        launch = self._node(self.last_launch)
        self.last_launch = launch
        if user == HOST:
            self.before[launch] += after
            return launch
        work = self._node(launch, self.last_work.get(user), *after)
        self.last_work[user] = work
        return work

    def _node(self, *after):
        self.before.append([node for node in after if node is not None])
        return len(self.before) - 1

    def reaches(self, early, late):
        seen, open_nodes = set(), [late]
        while open_nodes:
            node = open_nodes.pop()
            if node == early:
                return True
            if node not in seen:
                seen.add(node)
                open_nodes += self.before[node]
        return False

    def races(self, node, op):
        """Return whether an access, done at `node`, is in no order with one before it."""
        for buffer in buffers_of(op.span):
            uses = self.uses.get(buffer, [])
            if not op.writes and not any(use.writes for use in uses):
                return True
            for use in uses:
                if (use.writes or op.writes) and not self.reaches(use.node, node):
                    return True
        return False

    def use(self, node, op):
        for buffer in buffers_of(op.span):
            self.uses.setdefault(buffer, []).append(Use(node, op.writes))


def buffers_of(span):
    return [(span.space, span.first + i) for i in range(span.num_buffers)]


def first_difference(ops, order):
    """Run a program up to its first race.

    Returns whether it had a race, and where checker and graph differ, None if nowhere.
    """
    graph, clocks = HappensBefore(), []
    for place, op in enumerate(ops):
        match op:
            case Record(stream):
                graph.points.append(graph.add(stream))
                clocks.append(order.record(stream))
            case Wait(waiter, back):
                if clocks:
                    point = max(0, len(clocks) - 1 - back)
                    graph.add(waiter, graph.points[point])
                    order.wait(waiter, clocks[point])
            case Access(user, writes, span, reckless):
                node = graph.add(user)
                races = graph.races(node, op)
                if races and not reckless:
                    continue
                try:
                    kind = "writes" if writes else "reads"
                    order.access(user, **{kind: [span]})
                    raised = False
                except HazardError:
                    raised = True
                if raised != races:
                    return races, (place, op, "race" if races else "no race")
                if races:
                    return True, None
                graph.use(node, op)
    return False, None


@settings(max_examples=400)
@given(st.lists(OPS, max_size=60))
def test_the_checker_finds_all_races_and_invents_none(ops):
    assert first_difference(ops, StreamOrder())[1] is None


def random_program(random):
    ops = []
    for _ in range(60):
        kind = random.randrange(3)
        if kind == 0:
            ops.append(Record(random.choice(STREAMS)))
        elif kind == 1:
            ops.append(Wait(random.choice(USERS), random.randrange(4)))
        else:
            user, span = random.choice(USERS), random.choice(SPANS)
            ops.append(Access(user, random.random() < 0.5, span, random.random() < 0.05))
    return ops


def num_differences(order_class, num_programs=300):
    random = Random(0)
    programs = [random_program(random) for _ in range(num_programs)]
    results = [first_difference(ops, order_class()) for ops in programs]
    num_races = sum(races for races, _ in results)
    assert num_races > 50
    assert num_programs - num_races > 50
    return sum(difference is not None for _, difference in results)


def test_many_programs():
    assert num_differences(StreamOrder) == 0


class ForgetsReads(StreamOrder):
    def access(self, user, reads=(), writes=()):
        super().access(user, reads, writes)
        for buffer in self._buffers.values():
            buffer.reads.clear()


class KnowsOnlyWhomItWaitedFor(StreamOrder):
    def record(self, stream):
        return {stream: super().record(stream)[stream]}


class HostTellsNobody(StreamOrder):
    def _tick(self, user):
        clock = self._clocks.setdefault(user, {})
        clock[user] = clock.get(user, 0) + 1
        return clock


class PointsKnowTheFuture(StreamOrder):
    def record(self, stream):
        return self._tick(stream)


class HostSeesAllThatIsLaunched(StreamOrder):
    def access(self, user, reads=(), writes=()):
        super().access(user, reads, writes)
        self.wait(HOST, self._clocks[user])


@pytest.mark.parametrize(
    "wrong",
    [
        ForgetsReads,
        KnowsOnlyWhomItWaitedFor,
        HostTellsNobody,
        PointsKnowTheFuture,
        HostSeesAllThatIsLaunched,
    ],
    ids=lambda wrong: wrong.__name__,
)
def test_control_a_wrong_checker_would_show(wrong):
    assert num_differences(wrong) > 0
