"""The reports say what the result says, first line first, and the page stands on its own."""

import dataclasses
import html.parser
import io
import json
import math
import re

import pytest
from rich.console import Console
from rich.highlighter import ReprHighlighter

from conformance.judge.result import (
    Check,
    Coverage,
    Divergence,
    Flip,
    Problem,
    Result,
    Statistics,
    TapRow,
    TensorRow,
    TokenRow,
    Value,
)
from conformance.report import html as page
from conformance.report import machine, numbers, terminal, view

TOKENS = 7
EXPECTED, ACTUAL = -0.731058578, -0.7421875
LINE = "first divergence: layers.1.attn.g (attn.in -> attn.g): element 24.4 past its bound at token 3"


def tap(order, name, layer=None, ratio=0.5, **changes):
    passed = ratio <= 1
    value = Value((3, 1, 0), 3, EXPECTED, ACTUAL, EXPECTED.hex(), ACTUAL.hex(), 0.0111, 0.0111 / max(ratio, 1), ratio)
    row = TapRow(
        order=order,
        tap=name,
        layer=layer,
        step="attn.in -> here",
        inputs=("layers.1.attn.in",),
        kind="bounded",
        passed=passed,
        compared=84,
        failing=0 if passed else 5,
        max_ratio=ratio,
        p999_ratio=ratio * 0.9,
        median_ratio=ratio * 0.1,
        bias=0.015,
        bias_ratio=0.3,
        relative_l2=0.002,
        relative_l2_allowed=0.004,
        worst_row=3,
        worst_row_ratio=ratio,
        worst_column=0,
        worst_column_ratio=ratio * 0.5,
        checks=(Check("element", ratio, 1.0, ratio, passed, "token 3"),),
        by_token=tuple(ratio * (token + 1) / TOKENS for token in range(TOKENS)),
        values=() if passed else (value,),
        message="" if passed else "5 of 84 values outside the bound",
    )
    return dataclasses.replace(row, **changes)


def result(failing=True, **changes):
    names = ["attn_hc.pre", "attn.in", "attn.q", "attn.g", "attn.out", "mid", "out"]
    dsa = ["attn_hc.pre", "attn.in", "attn.q_resid", "indexer.scores", "attn.out", "mid", "out"]
    rows = [tap(0, "embed")]
    for layer, leaves in ((0, names), (1, names), (2, dsa)):
        rows += [tap(len(rows) + i, f"layers.{layer}.{leaf}", layer) for i, leaf in enumerate(leaves)]
    rows.append(
        tap(
            len(rows),
            "layers.2.router.indices",
            2,
            0.0,
            kind="exact",
            choices=21,
            flips=(Flip(4, 2, 6, 1e-5, 2e-5, True),),
        )
    )
    if failing:
        rows = [tap(row.order, row.tap, row.layer, 24.4) if row.tap == "layers.1.attn.g" else row for row in rows]
    made = Result(
        engine="fast",
        engine_version="1.2",
        checkpoint="tiny",
        export="nvidia",
        config_sha256="ab" * 32,
        arithmetic="bf16",
        schedule='{"prefill": [5], "decode": 2}',
        tokens=tuple(range(60, 60 + TOKENS)),
        layers=3,
        passed=not failing,
        first_divergence=Divergence("layers.1.attn.g", 1, "attn.in -> attn.g", "element", LINE) if failing else None,
        problems=(),
        tensors=tuple(
            TensorRow(
                f"w.{i}.weight", "routed expert", "scale", 2, "F8_E4M3", "U8", (4, 2), "identical", True, 8, 0, ()
            )
            for i in range(3)
        ),
        taps=tuple(rows),
        logits=tuple(
            TokenRow(i, 60 + i, 1e-5 * (i + 1), 1e-3, 0.01, 0.05, 0.002, 5, 5, True, 0.0, 0.01, True)
            for i in range(TOKENS)
        ),
        coverage=Coverage(30, len(rows), ("layers.0.attn.v",), (), 5, 3, ("lm_head.weight",), 84 * len(rows)),
        statistics=Statistics(64, 0, 1e-6, 200),
    )
    return dataclasses.replace(made, **changes)


def printed(*results, width=140):
    file = io.StringIO()
    terminal.print_report(results, Console(file=file, width=width, color_system=None))
    return file.getvalue()


