"""What the processes of one server must know to tell callers apart."""

from pathlib import Path

import msgspec

from serve.access.callers import Callers
from serve.access.principal import CLIENT_ROLES, EVERY_ROLE


class AccessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """See the module; paths are absolute."""

    #: Path of the tokens file.
    tokens_file: str | None = None
    #: Callers without credentials may do everything, where none are needed.
    open_to_all: bool = True
    #: Clients show certificates.
    certificates: bool = False
    #: See ``AuthConfig``.
    admin_on_port: bool = False

    def callers(self, inside: str | None = None) -> Callers:
        """Return the callers; `inside` is the secret of this server's processes.

        Raises ConfigError when the tokens file cannot be used.
        """
        return Callers(
            None if self.tokens_file is None else Path(self.tokens_file),
            open_roles=EVERY_ROLE if self.open_to_all else CLIENT_ROLES,
            certificates=self.certificates,
            admin_on_port=self.admin_on_port,
            inside=inside,
        )
