"""The reference's source uses only operations whose every bit IEEE 754 or integer arithmetic defines.

NumPy's functions are on a list of those that qualify; what is not on it has to be argued for here first. Left out on
purpose: sum, mean, dot, einsum and the like (order of addition), exp, log, power, tanh (differ between SIMD levels and
between C libraries), partition (order of equals), random distributions.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import reference

ROOT = Path(reference.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

LAYOUT = """append arange array array_equal asarray atleast_1d broadcast_shapes broadcast_to concatenate empty
    empty_like expand_dims frombuffer full full_like moveaxis put_along_axis ravel_multi_index repeat reshape shape size
    stack swapaxes take_along_axis unravel_index where zeros zeros_like"""
TYPES = "dtype errstate float32 float64 floating inf int32 int64 nan ndarray uint32 uint64 uint8"
ONE_ROUNDING = "abs add copysign floor isfinite isnan multiply nextafter rint sign signbit sqrt subtract"
COMPARISONS = "any all argwhere clip count_nonzero flatnonzero maximum minimum nonzero prod searchsorted sort unique"
IN_ORDER = "argsort cumsum"  # argsort with kind="stable" only; cumsum adds one after another by definition
ALLOWED = set(" ".join((LAYOUT, TYPES, ONE_ROUNDING, COMPARISONS, IN_ORDER)).split())
METHODS = {"sum", "mean", "dot", "prod", "cumsum", "cumprod", "var", "std", "trace", "argpartition", "round"}
UFUNC_METHODS = {"reduce", "accumulate", "reduceat", "outer", "at"}
MATH = {"inf", "isfinite", "prod"}
ONLY_IN = {"matmul": {"exact.py"}}
"""The raw product is exact on slices, and nowhere else."""


def problems(path: Path, source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}: "
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "np":
            if node.attr not in ALLOWED and path.name not in ONLY_IN.get(node.attr, ()):
                found.append(where + f"np.{node.attr}")
        elif isinstance(node, ast.Attribute) and node.attr in UFUNC_METHODS and ast.unparse(node).startswith("np."):
            found.append(where + ast.unparse(node))
        elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
            found.append(where + "@ on unsliced operands")
        elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Pow):
            base = node.left if isinstance(node, ast.BinOp) else node.target
            if not (isinstance(base, ast.Constant) and base.value == 2):
                found.append(where + f"{ast.unparse(node)}: only powers of two are exact in every C library")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            on_np = isinstance(node.func.value, ast.Name) and node.func.value.id == "np"
            if not on_np and node.func.attr in METHODS and not _is_ours(node):
                found.append(where + f".{node.func.attr}()")
            if node.func.attr == "argsort" and "kind='stable'" not in ast.unparse(node):
                found.append(where + "argsort without kind='stable'")
        elif isinstance(node, ast.ImportFrom) and node.module in ("math", "cmath", "numpy", "numpy.random"):
            found.extend(where + f"{node.module}.{name.name}" for name in node.names if name.name != "factorial")
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "math" and node.attr not in MATH:
            found.append(where + f"math.{node.attr}")
    return found


def _is_ours(call: ast.Call) -> bool:
    """`ar.dot(...)`, `self.dot(...)`: the arithmetic's own products; `layer.sum(...)`: a part of the model."""
    assert isinstance(call.func, ast.Attribute)
    return ast.unparse(call.func) in ("ar.dot", "self.dot", "self.ar.dot", "self.sum")


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(ROOT)) for p in FILES])
def test_nothing_depends_on_the_machine(path: Path) -> None:
    assert problems(path, path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "np.sum(x)",
        "x.sum()",
        "x.mean(axis=0)",
        "x.dot(y)",
        "x @ y",
        "x @= y",
        "np.matmul(x, y)",
        "np.einsum('i,i', x, y)",
        "np.add.reduce(x)",
        "np.linalg.norm(x)",
        "np.exp(x)",
        "math.exp(1.0)",
        "from math import exp",
        "d**-0.5",
        "x**2",
        "x **= 0.5",
        "np.float_power(x, 2)",
        "np.argsort(x)",
        "x.argsort()",
        "np.partition(x, 3)",
        "np.random.default_rng(0)",
    ],
)
def test_the_check_can_fail(line: str) -> None:
    assert problems(Path("ops/some.py"), line)
