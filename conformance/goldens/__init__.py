"""Golden files: what the reference computed once, to be computed again, bit for bit, on every machine.

A *case* names something the reference produces from a seed: a trace, a table, a plan, a list of refusals. `build` makes
it; `golden/` holds what it was, and `golden/manifest.json` the sha256 of every file and tensor. What is too large to
store is a *recipe*: only its hashes are kept, and of a trace also a hash per row, so that a difference still has a
place. This package needs NumPy and ml_dtypes only, so that it runs where torch does not.
"""
