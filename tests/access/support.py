"""A tokens file with a credential of every kind, and what each may do."""

from datetime import UTC, datetime
from pathlib import Path

from serve.access.callers import Callers
from serve.access.tokens import TenantLimits, Token, TokensFile, hash_of, write_tokens

#: By the name of the credential: its token. `none` sends nothing, `wrong` is in no file.
TOKENS = {
    "wrong": "gnn_" + "w" * 43,
    "expired": "gnn_" + "e" * 43,
    "infer": "gnn_" + "i" * 43,
    "observe": "gnn_" + "o" * 43,
    "admin": "gnn_" + "a" * 43,
    "other tenant": "gnn_" + "t" * 43,
}
CREDENTIALS = ("none", *TOKENS)
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
TENANT = "first"


def write_file(folder: Path) -> Path:
    path = folder / "tokens.toml"
    late = hash_of(TOKENS["expired"])
    rows = [
        Token(principal="late", roles=("infer",), hash=late, expires=LONG_AGO),
        Token(principal="app", roles=("infer",), hash=hash_of(TOKENS["infer"]), tenant=TENANT),
        Token(principal="eye", roles=("observe",), hash=hash_of(TOKENS["observe"])),
        Token(principal="root", roles=("admin",), hash=hash_of(TOKENS["admin"])),
        Token(principal="guest", roles=("infer",), hash=hash_of(TOKENS["other tenant"])),
        Token(principal="box", roles=("infer",), certificate="box.example"),
    ]
    limits = TenantLimits(name=TENANT, highest_priority=2, min_qos_target_us=500)
    write_tokens(path, TokensFile(token=tuple(rows), tenant=(limits,)))
    return path


def callers_of(folder: Path, *, admin_on_port: bool = False) -> Callers:
    return Callers(write_file(folder), admin_on_port=admin_on_port)


def headers(credential: str) -> list[tuple[str, str]]:
    if credential == "none":
        return []
    return [("authorization", f"Bearer {TOKENS[credential]}")]
