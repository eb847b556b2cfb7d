"""Entry of the process that exports traces, until the main process closes its socket or is gone."""

import logging
import queue
import signal
import socket
import sys
from contextlib import suppress

import msgspec
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExportResult

from serve.ipc.printed import log_to_pipe
from serve.ipc.signals import DRAINING, HANGUP, IGNORED
from serve.obs.log import setup_logging
from serve.obs.record import RequestRecord
from serve.server.tracing.sender import END_S, ExportCounts, ExportSettings
from serve.server.tracing.spans import GroupMates, spans_of
from serve.threads import Thread

_log = logging.getLogger(__name__)

#: Most requests that wait to be exported, and that are exported at once.
_MOST_WAITING, _MOST_AT_ONCE = 10_000, 256
#: Time for one export, with its repetitions.
_EXPORT_S = END_S * 0.8
_MOST_PACKET_BYTES = 1 << 16


class Exporter:
    """Reads records on one thread and exports their spans on another."""

    def __init__(self, settings: ExportSettings, records: socket.socket) -> None:
        """Connect to nobody yet."""
        self._socket = records
        self._waiting: queue.SimpleQueue[RequestRecord | None] = queue.SimpleQueue()
        self._counts = ExportCounts()
        #: Requests that came too fast; the reading thread counts them.
        self._left_out = 0
        self._failing = False
        self._mates = GroupMates()
        # The variables OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES count, too.
        self._resource = Resource.create({"service.version": settings.version})
        if str(self._resource.attributes["service.name"]).startswith("unknown_service"):
            self._resource = self._resource.merge(Resource({"service.name": "gnnserve"}))
        self._exporter = OTLPSpanExporter(endpoint=settings.endpoint, timeout=_EXPORT_S)

    def serve(self) -> None:
        """Export all that comes; returns when nothing comes any more and all is exported."""
        thread = Thread(target=self._read, name="records")
        thread.start()
        going = True
        while going:
            batch = [self._waiting.get()]
            with suppress(queue.Empty):
                while len(batch) < _MOST_AT_ONCE:
                    batch.append(self._waiting.get_nowait())
            going = None not in batch
            self._export([record for record in batch if record is not None])
        self._exporter.shutdown()

    def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(RequestRecord)
        with suppress(OSError):
            while packet := self._socket.recv(_MOST_PACKET_BYTES):
                if self._waiting.qsize() >= _MOST_WAITING:
                    self._left_out += 1
                else:
                    self._waiting.put(decoder.decode(packet))
        self._waiting.put(None)

    def _export(self, records: list[RequestRecord]) -> None:
        if records:
            # All that come are traced, those of a group mostly in one batch.
            self._mates.add(records, 1.0)
            spans = [
                span
                for record in records
                for span in spans_of(record, 1.0, self._resource, self._mates.links(record))
            ]
            good = self._exporter.export(spans) is SpanExportResult.SUCCESS
            if good:
                self._counts.exported += len(records)
            else:
                self._counts.lost += len(records)
            if good is self._failing:
                self._failing = not good
                (_log.info if good else _log.error)(
                    "traces are %s", "exported again" if good else "lost: the endpoint takes none"
                )
        told = ExportCounts(self._counts.exported, self._counts.lost + self._left_out)
        with suppress(OSError):
            self._socket.send(msgspec.msgpack.encode(told), socket.MSG_DONTWAIT)


def main() -> None:
    """Export with the settings in argv, as JSON."""
    settings = msgspec.json.decode(sys.argv[1], type=ExportSettings)
    # A service manager signals all processes; the main process closes the socket when it stops.
    for number in (*DRAINING, HANGUP, *IGNORED):
        signal.signal(number, signal.SIG_IGN)
    if settings.log_to_pipe:
        log_to_pipe(sys.stderr.fileno(), settings.log_level)
    else:
        setup_logging(level=settings.log_level)
    # It tells of every export that fails.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    with socket.socket(fileno=settings.records_fd) as records:
        Exporter(settings, records).serve()


if __name__ == "__main__":
    main()
