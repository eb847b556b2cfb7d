"""One request on its way through the server, from the thread that serves it.

The thread that got the request from the transport waits here. When the scheduler says so, that
same thread prepares the request's tensors, so that preparing the next group needs no thread of
its own and no hand-over; then it waits for the answer.
"""

from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from serve.core.events import PrepareFailed, TaskPrepared
from serve.core.types import (
    Completed,
    Failed,
    FailReason,
    Outcome,
    Rejected,
    RejectReason,
    Sized,
    Task,
)
from serve.errors import InvalidInput, InvariantViolation, QueueFull
from serve.estimate.estimator import NARROW_EDGE_SPARES_BYTES
from serve.ipc.messages import Part
from serve.ipc.shared_pool import Block
from serve.server import clock
from serve.server.api import InferCall, InferResult
from serve.server.node_requests import NodeRequest
from serve.server.node_sampling import PreparedNodes, derived_seed, prepare_nodes, stage_again
from serve.server.outcomes import error_of
from serve.server.report_rows import build_record
from serve.server.staging import Layout, Prepared, Staged, count_loops, stage, take_block

if TYPE_CHECKING:
    from serve.server.catalogue import ModelEntry
    from serve.server.driver import Driver
    from serve.server.launch import Launch


#: Reasons whose message is about the request's model, which the client knows by another name.
_OF_THE_MODEL = (FailReason.TIME_LIMIT, FailReason.QUARANTINED, RejectReason.QUARANTINED)


