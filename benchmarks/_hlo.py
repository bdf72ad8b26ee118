"""The kernels of a program, from the text of its optimised HLO.

A kernel moves its operands and results. Slices, gathers, and updates in place count what they touch; a loop counts as often as it
runs, or once if that is not known; of a conditional, the larger branch counts. Workspace is what no other kernel reads.
"""

from __future__ import annotations

import dataclasses
import math
import re

COPIES = ("concatenate", "transpose", "copy", "reverse", "pad", "convert")
SLICES = ("slice", "dynamic-slice", "gather")
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that holds what is written
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
COLLECTIVES += ("ragged-all-to-all",)
VIEWS = ("bitcast", "get-tuple-element", "reshape")
FREE = (*VIEWS, "parameter", "constant", "tuple", "after-all", "partition-id", "replica-id", "opt-barrier", "iota")


@dataclasses.dataclass(frozen=True)
class Step:
    """A kernel, or a library's call. bytes: that one run moves. copy: how it is called if it only moves; launches: kernels."""

    name: str
    op: str
    bytes: int
    times: int = 1
    launches: int = 1
    copy: str = ""
    workspace: int = 0

    @property
    def total(self) -> int:
        return self.bytes * self.times


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    sizes: tuple[int, ...]  # bytes of its results
    op: str
    operands: tuple[str, ...]
    inside: str  # its parentheses
    rest: str
    root: bool

    def called(self, key: str) -> list[str]:
        found = re.search(key + r"=\{?((?:%?[\w.\-]+(?:, )?)+)", self.rest)
        return [n.strip().lstrip("%") for n in found[1].split(",") if n.strip().startswith("%")] if found else []


