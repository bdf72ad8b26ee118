"""Structs of kernel arguments, by name.

A struct is declared once, in C++, in a header of ffi/kernels. A plan gives its members by name; their order and their types
come from the declaration:

    SHAPE = Params("indexing/direct.cuh", "DirectShape")
    SHAPE(vectors=4, threads=4 * 100, by_vectors=4, by_positions=100)

Numbers become scalars of the type of the member, and dividers where it is a Divider or a FastDivmod. Pointers are buffers or
`launch.null`; arrays are sequences of all their elements. Members that are structs themselves are given as structs, and enumerations as
scalars. The members of a base class precede the others.
"""

import functools
import re
import typing

from jaxkern._core import launch, runtime
from jaxkern._core.define import divider, fast_divmod

_MAKERS = {
    "bool": launch.boolean,
    "int": launch.i32,
    "int32_t": launch.i32,
    "uint32_t": launch.u32,
    "int64_t": launch.i64,
    "uint64_t": launch.u64,
    "float": launch.f32,
    "double": launch.f64,
    "Divider": divider,
    "FastDivmod": fast_divmod,
}
_DIVIDERS = ("Divider", "FastDivmod")


class Params:
    """A struct of this name, declared in this header; it is read when the first one is made."""

    def __init__(self, header: str, name: str, base: typing.Optional["Params"] = None):
        """base: the base class, if the struct has one."""
        self.header, self.name, self.base = header, name, base

    def __call__(self, **values) -> launch.Struct:
        if values.keys() != self.members.keys():
            wrong = ", ".join(sorted(values.keys() ^ self.members.keys()))
            raise TypeError(f"{self.name} of {self.header}: missing or unknown members: {wrong}")
        members = []
        for name, type in self.members.items():
            given = values[name] if type.endswith("[]") else [values[name]]
            members += [_member(type.removesuffix("[]"), value) for value in given]
        return launch.struct(*members)

    @functools.cached_property
    def empty(self) -> launch.Struct:
        """Null pointers, zeros and divisors of one."""
        return self(**{n: launch.null if t == "*" else int(t in _DIVIDERS) for n, t in self.members.items()})

    @functools.cached_property
    def members(self) -> dict[str, str]:
        """The type of each member, "*" for pointers and a trailing "[]" for arrays."""
        text = re.sub(r"//.*", "", (runtime.kernels_folder() / self.header).read_text())
        pattern = rf"^(?:template <[^>]*> )?struct {self.name}(?: : (\w+))? \{{\n(.*?)^\}};"
        found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
        if found is None or found[1] != (self.base and self.base.name):
            raise ValueError(f"{self.header} declares no struct {self.name}")
        members = dict(self.base.members) if self.base else {}
        for line in found[2].splitlines():
            # A declaration, not a part of a member function: functions are declared behind all members.
            if "(" in line:
                break
            if line.startswith("  static constexpr "):
                continue
            if declared := re.fullmatch(r"  (?:const )?([\w<>]+\*?) (.+);\s*", line):
                for name, array in re.findall(r"(\*?\w+)((?:\[[^]]+\])*)", declared[2]):
                    kind = "*" if "*" in declared[1] + name else declared[1]
                    members[name.lstrip("*")] = f"{kind}[]" if array else kind
            elif line.strip():
                raise ValueError(f"{self.header}: {self.name} has a member that a plan cannot give: {line.strip()}")
        return members


def _member(type: str, value):
    if type in _MAKERS:
        return _MAKERS[type](value)
    pointer = isinstance(value, launch.Buffer) or value is launch.null
    wanted = pointer if type == "*" else isinstance(value, (launch.Struct, launch.Scalar)) and not pointer
    if not wanted:
        raise TypeError(f"a {'pointer' if type == '*' else type} cannot be {value}")
    return value
