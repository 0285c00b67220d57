"""What every command promises: one line and status 2 for what it cannot use, whole outputs or none, help, silence."""

import importlib
import json
import os
import re
import stat
import struct
import sys
import types

import numpy as np
import pytest
from typer.main import get_command, get_group

from conformance.checkpoints.shared import shared
from conformance.files import write_whole
from conformance.trace import Schedule, Trace
from conformance.unit.tools.command import glm53, traced
from tools import make_checkpoint, output, plan
from tools.cli import COMMANDS, LazyGroup, app, main

IDS = np.arange(9)


def told(capsys):
    """The one line on stderr."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.fixture(scope="module")
def directory():
    return shared("nvidia", "odd")


@pytest.fixture(scope="module")
def made(directory):
    return traced(directory, IDS, Schedule((5,), 4))


# --- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("nope",),
        ("--nope",),
        ("make-checkpoint",),
        ("make-checkpoint", "x"),
        ("make-checkpoint", "x", "--export", "foo"),
        ("make-checkpoint", "x", "--export", "nvidia", "--seed", "x"),
        ("make-checkpoint", "x", "--export", "nvidia", "--layers", ""),
        ("quantize", "x"),
        ("inspect", "--nope"),
        ("trace", "x", "--decode", "many"),
        ("generate", "x"),
        ("diff", "--samples", "few"),
        ("diff", "--samples", "2"),
        ("golden", "nope"),
        ("plan", "--prefill-rows", "0"),
    ],
)
def test_arguments_that_cannot_be_parsed_are_one_line(arguments, capsys):
    assert glm53(*arguments) == 2
    assert told(capsys).startswith("glm53: ")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_its_help_has_an_example(name, capsys):
    module = importlib.import_module(COMMANDS[name][0])
    words: list[tuple[str, ...]] = [(name,)]
    if hasattr(module, "app"):
        words += [(name, sub) for sub in get_group(module.app).commands]
    for command in words:
        assert glm53(*command, "--help") == 0
        assert f"Example: glm53 {name}" in " ".join(capsys.readouterr().out.replace("│", " ").split())


OPTIONS = {
    "make-checkpoint": "--export --geometry --seed --layers --json --quiet",
    "quantize": "--export --json --quiet",
    "inspect": "--json --quiet",
    "trace": "--engine --tokens --prompt --arithmetic --tp --ep --device --prefill-chunk --decode --mtp --taps --out "
    "--json --quiet",
    "generate": "--tokens --prompt --max-new --engine --mtp --seed --json --quiet",
    "diff": "--checkpoint --html --json --quiet",
    "conform": "--engine --json --quiet",
    "mutants": "--only --json --quiet",
    "plan": "--export --tp --ep --context --mtp --vision --hardware --json --quiet",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_that_scripts_rely_on_have_these_names(name):
    group = get_command(app)
    assert isinstance(group, LazyGroup)
    command = group.get_command(None, name)
    assert set(OPTIONS[name].split()) <= {option for parameter in command.params for option in parameter.opts}


# --- faults that no command looks for itself -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device", "x/y"), "x/y: No space left on device"),
        (OSError(36, "File name too long"), "File name too long"),
        (MemoryError("Unable to allocate 9 TiB"), "out of memory: Unable to allocate 9 TiB"),
    ],
)
def test_what_the_system_refuses_is_one_line(monkeypatch, capsys, tmp_path, error, message):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(make_checkpoint.checkpoints, "make", refuse)
    assert glm53("make-checkpoint", tmp_path / "c", "--export", "nvidia", "--geometry", "odd") == 2
    assert message in told(capsys)


def test_what_an_engine_of_someone_else_raises_is_one_line(monkeypatch, capsys, tmp_path, directory):
    """Not a comparison that failed, and not a traceback either: status 2, what was raised and where."""

    def open_(self, directory, **options):
        raise KeyError("no_such_layer")

    verbs = dict.fromkeys(("run", "operands"), lambda self: None)
    module = types.ModuleType("some_engines")
    module.__dict__["Mine"] = type("Mine", (), verbs | {"name": "mine", "version": "1", "open": open_})
    monkeypatch.setitem(sys.modules, "some_engines", module)
    command = ("trace", directory, "--engine", "some_engines:Mine", "--prompt", "x", "--out", tmp_path / "t")
    assert glm53(*command) == 2
    assert re.search(r"KeyError: 'no_such_layer' \(.*test_cli\.py:\d+; glm53 --debug", told(capsys))
    with pytest.raises(KeyError):
        glm53("--debug", *command)


def test_a_name_that_no_file_can_have_is_one_line(capsys):
    assert glm53("make-checkpoint", "a" * 300, "--export", "nvidia", "--geometry", "odd") == 2
    assert "File name too long" in told(capsys)


def test_debug_lets_the_error_through(tmp_path):
    with pytest.raises(plan.UsageError):
        main(["--debug", "plan", "--export", "foo"])


def test_an_interrupted_command_leaves_nothing_and_says_so(monkeypatch, capsys, tmp_path):
    """Ctrl-C in the middle of the weights: status 130, no directory, no partial one."""
    seen = []

    def progress(*args):
        seen.append(args)
        if len(seen) == 20:
            raise KeyboardInterrupt

    class Bar:
        def __enter__(self):
            return progress

        def __exit__(self, *args):
            return None

    monkeypatch.setattr(make_checkpoint, "byte_bar", lambda *args: Bar())
    assert glm53("make-checkpoint", tmp_path / "c", "--export", "nvidia", "--geometry", "odd") == 130
    assert told(capsys) == "glm53: interrupted"
    assert list(tmp_path.iterdir()) == []


# --- outputs ---------------------------------------------------------------------------------------------------------


def test_an_output_that_fails_half_way_leaves_the_old_file(tmp_path):
    file = tmp_path / "a"
    file.write_text("old")

    def parts():
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_whole(file, parts())
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_an_output_follows_a_link_and_writes_into_a_pipe(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", b"through")
    assert (tmp_path / "file").read_bytes() == b"through"
    assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", [b"in", b"to"])
    assert os.read(reader, 10) == b"into"
    os.close(reader)
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


def test_a_file_name_of_the_greatest_length_can_be_written(tmp_path):
    write_whole(tmp_path / ("n" * 255), b"x")
    assert (tmp_path / ("n" * 255)).read_bytes() == b"x"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("no/x", "--json {}: cannot be written: No such file or directory"),
        ("file/x", "--json {}: cannot be written: Not a directory"),
        (".", "--json {}: cannot be written: Is a directory"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ("make-checkpoint", "{}/c", "--export", "nvidia", "--geometry", "odd"),
        ("quantize", "{}/no", "{}/c", "--export", "nvidia"),
        ("inspect", "{}/no"),
        ("trace", "{}/no", "--prompt", "x", "--out", "{}/t"),
        ("generate", "{}/no", "--prompt", "x", "--max-new", "1"),
        ("diff", "{}/no", "--checkpoint", "{}/no"),
        ("conform", "{}/no"),
        ("golden", "verify", "--only", "none"),
        ("plan", "--export", "nvidia", "--geometry", "odd"),
    ],
)
def test_a_result_with_no_place_is_refused_before_any_work(tmp_path, capsys, command, where, message):
    (tmp_path / "file").write_text("")
    assert glm53(*(word.format(tmp_path) for word in command), "--json", tmp_path / where) == 2
    assert message.format(tmp_path / where) in told(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("where", ["no/x", "file/x", "file"])
def test_goldens_with_no_place_are_refused_before_any_is_made(tmp_path, capsys, where):
    (tmp_path / "file").write_text("")
    assert glm53("golden", "regen", "--reason", "x", "--directory", tmp_path / where) == 2
    assert f"--directory {tmp_path / where}: cannot be written" in told(capsys)


def test_two_outputs_or_an_input_and_an_output_are_not_one_file(tmp_path):
    file = tmp_path / "f"
    with pytest.raises(output.UsageError, match="write the same file"):
        output.check_outputs({"--out": file, "--json": tmp_path / "." / "f"})
    file.write_text("")
    with pytest.raises(output.UsageError, match=r"--json .*f is an input"):
        output.check_outputs({"--json": file}, reads=[file])
    output.check_outputs({"--out": file, "--json": None}, reads=[None])


@pytest.mark.parametrize(
    "command",
    [
        ("trace", "{}", "--prompt", "x", "--out", "{}/config.json"),
        ("trace", "{}", "--prompt", "x", "--json", "{}/config.json"),
        ("generate", "{}", "--prompt", "x", "--max-new", "1", "--json", "{}/config.json"),
        ("inspect", "{}", "--json", "{}/config.json"),
        ("diff", "no", "--checkpoint", "{}", "--html", "{}/config.json"),
        ("conform", "{}", "--html", "{}/config.json"),
        ("plan", "--checkpoint", "{}", "--json", "{}/config.json"),
        ("bench", "load", "{}", "--json", "{}/config.json"),
        ("quantize", "{}", "x", "--export", "nvidia", "--json", "{}/config.json"),
    ],
    ids=lambda command: f"{command[0]} {command[-2]}",
)
def test_no_command_overwrites_the_checkpoint_it_reads(tmp_path, capsys, command):
    (tmp_path / "config.json").write_text("{}")
    assert glm53(*(word.format(tmp_path) for word in command)) == 2
    assert "config.json: would overwrite a file of the checkpoint" in told(capsys)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_device_is_written_into_and_stays_a_device(made):
    with pytest.raises(OSError, match="No space"):
        made.save("/dev/full")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_names_from_files_cannot_steer_the_terminal():
    assert output.printable("a\x1b[31m b\n\u202e한") == "a\\x1b[31m b\\n\\u202e한"


# --- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["1_000", "\u0661", "0x10", "1.0", "9" * 5000])
def test_only_plain_integers_are_tokens(directory, tmp_path, capsys, word):
    (tmp_path / "t").write_text(f"3\n{word}\n")
    assert glm53("trace", directory, "--tokens", tmp_path / "t", "--out", tmp_path / "o") == 2
    line = told(capsys)
    assert "t: line 2: " in line
    assert len(line) < 400


def test_an_array_larger_than_memory_or_than_64_bits_is_refused(directory, tmp_path, capsys):
    np.save(tmp_path / "a.npy", np.array([2**63 + 5], np.uint64))
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999999,), }"
    (tmp_path / "b.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + header.ljust(117) + b"\n")
    for name, message in (("a", "does not fit 64 bits"), ("b", "not a .npy array")):
        assert glm53("trace", directory, "--tokens", tmp_path / f"{name}.npy", "--out", tmp_path / "o") == 2
        assert message in told(capsys)


def test_bytes_of_the_command_line_that_are_no_utf8_are_ids(directory, tmp_path, capsys):
    prompt = os.fsdecode(b"a\xff")
    assert glm53("trace", directory, "--prompt", prompt, "--taps", "logits", "--out", tmp_path / "o", "--quiet") == 0
    assert Trace.load(tmp_path / "o").tokens.tolist() == [97, 255]
    assert glm53("trace", directory, "--prompt", "\ud800", "--out", tmp_path / "p") == 2
    assert "--prompt: not UTF-8" in told(capsys)


@pytest.mark.parametrize(
    ("engine", "option", "message"),
    [
        ("fast", ("--option", "kda_chunk=x"), "kda_chunk='x', expected a whole number"),
        ("fast", ("--option", "kda_chunk=0"), "kda_chunk 0, expected 1 to"),
        ("fast", ("--option", "mla=3"), "mla=3, expected text"),
        ("fast", ("--option", "vocab=foo"), "vocab 'foo', expected replicated or head or split"),
        ("fast", ("--device", "tpu"), "device 'tpu'"),
        ("fast", ("--device", ""), "device ''"),
        ("reference", ("--option", "kda=foo"), "kda 'foo', expected recurrent or chunked"),
        ("reference", ("--option", "kda_chunk=-1"), "kda_chunk -1, expected 1 to"),
        ("reference", ("--arithmetic", "fp8"), "arithmetic 'fp8', expected exact or bf16 or stochastic"),
        (":", (), "cannot import a nameless module"),
    ],
)
def test_an_option_of_an_engine_is_checked_before_it_reaches_it(directory, tmp_path, capsys, engine, option, message):
    arguments = ("--engine", engine, "--prompt", "x", *option, "--out", tmp_path / "o")
    assert glm53("trace", directory, *arguments) == 2
    assert message in told(capsys)


@pytest.mark.parametrize("seed", [-1, 2**63])
@pytest.mark.parametrize(
    "command",
    [
        ("make-checkpoint", "{}/c", "--export", "nvidia", "--geometry", "odd"),
        ("trace", "{}/no", "--prompt", "x", "--out", "{}/t"),
        ("diff", "{}/no", "--checkpoint", "{}/no"),
        ("conform", "{}/no"),
    ],
)
def test_a_seed_that_another_seed_would_repeat_is_refused(tmp_path, capsys, command, seed):
    assert glm53(*(word.format(tmp_path) for word in command), "--seed", seed) == 2
    assert f"--seed {seed}: expected 0 to" in told(capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-new", "2", "--seed", str(2**80)), "--seed "),
        (("--max-new", "2", "--mtp", "8"), "--mtp 8: expected 0 to 7"),
        (("--max-new", "2", "--stop", "-5"), "--stop -5: expected 0 to 256"),
        (("--max-new", "2", "--stop", "257"), "--stop 257: expected 0 to 256"),
        (("--max-new", "4096"), "--max-new 4096: the model has 4096 positions, the input takes 2"),
    ],
)
def test_a_continuation_that_cannot_be_is_refused(directory, capsys, options, message):
    assert glm53("generate", directory, "--prompt", "hi", *options) == 2
    assert message in told(capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--export", "nvidia", "--mtp", "-1"), "--mtp -1: expected 0 .. 7"),
        (("--export", "nvidia", "--mtp", "8"), "--mtp 8: expected 0 .. 7"),
        ((), "--export: missing"),
        (("--export", "nvidia", "--checkpoint", "x"), "--checkpoint x tells its own"),
        (("--export", "nvidia", "--context", "4097"), "--context 4097: expected 1 .. 4096"),
    ],
)
def test_a_plan_of_nothing_is_refused(capsys, options, message):
    assert glm53("plan", "--geometry", "odd", *options) == 2
    assert message in told(capsys)


def test_the_default_context_is_no_longer_than_the_model_has(tmp_path):
    assert glm53("plan", "--geometry", "odd", "--export", "nvidia", "--quiet", "--json", tmp_path / "p") == 0
    assert json.loads((tmp_path / "p").read_text())["ranks"][0]["context"] == 4096


# --- traces that lie -------------------------------------------------------------------------------------------------


def rewritten(made, path, change):
    """The trace with its header changed by `change(header) -> header or bytes`."""
    made.save(path)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = change(json.loads(data[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return path


def entry(**changes):
    return lambda header: header | {"tokens": header["tokens"] | changes}


def metadata(**changes):
    return lambda header: header | {"__metadata__": header["__metadata__"] | changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: b"[" * 200_000, "not JSON"),
        (lambda header: b'{"a":' + b"9" * 5000 + b"}", "not JSON"),
        (lambda header: json.dumps(header)[:-1].encode() + b', "tokens": 1}', "'tokens' is there twice"),
        (lambda header: header | {"a\x1b[31m": header["tokens"]}, "is not printable text"),
        (lambda header: header | {"": header["tokens"]}, "is not printable text"),
        (entry(data_offsets=5), "are not sizes"),
        (entry(data_offsets=[0]), "are not sizes"),
        (entry(shape=5), "are not sizes"),
        (entry(shape=[True]), "are not sizes"),
        (entry(dtype=["I32"]), "dtype ['I32'], expected one of"),
        (entry(dtype={}), "dtype {}, expected one of"),
        (metadata(engine="x\x1b[2J"), "expected printable text"),
        (metadata(schedule="[" * 100_000), "is not JSON"),
        (metadata(schedule='{"prefill": [5], "decode": 3, "decode": 4}'), "'decode' is there twice"),
        (metadata(rank_disagreements="x"), "metadata rank_disagreements"),
    ],
)
@pytest.mark.parametrize("check", [False, True], ids=["diff", "check"])
def test_a_trace_that_cannot_be_right_is_one_line_with_its_name(
    made, directory, tmp_path, capsys, change, message, check
):
    file = rewritten(made, tmp_path / "lie.trace", change)
    assert glm53("diff", *(("--check",) if check else ()), file, "--checkpoint", directory) == 2
    line = told(capsys)
    assert message in line
    assert line.startswith(f"glm53: {file}: ")
    assert len(line) < 600


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (metadata(config_sha256="00"), "metadata config_sha256 is 00"),
        (metadata(export="libertai"), "metadata export is libertai"),
        (metadata(rank_disagreements='{"logits": "rank 1 differs"}'), "tap logits: rank 1 differs"),
        (entry(shape=[9, 1]), "tap tokens has 2 axes"),
    ],
)
def test_check_names_metadata_and_axes_that_lie(made, directory, tmp_path, capsys, change, message):
    file = rewritten(made, tmp_path / "lie.trace", change)
    assert glm53("diff", "--check", file, "--checkpoint", directory) == 1
    out = capsys.readouterr().out
    assert message in out
    assert "not usable as it is" in out


def test_check_takes_tokens_without_any_axis(made, directory, tmp_path, capsys):
    taps = made.taps | {"tokens": np.array(3, np.int32)}
    Trace(made.metadata, taps).save(tmp_path / "lie.trace")
    assert glm53("diff", "--check", tmp_path / "lie.trace", "--checkpoint", directory) == 1
    assert "tap tokens has 0 axes" in capsys.readouterr().out
