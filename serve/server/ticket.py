"""One request on its way through the server, with or without a thread that serves it.

A request that came as a message has a thread from the transport, which waits here
(`WaitingTicket`). When the scheduler says so, that same thread stages the request's tensors, so
that preparing the next group needs no thread of its own and no hand-over. Then it waits for the
answer. A request that the front has staged (`PlainTicket`) needs no thread: the driver's thread
answers it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from serve.core.events import Event, PrepareFailed, TaskPrepared
from serve.core.types import (
    Completed,
    Failed,
    FailReason,
    Outcome,
    Rejected,
    RejectReason,
    Sized,
    Task,
    TaskId,
)
from serve.errors import InvalidInput, NotReady, QueueFull
from serve.obs.record import RequestRecord
from serve.server import clock
from serve.server.api import InferResult
from serve.server.lane_run import LaneRun
from serve.server.outcomes import error_of
from serve.server.request_inputs import RequestInputs
from serve.server.split import Outputs, Split, put_together

#: Answers the client of a ticket, given how its task ended; raises nothing.
Answer = Callable[["PlainTicket", Outcome], None]

#: Reasons whose message is about the request's model, which the client knows by another name.
_OF_THE_MODEL = (FailReason.TIME_LIMIT, FailReason.QUARANTINED, RejectReason.QUARANTINED)


class TicketDriver(Protocol):
    """The driver as tickets see it. Any thread may call any method."""

    def handle(self, event: Event) -> None:
        """Give the scheduler an event and carry out its commands."""
        ...

    def cancel(self, task_id: TaskId) -> None:
        """Cancel a task, unless it has ended."""
        ...

    def sized(self, exact: Callable[[], Sized]) -> Sized:
        """Return what `exact` returns under the lock, to which estimates belong."""
        ...

    def answered(
        self, ticket: "RequestTicket", outcome: Outcome, answered_ns: int
    ) -> RequestRecord:
        """Return the record of an answered request, and keep it."""
        ...

    def release(self, ticket: "RequestTicket", outcome: Outcome | None) -> None:
        """Note that the serving thread is done with the ticket, and how the task ended."""
        ...

    def answer_soon(self, ticket: "PlainTicket", outcome: Outcome) -> None:
        """Have the driver's thread answer and release the ticket. Under the lock."""
        ...


class JointRequest(NamedTuple):
    """A request for several models: its id, and the model of each task."""

    uid: str
    models: Mapping[TaskId, str]


class RequestTicket(ABC):
    """A request on its way; the driver calls methods marked "Driver" under its lock."""

    def __init__(
        self, driver: TicketDriver, inputs: RequestInputs, task: Task, request_uid: str
    ) -> None:
        """The ticket owns `inputs` from now on and releases them."""
        self.call = inputs.call
        self.entry = inputs.entry
        self.inputs = inputs
        self.task = task
        self.request_uid = request_uid
        #: The joint request that it is a part of; None for any other.
        self.joint: JointRequest | None = None
        #: Rows and columns of the output, which the lane tells with the end of the task.
        self.output_shape = (0, 0)
        #: Values of the outputs that are no finite numbers, which the lane tells too.
        self.nonfinite_values = 0
        #: The run it was launched in last; None until a lane is told to run it.
        self.run: LaneRun | None = None
        #: How long the answer waited for parts that other servers run.
        self.parts_ns = 0
        #: The server had been idle for a while when it came, and no other came since.
        self.alone = False
        self._driver = driver
        #: The inputs are released when the answer was read and no lane touches them any more.
        self._holds = 2

    def cancel(self) -> None:
        """Cancel the request: its client went away. Any thread, any number of times."""
        self._driver.cancel(self.task.task_id)

    @abstractmethod
    def command_prepare(self) -> Event | None:
        """Have the inputs staged; return the event for it when they are now. Driver."""

    @abstractmethod
    def command_answer(self, outcome: Outcome) -> None:
        """Have the request answered. Driver."""

    def release(self) -> None:
        """Give up one of the two holds on the inputs; the last one releases them. Driver."""
        self._holds -= 1
        if not self._holds:
            self.inputs.release()
            # The run names its members: with it, only the collector would free the message.
            self.run = None

    def _told(self, outcome: Outcome) -> Outcome:
        """Return the outcome in words for the client, who knows the model by another name."""
        if isinstance(outcome, Rejected) and outcome.task_id is not None and self.joint is not None:
            model = self.joint.models[outcome.task_id]
            return replace(outcome, message=f"model {model}: {outcome.message}")
        if isinstance(outcome, Failed | Rejected) and outcome.reason in _OF_THE_MODEL:
            message = f"model {self.entry.spec.key}: {outcome.message}"
            if outcome.reason is FailReason.TIME_LIMIT:
                own = "" if self.entry.limits.run_ns is None else ", model.max_run_s"
                message += f" (server.max_run_s{own})"
            return replace(outcome, message=message)
        return outcome


