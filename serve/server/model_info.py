"""Descriptions of models for clients: the protocol's metadata and the repository index."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from serve.inputs import INPUTS, Size
from serve.interface import interface_json
from serve.models.model_signature import Signature
from serve.models.repository import BrokenModel, ModelSpec, scan, version_order
from serve.server.api import OUTPUT, ModelInfo, TensorSpec, node_ids_of
from serve.server.catalogue import ModelCatalogue, ModelEntry

#: What is told of a version that is served and not in the repository any more.
_GONE = "its folder is gone: serves from memory until it is unloaded or the server ends"


class ModelInfos:
    """Describes the models of a catalogue, and those of its repository that are not served."""

    def __init__(
        self,
        catalogue: ModelCatalogue,
        *,
        graphs_of: Callable[[ModelEntry], Mapping[str, tuple[str, ...]]] = lambda entry: {},
        quarantine_reason: Callable[[str], str] = lambda key: "",
    ) -> None:
        """`graphs_of` names the resident graphs that a model can be asked about, and node types.

        `quarantine_reason` says why the model of a key is in quarantine; empty if it is not.
        """
        self._catalogue = catalogue
        self._graphs_of = graphs_of
        self._quarantine_reason = quarantine_reason

    def all(self) -> tuple[ModelInfo, ...]:
        """Describe all versions in the repository, and those served whose folder is gone."""
        infos = [self._of_found(found) for found in scan(self._catalogue.root)]
        there = {(info.name, info.version) for info in infos}
        for entry in self._catalogue.entries:
            info = self.of(entry)
            if (info.name, info.version) not in there:
                infos.append(replace(info, reason="; ".join(filter(None, (_GONE, info.reason)))))
        return tuple(sorted(infos, key=lambda info: (info.name, version_order(info.version))))

    def of(self, entry: ModelEntry) -> ModelInfo:
        """Describe a served model."""
        if entry.cached_info is None:
            factor = self._catalogue.factor_of(entry)
            entry.cached_info = _describe(entry, self._graphs_of(entry), factor)
        if reason := self._quarantine_reason(entry.key):
            return replace(entry.cached_info, state="UNAVAILABLE", reason=reason)
        return entry.cached_info

    def forget(self) -> None:
        """Describe all models anew, as the resident graphs have changed."""
        for entry in self._catalogue.entries:
            entry.cached_info = None

    def _of_found(self, found: ModelSpec | BrokenModel) -> ModelInfo:
        """Describe a version in the repository, or a model that has none."""
        name, version = found.name, found.version
        failure, entry = "", None
        if version is not None:
            failure = self._catalogue.failure(name, version)
            entry = self._catalogue.version(name, version)
        if entry is not None:
            info = self.of(entry)
            if failure and info.state == "READY":
                info = replace(info, reason=f"serves as it was, what is there now fails: {failure}")
            return info
        state, reason = self._catalogue.state(name)
        if isinstance(found, BrokenModel):
            state, reason = "UNAVAILABLE", self._catalogue.told(found.reason)
        elif failure and state == "UNAVAILABLE":
            reason = failure
        return ModelInfo(name, "" if version is None else str(version), state, reason)


def _describe(
    entry: ModelEntry, graphs: Mapping[str, tuple[str, ...]], qos_factor: float
) -> ModelInfo:
    """Describe a model that serves; `graphs` are those it can be asked about, by node types."""
    spec, signature = entry.spec, entry.signature
    inputs, outputs = _tensors(spec, signature)
    node_types = dict.fromkeys(of for types in graphs.values() for of in types)
    inputs += map(node_ids_of, node_types)
    properties = {
        "description": spec.description,
        "factory": spec.factory,
        "output_rows": "" if signature.rows == "declared" else signature.rows,
        "interface": "" if spec.interface is None else interface_json(spec.interface),
        "graphs": ", ".join(graphs),
        "deterministic": str(signature.deterministic).lower(),
        "replayed_up_to": str(entry.estimator.calibration.replay_most or ""),
        "gather_threads": str(entry.estimator.calibration.gather_threads or ""),
        "replay_reason": entry.estimator.calibration.replay_reason,
        "executor_reason": entry.executor_reason,
        "nonfinite_weights": ", ".join(spec.nonfinite_weights),
    }
    return ModelInfo(
        name=spec.name,
        version=str(spec.version),
        state="READY",
        reason=entry.estimator.calibration.remarks,
        inputs=tuple(inputs),
        outputs=outputs,
        interface=spec.interface,
        rows=None if signature.rows == "declared" else signature.rows,
        executor=entry.executor,
        weights_bytes=spec.weights_bytes,
        qos_factor=qos_factor,
        properties={key: value for key, value in properties.items() if value},
    )


def _tensors(
    spec: ModelSpec, signature: Signature
) -> tuple[list[TensorSpec], tuple[TensorSpec, ...]]:
    """Return the inputs and outputs, with -1 for sizes that a request determines."""
    if (interface := spec.interface) is not None:
        return [
            TensorSpec(slot.name, slot.datatype, slot.shape_for({}), slot.optional)
            for slot in interface.inputs
        ], tuple(
            TensorSpec(slot.name, slot.datatype, slot.shape_for({})) for slot in interface.outputs
        )
    sizes: dict[Size, int] = {"F": signature.num_features, "D": signature.edge_dim or -1}
    inputs = [
        TensorSpec(each.name, each.datatype, each.shape_of(sizes), each.optional)
        for each in map(INPUTS.__getitem__, spec.inputs)
    ]
    return inputs, (TensorSpec(OUTPUT, "FP32", (-1, signature.num_outputs)),)
