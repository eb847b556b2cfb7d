"""Trials: a model is built and run once, in a process of its own, without a server."""

from types import TracebackType

from serve.errors import ModelError, NotReady
from serve.ipc.shared_pool import SharedPool
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec
from serve.server.lanes.pool import LanePool
from serve.server.lanes.processes import stdout_as_stderr

#: Time limit of a trial.
_TRIAL_TIMEOUT_S = 120.0


class Trials:
    """Runs models on the processor; leaving the context ends all processes."""

    def __init__(self) -> None:
        self._shared = SharedPool(1 << 20)
        self._pool = LanePool(((),), self._shared, keep_bytes=0)

    def __enter__(self) -> "Trials":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.stop()
        self._shared.close()

    def run(self, spec: ModelSpec) -> Signature:
        """Build the model, load its weights, run it on small graphs, and return its signature.

        Raises ModelError when any of this fails, ends the process or takes too long.
        """
        try:
            with stdout_as_stderr(), self._pool.calibrator() as process:
                return process.try_out(spec, _TRIAL_TIMEOUT_S)
        except (NotReady, OSError, EOFError) as error:
            reason = str(error).removesuffix("; see the log")
            raise ModelError(f"model {spec.key}: {reason}") from error
