"""Reports of a comparison: `terminal.print_report`, `machine.write` (JSON) and `html.write` (one page), all from the
same list of results. Nothing here computes a verdict."""
