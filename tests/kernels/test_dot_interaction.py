"""dot_interaction against its definition, in the interpreter (on a GPU: compiled) and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.dot_interaction import by_index, dot_interaction, dot_interaction_at, reference
from kernels.tuning import pinned, tile
from tests.kernels import checks


def _inputs(batch: int, features: int, size: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((batch, size), (batch, features, size))
    return [torch.randn(s).to(dtype).to(device) for s in shapes]


def _op(upper: bool) -> checks.Function:
    return lambda dense, embedded: dot_interaction(dense, embedded, upper)


def _plain(upper: bool) -> checks.Function:
    def run(dense: Tensor, embedded: Tensor) -> Tensor:
        pairs = reference.triangle(embedded.shape[1] + 1, upper, embedded.device)
        return reference.dot_interaction(dense, embedded, *pairs)

    return run


@pytest.mark.parametrize("device", checks.DEVICES)
@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize(
    ("batch", "features", "size", "upper"),
    [(5, 3, 8, False), (3, 26, 16, True), (2, 1, 130, True), (1, 16, 5, False), (0, 4, 8, True)],
)
def test_is_as_accurate_as_plain_pytorch(
    batch: int, features: int, size: int, upper: bool, dtype: torch.dtype, device: str
) -> None:
    inputs = _inputs(batch, features, size, dtype, device)
    checks.against(_op(upper), _plain(upper), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_takes_a_vector_in_several_tiles(device: str) -> None:
    inputs = _inputs(5, 3, 40, torch.float32, device)
    narrow = tile(WIDTH=16)
    with pinned("dot_interaction_fwd", narrow), pinned("dot_interaction_bwd", narrow):
        checks.against(_op(True), _plain(True), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_types_of_both_inputs_may_differ(device: str) -> None:
    dense, embedded = _inputs(5, 3, 8, torch.bfloat16, device)
    checks.against(_op(True), _plain(True), [dense.float(), embedded])


@pytest.mark.parametrize("device", checks.DEVICES)
def test_reads_its_inputs_where_they_lie(device: str) -> None:
    inputs = [checks.apart(x) for x in _inputs(3, 4, 8, torch.float32, device)]
    checks.against(_op(True), _plain(True), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_offsets_have_64_bits(device: str) -> None:
    inputs = [checks.far_apart(x) for x in _inputs(2, 3, 8, torch.bfloat16, device)]
    checks.against(_op(False), _plain(False), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_is_the_same_each_time(device: str) -> None:
    checks.same_each_time(_op(True), _inputs(4, 5, 8, torch.bfloat16, device))


@pytest.mark.parametrize("device", checks.DEVICES)
def test_works_in_one_compiled_graph(device: str) -> None:
    checks.compiles(_op(True), _inputs(4, 5, 8, torch.float32, device))


@pytest.mark.parametrize("device", checks.DEVICES)
@pytest.mark.parametrize("lowered", ["none", "dense", "both"])
def test_casts_under_autocast(lowered: str, device: str) -> None:
    dense, embedded = _inputs(4, 5, 8, torch.float32, device)
    dense = dense if lowered == "none" else dense.bfloat16()
    embedded = embedded.bfloat16() if lowered == "both" else embedded
    plain = _torchrec if lowered != "dense" else None
    if plain is not None:
        checks.casts(_op(True), plain, [dense, embedded])
    with torch.autocast(device, torch.bfloat16):
        expected = torch.float32 if lowered == "none" else torch.bfloat16
        assert dot_interaction(dense, embedded).dtype == expected


def _torchrec(dense: Tensor, embedded: Tensor) -> Tensor:
    vectors = torch.cat((dense.unsqueeze(1), embedded), 1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    rows, columns = torch.triu_indices(vectors.shape[1], vectors.shape[1], 1)
    return torch.cat((dense, products[:, rows, columns]), 1)


def test_orders_pairs_as_torchrec_does() -> None:
    dense, embedded = _inputs(3, 4, 8, torch.float64, "cpu")
    torch.testing.assert_close(dot_interaction(dense, embedded, True), _torchrec(dense, embedded))


@pytest.mark.parametrize("interpreted", [True, False])
def test_gradients_are_those_of_finite_differences(interpreted: bool) -> None:
    inputs = [x.requires_grad_() for x in _inputs(2, 3, 4, torch.float64, "cpu")]
    if interpreted:
        torch.autograd.gradcheck(_op(True), inputs, fast_mode=True)
    else:
        with checks.on_reference():
            torch.autograd.gradcheck(_op(False), inputs)


def test_passes_opcheck() -> None:
    inputs = [x.requires_grad_() for x in _inputs(2, 3, 4, torch.float32, "cpu")]
    torch.library.opcheck(torch.ops.kernels.dot_interaction.default, (*inputs, True))


ORDERS = {
    "upper": torch.triu_indices(5, 5, 1),
    "lower": torch.tril_indices(5, 5, -1),
    "with squares": torch.tril_indices(5, 5),
    "one pair twice": torch.tensor([[0, 0, 3], [1, 1, -1]]),
}


@pytest.mark.parametrize("device", checks.DEVICES)
@pytest.mark.parametrize("order", ORDERS)
def test_takes_pairs_in_any_order(order: str, device: str) -> None:
    rows, columns = ORDERS[order].to(device).unbind()

    def plain(dense: Tensor, embedded: Tensor) -> Tensor:
        vectors = torch.cat((dense.unsqueeze(1), embedded), 1)
        return torch.cat((dense, torch.bmm(vectors, vectors.mT)[:, rows, columns]), 1)

    def op(dense: Tensor, embedded: Tensor) -> Tensor:
        return dot_interaction_at(dense, embedded, rows, columns)

    inputs = _inputs(3, 4, 8, torch.float32, device)
    checks.against(op, plain, inputs)
    checks.compiles(op, inputs)


def test_knows_the_order_of_pairs() -> None:
    known = {name: by_index.order_of(*pairs.unbind(), 5) for name, pairs in ORDERS.items()}
    assert known == {"upper": True, "lower": False, "with squares": None, "one pair twice": None}


def test_an_order_that_changes_is_looked_at_again() -> None:
    pairs = torch.triu_indices(5, 5, 1)
    assert by_index.order_of(*pairs.unbind(), 5) is True
    pairs[0, 0] = 1
    assert by_index.order_of(*pairs.unbind(), 5) is None


def test_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="needs dense"):
        dot_interaction(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match="does not fit"):
        dot_interaction(torch.ones(2, 3), torch.ones(2, 4, 5))
