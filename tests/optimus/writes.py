"""Statements of random programs that write to memory."""

from __future__ import annotations

from tests.optimus.program import Builder, at_least
from tests.optimus.spellings import (
    AT_ONCE,
    AT_ONCE_IN_PLACE,
    EMPTY,
    FILLS,
    IN_PLACE,
    INTO,
    MEMORY,
    UPDATES,
)


def write(b: Builder) -> None:
    """A write to a tensor's memory."""
    x = b.tensor(lambda t: not (t.is_leaf and t.requires_grad))
    if x is not None:
        shape = b.value(x).shape
        y = b.tensor(lambda t: t.shape == shape)
        b.write(str(b.pick(IN_PLACE)).format(x, y if y is not None else x))


def into(b: Builder) -> None:
    """A result in memory given by out=: new, of another value, or a view."""
    x = b.tensor(at_least(1))
    if x is None:
        return
    shape = b.value(x).shape
    y, z = (b.tensor(lambda t: t.shape == shape and t.is_floating_point()) or x for _ in range(2))
    quiet = b.chance(60)
    if quiet:
        b.open("torch.no_grad()")
    out, result = b.new("o"), b.new()
    memory = str(b.pick(MEMORY)).format(x, y, z)
    call = str(b.pick(INTO)).format(x, y, out)
    b.write(f"{out} = {memory}; {result} = {call}", out, result)
    if quiet:
        b.close()


def fill(b: Builder) -> None:
    """A tensor made first and filled with a group, part by part."""
    group = b.group()
    if group is None or not b.value(group[0]).dim():
        return
    first, count = group[0], len(group)
    width = b.value(first).shape[-1]
    along, form = b.pick(FILLS)
    shape = f"*{first}.shape[:-1], {width * count}" if along else f"{count}, *{first}.shape"
    out = b.assign(str(b.pick(EMPTY)).format(first, shape))
    if out is None:
        return
    for i, name in enumerate(group):
        b.write(form.format(out, i, name, width * i, width * (i + 1)), out)
    if b.chance(30):
        b.assign(f"{out} + 1")


def at_once(b: Builder) -> None:
    """One call for all of a group."""
    group = b.group()
    if group is None:
        return
    if b.chance(40):
        b.write(str(b.pick(AT_ONCE_IN_PLACE)).format(", ".join(group)))
        return
    names = [b.new() for _ in group]
    call = str(b.pick(AT_ONCE)).format(", ".join(group))
    if b.write(f"{', '.join(names)}, = {call}", *names):
        b.groups.append(names)


def buffer(b: Builder) -> None:
    """An update of a buffer."""
    x = b.tensor(at_least(0))
    if x is None:
        return
    name = b.new("b")
    b.tie(f"self.register_buffer('{name}', torch.ones(()))")
    form = b.pick(UPDATES)
    if b.value(x).numel() and b.write(form.format(x, name)):
        b.assign(f"{x} * self.{name}")


def statistics(b: Builder) -> None:
    """Batch normalisations that update the same running statistics."""
    x = b.tensor(at_least(2))
    if x is None or not b.is_static(x, 1):
        return
    width, name = b.value(x).shape[1], b.new("s")
    b.tie(f"self.register_buffer('{name}_mean', torch.zeros({width}))")
    b.tie(f"self.register_buffer('{name}_var', torch.ones({width}))")
    training = b.pick(("self.training", True, False))
    form = "F.batch_norm({0}, self.{1}_mean, self.{1}_var, training={2}, momentum=0.3)"
    made = [b.assign(form.format(source, name, training)) for source in (x, f"{x} * 2")]
    if all(made):
        b.groups.append([result for result in made if result])
        if b.chance(30):
            b.assign(f"self.{name}_mean * 2")
