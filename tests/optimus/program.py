"""Random programs: modules as a user writes them, built statement by statement.

`Builder` runs every statement as soon as it is written, on two sets of inputs that differ in batch
size, and forgets what eager mode refuses; so shapes are always known and nearly all programs run.
A `Program` is plain text: it prints as the module that failed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.library.custom_op("optimus_tests::memory_order", mutates_args=())
def memory_order(x: Tensor) -> Tensor:
    """All elements as they lie in memory: a custom operator that minds strides."""
    order = sorted(range(x.dim()), key=lambda dim: -x.stride(dim))
    return x.permute(order).reshape(-1).clone()


@memory_order.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.numel())


@torch.library.custom_op("optimus_tests::add_one_", mutates_args={"x"})
def add_one_(x: Tensor) -> None:
    """A custom operator that writes to its input."""
    x.add_(1)


NAMES: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "nn": nn,
    "operator": operator,
    "memory_order": memory_order,
    "add_one_": add_one_,
}


@dataclass(frozen=True)
class Input:
    """One argument of a program; sizes of -1 are the batch.

    `of`: another input `x` it is taken from, by the expression `view`. Of Python's types it is a
    number, that follows the batch if its shape does. One that is not `given` lends its memory only.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    requires_grad: bool = False
    of: str = ""
    view: str = "x.detach()[..., 1:]"
    given: bool = True

    @property
    def is_number(self) -> bool:
        """Whether it is a number of Python's."""
        return isinstance(self.dtype, type)

    def make(self, batch: int, generator: torch.Generator, others: dict[str, Any]) -> Any:
        """Its value for one batch size."""
        if self.of:
            return eval(self.view, {"x": others[self.of]})
        if self.is_number:
            size = batch if self.shape else 3
            return {int: size % 4, float: 0.1 + 0.1 * size, bool: size > 2}[self.dtype]
        shape = [batch if size == -1 else size for size in self.shape]
        if self.dtype is torch.bool:
            return torch.rand(shape, generator=generator) > 0.5
        if not self.dtype.is_floating_point:
            return torch.randint(0, 4, shape, generator=generator, dtype=self.dtype)
        value = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
        return value.requires_grad_(self.requires_grad)

    def __str__(self) -> str:
        shape = ", ".join("B" if size == -1 else str(size) for size in self.shape)
        if self.of:
            return f"{self.name}: {self.view}, x = {self.of}"
        if self.is_number:
            return f"{self.name}: {self.dtype.__name__} {'(B)' * bool(self.shape)}"
        how = ", requires_grad" * self.requires_grad + ", not given" * (not self.given)
        return f"{self.name}: ({shape}) {str(self.dtype)[6:]}{how}"


