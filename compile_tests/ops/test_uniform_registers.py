"""Machine code that reads uniform registers which nothing wrote is found; test_walks.py has what ptxas makes."""

import pytest

from compile_tests.helpers.uniform_registers import instructions, undefined_reads

DESCRIPTORS = """
        /*0000*/                   S2UR UR4, SR_CgaCtaId ;                    /* 0x00000000000479c3 */
                                                                              /* 0x000e220000008800 */
        /*0010*/                   ULEA UR4, UR4, UR4, 0x18 ;
        /*0020*/               @P0 BRA 0x60 ;
        /*0030*/                   {copy} ;
        /*0040*/                   UIADD3 UR18, UP0, {from}, 0x20, URZ ;
        /*0050*/                   UIADD3.X UR19, URZ, -0x3ffffff0, URZ, UP0, !UPT ;
        /*0060*/                   HGMMA.64x16x16.F32.BF16 R24, R76, gdesc[UR16].tnspB, RZ, !UPT ;
        /*0070*/              @!P1 BRA 0x30 ;
        /*0080*/                   EXIT ;
"""


def code(copy: str, source: str) -> str:
    return DESCRIPTORS.replace("{copy}", copy).replace("{from}", source)


@pytest.mark.parametrize("first", ["UMOV UR18, UR4", "ULDC.64 UR18, c[0x0][0x208]", "R2UR UR18, R3"])
def test_a_sum_of_what_was_copied_is_right(first: str) -> None:
    assert len(instructions(code(first, "UR18"))) == 9
    assert not undefined_reads(code(first, "UR18"))


def test_a_sum_without_the_copy_is_found() -> None:
    (line,) = undefined_reads(code("NOP", "UR7"))
    assert (line.address, line.name) == (0x40, "UIADD3")
    assert [line.address for line in undefined_reads(code("UMOV UR17, UR4", "UR7"))] == [0x40]


def test_a_register_that_is_only_written_from_itself_is_found() -> None:
    """The next turn of a loop reads what this one wrote, so that only a first turn outside of loops can be told."""
    text = code("NOP", "UR18").replace("@!P1 BRA 0x30", "NOP")
    assert [line.address for line in undefined_reads(text)] == [0x40]


def test_both_descriptors_of_a_product_are_read() -> None:
    text = code("UMOV UR18, UR4", "UR18").replace("R24, R76, gdesc[UR16].tnspB, RZ, !UPT", "R24, gdesc[UR16], R24")
    assert [line.name for line in undefined_reads(text)] == ["HGMMA.64x16x16.F32.BF16"]
