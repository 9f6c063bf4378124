"""The parts every command shares: lazy loading, --json, --debug, exit codes and error output.

`exportkit --help` must stay fast, so command modules import neither torch nor rich at their top.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

import exportkit
from exportkit.child.process_end import end_at_once
from exportkit.cli.output import print_json, printable, printable_lines
from exportkit.errors import EXIT_CODES, ExportError, ExportkitError, HostError
from exportkit.installed import declared

if TYPE_CHECKING:
    from exportkit.child.supervised import Crash

F = TypeVar("F", bound=Callable[..., Any])

BUG_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h
VERDICT_CODES = range(10, 22)
"""The exit codes of `verify`'s verdicts."""
INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as in a shell

# In the order of the work. Each name is a module whose attribute `command` is the command. What it does stands here, so
# that `exportkit --help` need not import it.
GROUPS = {
    "Make": {
        "export": "Trace and compile a model, and record cases.",
        "package": "Add operator libraries, and verify.",
    },
    "Check": {
        "verify": "Run an artifact in a fresh process and compare.",
        "inspect": "Show what an artifact holds.",
        "doctor": "Show what this machine can do; look after its cache.",
    },
    "Ship": {
        "sign": "Sign a package.",
        "revoke": "Add keys and packages to a revocation list.",
        "oci": "Write a package as an OCI image layout, for registries.",
    },
    "Run": {
        "serve": "Serve packages over HTTP and gRPC.",
        "triton": "Serve a package with Triton.",
        "bench": "Time operators or packages beside the alternatives.",
    },
    "Operators": {"ops": "Write, list and check custom operators."},
}
COMMANDS = {name: does for group in GROUPS.values() for name, does in group.items()}

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}


class LazyGroup(click.Group):
    """A group that imports a command when it is looked up.

    Attributes:
        modules: The modules in exportkit.cli by command, in the order of the work. Each has the command as `command`.
    """

    modules: ClassVar[Mapping[str, str]] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Lists the commands in the order of the work instead of the alphabet."""
        return list(self.modules)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command. For a name that there is not, it names the closest one, as click does for options."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            if not close or "Did you mean" in error.message:
                raise
            raise click.UsageError(f"{error.message.rstrip('.')}. Did you mean {close[0]!r}?", ctx) from error

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command's module and returns the command."""
        if cmd_name not in self.modules:
            return None
        command: click.Command = importlib.import_module(f"exportkit.cli.{self.modules[cmd_name]}").command
        return command


def _unusable(entry: EntryPoint, error: Exception) -> click.Command:
    """Returns a command that says why the one of an installed package cannot be had."""

    def refuse(**_: object) -> None:
        raise HostError(
            f"{entry.value}, which an installed package declares for `exportkit {entry.name}`, cannot be imported: "
            f"{type(error).__name__}: {error}",
            hint="Mend that package or uninstall it.",
        )

    return click.Command(entry.name, callback=refuse, short_help="Cannot be imported: run it to see why.")


