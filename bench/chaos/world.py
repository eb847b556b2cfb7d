"""What a chaos run serves: repository, held graph, credentials, and the answers by plain PyG.

Everything is made before the server starts, so that the answers come from files that no fault has
touched. ``expected.npz`` holds them for the checker: `MODEL/VERSION/CASE` for tensors of a case,
and `MODEL/VERSION/held/STATE` for all nodes of the held graph, whose features are in one of
``STATES`` states: version v of the graph has state v % STATES.
"""

import hashlib
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bench.chaos import chaos_models
from bench.chaos.chaos_models import FEATURES
from bench.kit.result import ROOT
from serve.access.tokens import TenantLimits, Token, TokensFile, hash_of, new_token, write_tokens
from serve.lane.models.loader import LoadedModel, load_model
from serve.models.repository import WEIGHTS_FILE, find
from serve.models.writer import write_model
from serve.wire.messages import Array

#: Models that answer, whatever happens.
DEMO = ("gcn", "sage", "gin", "gat")
GOOD = (*DEMO, "in_place")
BAD = "misbehaving"
#: Models that bring their source code.
WITH_SOURCE = ("in_place", BAD)
#: Good models of which a second version comes and goes.
ROLLED = ("gcn", "sage")
CASES, STATES, TENANTS = 24, 4, 8
HELD, HELD_NODES, HELD_EDGES = "held", 300, 1200
#: Nodes of the held graph whose features change.
CHANGED = 100
#: A step of the wall clock, in seconds, and when a token expires: less than such a step ahead.
STEP_S, EXPIRES_S = 86_400, 43_200


@dataclass(frozen=True)
class World:
    """Folders and files of one chaos run."""

    folder: Path

    @property
    def repository(self) -> Path:
        """Folder of the models that the server reads."""
        return self.folder / "models"

    @property
    def scratch(self) -> Path:
        """Folder for the server's temporary files."""
        return self.folder / "tmp"

    @property
    def later(self) -> Path:
        """Folder of the second versions, from where they are copied."""
        return self.folder / "later"

    @property
    def tokens(self) -> list[str]:
        """Tokens of the tenants, then of who expires, the visitor and the administrator."""
        return (self.folder / "tokens.txt").read_text().split()

    @property
    def expiring(self) -> str:
        """Token that expires before the next day."""
        return self.tokens[-3]

    @property
    def visitor(self) -> str:
        """Token of an observer that is taken away now and then."""
        return self.tokens[-2]

    @property
    def admin(self) -> str:
        """Token of the administrator."""
        return self.tokens[-1]

    @property
    def region_name(self) -> str:
        """With what the names of its clients' shared memory begin."""
        digest = hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()
        return f"gnnserve-chaos-{digest[:12]}-"

    @property
    def authority(self) -> Path:
        """Certificate of the authority that clients trust."""
        return self.folder / "authority.crt"

    @property
    def certificate(self) -> tuple[Path, Path]:
        """The server's certificate and its key."""
        return self.folder / "server.crt", self.folder / "server.key"

    def weights(self, model: str, version: int = 1) -> Path:
        """Return the weights file of a version in the repository."""
        return self.repository / model / str(version) / WEIGHTS_FILE


@cache
def case(number: int) -> tuple[Array, Array]:
    """Return x float32 [N, 32] and edge_index int64 [2, E] of a case, to read; sizes differ."""
    rng = np.random.default_rng(number)
    nodes = int(rng.integers(2, 400))
    x = rng.standard_normal((nodes, FEATURES), dtype=np.float32)
    edges = rng.integers(0, nodes, (2, 4 * nodes))
    x.flags.writeable = edges.flags.writeable = False
    return x, edges


def held_features(state: int) -> Array:
    """Return the features that the changed nodes of the held graph have in a state."""
    rng = np.random.default_rng(1000 + state)
    return rng.standard_normal((CHANGED, FEATURES), dtype=np.float32)


def make_world(folder: Path) -> World:
    """Write everything into an empty folder."""
    world = World(folder)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name in DEMO:
        shutil.copytree(ROOT / "configs" / "models" / name, world.repository / name)
    for name, module in {
        "in_place": chaos_models.in_place(),
        BAD: chaos_models.misbehaving(),
    }.items():
        inside = write_model(world.repository, name, module, factory=f"./model.py:{name}", args={})
        shutil.copy(chaos_models.__file__, inside / "model.py")
    for name in ROLLED:
        shutil.copytree(world.repository / name, world.later / name)
        (world.later / name / "1").rename(world.later / name / "2")
        change_weights(world.later / name / "2" / WEIGHTS_FILE, seed=2)
    _write_held_graph(folder)
    _write_expected(world)
    _write_credentials(folder)
    return world


