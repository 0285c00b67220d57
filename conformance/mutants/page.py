"""The outcomes as one self-contained HTML page, in the report's own style."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import jinja2

from conformance.mutants import runner
from conformance.mutants.runner import Outcome

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{{ 'PASS' if passed else 'FAIL' }} · mutants</title>
<style>{{ style | safe }}</style></head><body>
<header class="top"><p class="brand">glm53 conformance</p></header><main>
<section class="verdict {{ 'pass' if passed else 'fail' }}">
<p class="stamp">{{ 'PASS' if passed else 'FAIL' }}</p><div>
<h1 class="finding">{{ total.caught }} of {{ total.caught + total.missed }} faults caught,
{{ total.localised }} named at their place</h1>
<p class="subject">{{ total.mutants }} faults put into the fast engine one at a time, {{ total.equivalent }} of them
without effect by proof</p></div></section>
<section class="card"><h2>By class</h2><div class="scroll" tabindex="0" role="region" aria-label="Score per class">
<table><thead><tr><th scope="col">class</th>
{%- for name in ('mutants', 'caught', 'missed', 'localised', 'equivalent') %}
<th scope="col" class="num">{{ name }}</th>
{%- endfor %}
</tr></thead><tbody>
{%- for s in scores %}
<tr><th scope="row">{{ s.fault }}</th><td class="num">{{ s.mutants }}</td><td class="num">{{ s.caught }}</td>
<td class="num{{ ' over' if s.missed }}">{{ s.missed }}</td><td class="num">{{ s.localised }}</td>
<td class="num">{{ s.equivalent }}</td></tr>
{%- endfor %}
</tbody></table></div></section>
<section class="card"><h2>Every fault</h2><div class="scroll" tabindex="0" role="region" aria-label="Every fault">
<table class="list"><thead><tr><th scope="col">verdict</th><th scope="col">fault</th><th scope="col">source</th>
<th scope="col">where</th><th scope="col">expected first</th><th scope="col">found first</th>
<th scope="col" class="num">s</th></tr></thead><tbody>
{%- for o in outcomes %}
{%- set fine = o.good and (o.localised or o.equivalent) %}
<tr><td><span class="mark {{ 'pass' if fine else 'fail' }}">{{ verdict(o) }}</span></td>
<th scope="row" class="mono">{{ o.name }}</th><td>{{ o.source }}</td><td class="mono">{{ o.where }}</td>
<td class="mono">{{ o.equivalent or o.expected | join(' or ') }}</td>
<td>{{ o.error or o.line or 'nothing' }}</td><td class="num">{{ '%.1f' | format(o.seconds) }}</td></tr>
{%- endfor %}
</tbody></table></div></section>
</main></body></html>
"""


def verdict(outcome: Outcome) -> str:
    """One word."""
    if outcome.error:
        return "error"
    if outcome.equivalent is not None:
        return "caught" if outcome.caught else "equivalent"
    if not outcome.caught:
        return "missed" if outcome.changed else "missed, no bit changed"
    return "caught" if outcome.localised else "caught elsewhere"


def finding(outcome: Outcome) -> str:
    """One line about an outcome that is not as its record says."""
    found = outcome.error or outcome.line or "nothing failed"
    return f"{outcome.name}: {verdict(outcome)}: {found}; expected {' or '.join(outcome.expected)}"


def render(outcomes: Sequence[Outcome]) -> str:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_TEMPLATE).render(
        passed=runner.passed(outcomes),
        total=runner.score("all", outcomes),
        scores=runner.scores(outcomes),
        outcomes=outcomes,
        verdict=verdict,
        style=(files("conformance.report") / "page.css").read_text(encoding="utf-8"),
    )
