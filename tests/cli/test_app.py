from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from importlib.metadata import EntryPoint

import click
import pytest
import torch

from exportkit.cli import app, output
from exportkit.cli.app import COMMANDS, group, main
from exportkit.cli.ops import OperatorCommands
from exportkit.cli.output import print_json, print_table, printable, progress
from exportkit.errors import EXIT_CODES, DigestMismatchError, NoTargetError
from exportkit.progress import bytes_text

OPERATORS = [*OperatorCommands.modules]


@pytest.fixture
def broken(monkeypatch):
    """`exportkit doctor` raises what it is given."""

    def install(error):
        @app.command("doctor")
        def command(as_json):
            """Raise."""
            raise error

        monkeypatch.setattr("exportkit.cli.doctor.command", command)

    return install


def test_help_imports_neither_torch_nor_rich():
    asked = [["--help"], *([name, "--help"] for name in COMMANDS), *(["ops", name, "--help"] for name in OPERATORS)]
    code = f"import sys; from exportkit.cli import main; print([main(each) for each in {asked!r}])"
    code += "; print({'torch', 'rich'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-2:] == [str([0] * len(asked)), "set()"]


def test_help_lists_every_command_in_the_order_of_the_work_and_every_exit_code(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    places = [text.index(f"\n  {name} ") for name in COMMANDS]
    assert places == sorted(places)
    assert main(["verify", "--help"]) == 0
    text += capsys.readouterr().out
    assert [text.count(f"\n  {code} ") for code in EXIT_CODES] == [1] * len(EXIT_CODES)


def commands():
    """Every command that does something, with the words it is called by."""
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from ((f"{name} {own}", command.get_command(click.Context(command), own)) for own in OPERATORS)
        else:
            yield name, command


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=[name for name, _ in commands()])
def test_every_command_has_json_debug_and_a_help_text(name, command):
    options = {option for parameter in command.params for option in parameter.opts}
    assert {"--json", "--debug"} <= options
    assert command.help
    for parameter in command.params:
        assert isinstance(parameter, click.Argument) or parameter.help, f"{name} {parameter.opts} has no help"
    assert {*getattr(command, "common", ())} <= {parameter.name for parameter in command.params}


FORGED = "no target 'x\nok: 9 calls agree\r\u2028\x85\x0b\x1cok\x1b[2K\nerror: y'"


def test_a_message_that_quotes_a_package_forges_no_line(broken, capsys):
    """A package's strings are its maker's: none of them may look like what exportkit says of it."""
    for error in (NoTargetError(FORGED, hint=FORGED), KeyError(FORGED), RuntimeError(FORGED)):
        broken(error)
        main(["doctor", "--debug"])
        said = capsys.readouterr().err
        starts = [line for line in said.splitlines() if not line.startswith("  ")]
        assert len(starts) == 1
        assert starts[0].startswith("error: ")
        assert not set("\x1b\r\u2028\x85\x0b\x1c") & set(said)