class Commands(LazyGroup):
    """All commands by what they are for, with the exit codes below them."""

    modules: ClassVar[Mapping[str, str]] = {name: name for name in COMMANDS}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Lists exportkit's own commands, then those of installed packages."""
        return [*COMMANDS, *(name for name in declared("exportkit.commands") if name not in COMMANDS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns exportkit's own command, or else that of an installed package."""
        if cmd_name in COMMANDS or (entry := declared("exportkit.commands").get(cmd_name)) is None:
            return super().get_command(ctx, cmd_name)
        try:
            installed: click.Command = entry.load()
        except Exception as error:  # a stranger's module may raise anything, and the other commands go on
            return _unusable(entry, error)
        return installed

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands, by group."""
        others = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)[len(COMMANDS) :]]
        installed = {name: command.get_short_help_str(80) for name, command in others if command}
        wide = max(map(len, COMMANDS | installed))
        for title, group in (GROUPS | {"Of installed packages": installed}).items():
            if group:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(wide), does) for name, does in group.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the exit codes that are not `verify`'s own."""
        with formatter.section("Exit codes"):
            formatter.write_dl(
                [(str(code), meaning) for code, meaning in EXIT_CODES.items() if code not in VERDICT_CODES]
            )
            formatter.write_text(
                f"Those of `verify` ({min(VERDICT_CODES)} to {max(VERDICT_CODES)}): `exportkit verify --help`."
            )


class Command(click.Command):
    """A command that shows the options of every day before the others.

    Attributes:
        common: The names of the parameters to show first; without any, all options are in one list.
    """

    common: Collection[str] = ()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options, in one list or in two."""
        usual: list[tuple[str, str]] = []
        others: list[tuple[str, str]] = []
        for each in self.get_params(ctx):
            row = each.get_help_record(ctx)
            if isinstance(each, click.Option) and row is not None:
                of_all = {"--json", "--debug", "--help"} & {*each.opts}
                (usual if not self.common or of_all or each.name in self.common else others).append(row)
        for title, rows in (("Options", usual), ("More options", others)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the exit codes of `verify`, whose verdicts they are."""
        if self.name == "verify":
            with formatter.section("Exit codes"):
                formatter.write_dl([(str(code), EXIT_CODES[code]) for code in VERDICT_CODES])


@click.group(cls=Commands, context_settings=SETTINGS)
@click.version_option(exportkit.__version__, message="exportkit %(version)s")
def group() -> None:
    """Turn a PyTorch module with custom operators into one verified, self-contained .pt2.

    \b
    exportkit export arr-coc -o model_aoti.pt2          trace and compile; record cases
    exportkit package model_aoti.pt2 -o model.pt2       add the operator libraries
    exportkit verify model.pt2                          replay the cases in a fresh process
    """  # noqa: D301 (click wants the control character, to keep the lines below it)


def command(name: str, *, common: Collection[str] = (), **settings: Any) -> Callable[[F], click.Command]:
    """Makes a command with --json and --debug.

    The function receives --json as `as_json`. Only `main` reads --debug. `common` is that of `Command`, and `settings`
    are click's.
    """
    settings = {"cls": Command, "short_help": COMMANDS.get(name)} | settings

    def decorate(function: F) -> click.Command:
        made = click.command(name, context_settings=SETTINGS, **settings)(function)
        made.common = common
        json_help = "Print one JSON document on stdout, nothing else."
        made.params += [
            click.Option(["--json", "as_json"], is_flag=True, help=json_help),
            click.Option(["--debug"], is_flag=True, expose_value=False, help="Show the traceback of an error."),
        ]
        return made

    return decorate


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: The arguments without the program's name. Default: the arguments of this process.

    Returns:
        The exit code.
    """
    gc.set_threshold(1_000_000)  # importing torch creates half a million objects and little garbage
    if arguments is not None or "torch" in sys.modules:
        return _main(sys.argv[1:] if arguments is None else list(arguments))
    if sys.argv[1:2] != ["export"]:
        return end_at_once(_main(sys.argv[1:]))
    from exportkit.child.supervised import run_supervised

    # The user's kernels, the compiler's and a GPU's driver run in there.
    ended = run_supervised(lambda: _main(sys.argv[1:]))
    return ended if isinstance(ended, int) else _crashed(ended, "--json" in sys.argv)


def _crashed(crash: Crash, as_json: bool) -> int:
    """Says what died where, and removes what it left."""
    from exportkit.child.process import describe_end
    from exportkit.package.atomic import temporary_folder

    with temporary_folder(None, "exportkit-compile"):
        pass  # making one removes those of dead processes
    where = crash.line or (crash.node if crash.status != -signal.SIGKILL else "")  # memory may run out anywhere
    message = f"the process that exports {describe_end(crash.status)} while {crash.step or 'it started'}"
    message += f", at {where}" if where else ""
    if crash.status == -signal.SIGKILL:
        hint = "Export on a machine with more memory, or with smaller example inputs."
        return _show("HostError", message, hint, HostError.exit_code, as_json)
    hint = (
        "It is that operator, or what the compiler made of it: run it by itself (`exportkit ops check`), or keep it "
        "out of the model. No file was written."
    )
    if crash.step.startswith("recording edge values"):
        hint += " If only such values kill it, as NaN does LAPACK's eigenvalues, export with --no-edge-cases."
    return _show("ExportError", message, hint, ExportError.exit_code, as_json)


def _main(arguments: Sequence[str]) -> int:
    as_json, debug = "--json" in arguments, "--debug" in arguments
    try:
        code = group.main(arguments, prog_name="exportkit", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        message = error.format_message()
        hint = f"See `{error.ctx.command_path} --help`." if isinstance(error, click.UsageError) and error.ctx else None
        return _show(type(error).__name__, message, hint, error.exit_code, as_json)
    except ExportkitError as error:
        if debug:
            _show_traceback()
        return _show(type(error).__name__, error.message, error.hint, error.exit_code, as_json)
    except (click.Abort, KeyboardInterrupt):
        return _show("Interrupted", "interrupted", None, INTERRUPTED_EXIT_CODE, as_json)
    except OSError as error:
        if error.errno is None:  # raised by Python code, such as inspect's "could not get source code"
            return _bug(error, as_json)
        if debug:
            _show_traceback()
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
        hint = "The operating system reported this error; --debug shows where."
        return _show(type(error).__name__, message, hint, HostError.exit_code, as_json)
    except Exception as error:  # every other error is a bug in exportkit
        if not _is_lack_of_memory(error):
            return _bug(error, as_json)
        if debug:
            _show_traceback()
        # torch goes on with every process that has memory, and with how to set its allocator.
        message = ". ".join(str(error).split(". ")[:3]) or "not enough memory"
        hint = "Take smaller sizes, or end what else uses the memory; --debug shows where it was missing."
        return _show(type(error).__name__, message, hint, HostError.exit_code, as_json)


def _is_lack_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)


def _show_traceback() -> None:
    click.echo(printable_lines(traceback.format_exc().rstrip(), "  "), err=True)


def _bug(error: Exception, as_json: bool) -> int:
    _show_traceback()
    hint = "This is a bug in exportkit. Please report it with the lines above."
    return _show(type(error).__name__, str(error), hint, BUG_EXIT_CODE, as_json)


def _show(kind: str, message: str, hint: str | None, exit_code: int, as_json: bool) -> int:
    if as_json:
        print_json({"error": {"kind": kind, "message": message, "hint": hint, "exit_code": exit_code}})
    first, *others = f"{message}\n  {hint}".split("\n") if hint else message.split("\n")
    click.echo(f"error: {printable(first)}", err=True)
    # A message may quote untrusted text, so only its first line starts at the margin.
    for line in others:
        click.echo(("" if line.startswith("  ") else "  ") + printable(line), err=True)
    return exit_code