# --- the terminal ----------------------------------------------------------------------------------------------------


def test_the_first_line_of_a_failure_names_the_first_divergence():
    assert printed(result()).splitlines()[0] == LINE


def test_the_first_line_of_a_success_says_so():
    assert printed(result(failing=False)).splitlines()[0].startswith("PASS every compared tap is within")


def test_no_run_at_all_is_a_failure():
    assert printed().startswith("FAIL nothing was compared")


def test_the_last_line_of_several_runs_counts_them():
    assert printed(result(failing=False), result(failing=False)).splitlines()[-1] == "PASS all 2 runs"
    text = printed(result(), result(failing=False), result())
    assert text.splitlines()[-1] == "FAIL 2 of 3 runs, first at layers.1.attn.g"
    assert "runs" not in printed(result()).splitlines()[-1]


def test_a_schedule_that_cannot_be_read_is_no_error_of_the_report():
    """The hint about tokens is left out; the trace's own fault is told as one."""
    for schedule in ("", "[]", "{", '{"prefill": 3}'):
        assert printed(result(schedule=schedule)).splitlines()[0] == LINE


def test_a_fatal_problem_without_a_divergence_is_the_first_line():
    problem = Problem("empty", "trace", "0 taps", "some", True, "the trace holds no tap that can be compared")
    lines = printed(result(failing=False, passed=False, problems=(problem,))).splitlines()
    assert lines[0] == "FAIL the trace holds no tap that can be compared"
    assert any(line.strip().startswith("empty") for line in lines[1:])


def test_many_problems_are_counted():
    problems = tuple(Problem("extra", f"x{i}", "", "", True, f"x{i} is unknown") for i in range(11))
    text = printed(result(failing=False, passed=False, problems=problems))
    assert text.count("is unknown") == 1 + terminal.SHOWN_PROBLEMS
    assert "and 3 more problems" in text


def test_failing_values_are_printed_exactly():
    text = printed(result())
    assert f"[3, 1, 0] expected -0.731058578 ({EXPECTED.hex()}), actual -0.7421875 ({ACTUAL.hex()})" in text
    assert "24.4 of the allowed" in text


def test_a_failing_operand_and_an_unexcused_flip_are_printed():
    bad = TensorRow("w.9.weight", "norm", "value", 0, "BF16", "F32", (8,), "upcast", False, 8, 2, ())
    flip = Flip(4, 2, 6, 0.5, 2e-5, False)
    row = tap(99, "layers.2.router.indices", 2, math.inf, kind="exact", passed=False, flips=(flip,))
    text = printed(result(tensors=(bad,), taps=(row,)))
    assert "operand w.9.weight (value): 2 of 8 elements differ; upcast" in text
    assert "token 4: chose 2, expected 6; the scores differ by 0.500, 2.0e-5 is allowed" in text


def test_what_was_not_covered_is_printed():
    coverage = Coverage(30, 2, ("layers.0.attn.v",), ("attn.decay",), 5, 3, (), 9)
    text = printed(result(coverage=coverage))
    assert "not in the trace: layers.0.attn.v" in text
    assert "known to no table: attn.decay" in text
    assert "covered: 2 of 30 taps, 3 of 5 operands" in text


def test_square_brackets_are_text_and_not_markup():
    assert "[red]x" in printed(result(checkpoint="[red]x"))


def test_a_narrow_terminal_keeps_the_first_line_whole():
    assert printed(result(), width=40).splitlines()[0] == LINE


def test_no_pattern_is_sought_in_what_a_trace_says(monkeypatch, capsys):
    monkeypatch.setattr(ReprHighlighter, "highlight", lambda self, text: pytest.fail(f"{len(text)} characters sought"))
    terminal.print_report([result(engine="x" * 100_000)], terminal.default_console())
    assert "x" * 100_000 in capsys.readouterr().out


# --- for programs ----------------------------------------------------------------------------------------------------