class RequestTicket:
    """Implements ``api.Ticket``; the driver calls the methods marked so under its lock."""

    def __init__(
        self,
        driver: "Driver",
        call: InferCall,
        entry: "ModelEntry",
        task: Task,
        source: "Layout | NodeRequest",
        request_uid: str,
        prepared: Prepared | None = None,
    ) -> None:
        """`source` says where the tensors go that came, or which nodes are to be sampled.

        `prepared`: the tensors that came are there.
        """
        self.call = call
        self.entry = entry
        self.task = task
        self.request_uid = request_uid
        self.arrived_unix_ns = clock.wall_of(call.arrived_ns)
        #: Shape of the output, told by the lane with the end of the task.
        self.output_shape = (0, 0)
        #: Self-loops among its edges, where they were counted.
        self.num_loops: int | None = None
        #: The run it was launched in last.
        self.run: Launch | None = None
        self._driver = driver
        self._asked = source if isinstance(source, NodeRequest) else None
        #: Known once it is sampled for a request by node id.
        self._layout = source if isinstance(source, Layout) else None
        #: What nodes are sampled with, and of which version of the graph.
        self.seed = None
        if self._asked is not None:
            self.seed = derived_seed(request_uid) if call.seed is None else call.seed
        #: The sample, once it is drawn.
        self._nodes: PreparedNodes | None = None
        self._staged: Staged | None = None
        self._block: Block | None = None
        if prepared is not None:
            self._staged, self._block = prepared.staged, prepared.staged.block
            self.num_loops = prepared.num_loops
        #: None: prepare now. Anything else is the answer.
        self._mailbox: SimpleQueue[Outcome | None] = SimpleQueue()
        #: The block goes back when the answer was read and no lane touches it any more.
        self._holds = 2
        self._launched = False
        #: Came to a server that was idle for a while, and none has come since.
        self.alone = False

    def result(self) -> InferResult:
        """See ``api.Ticket``."""
        outcome = None
        try:
            while (outcome := self._mailbox.get()) is None:
                self._prepare()
            output = self._read_output(outcome)
            record = build_record(self, outcome, clock.now_ns(), self._driver.scheduling)
            self._driver.keep(self.task, record)
        finally:
            # Last: whoever put the outcome may still hold the lock that this takes.
            self._driver.unhold(self, outcome)
        if output is None:
            raise error_of(outcome)
        return InferResult(output, record)

    def cancel(self) -> None:
        """See ``api.Ticket``."""
        self._driver.cancel(self.task.task_id)

    @property
    def graph_version(self) -> int:
        """Of the graph that was sampled; 0: none was."""
        return 0 if self._nodes is None else self._nodes.snapshot.version

    @property
    def input_bytes(self) -> int:
        """Size of the staged inputs."""
        return 0 if self._layout is None else self._layout.input_bytes

    @property
    def output_capacity_bytes(self) -> int:
        """Size of the output's place."""
        return 0 if self._staged is None else self._staged.output_capacity_bytes

    @property
    def spared_bytes(self) -> int:
        """What the staged inputs would take more if their edges were int64."""
        if self._layout is None or not self._layout.narrow_edges:
            return 0
        return NARROW_EDGE_SPARES_BYTES * self.task.num_edges

    @property
    def launched(self) -> bool:
        """Whether a lane was told to run it."""
        return self._launched

    def command_prepare(self) -> None:
        """Tell the waiting thread to prepare. Driver."""
        self._mailbox.put(None)

    def command_answer(self, outcome: Outcome) -> None:
        """Tell the waiting thread how the request ended. Driver."""
        if isinstance(outcome, Failed | Rejected) and outcome.reason in _OF_THE_MODEL:
            words = f"model {self.entry.spec.key}: {outcome.message}"
            if outcome.reason is FailReason.TIME_LIMIT:
                words += " (server.max_run_s)"
            outcome = replace(outcome, message=words)
        self._mailbox.put(outcome)

    def launch(self) -> Part:
        """What the lane needs of it, which runs from now on. Driver, after it was prepared."""
        staged = self._staged
        if staged is None:
            raise InvariantViolation(f"task {self.task.task_id} is launched but was not prepared")
        self._launched = True
        return Part(
            staged.inputs,
            staged.output_offset_bytes,
            staged.output_capacity_bytes,
            staged.gather,
        )

    def unhold(self) -> Block | None:
        """Give up one hold; the block to free when it was the last. Driver."""
        self._holds -= 1
        if self._holds:
            return None
        block, self._block = self._block, None
        return block

    def _prepare(self) -> None:
        task_id = self.task.task_id
        try:
            found = self._stage()
        except InvalidInput as error:
            self._driver.handle(PrepareFailed(task_id, FailReason.INVALID_INPUT, str(error)))
        except QueueFull as error:
            self._driver.handle(PrepareFailed(task_id, FailReason.OUT_OF_MEMORY, str(error)))
        except BaseException as error:
            # The scheduler must hear of every end, or the task would wait for ever.
            self._driver.handle(PrepareFailed(task_id, FailReason.MODEL_ERROR, repr(error)))
            raise
        else:
            self._driver.handle(TaskPrepared(task_id, found))

    def _stage(self) -> Sized | None:
        """Lay the inputs out in the pool; what the task is then, if it was not known before.

        A task that runs again is staged again, as it was: its model may have worked in place.
        """
        if self._asked is not None:
            return self._stage_nodes(self._asked)
        pool = self._driver.shared
        assert self._layout is not None
        if self._block is None:
            self._block = take_block(pool, self._layout)
        self._staged = stage(
            self.call, self._layout, pool, self._block, check_finite=self._driver.check_finite
        )
        if self.num_loops is None and self.entry.estimator.counts_loops:
            self.num_loops = count_loops(self._staged, pool)
            return self._resize(self._without_loops)
        return None

    def _stage_nodes(self, asked: NodeRequest) -> Sized | None:
        """The same for the nodes' sample."""
        pool = self._driver.shared
        assert self.seed is not None
        if self._nodes is not None:
            stage_again(self._nodes, asked, self.seed, pool)
            return None
        self._nodes = nodes = prepare_nodes(asked, self.call, self.entry, self.seed, pool)
        self._block, self._layout, self._staged = nodes.staged.block, nodes.layout, nodes.staged
        self.num_loops = nodes.found.num_loops
        return self._resize(lambda: asked.exact(self.entry.estimator, nodes.found))

    def _resize(self, exact: Callable[[], Sized]) -> Sized:
        """Go on with what the task turned out to be."""
        found = self._driver.sized(exact)
        self.task = self.task.found(found)
        return found

    def _without_loops(self) -> Sized:
        """It was admitted as if any number of its edges were self-loops; now they are counted."""
        task = self.task
        size = task.num_nodes, task.num_edges
        assert self._layout is not None
        peak_bytes, reserve_bytes = self.entry.estimator.memory(
            *size, self.num_loops, narrow_edges=self._layout.narrow_edges
        )
        estimate = replace(task.estimate, peak_bytes=peak_bytes, reserve_bytes=reserve_bytes)
        return Sized(*size, estimate)

    def _read_output(self, outcome: Outcome) -> np.ndarray | None:
        """A copy of the output, as its place in the pool is given back."""
        if not isinstance(outcome, Completed) or self._staged is None:
            return None
        place = self._driver.shared.array(
            self._staged.output_offset_bytes, "float32", self.output_shape
        )
        return place.copy() if self._nodes is None else place[self._nodes.positions]
