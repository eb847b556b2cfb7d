"""The program that `gnnserve import` prints asks a server for the model, as it is printed."""

import pytest

from bench.kit import gallery as entries
from bench.kit.gallery import BASIC, GALLERY
from serve.commands.import_model import Imported, client_snippet
from serve.lane.measure.probe_signature import probe_signature

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")


@pytest.mark.parametrize("name", [*GALLERY, *BASIC])
def test_the_printed_program_is_answered(gallery, server, name, capsys):
    loaded = gallery[1][name]
    found = Imported(spec=loaded.spec, signature=probe_signature(loaded), tensors=0, notes=())
    program = client_snippet(found, server.target)
    exec(compile(program, name, "exec"), {})
    printed = [line.split(" ", 1)[0] for line in capsys.readouterr().out.splitlines()]
    assert printed == [slot.name for slot in entries.interface(loaded).outputs]