def test_the_json_report_comes_back_equal(tmp_path):
    results = [result(), result(failing=False, taps=(tap(0, "embed", bias=math.nan, max_ratio=math.inf),))]
    machine.write(results, tmp_path / "r.json")
    back = machine.read(tmp_path / "r.json")
    assert back[0] == results[0]
    assert math.isnan(back[1].taps[0].bias)
    assert back[1].taps[0].max_ratio == math.inf
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["passed"] is False
    assert data["first_divergences"] == [LINE]
    assert json.loads(machine.render([result(failing=False)]))["passed"] is True
    assert json.loads(machine.render([]))["passed"] is False


DEEP = pytest.param("[" * 100_000, id="deep")


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "glm53-report/0"}', '{"format": "glm53-report/1"}', DEEP])
def test_another_json_file_is_refused(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match="not a glm53-report/1 report"):
        machine.read(tmp_path / "r.json")


# --- the page --------------------------------------------------------------------------------------------------------


class Outline(html.parser.HTMLParser):
    """Checks nesting; collects ids, references, external addresses, table heads and text."""

    VOID = frozenset({"meta", "input", "br", "link", "img", "line", "polyline"})

    def __init__(self, text):
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str | None] = []
        self.references: list[str] = []
        self.addresses: list[str | None] = []
        self.words: list[str] = []
        self.heads: list[str | None] = []
        self.feed(text)
        self.close()
        assert self.stack == [], "unclosed elements"

    def handle_starttag(self, tag, attributes):
        known = dict(attributes)
        if tag not in self.VOID:
            self.stack.append(tag)
        if "id" in known:
            self.ids.append(known["id"])
        self.references += [value for key in ("aria-labelledby", "for") if (value := known.get(key))]
        self.references += [href[1:] for href in (known.get("href"),) if href and href.startswith("#")]
        self.addresses += [known[key] for key in ("src", "href", "action") if key in known]
        if tag == "th":
            self.heads.append(known.get("scope"))
        if tag in ("input", "select"):
            assert "label" in self.stack, f"{tag} without a label"

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.stack[-1] == tag, f"</{tag}> closes <{self.stack[-1]}>"
            self.stack.pop()

    def handle_data(self, data):
        if not {"script", "style"} & set(self.stack):
            self.words.append(data)


@pytest.fixture(scope="module", params=["failing", "passing", "two", "none", "bare"])
def written(request):
    bare = result(failing=False, taps=(), logits=(), tensors=(), passed=False)
    runs = {
        "failing": [result()],
        "passing": [result(failing=False)],
        "two": [result(), result(failing=False)],
        "none": [],
        "bare": [bare],
    }[request.param]
    return runs, page.render(runs)


def test_the_page_is_well_formed_and_refers_to_nothing_outside(written):
    _, text = written
    outline = Outline(text)
    assert len(set(outline.ids)) == len(outline.ids), "an id twice"
    assert [name for name in outline.references if name not in {*outline.ids, "run-0"}] == []
    assert [address for address in outline.addresses if not (address or "").startswith("#")] == []
    assert not re.search(r"url\(|@import|https?://|fetch\(|XMLHttpRequest", text)


def test_every_table_head_has_a_scope(written):
    assert None not in Outline(written[1]).heads


def test_the_title_carries_the_verdict(written):
    runs, text = written
    good = bool(runs) and all(run.passed for run in runs)
    assert f"<title>{'PASS' if good else 'FAIL'} · " in text


def test_the_first_divergence_is_the_heading_and_failing_values_are_exact():
    text = page.render([result()])
    assert re.search(r"<h1[^>]*>" + re.escape(LINE.replace("->", "-&gt;")) + "</h1>", text)
    for piece in (EXPECTED.hex(), ACTUAL.hex(), "-0.731058578", "[3, 1, 0]", "5 of 84 values outside the bound"):
        assert piece in text


def test_every_tap_token_and_uncovered_name_is_on_the_page():
    run = result()
    words = " ".join(Outline(page.render([run])).words)
    for row in run.taps:
        assert row.tap in words
    for name in (*run.coverage.taps_missing, *run.coverage.tensors_missing, run.config_sha256):
        assert name in words
    assert "64 samples of stochastic arithmetic" in words


def test_what_an_engine_calls_itself_cannot_break_the_page():
    evil = "</script><script>alert(1)</script>"
    run = result(engine=evil, checkpoint=evil, taps=(tap(0, evil, message=evil),))
    text = page.render([run])
    assert evil not in text
    Outline(text)