class WaitingTicket(RequestTicket):
    """A request whose thread waits for the end; implements ``api.Ticket``."""

    def __init__(
        self,
        driver: TicketDriver,
        inputs: RequestInputs,
        task: Task,
        request_uid: str,
        orders: "SimpleQueue[Order] | None" = None,
    ) -> None:
        """The ticket owns `inputs` from now on and releases them.

        Its thread hears of it through `orders`; None for a queue of its own.
        """
        super().__init__(driver, inputs, task, request_uid)
        self._orders: SimpleQueue[Order] = SimpleQueue() if orders is None else orders

    def result(self) -> InferResult:
        """See ``api.Ticket``."""
        try:
            while (outcome := self._orders.get()[1]) is None:
                self.prepare()
            return self.end(outcome)
        finally:
            if self.call.split is not None:
                self.call.split.others.end()

    def cancel(self) -> None:
        """See ``RequestTicket``."""
        super().cancel()
        if self.call.split is not None:
            self.call.split.others.end()

    def command_prepare(self) -> None:
        """Tell the waiting thread to prepare. Driver."""
        self._orders.put((self, None))

    def command_answer(self, outcome: Outcome) -> None:
        """Tell the waiting thread how the request ended. Driver."""
        self._orders.put((self, self._told(outcome)))

    def prepare(self) -> None:
        """Stage the inputs and tell the scheduler; for its thread."""
        task_id = self.task.task_id
        try:
            found = None
            if self.inputs.stage():
                found = self._driver.sized(lambda: self.inputs.exact(self.task))
                self.task = self.task.found(found)
        except InvalidInput as error:
            self._driver.handle(PrepareFailed(task_id, FailReason.INVALID_INPUT, str(error)))
        except QueueFull as error:
            self._driver.handle(PrepareFailed(task_id, FailReason.OUT_OF_MEMORY, str(error)))
        except NotReady as error:
            self._driver.handle(PrepareFailed(task_id, FailReason.ROWS_LOST, str(error)))
        except BaseException as error:
            # The scheduler must hear of every end, or the task would wait for ever.
            self._driver.handle(PrepareFailed(task_id, FailReason.MODEL_ERROR, repr(error)))
            self._driver.release(self, None)
            raise
        else:
            self._driver.handle(TaskPrepared(task_id, found))

    def end(self, outcome: Outcome) -> InferResult:
        """Return the result of the outcome, or raise a ServeError; once, for its thread."""
        try:
            outputs = None
            if isinstance(outcome, Completed):
                outputs = self.inputs.read_outputs(self.output_shape)
                if self.call.split is not None and outputs is not None:
                    outcome, outputs = self._put_together(outcome, outputs, self.call.split)
            record = self._driver.answered(self, outcome, clock.now_ns())
        finally:
            # Last, as it waits for the lock, which the thread that put the outcome may still hold.
            self._driver.release(self, outcome)
        if outputs is None:
            raise error_of(outcome)
        return InferResult(outputs, record, self.inputs.graph_state)

    def _put_together(
        self, outcome: Completed, mine: Outputs, split: Split
    ) -> tuple[Outcome, Outputs | None]:
        """Wait for the parts that other servers run; return the end of the whole request."""
        began_ns = clock.now_ns()
        answers = split.others.answers()
        self.parts_ns = clock.now_ns() - began_ns
        if not isinstance(answers, Sequence):
            return answers, None
        whole = put_together(split, mine, self.inputs.graph_state, answers)
        return (whole, None) if isinstance(whole, Failed) else (outcome, whole)


#: What the driver tells the thread of a ticket: None to prepare it, or how its task ended.
Order = tuple[WaitingTicket, Outcome | None]


class PlainTicket(RequestTicket):
    """A request that the front has staged; the driver's thread answers it."""

    def __init__(
        self,
        driver: TicketDriver,
        inputs: RequestInputs,
        task: Task,
        request_uid: str,
        answer: Answer,
    ) -> None:
        """The ticket owns `inputs` from now on and releases them."""
        super().__init__(driver, inputs, task, request_uid)
        self._answer = answer

    def command_prepare(self) -> Event:
        """Stage the inputs again at once: a run of them did not end. Driver."""
        task_id = self.task.task_id
        try:
            self.inputs.stage()
        except NotReady as error:
            return PrepareFailed(task_id, FailReason.LANE_LOST, str(error))
        return TaskPrepared(task_id)

    def command_answer(self, outcome: Outcome) -> None:
        """Have the driver's thread answer. Driver."""
        self._driver.answer_soon(self, self._told(outcome))

    def answer(self, outcome: Outcome) -> None:
        """Answer the client. For the driver's thread, without the lock, before `release`."""
        self._answer(self, outcome)

    def finished(self, outcome: Outcome) -> RequestRecord:
        """Return the record of the answer that is about to be sent, or raise a ServeError."""
        record = self._driver.answered(self, outcome, clock.now_ns())
        if not isinstance(outcome, Completed):
            raise error_of(outcome)
        return record