def _bytes(shape: str) -> tuple[int, ...]:
    bits = lambda t: {"pred": 8, "token": 0}.get(t) or int((re.search(r"\d+", t) or "0")[0]) * (2 if t == "c" else 1)
    count = lambda dims: math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d)
    return tuple(-(-bits(t) * count(d) // 8) for t, d in re.findall(r"([a-z]\w*)\[([\d,<=]*)\]", shape))


def _closed(text: str) -> int:
    """Where the parenthesis that opens `text` closes."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.end()
    return len(text)


def _instruction(root, name, text) -> _Instruction:
    end = _closed(text) if text[0] == "(" else text.index(" ")
    shape, text = text[:end], text[end:].lstrip()
    op, start = text[: text.index("(")], text.index("(")
    end = start + _closed(text[start:])
    if op.endswith("-start"):  # ((operands), results, ...) for a copy: (result, operand, ...)
        shape = shape[1 + _closed(shape[1:]) :] if shape.startswith("((") else shape
        first = re.match(r"\W*(\([^()]*\)|[a-z]\w*\[[^\]]*\])", shape)
        shape = first[1] if first else shape
    inside = text[start:end]
    return _Instruction(
        name, _bytes(shape), op, tuple(re.findall(r"%([\w.\-]+)", inside)), inside, text[end:], bool(root)
    )


def _computations(text: str) -> dict[str, dict[str, _Instruction]]:
    found: dict[str, dict[str, _Instruction]] = {}
    current: dict[str, _Instruction] = {}
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            current = found["ENTRY" if head[1] else head[2]] = {}
        elif own := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", line):
            current[own[2]] = _instruction(*own.groups())
    return found


def steps(text: str) -> list[Step]:
    """The kernels of a program, from the text of its optimised HLO."""
    return _Reader(text).steps("ENTRY")


class _Reader:
    def __init__(self, text: str):
        self.computations = _computations(text)

    def steps(self, name: str) -> list[Step]:
        inside, found = self.computations[name], []
        for i in inside.values():
            op = i.op.removesuffix("-start")
            if op in FREE or op.endswith(("-done", "-update")):
                continue
            if op == "while":
                count = re.search(r'"known_trip_count":\{"n":"(\d+)"', i.rest)
                times = int(count[1]) if count else 1
                inner = [s for key in ("body", "condition") for n in i.called(key) for s in self.steps(n)]
                found += [dataclasses.replace(s, times=s.times * times) for s in inner]
            elif op == "conditional":
                branches = i.called("branch_computations") or [
                    *i.called("true_computation"),
                    *i.called("false_computation"),
                ]
                found += max(map(self.steps, branches), key=lambda b: sum(s.total for s in b))
            elif op in ("call", "async"):
                found += [s for n in i.called("to_apply" if op == "call" else "calls") for s in self.steps(n)]
            else:
                found.append(self._step(i, op, inside))
        return found

    def _step(self, i: _Instruction, op: str, around: dict[str, _Instruction]) -> Step:
        size = lambda n: sum(around[n].sizes) if n in around else 0
        operands = dict.fromkeys(i.operands)
        if op in COLLECTIVES:
            return Step(i.name, op, max(sum(map(size, operands)), sum(i.sizes)))
        if op == "custom-call":
            return self._call(i, operands, size, around)
        if op == "fusion":
            body = self.computations[i.called("calls")[0]]
            numbers = {p.name: int(p.inside[1:-1]) for p in body.values() if p.op == "parameter"}
            calls = [j for j in body.values() if j.op == "custom-call"]
        else:  # as a fusion of itself
            body = {n: around[n] for n in operands if n in around} | {i.name: dataclasses.replace(i, root=True)}
            numbers, calls = {n: i.operands.index(n) for n in operands}, []
        moved = self._reads(body, numbers, i.operands, size) + self._writes(body, numbers)
        ops = {j.op for j in body.values() if j.name not in numbers} - {*FREE, "broadcast"}
        moves = bool(ops) and ops <= {*COPIES, *SLICES, "dynamic-update-slice"}
        copy = next((c for c in (*COPIES, *SLICES, "dynamic-update-slice") if c in ops), "") if moves else ""
        launches = sum(map(_launches, calls)) or 1
        return Step(i.name, op, moved, launches=launches, copy=copy)

    def _call(self, i, operands, size, around) -> Step:
        """Results that nothing reads are workspace. Where a result overwrites an operand, no more than the other operands moves."""
        used = {int(m[1]) for j in around.values() if i.name in j.operands and (m := re.search(r"index=(\d+)", j.rest))}
        whole = any(i.name in j.operands and j.op != "get-tuple-element" for j in around.values()) or i.root
        sizes = [s for k, s in enumerate(i.sizes) if whole or k in used or len(i.sizes) == 1]
        target = re.search(r'custom_call_target="([^"]*)"', i.rest)
        op = target[1] if target else i.op
        moved = sum(map(size, operands)) + sum(sizes)
        if op.startswith("jaxkern"):
            pairs = [i.operands[int(k)] for _, k in re.findall(r"\{(\d*)\}: \((\d+), ", i.rest)]
            others = sum(size(n) for n in operands if n not in pairs)
            moved -= sum(2 * max(0, size(n) - others) for n in pairs)
        return Step(i.name, op, moved, launches=_launches(i), workspace=sum(i.sizes) - sum(sizes))

    def _reads(self, body, numbers, names, size) -> int:
        """Bytes that a fusion reads of its operands; each is read once."""
        least: dict[str, int] = {}
        for p, k in numbers.items():
            whole, parts = size(names[k]), 0
            for user, at in _users(body, p):
                if user.op in SLICES and at == 0:
                    parts += sum(user.sizes)
                elif user.op in UPDATES and at == 0:  # a scatter reads what it adds to
                    parts += (
                        sum(body[user.operands[2]].sizes) if user.op == "scatter" and user.operands[2] in body else 0
                    )
                else:
                    parts += whole
            least[names[k]] = max(least.get(names[k], 0), min(whole, parts))
        return sum(least.values())

    def _writes(self, body, numbers) -> int:
        root = next(j for j in body.values() if j.root)
        total = 0
        for j in [body[n] for n in root.operands] if root.op == "tuple" else [root]:
            j = _behind(body, j)
            at = UPDATES.get(j.op)
            in_place = at is not None and _behind(body, body[j.operands[0]]).name in numbers
            whole = sum(j.sizes)
            total += min(whole, sum(body[j.operands[at]].sizes)) if in_place and at is not None else whole
        return total


def _users(body, name):
    """(instruction, the number of its operand) of all that read an instruction of a fusion, through views."""
    for j in body.values():
        for at, n in enumerate(j.operands):
            if n == name:
                yield from _users(body, j.name) if j.op in VIEWS and not j.root else [(j, at)]


def _behind(body, j):
    """The instruction that a view shows."""
    while j.op in VIEWS and j.operands[0] in body:
        j = body[j.operands[0]]
    return j


def _launches(call: _Instruction) -> int:
    """How many kernels a custom call launches: our launch list for aligned buffers says it; any other call counts as one."""
    aligned = call.rest.split("alignment ")[1:2]
    return len(re.findall(r"(?:\\0A|\\n)(?:launch grid|memset p)", aligned[0])) or 1 if aligned else 1