def test_a_page_is_written_whole(tmp_path):
    page.write([result()], tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == page.render([result()])
    assert [item.name for item in tmp_path.iterdir()] == ["r.html"]


# --- what the tables are made of -------------------------------------------------------------------------------------


def test_the_matrix_keeps_dataflow_order_and_marks_failures():
    names, rows = view.matrix(result())
    assert names == [
        *("attn_hc.pre", "attn.in", "attn.q_resid", "indexer.scores", "attn.q", "attn.g", "attn.out", "mid", "out"),
        "router.indices",
    ]
    assert [(row.layer, row.kind, row.failed) for row in rows] == [
        ("0", "KDA", False),
        ("1", "KDA", True),
        ("2", "DSA", False),
    ]
    by_name = dict(zip(names, rows[1].cells, strict=True))
    assert (by_name["attn.g"].text, by_name["attn.g"].failed, by_name["attn.g"].level) == ("24.40", True, 9)
    assert (by_name["attn.q_resid"].text, by_name["attn.q_resid"].level) == ("", 0)


def test_two_steps_into_one_tap_show_the_worse():
    rows = (tap(0, "layers.0.out", 0, 0.2), tap(1, "layers.0.out", 0, 0.7))
    assert view.matrix(result(taps=rows))[1][0].cells[0].text == "0.70"


def test_the_heat_map_holds_every_token_and_survives_strange_values():
    row = tap(0, "layers.0.out", 0, by_token=(0.1, math.nan, math.inf, 0.0, 0.123456, 1e-7, 2.0))
    data = json.loads(view.heat_data(result(taps=(row, tap(1, "embed")))))
    assert data["taps"] == {"out": {"0": [0.1, None, 1e9, 0.0, 0.123, 1e-7, 2.0]}}
    assert len(data["outside"]["embed"]) == TOKENS
    assert data["group"] == 1


def test_long_inputs_are_grouped_by_their_worst_token():
    count = 1001
    row = tap(0, "layers.0.out", 0, by_token=tuple(float(token == 500) for token in range(count)))
    data = json.loads(view.heat_data(result(taps=(row,), tokens=tuple(range(count)))))
    cells = data["taps"]["out"]["0"]
    assert data["group"] == 3
    assert len(cells) == 334
    assert [index for index, cell in enumerate(cells) if cell == 1.0] == [500 // 3]


def test_operands_are_grouped_failures_first():
    good = result().tensors
    bad = dataclasses.replace(good[0], role="norm", passed=False, differing=3)
    groups = view.tensor_groups((*good, bad))
    assert [(group.role, group.tensors, group.failing, group.differing) for group in groups] == [
        ("norm", 1, 1, 3),
        ("routed expert", 3, 0, 0),
    ]


@pytest.mark.parametrize(
    ("value", "level"), [(math.nan, 0), (0.0, 1), (0.25, 5), (0.999, 8), (1.0, 9), (50.0, 9), (math.inf, 9)]
)
def test_shades(value, level):
    assert view.level(value) == level


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1.00"),
        (0.12345, "0.123"),
        (24.36, "24.4"),
        (1234.5, "1234"),
        (9.999, "10.0"),
        (0.000123, "1.2e-4"),
        (5e8, "5.0e8"),
        (2e12, "2.0e12"),
        (math.inf, "∞"),
        (math.nan, "–"),
        (-0.5, "-0.500"),
    ],
)
def test_ratios_have_three_digits(value, text):
    assert numbers.ratio(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0049, "<.01"), (0.005, "0.01"), (0.994, "0.99"), (0.996, "1.00"), (123.4, "123"), (math.inf, "∞")],
)
def test_short_ratios(value, text):
    assert numbers.short(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.015, "+1.50 %"), (-2e-6, "-2.0e-4 %"), (0.0, "0 %"), (math.nan, "–"), (math.inf, "–")]
)
def test_percentages_are_signed(value, text):
    assert numbers.percent(value) == text


def test_a_chart_needs_something_to_draw():
    assert view.kl_chart(result(logits=())) is None
    chart = view.kl_chart(result())
    assert chart is not None
    assert len(chart["points"].split()) == TOKENS
    assert 0 <= chart["limit"] <= chart["height"]