def test_json_gives_an_error_as_one_document_on_stdout(broken, capsys):
    broken(DigestMismatchError("record x", hint="Ask."))
    assert main(["doctor", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document == {"error": {"kind": "DigestMismatchError", "message": "record x", "hint": "Ask.", "exit_code": 3}}
    assert main(["inspect", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 2


OF_A_GPU = "CUDA out of memory. Tried to allocate 770.00 MiB. 677.88 MiB is free. Process 1953 has 7.20 GiB in use."


def of_the_host() -> RuntimeError:
    """What torch says of a lack of memory."""
    try:
        torch.empty(1 << 60, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("there was so much memory")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (DigestMismatchError("record x", hint="Ask."), 3, r"^error: record x[\s\S]*Ask\."),
        (NoTargetError("y"), 4, "^error: y"),
        (PermissionError(errno.EACCES, "Permission denied", "/x.pt2"), 4, "^error: /x.pt2: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), 4, "^error: No space left on device"),
        (torch.OutOfMemoryError(OF_A_GPU), 4, "^error: CUDA .* 677.88 MiB is free\n  Take smaller sizes"),
        (MemoryError(), 4, "^error: not enough memory\n  Take smaller sizes"),
        (of_the_host(), 4, "allocate 1152921504606846976 bytes"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (KeyError("oops"), 70, r"Traceback[\s\S]*Please report it"),
        (OSError("could not get source code"), 70, r"Traceback[\s\S]*Please report it"),
    ],
    ids=repr,
)
def test_an_error_has_its_exit_code_and_its_words_and_only_a_bug_a_traceback(broken, capsys, error, code, says):
    broken(error)
    assert main(["doctor"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(says, captured.err)
    assert ("Traceback" in captured.err) == (code == 70)
    main(["doctor", "--debug"])
    assert ("Traceback" in capsys.readouterr().err) == (code != 130)


def test_the_module_and_the_version_run():
    done = subprocess.run([sys.executable, "-m", "exportkit", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("exportkit ")


def test_json_has_words_for_what_is_no_number(capsys):
    print_json({"a": float("inf"), "b": [float("nan"), 1.5], "c": (True, None)})
    assert json.loads(capsys.readouterr().out) == {"a": "inf", "b": ["nan", 1.5], "c": [True, None]}


def test_what_a_model_prints_goes_to_stderr_and_the_result_to_stdout():
    code = """
import ctypes, os, sys
from exportkit.cli.output import print_json, progress
with progress():
    print("from Python")
    ctypes.CDLL(None).puts(b"from C")
    os.system("echo from a child")
print_json({"ok": True})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"ok": True}
    assert sorted(done.stderr.splitlines()) == ["from C", "from Python", "from a child"]


def test_a_path_that_an_ascii_locale_did_not_decode_is_read_as_utf_8() -> None:
    as_given = "ünï/模型.pt2".encode().decode("ascii", "surrogateescape")
    assert printable(as_given) == "ünï/模型.pt2"
    assert printable(b"\xff\x1b\xc3.pt2".decode("ascii", "surrogateescape")) == r"\udcff\x1b\udcc3.pt2"


def test_tables_align_their_columns(capsys):
    print_table([("a", "bb", "c"), ("aaa", "b", "c")])
    assert capsys.readouterr().out == "  a    bb  c\n  aaa  b   c\n"


def test_sizes_have_units():
    assert [*map(bytes_text, (0, 999, 1500, 3_200_000_000))] == ["0 bytes", "999 bytes", "1.5 kB", "3.2 GB"]


def completions(words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What bash is offered for the last word."""
    monkeypatch.setenv("_EXPORTKIT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    return [line.partition(",")[2] for line in capsys.readouterr().out.splitlines()]


def test_the_shell_completes_commands_their_subcommands_options_and_choices(capsys, monkeypatch):
    assert completions("exportkit ", capsys, monkeypatch) == [*COMMANDS, "demo"]
    assert completions("exportkit ops ch", capsys, monkeypatch) == ["check"]
    assert "--op-library" in completions("exportkit export x --op", capsys, monkeypatch)
    assert completions("exportkit verify x --against e", capsys, monkeypatch) == ["eager"]


def test_a_command_of_a_package_that_cannot_be_imported_says_so_and_hides_no_other(capsys, monkeypatch):
    broken = EntryPoint("broken", "no_such_module_here:command", "exportkit.commands")
    there = {"broken": broken, "verify": broken}
    monkeypatch.setattr("exportkit.cli.app.declared", lambda group: there)
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "broken" in out
    assert "verify" in out
    assert main(["broken"]) == 4
    err = capsys.readouterr().err
    assert "no_such_module_here:command, which an installed package declares for `exportkit broken`" in err
    assert "Mend that package" in err
    assert main(["verify", "--help"]) == 0  # which no package takes the place of


def test_progress_is_plain_lines_on_stderr_and_a_long_step_is_reported_again(capsys, monkeypatch):
    monkeypatch.setattr(output, "LONG", 0.01)
    said = ""
    with progress() as step:
        step("tracing")
        while said.count("\n") < 2:
            captured = capsys.readouterr()
            assert captured.out == ""
            said += captured.err
    assert said.startswith("tracing ...\ntracing, for 0 s")
