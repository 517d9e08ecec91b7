"""Statements of random programs with integers, masks and numbers."""

from __future__ import annotations

import torch

from tests.optimus.program import Builder, at_least
from tests.optimus.spellings import LOOKUPS, NUMBERED


def masks(b: Builder) -> None:
    """What is done with masks."""
    mask = b.tensor(lambda t: t.dtype is torch.bool)
    if mask is None:
        return
    shape = b.value(mask).shape
    x = b.tensor(lambda t: t.shape == shape and t.is_floating_point())
    options = ("~{0}", "{0}.any(-1)", "{0} & {0}", "{0}.to(torch.float32)", "{0}.cumsum(-1)")
    b.assign(str(b.pick(options)).format(mask))
    if x is not None:
        options = ("torch.where({0}, {1}, -{1})", "{1} * {0}", "torch.where({0}, 0.5, {1})")
        b.assign(str(b.pick(options)).format(mask, x))


def look_up(b: Builder) -> None:
    """Rows of tables by integers, for all of a group or for one."""
    ints = b.tensor(lambda t: t.dtype is torch.int64)
    if ints is None:
        x = b.tensor(at_least(1))
        ints = b.assign(f"({x} * 2).long()") if x is not None else None
    if ints is None:
        return
    if b.chance(20):
        b.assign(str(b.pick(("{0} + 1", "{0} // 2", "{0} * {0}", "{0}.cumsum(0)"))).format(ints))
    form, own = str(b.pick(LOOKUPS)), b.chance(70)
    rows = b.assign(f"{ints}.clamp(0, 7)")
    table = b.module("nn.Embedding(8, 4)", "e")
    made: list[str] = []
    for i in range(b.pick((1, 2, 3, 4))):
        source = f"{rows}[:, {i}]" if b.chance(50) else rows
        table = b.module("nn.Embedding(8, 4)", "e") if own else table
        name = b.assign(form.format(source, f"{table}.weight"))
        made += [name] if name else []
    if made:
        b.groups.append(made)


def numbers(b: Builder) -> None:
    """An operation of a tensor and a number."""
    x = b.tensor(at_least(0))
    if x is not None:
        b.assign(str(b.pick(NUMBERED)).format(x, b.number()))
