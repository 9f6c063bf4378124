"""The command of the example: `exportkit-speech serve`, and `exportkit-speech listen voice.wav`."""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from exportkit.errors import ExportkitError

PACKAGE = Path("speech.pt2")
MAKE = (
    "export speech -o speech_aoti.pt2",
    f"package speech_aoti.pt2 -o {PACKAGE}",
    f"verify {PACKAGE}",
)


def serve(options: list[str]) -> int:
    """Makes the package, if it is not there, and serves it. Shows each command."""
    for command in () if PACKAGE.exists() else MAKE:
        if status := _run(shlex.split(command)):
            return status
    return _run(["serve", str(PACKAGE), *options])


def _run(arguments: list[str]) -> int:
    print("$", shlex.join(["exportkit", *arguments]), file=sys.stderr, flush=True)
    process = subprocess.Popen([sys.executable, "-m", "exportkit", *arguments])
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            pass  # the command got it, too, and knows how to end


def listen(asked: argparse.Namespace) -> int:
    """Prints what is heard in recordings."""
    from exportkit_speech import listen as module

    source = module.there(asked.url, asked.model, asked.api_key) if asked.url else module.here(asked.package)
    with source as hear:
        for line in module.listen(asked.files, hear, real_time=asked.real_time, each=asked.each):
            print(line, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="exportkit-speech", description="A detector of speech with real weights.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "serve",
        help=f"export, package, verify and serve {PACKAGE}",
        description=f"Makes {PACKAGE} in this folder, if it is not there, and serves it.",
        epilog="Other options are those of `exportkit serve`.",
    )
    heard = commands.add_parser("listen", help="say when somebody speaks in recordings")
    heard.add_argument(
        "files", nargs="+", type=Path, metavar="WAV", help="16 bits at 16 kHz or more; one after another"
    )
    heard.add_argument("--package", type=Path, default=PACKAGE, help="run this package here (default: %(default)s)")
    heard.add_argument("--url", help="ask this server instead, such as http://127.0.0.1:8000")
    heard.add_argument("--model", default="speech", help="what the server calls it (default: %(default)s)")
    heard.add_argument("--api-key", help="the server's API key")
    heard.add_argument("--real-time", action="store_true", help="send as fast as one speaks, not as fast as it goes")
    heard.add_argument("--each", action="store_true", help="print each answer, too")
    return parser


def main() -> int:
    """Runs the command. Returns the exit code."""
    asked, options = _parser().parse_known_args()
    try:
        if asked.command == "serve":
            return serve(options)
        if options:
            _parser().error(f"unrecognized arguments: {' '.join(options)}")
        return listen(asked)
    except ExportkitError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except (OSError, ValueError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
