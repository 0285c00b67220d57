"""`python -m conformance.goldens`: make again what NumPy computes of the goldens and compare, without torch.

Prints JSON: the digest, what differs, and what this process really computed with (NumPy's SIMD features, the BLAS
kernels). The portability lanes run it under other interpreters; people use `glm53 golden verify`. Exit status 1 for a
difference.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from conformance.goldens.lanes import environment
from conformance.goldens.verify import verify


def main(directory: str) -> int:
    verdict = verify(Path(directory), computed=True)
    lines = [line for finding in verdict.findings for line in finding.lines()]
    report = {"digest": verdict.digest, "expected": verdict.expected_digest, "findings": lines}
    print(json.dumps(report | {"environment": environment()}))
    return 0 if verdict.sound else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
