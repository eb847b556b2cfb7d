"""Sending of requests by a client for threads, made from ``aio_inference``."""

import contextlib
import threading
from collections.abc import Mapping

from serve.client.errors import Cancelled, ClientError, InvalidRequest, NotFound, TimedOut
from serve.client.facts import JointInterface, ModelInterface
from serve.client.requests import Request
from serve.client.retries import TimeLimit
from serve.client.shared import SharedMemory
from serve.client.sync_connection import Transport
from serve.client.turns import Turns
from serve.pb import grpc_service_pb2 as pb
from serve.wire.messages import Array

#: Time limit for telling the server that the client closes.
_FORGET_S = 1.0


class Requester:
    """Sends requests, in messages or in shared memory, and knows what models take."""

    def __init__(
        self, connection: Transport, max_message_bytes: int, shared_memory_bytes: int
    ) -> None:
        """See ``Client`` for the two sizes."""
        self._connection = connection
        self._max_message_bytes = max_message_bytes
        self._shared_memory_bytes = shared_memory_bytes
        self._memory: SharedMemory | None = None
        self._registering = threading.Lock()
        self._interfaces: dict[tuple[str, str], Question] = {}

    def close(self) -> None:
        """Have the server forget the shared memory. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
            forget = pb.SystemSharedMemoryUnregisterRequest(name=memory.name)
            method = self._connection.standard.SystemSharedMemoryUnregister
            with contextlib.suppress(ClientError):
                self._connection.call(method, forget, TimeLimit(_FORGET_S), repeated=False)

    def send(self, request: Request, tensors: Mapping[str, Array], limit: TimeLimit) -> bytes:
        """Send `request` with `tensors`; returns the response."""
        try:
            if self._shared_memory_bytes:
                return self._infer_shared(request, tensors, limit)
            return self._infer(request, tensors, limit)
        except InvalidRequest:
            # Perhaps another version of the model was loaded.
            for key in request.models:
                self._interfaces.pop(key, None)
            raise

    def _infer(self, request: Request, tensors: Mapping[str, Array], limit: TimeLimit) -> bytes:
        """Send `request` with `tensors` in the message; returns the response."""
        message = request.encode(tensors, self._max_message_bytes)
        connection = self._connection
        response: bytes = connection.call(
            connection.infer, message, limit, repeated=request.retry, graph=request.graph or ""
        )
        return response

    def _infer_shared(
        self, request: Request, tensors: Mapping[str, Array], limit: TimeLimit
    ) -> bytes:
        """Send `request` with `tensors` in shared memory if that has room; returns the response."""
        memory = self._registered(limit)
        places = memory.place(tensors)
        if places is None:
            return self._infer(request, tensors, limit)
        connection = self._connection
        try:
            message = request.encode(tensors, self._max_message_bytes, places)
            response: bytes = connection.call(
                connection.infer, message, limit, repeated=request.retry
            )
            return response
        except NotFound:
            if self._is_known(memory, limit):
                raise
        finally:
            memory.release(places)
        # The server was restarted and does not know the memory; the next request registers anew.
        memory.close()
        if self._memory is memory:
            self._memory = None
        return self._infer(request, tensors, limit)

    def _registered(self, limit: TimeLimit) -> SharedMemory:
        """Return the shared memory, which is created and registered on first use."""
        with self._registering:
            if self._memory is None:
                memory = SharedMemory(self._shared_memory_bytes)
                method = self._connection.standard.SystemSharedMemoryRegister
                try:
                    self._connection.call(method, memory.registration, limit, changes=True)
                except BaseException:
                    memory.close()
                    raise
                # The server has opened it; without a name nothing outlives the two processes.
                memory.unlink()
                self._memory = memory
            return self._memory

    def _is_known(self, memory: SharedMemory, limit: TimeLimit) -> bool:
        wanted = pb.SystemSharedMemoryStatusRequest(name=memory.name)
        method = self._connection.standard.SystemSharedMemoryStatus
        try:
            self._connection.call(method, wanted, limit)
        except NotFound:
            return False
        return True

    def needed(self, request: Request, limit: TimeLimit) -> ModelInterface | None:
        """Return what the model takes, None when the request does not depend on it."""
        if not request.needs_interface:
            return None
        found = [self.interface(*key, limit) for key in request.models]
        if not request.is_joint:
            return found[0]
        try:
            return JointInterface(found)
        except ValueError as error:
            raise InvalidRequest.local(str(error)) from error

    def interface(self, model: str, version: str, limit: TimeLimit) -> ModelInterface:
        """Return what the model takes; one caller asks the server, and the others wait for it."""
        key = model, version
        asked = self._interfaces.setdefault(key, Question())
        with asked.turn.taken(limit.remaining_s):
            if asked.failure is not None:
                # That of the call that this one has waited for.
                raise type(asked.failure)(asked.failure.code, asked.failure.message)
            if asked.found is None:
                method = self._connection.standard.ModelMetadata
                request = pb.ModelMetadataRequest(name=model, version=version)
                try:
                    found = self._connection.call(method, request, limit)
                except ClientError as error:
                    # A limit that was this caller's own says nothing to the others.
                    if not isinstance(error, TimedOut | Cancelled):
                        asked.failure = error
                        self._interfaces.pop(key, None)
                    raise
                asked.found = ModelInterface.of(found)
            return asked.found

    def forget(self, model: str) -> None:
        """Have the interface of `model` asked for again."""
        for key in [key for key in self._interfaces if key[0] == model]:
            self._interfaces.pop(key, None)


class Question:
    """The interface of one model, asked for by one caller at a time."""

    def __init__(self) -> None:
        self.turn = Turns(1, "questions about the model")
        self.found: ModelInterface | None = None
        self.failure: ClientError | None = None
