"""The engines the judge can run: the reference, the fast engine, the public torch classes, and a trace from a file."""
