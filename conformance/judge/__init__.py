"""The judge: one trace against the reference, per tensor, per step and per token."""

from conformance.judge.rebase import Rebase
from conformance.judge.result import Result
from conformance.judge.verdict import compare

__all__ = ["Rebase", "Result", "compare"]
