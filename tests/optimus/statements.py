"""The kinds of statement that random programs are made of, in the many spellings of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from tests.optimus.blocks import (
    attention,
    block,
    branches,
    experts,
    interaction,
    tokens,
    tower,
)
from tests.optimus.frames import frame
from tests.optimus.lookups import look_up, masks, numbers
from tests.optimus.program import Builder, Program, at_least
from tests.optimus.spellings import (
    DROPS,
    IN_PLACE,
    JOINS,
    LAYERS,
    NUMBERED,
    PAIRS,
    POINTWISE,
    PRODUCTS,
    REGIONS,
    ROWS,
    SHAPES,
    WIDTHS,
    forms,
)
from tests.optimus.writes import at_once, buffer, fill, into, statistics, write


def random_program(rng: Random, most_statements: int = 16) -> Program:
    """A program of up to that many statements (each of several lines)."""
    program = frame(rng)
    builder = Builder(rng, program)
    for _ in range(rng.randrange(most_statements) + 1):
        KINDS[rng.randrange(len(KINDS))](builder)
    return builder.finish(_outputs(builder))


# Kinds of statement.


def nothing(b: Builder) -> None:
    """So that shrinking can take statements out."""


def parts(b: Builder) -> None:
    """Take a tensor apart, by any of the ways there are."""
    x = b.tensor(at_least(1))
    if x is None:
        return
    rank = b.value(x).dim()
    dim = b.pick([rank - 1, *range(rank)])
    if not b.is_static(x, dim) and not b.chance(30):
        return
    extent = b.extent(x, dim)
    shown = dim - rank if b.chance(40) else dim
    whole = b.new("p")
    kind = b.pick((_even, _sections, _unbound, _slices, _indices))
    if kind in (_slices, _indices):
        found = [b.assign(text) for text in kind(b, x, dim, rank, extent)]
        members = [name for name in found if name]
    else:
        text = kind(b, x, shown, extent)
        members = _items(b, whole, text) if text else []
    if members:
        b.groups.append(members)


def _even(b: Builder, x: str, dim: int, extent: int) -> str:
    k = b.pick((2, 1, 3, 4, 5))
    options = forms("""
        torch.split({0}, {1}, {2}); {0}.split({1}, dim={2}); torch.chunk({0}, {1}, {2});
        {0}.chunk({1}, {2}); torch.tensor_split({0}, {1}, dim={2});
        {0}.tensor_split({1}, {2}); torch.split({0}, split_size_or_sections={1}, dim={2})
    """)
    return str(b.pick(options)).format(x, k, dim)


def _sections(b: Builder, x: str, dim: int, extent: int) -> str:
    sizes: list[int] = []
    while sum(sizes) < extent and len(sizes) < 5:
        sizes.append(min(b.pick((2, 1, 2, 3, 0)), extent - sum(sizes)))
    sizes[-1:] = [extent - sum(sizes[:-1])]
    ends = tuple(sum(sizes[: i + 1]) for i in range(len(sizes) - 1))
    options = forms("""
        torch.split({0}, {1}, {2}); {0}.split({1}, {2});
        torch.split_with_sizes({0}, {1}, {2}); torch.tensor_split({0}, {3}, {2});
        {0}.split_with_sizes({1}, dim={2})
    """)
    return str(b.pick(options)).format(x, sizes, dim, ends)


def _unbound(b: Builder, x: str, dim: int, extent: int) -> str:
    return str(b.pick(("torch.unbind({0}, {1})", "{0}.unbind({1})"))).format(x, dim)


def _slices(b: Builder, x: str, dim: int, rank: int, extent: int) -> list[str]:
    width = b.pick((2, 1, 3))
    form = b.pick(("index", "ellipsis", "narrow", "mixed"))
    found: list[str] = []
    for start in range(0, max(extent - width, 0) + 1, b.pick((width, width, 1))):
        kind = b.pick(("index", "narrow")) if form == "mixed" else form
        stop = start + width
        if kind == "narrow":
            spelling = b.pick(("{0}.narrow({1}, {2}, {3})", "torch.narrow({0}, {1}, {2}, {3})"))
            found.append(spelling.format(x, dim, start, width))
        elif kind == "ellipsis" and dim == rank - 1:
            found.append(f"{x}[..., {start}:{stop}]")
        else:
            found.append(f"{x}[{':, ' * dim}{start}:{stop}]")
    return found[:5]


def _indices(b: Builder, x: str, dim: int, rank: int, extent: int) -> list[str]:
    options = ("{0}.select({1}, {2})", "{0}[{3}{2}]", "torch.select({0}, {1}, {2})")
    form = b.pick(options)
    return [form.format(x, dim, i, ":, " * dim) for i in range(min(extent, 5))]


def _items(b: Builder, whole: str, text: str) -> list[str]:
    """Write `p = torch.split(...)` and take its items."""
    if not b.write(f"{whole} = {text}"):
        return []
    count = len(b.value(whole))
    names = [b.new() for _ in range(count)]
    if 1 < count < 6 and b.chance(40) and b.write(f"{', '.join(names)} = {whole}", *names):
        return names
    kept = [i for i in range(min(count, 6)) if not b.chance(15)]
    items = [b.assign(f"{whole}[{i - count if b.chance(10) else i}]") for i in kept]
    return [name for name in items if name]


def map_group(b: Builder) -> None:
    """Do the same to each of a group, or almost the same."""
    group = b.group()
    if group is None:
        return
    if b.chance(15):
        b.rng.shuffle(group)
    _map(b, group)


def _map(b: Builder, group: list[str]) -> list[str]:
    make = b.pick(MAKERS)
    template, odd = make(b, group), b.between(0, len(group) * 5) - 1
    made: list[str] = []
    for i, name in enumerate(group):
        if template is None:
            return []
        text = template(name)
        if i == odd and text is not None:
            text = _disturb(b, name, text, made)
        result = b.assign(text) if text is not None else None
        if result:
            made.append(result)
    if made:
        b.groups.append(made)
    return made


def branch(b: Builder) -> None:
    """The same steps for each part of one tensor, joined again."""
    if branches(b, _map):
        join(b)


def _disturb(b: Builder, name: str, text: str, made: Sequence[str]) -> str | None:
    """One member of the group is different."""
    kind = b.between(0, 4)
    if kind == 0:
        return str(b.pick(POINTWISE)).format(name)
    if kind == 1:
        b.write(str(b.pick(IN_PLACE)).format(b.pick([name, *made]), name))
    elif kind == 2 and made:
        b.write(f"{name} = {name} + {made[-1]}.sum()", name)
    elif kind == 3:
        b.open(b.pick(REGIONS))
        result = b.assign(text)
        b.close()
        return result
    return text


Template = Callable[[str], str | None]


def _pointwise(b: Builder, group: Sequence[str]) -> Template:
    form = str(b.pick(POINTWISE if b.chance(90) else DROPS))
    return form.format


def _rows(b: Builder, group: Sequence[str]) -> Template:
    form = str(b.pick(ROWS))
    return lambda name: form.format(name, b.value(name).shape[-1]) if b.value(name).dim() else None


def _numbered(b: Builder, group: Sequence[str]) -> Template:
    form, number = str(b.pick(NUMBERED)), b.number()
    return lambda name: form.format(name, b.number() if b.chance(20) else number)


def _shape(b: Builder, group: Sequence[str]) -> Template:
    form = str(b.pick(SHAPES))
    return form.format


def _width(b: Builder, name: str) -> int | None:
    value = b.value(name)
    fits = value.dim() >= 1 and value.is_floating_point() and b.is_static(name, -1)
    return value.shape[-1] if fits and value.shape[-1] else None


def _own_linear(b: Builder, group: Sequence[str]) -> Template:
    out, bias = b.pick(WIDTHS), b.chance(70)
    spelling = b.pick(("{0}({1})", "F.linear({1}, {0}.weight, {0}.bias)", "{1} @ {0}.weight.t()"))

    def template(name: str) -> str | None:
        width = _width(b, name)
        if width is None:
            return None
        module = b.module(f"nn.Linear({width}, {out}, bias={bias})")
        return str(spelling.format(module, name))

    return template


def _shared_linear(b: Builder, group: Sequence[str]) -> Template | None:
    width = _width(b, group[0])
    if width is None:
        return None
    out = b.pick(WIDTHS)
    module = b.module(f"nn.Linear({width}, {out})")
    if b.chance(30):  # tied: another module with the same weight
        other = b.module(f"nn.Linear({width}, {out})")
        b.tie(f"{other}.weight = {module}.weight")
        return lambda name: f"{b.pick((module, other))}({name})"
    return lambda name: f"{module}({name})"


def _norm(b: Builder, group: Sequence[str]) -> Template:
    kind, shared = b.pick(LAYERS), b.chance(20)
    made: dict[int, str] = {}

    def template(name: str) -> str | None:
        width = _width(b, name)
        if width is None:
            return None
        if width not in made or not shared:
            made[width] = b.module(kind.format(width))
        return f"{made[width]}({name})"

    return template


def _matmul(b: Builder, group: Sequence[str]) -> Template | None:
    width, out = _width(b, group[0]), b.pick(WIDTHS)
    if width is None:
        return None
    shared = b.chance(40)
    form = b.pick(PRODUCTS)
    weight = b.module(f"nn.Parameter(torch.randn({width}, {out}) / 2)", "w")

    def template(name: str) -> str:
        own = weight if shared else b.module(f"nn.Parameter(torch.randn({width}, {out}) / 2)", "w")
        return str(form.format(name, own))

    return template


MAKERS = (_pointwise, _own_linear, _rows, _shared_linear, _norm, _matmul, _shape, _numbered)


def join(b: Builder) -> None:
    """Put a group together again, in order or not."""
    group = b.group()
    if group is None:
        return
    if b.chance(20):
        b.rng.shuffle(group)
    if b.chance(10):
        group.insert(b.between(0, len(group)), b.pick(group))
    if b.chance(10):
        del group[b.between(0, len(group) - 1)]
    other = b.tensor() if b.chance(10) else None
    group = [*group, other] if other else group
    rank = max([b.value(name).dim() for name in group], default=0)
    dim = b.pick((1, rank - 1, 0, -1, -2))
    b.assign(str(b.pick(JOINS)).format(", ".join(group), dim))


def one(b: Builder) -> None:
    """An operation of one tensor."""
    x = b.tensor(at_least(0))
    if x is not None:
        form = str(b.pick(b.pick((POINTWISE, SHAPES, ROWS))))
        width = b.value(x).shape[-1] if b.value(x).dim() else 0
        b.assign(form.format(x, width))


def layer(b: Builder) -> None:
    """A module or a matrix product on one tensor."""
    x = b.tensor(at_least(2))
    if x is not None:
        template = b.pick((_own_linear, _norm, _matmul))(b, [x])
        text = template(x) if template else None
        if text:
            b.assign(text)


def wide(b: Builder) -> None:
    """Several linears on one input."""
    x = b.tensor(at_least(2))
    width = _width(b, x) if x is not None else None
    if x is None or width is None:
        return
    template = _own_linear(b, [x])
    texts = [template(x) for _ in range(b.between(2, 4))]
    made = [b.assign(text) for text in texts if text]
    if all(made):
        b.groups.append([name for name in made if name])


def two(b: Builder) -> None:
    """An operation of two tensors."""
    x = b.tensor()
    if x is not None:
        shape = b.value(x).shape
        y = b.tensor(lambda t: t.shape == shape if b.chance(60) else t.dim() == len(shape))
        b.assign(str(b.pick(PAIRS)).format(x, y if y is not None else x))


def region(b: Builder) -> None:
    """Begin or end a block of another grad mode or autocast state."""
    if b.chance(50) or len(b.regions) > 2:
        b.close()
    else:
        b.open(b.pick(REGIONS))


KINDS: tuple[Callable[[Builder], None], ...] = (
    nothing, parts, parts, parts, *[map_group] * 6, join, join, join, join, one, one, one, two, two,
    layer, wide, wide, write, write, buffer, region, region, masks, look_up, look_up, into, into,
    at_once, statistics, numbers, numbers, branch, branch, branch, branch, experts, experts, tower,
    tower, block, block, interaction, fill, attention, tokens,
)  # fmt: skip


def _outputs(b: Builder) -> str:
    """What the program returns: mostly the last tensors, at times inputs, doubles, numbers."""
    names = [b.names[-1]]
    for _ in range(b.between(0, 4)):
        names.append(b.pick(b.names[::-1]))
    if b.groups and b.chance(30):
        names += b.groups[-1]
    if b.chance(10):
        names.append(f"{names[0]}.shape[0] if {names[0]}.dim() else 1")
    form = b.pick(("({0},)", "[{0}]", "{{'out': ({0},)}}"))
    return str(form.format(", ".join(names)))
