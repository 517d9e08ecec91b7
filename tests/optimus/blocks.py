"""Statements of random programs that stand together in models: branches, experts, interactions.

Most rewrites need several nodes in a row that fit; made one by one they hardly ever meet.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.optimus.program import Builder, at_least
from tests.optimus.spellings import (
    ATTENTIONS,
    EXPERTS,
    MIXTURES,
    PARTS,
    REGIONS,
    SEQUENTIAL,
    TRIANGLES,
    TURNED,
    UNITS,
    WIDTHS,
)

Step = Callable[[Builder, list[str]], list[str]]
"""Does the same, or almost the same, to each of a group; the results."""


def branches(b: Builder, step: Step) -> bool:
    """The same few steps for each part of one tensor, at times in a region of another state; False
    if it has no such parts."""
    x = _rows(b)
    if x is None:
        return False
    size = b.value(x).shape[-1]
    count = b.pick([k for k in (2, 3, 4, 6, 1) if size % k == 0])
    whole = b.new("p")
    if not b.write(f"{whole} = {str(b.pick(PARTS)).format(x, size // count, count)}"):
        return False
    names = [b.new() for _ in b.value(whole)]
    if not b.write(f"{', '.join(names)}, = {whole}", *names):
        return False
    b.groups.append(names)
    inside = b.chance(20)
    if inside:
        b.open(b.pick(REGIONS))
    for _ in range(b.between(1, 4)):
        names = step(b, names) or names
    if inside:
        b.close()
    return True


def experts(b: Builder) -> None:
    """Networks on one tensor, mixed by gates, some of them by several gates."""
    x = _rows(b)
    if x is None:
        return
    hidden, out = b.pick(WIDTHS), b.pick(WIDTHS)
    form, width = str(b.pick(EXPERTS)), b.value(x).shape[-1]
    modules = [b.module(form.format(width, hidden, out)) for _ in range(b.between(2, 4))]
    made = [b.assign(f"{module}({x})") for module in modules]
    found = [name for name in made if name]
    if len(found) < 2:
        return
    b.groups.append(found)
    mixed: list[str] = []
    mixture, at = str(b.pick(MIXTURES)), b.pick((1, 1, -2))
    for i in range(b.between(1, 3)):
        chosen = found[i:] + found[:1] if b.chance(40) else found
        gate = b.assign(f"F.softmax({b.module(f'nn.Linear({width}, {len(chosen)})')}({x}), -1)")
        stacked = f"torch.stack([{', '.join(chosen)}], {at})"
        result = b.assign(mixture.format(gate, stacked)) if gate else None
        mixed += [result] if result else []
    if mixed:
        b.groups.append(mixed)


def interaction(b: Builder) -> None:
    """Products of vectors with one another."""
    group = b.group()
    if group is None:
        return
    vectors = b.assign(f"torch.stack([{', '.join(group)}], 1)")
    if vectors is None or b.value(vectors).dim() != 3:
        return
    if b.chance(50):
        dense, embedded = group[0], vectors
        vectors = b.assign(f"torch.cat([{dense}.unsqueeze(1), {embedded}], 1)")
    count = b.value(vectors).shape[1] if vectors else 0
    if vectors is None or count < 2:
        return
    places = str(b.pick(TRIANGLES)).format(count)
    turned = b.pick(("transpose(1, 2)", "mT", "permute(0, 2, 1)"))
    products = b.assign(f"torch.bmm({vectors}, {vectors}.{turned})")
    if products is not None:
        chosen = b.assign(f"{products}[:, {places}[0], {places}[1]]")
        if chosen is not None:
            b.assign(f"torch.cat([{group[0]}, {chosen}], 1)")


def tower(b: Builder) -> None:
    """Layers one behind the other, of the kinds that models are deep in; some are shared."""
    x = _rows(b)
    if x is None:
        return
    form, first = str(b.pick(UNITS)), x
    shared: dict[int, tuple[str, str]] = {}
    for _ in range(b.between(1, 3)):
        width = b.value(x).shape[-1]
        if width not in shared or b.chance(60):
            shared[width] = _pair(b, width)
        result = b.assign(form.format(x, first, *shared[width]))
        if result is None or not _is_row(b, result):
            return
        x = result


def _pair(b: Builder, width: int) -> tuple[str, str]:
    inner = b.pick((width, *WIDTHS))
    layers = (f"nn.Linear({width}, {inner})", f"nn.Linear({inner}, {width}, bias={b.chance(50)})")
    return b.module(layers[0]), b.module(layers[1])


def block(b: Builder) -> None:
    """One module of several layers, for each of a group, or one for each."""
    group = b.group()
    if group is None:
        return
    rows = [name for name in group if _is_row(b, name)]
    if not rows:
        return
    width, own = b.value(rows[0]).shape[-1], b.chance(50)
    form = str(b.pick(SEQUENTIAL)).format(width, b.pick(WIDTHS))
    module = b.module(form)
    made: list[str] = []
    for name in rows:
        result = b.assign(f"{module}({name})")
        made += [result] if result else []
        module = b.module(form) if own else module
    if made:
        b.groups.append(made)


def attention(b: Builder) -> None:
    """Queries, keys and values of one linear, or of three, and tokens that look at each other."""
    x = b.tensor(lambda t: t.dim() == 3 and at_least(3)(t) and t.shape[-1] > 0)
    if x is None:
        wide = b.tensor(lambda t: t.dim() == 2 and at_least(2)(t) and t.shape[1] in (4, 6, 8, 12))
        x = b.assign(f"{wide}.view(-1, 2, {b.value(wide).shape[1] // 2})") if wide else None
    if x is None or not b.is_static(x, -1):
        return
    width, heads = b.value(x).shape[-1], [b.new() for _ in range(3)]
    if b.chance(50):
        module = b.module(f"nn.Linear({width}, 12)")
        made = b.write(f"{', '.join(heads)} = {module}({x}).chunk(3, -1)", *heads)
    else:
        modules = [b.module(f"nn.Linear({width}, 4, bias=False)") for _ in heads]
        calls = [f"{head} = {m}({x})" for head, m in zip(heads, modules, strict=True)]
        made = all(b.write(call, head) for call, head in zip(calls, heads, strict=True))
    if made:
        b.assign(str(b.pick(ATTENTIONS)).format(*heads))


def tokens(b: Builder) -> None:
    """Heads of two tokens mixed with each other, and a layer for each token."""
    x = b.tensor(lambda t: t.dim() == 2 and at_least(2)(t) and t.shape[1] in (4, 8, 12))
    if x is None or not b.is_static(x, 1):
        return
    half = b.value(x).shape[1] // 2
    turned = str(b.pick(TURNED)).format(x, half // 2)
    mixed = b.assign(f"{turned}.reshape(-1, 2, {half})")
    if mixed is None:
        return
    mixed = b.assign(f"{mixed} + {x}.view(-1, 2, {half})") or mixed
    layers = [b.module(f"nn.Linear({half}, {half})") for _ in range(2)]
    calls = [f"{layer}({mixed}[:, {i}])" for i, layer in enumerate(layers)]
    made = [name for name in map(b.assign, calls) if name]
    if len(made) == len(calls):
        b.groups.append(made)
        b.assign(f"{mixed} + F.gelu(torch.stack([{', '.join(made)}], 1))")


def _rows(b: Builder) -> str | None:
    x = b.tensor(lambda t: at_least(2)(t) and t.shape[-1] > 0)
    return x if x is not None and b.is_static(x, -1) else None


def _is_row(b: Builder, name: str) -> bool:
    value = b.value(name)
    return at_least(1)(value) and value.shape[-1] > 0 and b.is_static(name, -1)
