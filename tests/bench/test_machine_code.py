"""What nvcc makes of the kernels along edges: nothing spilled, enough reads in flight."""

import pytest

from bench.gpu.machine_code import compiled, nvcc, reads_in_flight

#: A multiprocessor has 65,536 registers: with so many a thread it holds 512 threads.
_MOST_REGISTERS = 128


def test_reads_count_until_the_first_is_used():
    listing = """
        Function : rows
        /*0100*/  LDG.E R2, [R4.64] ;
        /*0110*/  LDG.E.128 R8, [R4.64] ;
        /*0120*/  IMAD.WIDE R6, R2, 0x4, R6 ;
        /*0130*/  LDG.E.128 R12, [R6.64] ;
        /*0140*/  FFMA R8, R12, R2, R8 ;
        /*0150*/  LDG.E.128 R12, [R6.64] ;
        Function : others
        /*0100*/  LDG.E.128.CONSTANT R12, [R6.64] ;
    """
    assert reads_in_flight(listing) == 2
    assert reads_in_flight("Function : none") == 0


@pytest.mark.skipif(nvcc() is None, reason="there is no nvcc")
@pytest.mark.parametrize(
    ("name", "least_reads"),
    [("sum 2", 8), ("sum, shuffled 2", 8), ("sum of pieces 2", 8), ("additive 1", 4)],
)
def test_kernels_read_ahead_and_spill_nothing(name, least_reads):
    found = compiled(name)
    assert found.spilled_bytes == 0
    assert found.registers <= _MOST_REGISTERS
    assert found.reads_in_flight is None or found.reads_in_flight >= least_reads
