"""The decision on a call: a table of methods and the roles that allow them.

Both front ends of the gRPC port and the HTTP port ask ``decide``. A method is a path of gRPC, as
`/inference.GRPCInferenceService/ModelInfer`, or a method and path of HTTP, as `GET /metrics`. A
method without a row is the administrators' alone.
"""

from serve.access.principal import Principal, Role
from serve.errors import NotIdentified, NotPermitted, ServeError

#: Callers without credentials, and everybody else.
_FREE: frozenset[Role] = frozenset()
_INFER = frozenset((Role.INFER, Role.ADMIN))
_OBSERVE = frozenset((Role.OBSERVE, Role.ADMIN))
#: Clients need it to make their requests, observers to know what is served.
_EITHER = _INFER | _OBSERVE
_ADMIN = frozenset((Role.ADMIN,))

_STANDARD = {
    "ServerLive": _FREE,
    "ServerReady": _FREE,
    "ModelReady": _FREE,
    "ServerMetadata": _EITHER,
    "ModelMetadata": _EITHER,
    "ModelConfig": _EITHER,
    "ModelInfer": _INFER,
    "ModelStreamInfer": _INFER,
    "ModelStatistics": _OBSERVE,
    "RepositoryIndex": _OBSERVE,
    "RepositoryModelLoad": _ADMIN,
    "RepositoryModelUnload": _ADMIN,
    "SystemSharedMemoryStatus": _INFER,
    "SystemSharedMemoryRegister": _INFER,
    "SystemSharedMemoryUnregister": _INFER,
    "CudaSharedMemoryStatus": _INFER,
    "CudaSharedMemoryRegister": _INFER,
    "CudaSharedMemoryUnregister": _INFER,
    "TraceSetting": _ADMIN,
    "LogSettings": _ADMIN,
}
_OWN = {
    "Describe": _EITHER,
    "Estimate": _EITHER,
    "ListGraphs": _EITHER,
    "UpdateGraph": _ADMIN,
    "Report": _OBSERVE,
    "ListVersions": _OBSERVE,
    "ChangeVersions": _ADMIN,
    "SubmitJob": _ADMIN,
    "ListJobs": _ADMIN,
    "WatchJob": _ADMIN,
    "CancelJob": _ADMIN,
}
# `List` names every model.
_HEALTH = {"Check": _FREE, "Watch": _FREE, "List": _EITHER}

#: Ends of the paths below a model, and the method of the standard service that each is.
_OF_MODEL = {
    "": "ModelMetadata",
    "/ready": "ModelReady",
    "/config": "ModelConfig",
    "/stats": "ModelStatistics",
}
#: Paths of HTTP, and the method of the standard service that each is.
_SAME_AS = {
    "GET /v2": "ServerMetadata",
    "GET /v2/health/live": "ServerLive",
    "GET /v2/health/ready": "ServerReady",
    "GET /v2/models": "RepositoryIndex",
    "GET /v2/models/stats": "ModelStatistics",
    "POST /v2/repository/index": "RepositoryIndex",
    "POST /v2/repository/models/{model}/load": "RepositoryModelLoad",
    "POST /v2/repository/models/{model}/unload": "RepositoryModelUnload",
    "GET /v2/systemsharedmemory/status": "SystemSharedMemoryStatus",
    "POST /v2/systemsharedmemory/unregister": "SystemSharedMemoryUnregister",
    "GET /v2/systemsharedmemory/region/{region}/status": "SystemSharedMemoryStatus",
    "POST /v2/systemsharedmemory/region/{region}/register": "SystemSharedMemoryRegister",
    "POST /v2/systemsharedmemory/region/{region}/unregister": "SystemSharedMemoryUnregister",
    **{
        f"GET /v2/models/{{model}}{version}{end}": method
        for version in ("", "/versions/{version}")
        for end, method in _OF_MODEL.items()
    },
    **{
        f"POST /v2/models/{{model}}{version}/infer": "ModelInfer"
        for version in ("", "/versions/{version}")
    },
    **{
        f"{verb} /predictions/{{model}}{version}": "ModelInfer"
        for verb in ("POST", "PUT")
        for version in ("", "/{version}")
    },
    **{
        f"{verb} {path}": method
        for verb in ("GET", "POST")
        for path, method in {
            "/v2/trace/setting": "TraceSetting",
            "/v2/models/{model}/trace/setting": "TraceSetting",
            "/v2/logging": "LogSettings",
            "/v2/cudasharedmemory/status": "CudaSharedMemoryStatus",
            "/v2/cudasharedmemory/unregister": "CudaSharedMemoryUnregister",
            "/v2/cudasharedmemory/region/{region}/status": "CudaSharedMemoryStatus",
            "/v2/cudasharedmemory/region/{region}/register": "CudaSharedMemoryRegister",
            "/v2/cudasharedmemory/region/{region}/unregister": "CudaSharedMemoryUnregister",
        }.items()
    },
}

#: Roles of which one is needed, by method; none are needed where there are none.
ROLES: dict[str, frozenset[Role]] = {
    **{f"/inference.GRPCInferenceService/{name}": roles for name, roles in _STANDARD.items()},
    **{f"/gnnserve.v1.GnnServe/{name}": roles for name, roles in _OWN.items()},
    **{f"/grpc.health.v1.Health/{name}": roles for name, roles in _HEALTH.items()},
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _EITHER,
    **{path: _STANDARD[name] for path, name in _SAME_AS.items()},
    "GET /v2/repository/versions": _OWN["ListVersions"],
    "GET /v2/repository/models/{model}/versions": _OWN["ListVersions"],
    "POST /v2/repository/models/{model}/versions": _OWN["ChangeVersions"],
    "GET /metrics": _OBSERVE,
    "GET /report": _OBSERVE,
    "GET /report.json": _OBSERVE,
    # A browser asks for a token when it opens the page, and sends it with what the page asks for.
    "GET /": _OBSERVE,
    "GET /live/assets/{asset}": _FREE,
    "GET /live/events": _OBSERVE,
    "GET /live/requests": _OBSERVE,
    "GET /live/requests/{uid}": _OBSERVE,
    # The page of the documentation is the same for every server; what it shows is not.
    "GET /docs": _FREE,
    "GET /docs/{asset}": _FREE,
    "GET /openapi.json": _EITHER,
}


def decide(method: str, caller: Principal) -> ServeError | None:
    """Return None when `caller` may call `method`, else the error that it gets.

    The error is NotIdentified without credentials that the server accepts, and NotPermitted when
    their roles do not allow the call.
    """
    needed = ROLES.get(method, _ADMIN)
    if not needed or not needed.isdisjoint(caller.roles):
        return None
    if caller.problem:
        return NotIdentified(caller.problem)
    wanted = " or ".join(role.value for role in Role if role in needed and role is not Role.ADMIN)
    have = ", ".join(role.value for role in Role if role in caller.roles) or "none"
    who = f"'{caller.name}'" if caller.name else "a caller without credentials"
    where = "" if wanted else ", which the admin socket has, and the port with auth.admin_on_port"
    return NotPermitted(f"{method}: role {wanted or 'admin'} is needed{where}; {who} has: {have}")
