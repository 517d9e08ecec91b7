"""docs/patterns.md, made from the pattern files: `python -m optimus.catalogue` writes it anew.

Each pattern's text is its file's; its example is the first of its examples that fires, rewritten
when the page is made.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from optimus.driver import copy_graph_module, rewrite
from optimus.explain import text_of
from optimus.history import History
from optimus.listing import listing
from optimus.pattern import Example, Rewrite
from optimus.pipeline import PIPELINE, select_alone
from optimus.upstream import NO_COUNTERPART, PRESETS_UPSTREAM, TRANSLATIONS, upstream_names

PAGE = Path(__file__).parents[1] / "docs" / "patterns.md"
HEADS = ("Before", "After", "Gains", "Costs", "Needs")

_INTRODUCTION = """\
# Patterns

<!-- Made by `python -m optimus.catalogue` from the pattern files; do not edit. -->

What Optimus rewrites, in the order in which it does: {count} patterns in {phases} phases, each of
which is repeated until nothing changes. `patterns=NAME` selects one (the normalisations come with
it), `disable=[NAME]` leaves one out, `knobs={{NAME: {{KNOB: VALUE}}}}` sets its knobs, and
`explain=NAME` tells what it did to a model of yours. The examples are real: lines with `-` are what
the pattern took over, lines with `+` what it made; the normalisations ran before it.
"""

_PHASES = {
    "normalize": "One spelling for what can be said in many ways, so that the others see it. These "
    "come with any other pattern.",
    "vertical": "Fewer detours: split, cat, stack, unbind and reshape that cancel or merge.",
    "horizontal": "Many equal operations as one. All of these look at the whole graph together.",
    "kernels": "A hand-written kernel where a part of the graph has a better form.",
    "finish": "What is better done once nothing else is left to merge.",
}

_UPSTREAM = """\
## PyTorch's names

Keys of `torch._inductor.config.pre_grad_fusion_options` and `post_grad_fusion_options`, and the
presets of PyTorch's benchmark, are understood in `patterns`, `disable` and `explain`:
"""


def page() -> str:
    """The whole page as Markdown. Compiles and rewrites one example of every pattern."""
    count = sum(len(phase.patterns) for phase in PIPELINE)
    introduction = _INTRODUCTION.format(count=count, phases=len(PIPELINE))
    parts = [introduction, *_contents()]
    for phase in PIPELINE:
        parts += [f"## Phase: {phase.name}\n", f"{_PHASES.get(phase.name, '')}\n"]
        parts += ["\n".join(_section(pattern)) for pattern in phase.patterns]
    return "\n".join([*parts, _UPSTREAM, *_translations()]).rstrip() + "\n"


def sections(text: str) -> tuple[str, dict[str, str]]:
    """What a pattern's text says freely, and what it says under each of HEADS."""
    parts = re.split(rf"(?:^|(?<=\s))({'|'.join(HEADS)}):\s", text)
    free, found = [parts[0]], {}
    for head, body in zip(parts[1::2], parts[2::2], strict=True):
        said, *rest = body.split("\n\n", 1)
        found[head] = " ".join(said.split())
        free += rest
    paragraphs = [" ".join(p.split()) for part in free for p in part.split("\n\n")]
    return "\n\n".join(filter(None, paragraphs)), found


def _contents() -> Iterator[str]:
    for phase in PIPELINE:
        links = ", ".join(f"[{p.name()}](#{p.name()})" for p in phase.patterns)
        yield f"- {phase.name}: {links}"
    yield "- [PyTorch's names](#pytorchs-names)\n"


def _section(pattern: Rewrite) -> Iterator[str]:
    free, found = sections(text_of(pattern))
    yield f"### {pattern.name()}\n"
    yield f"{free}\n"
    yield from (f"- **{head}:** {found[head]}" for head in HEADS if head in found)
    if pattern.needs:
        yield f"- **Needs patterns:** {', '.join(pattern.needs)}"
    knobs = [f"`{f.name}={getattr(pattern, f.name)!r}`" for f in _knobs(pattern)]
    yield f"- **Knobs:** {', '.join(knobs) or 'none'}"
    names = ", ".join(f"`{name}`" for name in upstream_names(pattern.name()))
    yield f"- **In PyTorch:** {names or 'none'}\n"
    example = next(e for e in pattern.examples() if e.fires)
    before, after = _rewritten(pattern, example)
    yield f'Example "{example.name}", before and after:\n'
    yield f"```diff\n{before}\n```\n\n```diff\n{after}\n```\n"


def _knobs(pattern: Rewrite) -> tuple[dataclasses.Field[Any], ...]:
    dataclass: Any = pattern
    return dataclasses.fields(dataclass)


def _rewritten(pattern: Rewrite, example: Example) -> tuple[str, str]:
    """The example's graph as captured, and after the normalisations and the pattern."""
    torch.manual_seed(0)
    module, inputs = example.build()
    captured = _captured(module.train(example.train), inputs)
    copy, history = copy_graph_module(captured), History()
    rewrite(copy, select_alone(pattern.ungated()).phases, history=history)
    name = pattern.name()
    assert history.taken_by(name), f"example {example.name!r} of {name} does not fire"
    made = [n.name for n in copy.graph.nodes if name in history.makers(n.name)]
    return (
        listing(captured.graph, history.taken_by(name), "-"),
        listing(copy.graph, made, "+"),
    )


def _captured(module: torch.nn.Module, inputs: Sequence[Any]) -> GraphModule:
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(module, backend=keep, fullgraph=True, dynamic=False)(*inputs)
    return graphs[0]


def _translations() -> Iterator[str]:
    yield "| PyTorch | here |\n|---|---|"
    for preset, ours in PRESETS_UPSTREAM.items():
        yield f"| `{preset}` | the preset `{ours}` |"
    for name, patterns in TRANSLATIONS.items():
        yield f"| `{name}` | {', '.join(f'[{p}](#{p})' for p in patterns)} |"
    for name, why in NO_COUNTERPART.items():
        yield f"| `{name}` | none: {why} |"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(page(), encoding="utf-8")
    print(f"wrote {target}")
