"""Principals: whom a credential belongs to, with their roles and the limits of their tenant."""

from dataclasses import dataclass
from enum import Enum

from serve.errors import NotPermitted


class Role(Enum):
    """What a credential allows. `ADMIN` includes the others."""

    INFER = "infer"
    OBSERVE = "observe"
    ADMIN = "admin"


EVERY_ROLE = frozenset(Role)
#: Roles of callers on a port that asks for no credentials and is not the host's own.
CLIENT_ROLES = frozenset((Role.INFER, Role.OBSERVE))


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant, with the limits that are checked before a request becomes a task."""

    name: str
    #: The most urgent priority that its requests may have; None for any.
    highest_priority: int | None = None
    #: Smallest `qos_target_us` that its requests may ask for; None for any.
    min_qos_target_us: int | None = None

    def require(self, tenant: str | None, priority: int, qos_target_us: int | None) -> None:
        """Raise NotPermitted when a request asks for more than the tenant may.

        Args:
            tenant: The request's parameter `tenant`; None or empty when it has none.
            priority: Its parameter `priority`, 0 when it has none.
            qos_target_us: Its parameter `qos_target_us`; None when it has none.
        """
        if tenant and tenant != self.name:
            raise NotPermitted(
                f"parameter 'tenant': '{tenant}' is not the tenant of this credential, "
                f"'{self.name}'"
            )
        highest = self.highest_priority
        if highest is not None and 0 < priority < highest:
            raise NotPermitted(
                f"parameter 'priority': {priority} is more urgent than {highest}, the most urgent "
                f"that tenant '{self.name}' may use"
            )
        smallest = self.min_qos_target_us
        if smallest is not None and qos_target_us is not None and qos_target_us < smallest:
            raise NotPermitted(
                f"parameter 'qos_target_us': {qos_target_us} is less than {smallest}, the smallest "
                f"that tenant '{self.name}' may ask for"
            )


@dataclass(frozen=True, slots=True)
class Principal:
    """Whom a call comes from."""

    #: Empty when nobody is told apart.
    name: str
    roles: frozenset[Role]
    #: None: the request names its tenant as it likes.
    tenant: Tenant | None = None
    #: Why the call's credentials are not accepted; empty when they are, or none are needed.
    problem: str = ""

    @property
    def is_admin(self) -> bool:
        """True when it may do everything."""
        return Role.ADMIN in self.roles


#: Callers of a server that tells nobody apart.
ANYBODY = Principal("", EVERY_ROLE)
#: Whoever may open the admin socket's file.
ADMINISTRATOR = Principal("admin socket", EVERY_ROLE)
#: The server itself.
SERVER = Principal("server", EVERY_ROLE)