@dataclass
class Program:
    """A module's text and how it is run. `batches`: one call each; two make the batch dynamic, and
    `symbolic` makes all sizes and numbers so."""

    inputs: list[Input] = field(default_factory=list[Input])
    init: list[str] = field(default_factory=list[str])
    body: list[str] = field(default_factory=list[str])
    batches: tuple[int, ...] = (3,)
    train: bool = True
    grad: bool = True
    autocast: bool = False
    symbolic: bool = False
    seed: int = 0

    @property
    def given(self) -> list[Input]:
        """The arguments that it is called with."""
        return [spec for spec in self.inputs if spec.given]

    def source(self) -> str:
        """The module as Python text."""
        names = ", ".join(["self", *(i.name for i in self.given)])
        init = [f"        {line}" for line in self.init]
        body = [f"        {line}" for line in self.body]
        return "\n".join([
            "class Program(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *init,
            "",
            f"    def forward({names}):",
            *body,
        ])  # fmt: skip

    def __str__(self) -> str:
        how = f"batches {self.batches}, {'train' if self.train else 'eval'}"
        how += ", no_grad" * (not self.grad) + ", autocast" * self.autocast
        how += ", all sizes dynamic" * self.symbolic
        arguments = "".join(f"\n# {i}" for i in self.inputs)
        return f"\n# {how}, seed {self.seed}{arguments}\n{self.source()}\n"

    def build(self, widen: bool = False) -> nn.Module:
        """A new module with the same weights each time; `widen` makes it a float64 program."""
        text = self.source()
        if widen:
            text = _in_double(text)
        names = dict(NAMES)
        exec(compile(text, "<program>", "exec"), names)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            module: nn.Module = names["Program"]()
        module.train(self.train)
        return module.double() if widen else module

    def arguments(self, batch: int, widen: bool = False) -> list[Any]:
        """New inputs for one call."""
        generator = torch.Generator().manual_seed(self.seed + batch)
        values: dict[str, Any] = {}
        for spec in self.inputs:
            value = spec.make(batch, generator, values)
            own = isinstance(value, Tensor) and not spec.of
            if widen and own and value.is_floating_point():
                value = value.detach().double().requires_grad_(value.requires_grad)
            values[spec.name] = value
        return [values[spec.name] for spec in self.given]

    @contextmanager
    def context(self, widen: bool = False) -> Iterator[None]:
        """The state that the module is called in."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.autocast and not widen:
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            yield


def _in_double(text: str) -> str:
    for narrow in ("torch.float32", "torch.bfloat16"):
        text = text.replace(narrow, "torch.float64")
    for narrow in (".float()", ".bfloat16()"):
        text = text.replace(narrow, ".double()")
    return text.replace("autocast('cpu', dtype=torch.float64", "autocast('cpu', enabled=False")


class Builder:
    """A program in the making. `names` are its tensors, `groups` those made side by side."""

    def __init__(self, rng: Random, program: Program) -> None:
        self.rng = rng
        self.program = program
        self.names = [i.name for i in program.given if not i.is_number]
        self.numbers = [i.name for i in program.given if i.is_number]
        self.groups: list[list[str]] = []
        self._num_names = 0
        self.regions: list[str] = []
        self._scopes: list[dict[str, Any]] = []
        for batch in program.batches:
            module = nn.Module().train(program.train)
            names = [i.name for i in program.given]
            values = dict(zip(names, program.arguments(batch), strict=True))
            self._scopes.append(NAMES | {"self": module} | values)

    # Choices.

    def chance(self, percent: int) -> bool:
        """True that often; shrinks to False."""
        return self.rng.randrange(100) >= 100 - percent

    def pick(self, options: Sequence[Any]) -> Any:
        """One of `options`; shrinks to the first."""
        return options[self.rng.randrange(len(options))]

    def between(self, low: int, high: int) -> int:
        """A number in [low, high]; shrinks to `low`."""
        return low + self.rng.randrange(high - low + 1)

    def tensor(self, fits: Callable[[Tensor], bool] = lambda _: True) -> str | None:
        """A tensor's name, one of the last ones more often; None if none fits."""
        found = [name for name in reversed(self.names) if self._fits(name, fits)]
        if not found:
            return None
        return str(self.pick(found[:4] if self.chance(60) else found))

    def _fits(self, name: str, fits: Callable[[Tensor], bool]) -> bool:
        try:
            return fits(self.value(name))
        except RuntimeError:  # autograd forbids to look at it
            return False

    def group(self) -> list[str] | None:
        """Names of tensors made side by side."""
        return list(self.pick(self.groups[::-1][:4])) if self.groups else None

    def number(self) -> str:
        """A number as text: one that the program is given, if there is one, or a literal."""
        literal = str(self.pick((2, 1, 0.5, 3, True, 0)))
        return str(self.pick(self.numbers)) if self.numbers and self.chance(80) else literal

    # Facts.

    def value(self, name: str) -> Any:
        """What `name` holds in the first run."""
        return self._scopes[0][name]

    def size(self, name: str, dim: int) -> str:
        """A size as text: a number, or how to ask for it where it follows the batch."""
        static = self.is_static(name, dim)
        return str(self.value(name).shape[dim]) if static else f"{name}.shape[{dim}]"

    def is_static(self, name: str, dim: int) -> bool:
        """Whether a size is the same for every batch."""
        return len({scope[name].shape[dim] for scope in self._scopes}) == 1

    def extent(self, name: str, dim: int) -> int:
        """The least size that a tensor has there in any run."""
        return min(scope[name].shape[dim] for scope in self._scopes)

    # Writing.

    def new(self, stem: str = "t") -> str:
        """A name not used so far."""
        self._num_names += 1
        return f"{stem}{self._num_names}"

    def assign(self, expression: str) -> str | None:
        """Write `t = expression`; the tensor's name, None if it is no good."""
        name = self.new()
        return name if self.write(f"{name} = {expression}", name) else None

    def write(self, line: str, *results: str) -> bool:
        """Write a statement that makes the tensors `results`; False if eager mode refuses it or
        values blow up."""
        with self.program.context(), ExitStack() as regions:
            for region in self.regions:
                regions.enter_context(eval(region, NAMES))
            try:
                for scope in self._scopes:
                    exec(line, scope)
                values = [scope[name] for scope in self._scopes for name in results]
                tame = all(isinstance(value, Tensor) and _is_tame(value) for value in values)
                for scope in self._scopes:  # a view that autograd forbids to look at is no good
                    _ = [scope[name].grad_fn for name in (*self.names, *results)]
            except Exception:
                return False
        if not tame:
            return False
        self._append(line)
        self.names += results
        return True

    def module(self, text: str, stem: str = "m") -> str:
        """Write `self.m = text` into __init__; its name with `self.`."""
        name = f"self.{self.new(stem)}"
        line = f"{name} = {text}"
        for scope in self._scopes:
            exec(line, scope)
            scope["self"].train(self.program.train)
        self.program.init.append(line)
        return name

    def tie(self, line: str) -> None:
        """Write any other statement into __init__."""
        for scope in self._scopes:
            exec(line, scope)
        self.program.init.append(line)

    def open(self, region: str) -> None:
        """Begin a `with` block."""
        self._append(f"with {region}:")
        self.regions.append(region)
        self._append("pass")

    def close(self) -> bool:
        """End the innermost `with` block; False if there is none."""
        return bool(self.regions) and bool(self.regions.pop())

    def finish(self, outputs: str) -> Program:
        """End all blocks and return."""
        while self.close():
            pass
        self._append(f"return {outputs}")
        return self.program

    def _append(self, line: str) -> None:
        self.program.body.append("    " * len(self.regions) + line)


def at_least(rank: int) -> Callable[[Tensor], bool]:
    """Whether a tensor is of floating point and has that many dimensions."""
    return lambda x: x.dim() >= rank and x.is_floating_point()


def _is_tame(value: Tensor) -> bool:
    if not value.is_floating_point() or not value.numel():
        return value.numel() < 1000
    limit = value.detach().double().abs().max().item()
    return limit < 1000 and value.numel() < 1000  # also False for NaN
