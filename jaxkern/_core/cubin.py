"""What a compiled kernel uses, read from its cubin.

A cubin is a 64-bit ELF file. Section .nv.info is a list of attributes: two bytes of kind, two bytes of size, then the value;
the values read here are pairs (symbol, number). `cuobjdump --dump-resource-usage` prints the same numbers.
"""

import struct
import typing

_REGISTERS, _STACK = 0x2F04, 0x1204  # EIATTR_REGCOUNT and EIATTR_MIN_STACK_SIZE, both with values of a given size
_SIZED = 0x04  # the format of an attribute whose value has its size before it; all others are four bytes long
_LOCAL = (0x983, 0x387)  # LDL and STL: the low 12 bits of an instruction of 16 bytes, on every GPU since Volta
_RESERVED = 1024  # bytes of shared memory that the system has in each block; in the size of the section since Hopper


class Usage(typing.NamedTuple):
    """The resources of a kernel. `local`: its instructions that read or write local memory. Sizes are in bytes."""

    registers: int
    stack: int
    shared: int
    local: int


def usage(cubin: bytes, capability: int) -> Usage:
    """The resources of the only kernel in a cubin for GPUs of this compute capability."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    count, strings = struct.unpack_from("<HH", cubin, 60)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * k) for k in range(count)]
    names = sections[strings][4]
    registers = stack = shared = local = 0
    for at, _, _, _, begin, size in sections:
        name = cubin[names + at : cubin.index(b"\0", names + at)].decode()
        if name == ".nv.info":
            found = _attributes(cubin[begin : begin + size])
            registers, stack = max(found.get(_REGISTERS, [0])), max(found.get(_STACK, [0]))
        elif name.startswith(".nv.shared.") and not name.startswith(".nv.shared.reserved"):
            shared += size - (_RESERVED if capability >= 90 else 0)
        elif name.startswith(".text."):
            codes = struct.unpack_from(f"<{size // 8}Q", cubin, begin)[::2]
            local += sum(code & 0xFFF in _LOCAL for code in codes)
    return Usage(registers, stack, shared, local)


def _attributes(info: bytes) -> dict[int, list[int]]:
    """The numbers of each kind of attribute, one for each function of the cubin."""
    found: dict[int, list[int]] = {}
    at = 0
    while at + 4 <= len(info):
        kind, size = struct.unpack_from("<HH", info, at)
        sized = kind & 0xFF == _SIZED
        if sized and size == 8:
            found.setdefault(kind, []).append(struct.unpack_from("<I", info, at + 8)[0])
        at += 4 + size * sized
    return found
