"""Answers to a request for several models."""

import json
from collections.abc import Iterator, Mapping, Sequence

from serve.client.answers import Answer
from serve.client.errors import ClientError, error_for
from serve.wire.messages import Response

#: Between a model and one of its outputs or its facts.
_OF = "/"


class Answers(Mapping[str, Answer]):
    """The answer of each model, by its name as asked, in that order.

    A model that failed has a ``ClientError`` instead, which looking its answer up raises;
    `errors` holds those by name.
    """

    def __init__(
        self, found: Mapping[str, Answer | ClientError], request_id: str, joint_uid: str
    ) -> None:
        self._found = dict(found)
        #: As sent, or made by the server.
        self.request_id = request_id
        #: Common to the rows of the report of all models.
        self.joint_uid = joint_uid

    @classmethod
    def of(
        cls,
        response: Response,
        graph_nodes: Sequence[int] | None = None,
        graph_rows: Mapping[str, tuple[int, ...]] | None = None,
    ) -> "Answers":
        """Convert a decoded message; see ``Answer.of``."""
        parameters = response.parameters
        found: dict[str, Answer | ClientError] = {}
        for name in str(parameters["models"]).split(","):
            facts = json.loads(str(parameters[f"{name}{_OF}facts"]))
            if "status" in facts:
                retry_ms = facts.get("retry_after_ms")
                retry_s = None if retry_ms is None else retry_ms / 1000
                found[name] = error_for(facts["status"], facts["message"], retry_s)
                continue
            begin = f"{name}{_OF}"
            own = Response(
                name.partition(":")[0],
                facts["model_version"],
                response.request_id,
                {
                    output.removeprefix(begin): array
                    for output, array in response.outputs.items()
                    if output.startswith(begin)
                },
                facts,
            )
            found[name] = Answer.of(own, graph_nodes, graph_rows)
        return cls(found, response.request_id, str(parameters.get("joint_uid", "")))

    @property
    def errors(self) -> dict[str, ClientError]:
        """The errors of the models that failed, by name."""
        return {name: one for name, one in self._found.items() if isinstance(one, ClientError)}

    def __getitem__(self, model: str) -> Answer:
        found = self._found[model]
        if isinstance(found, ClientError):
            raise found
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        told = {n: type(o).__name__ for n, o in self._found.items()}
        return f"Answers({told})"
