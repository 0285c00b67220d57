"""The `glm53` command line: one module per command, wired together by `tools.cli`."""
