"""Rules that hold for all kernels: they stand alone, and they compile for the GPU."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

from kernels import launch
from tests import processes

ROOT = Path(__file__).parents[2]


def test_kernels_import_nothing_of_ours() -> None:
    for file in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            ours = {name.split(".")[0] for name in names} & {"optimus", "recsys", "tests", "conf"}
            assert not ours, f"{file.name} imports {ours}"


def test_exact_float32_products_are_left_to_the_blas_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "can_launch", lambda *tensors: True)
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    assert launch.can_multiply(torch.ones(2, dtype=torch.bfloat16))
    assert not launch.can_multiply(torch.ones(2))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert launch.can_multiply(torch.ones(2))


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    """In a process of its own: here they are loaded for the interpreter."""
    command = [sys.executable, "-m", "tests.kernels.hopper", "--first", "bf16"]
    done = processes.run(command, timeout=500, forked=True)
    assert done.returncode == 0, done.stdout + done.stderr