def change_weights(path: Path, seed: int) -> None:
    """Write other numbers of the same shapes over a weights file, in place."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: value.clone() for name, value in load_file(path).items()}
    for value in state.values():
        if value.is_floating_point():
            value *= 1 + 0.5 * torch.randn(value.shape, generator=generator)
    draft = path.with_name("draft")
    save_file(state, draft)
    path.write_bytes(draft.read_bytes())
    draft.unlink()


def _write_held_graph(folder: Path) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((HELD_NODES, FEATURES), dtype=np.float32)
    x[:CHANGED] = held_features(1)  # version 1
    edges = rng.integers(0, HELD_NODES, (2, HELD_EDGES))
    np.savez(folder / "held.npz", num_nodes=HELD_NODES, edge_index=edges, x=x)


def _write_expected(world: World) -> None:
    held = np.load(world.folder / "held.npz")
    found = {}
    for name in (*GOOD, BAD):
        for version in (1, 2) if name in ROLLED else (1,):
            root = world.repository if version == 1 else world.later
            model = load_model(find(root, name, str(version)))
            for number in range(CASES):
                found[f"{name}/{version}/{number}"] = _answer(model, *case(number))
            for state in range(STATES):
                x = held["x"].copy()
                x[:CHANGED] = held_features(state)
                answer = _answer(model, x, held["edge_index"])
                found[f"{name}/{version}/held/{state}"] = answer
    np.savez(world.folder / "expected.npz", **found)  # type: ignore[arg-type]


def _answer(model: LoadedModel, x: Array, edges: Array) -> Array:
    """Return what plain PyG answers; a model may change what it is given, so it gets copies."""
    answer: Array = model.run({"x": torch.tensor(x), "edge_index": torch.tensor(edges)}).numpy()
    return answer


def _write_credentials(folder: Path) -> None:
    """Write an authority, the server's certificate by it, and the tokens of all callers."""
    authority = folder / "authority.crt"
    _openssl(
        "req", "-x509", *_NEW_KEY, "-nodes", "-days", "30", "-subj", "/CN=chaos authority",
        "-keyout", authority.with_suffix(".key"), "-out", authority,
    )  # fmt: skip
    issue_certificate(World(folder))
    secret = folder / "tokens.txt"
    secret.touch(0o600)
    secret.write_text("\n".join(new_token() for _ in range(TENANTS + 3)))
    expires = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=EXPIRES_S)
    (folder / "expires.txt").write_text(expires.isoformat())
    write_credentials(World(folder), visitor=True)


def write_credentials(world: World, visitor: bool) -> None:
    """Write the tokens file, with the visitor's token or without."""
    *tenants, expiring, visiting, admin = world.tokens
    rows = [
        Token(principal=f"app{n}", roles=("infer",), hash=hash_of(token), tenant=f"tenant{n}")
        for n, token in enumerate(tenants)
    ]
    rows.append(
        Token(
            principal="short", roles=("infer",), hash=hash_of(expiring),
            expires=datetime.fromisoformat((world.folder / "expires.txt").read_text()),
        )
    )  # fmt: skip
    if visitor:
        rows.append(Token(principal="visitor", roles=("observe",), hash=hash_of(visiting)))
    rows.append(Token(principal="root", roles=("admin", "observe", "infer"), hash=hash_of(admin)))
    limits = tuple(
        TenantLimits(
            name=f"tenant{n}",
            weight=1.0 + n,
            max_in_queue=None if n else FLOOD_QUEUE,
            requests_per_s=None if n else FLOOD_RATE,
        )
        for n in range(TENANTS)
    )
    write_tokens(world.folder / "tokens.toml", TokensFile(token=tuple(rows), tenant=limits))


def issue_certificate(world: World) -> str:
    """Put a new certificate and its key in the place of the old; returns it in PEM."""
    certificate, key = world.certificate
    authority = world.authority
    with tempfile.TemporaryDirectory(dir=world.folder) as folder:
        draft = Path(folder)
        names = draft / "names"
        names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
        _openssl(
            "req", *_NEW_KEY, "-nodes", "-subj", "/CN=chaos",
            "-keyout", draft / "key", "-out", draft / "asked",
        )  # fmt: skip
        _openssl(
            "x509", "-req", "-in", draft / "asked", "-days", "30", "-extfile", names,
            "-CA", authority, "-CAkey", authority.with_suffix(".key"), "-CAcreateserial",
            "-out", draft / "certificate",
        )  # fmt: skip
        text = (draft / "certificate").read_text()
        (draft / "key").rename(key)
        (draft / "certificate").rename(certificate)
    return text


#: Limits of the tenant that floods: its most requests in the queue, and in a second.
FLOOD_QUEUE, FLOOD_RATE = 16, 200.0
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
