"""The picture: branches drawn as one, boxes that do not overlap, one file with no part outside."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from optimus.listing import operation
from optimus.picture import HEIGHT, TOP, Box, boxes, picture, place
from tests.optimus.capture import Captured


def towers(count: int, depth: int) -> Captured:
    """Towers of `depth` layers on slices of one input, joined again."""
    layers = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth))) for _ in range(count)]
    module = nn.ModuleList(layers)

    def program(x: torch.Tensor) -> torch.Tensor:
        parts = x.split(4, 1)
        return torch.cat([torch.relu(tower(p)) for tower, p in zip(module, parts, strict=True)], 1)

    return Captured(program, (torch.ones(2, 4 * count),))


def test_equal_branches_are_one_box() -> None:
    found = boxes(towers(40, 3).module.graph, (), "taken")
    titles = [box.lines[0] for box in found]
    assert titles == [
        "input", "split", "linear x 40", "linear x 40", "linear x 40", "relu x 40", "cat", "output"
    ]  # fmt: skip
    assert [box.layer for box in found] == list(range(8))


def test_marked_nodes_stand_apart_and_are_coloured() -> None:
    graph = towers(4, 1).module.graph
    marked = [node.name for node in graph.nodes if operation(node) == "linear"][:2]
    found = boxes(graph, marked, "taken")
    assert [(b.lines[0], b.fill) for b in found if b.title == "linear"] == [
        ("linear x 2", "taken"),
        ("linear x 2", ""),
    ]


def chain(length: int) -> Captured:
    """`length` layers that all differ in shape, each read by the next and by the last."""

    def program(x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for i in range(length):
            values.append(torch.cat([values[-1], values[-1][:, : i + 1].exp()], 1)[:, : i + 2])
        return torch.cat(values, 1)

    return Captured(program, (torch.ones(2, 1),))


@pytest.mark.parametrize("captured", [towers(6, 2), chain(60)], ids=["towers", "chain"])
def test_no_box_lies_on_another(captured: Captured) -> None:
    found = boxes(captured.module.graph, (), "taken")
    right = place(found, 10.0)
    for one, other in itertools.combinations(found, 2):
        apart = abs(one.y - other.y) >= HEIGHT or _left(one, other) or _left(other, one)
        assert apart, (one.lines, other.lines)
    assert all(box.x >= 10.0 and box.x + box.width <= right + 0.1 for box in found)
    assert all(box.y >= TOP and _below_its_inputs(box, found) for box in found)


def _left(one: Box, other: Box) -> bool:
    return one.x + one.width <= other.x


def _below_its_inputs(box: Box, found: list[Box]) -> bool:
    return all(found[i].y < box.y for i in box.inputs)


def test_the_file_is_whole() -> None:
    before, after = towers(3, 1).module.graph, towers(5, 2).module.graph
    text = picture("a <b> & c", before, ["linear"], after, ["relu"])
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "href" not in text and "<script" not in text
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "a <b> & c" in words and "linear x 5" in words
    assert any(word is not None and word.startswith("before: ") for word in words)
