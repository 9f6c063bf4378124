"""The command of the example: `exportkit-speech serve`, and `exportkit-speech listen voice.wav`."""

import argparse
import os
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
    """Makes the package, if it is not there, and becomes its server. Shows each command."""
    for command in () if PACKAGE.exists() else MAKE:
        if status := subprocess.run(_shown(shlex.split(command)), check=False).returncode:
            return status
    arguments = _shown(["serve", str(PACKAGE), *options])
    os.execv(arguments[0], arguments)


def _shown(arguments: list[str]) -> list[str]:
    print("$", shlex.join(["exportkit", *arguments]), file=sys.stderr, flush=True)
    return [sys.executable, "-m", "exportkit", *arguments]


def listen(asked: argparse.Namespace) -> int:
    """Prints what is heard in recordings, and draws it."""
    import torch

    from exportkit_speech import listen as heard
    from exportkit_speech import picture, recording

    pieces = [(file.name, recording.read(file)) for file in asked.files]
    samples = torch.cat([piece for _, piece in pieces])
    answers = []

    def kept(found):
        for answer in found:
            answers.append(answer)
            yield answer

    with heard.there(asked.url, asked.model, asked.api_key) if asked.url else heard.here(asked.package) as hear:
        for line in heard.lines(kept(heard.listen(samples, hear, real_time=asked.real_time)), each=asked.each):
            print(line, flush=True)
    if asked.picture:
        unfinished = asked.picture.with_name(f".{asked.picture.name}.unfinished")
        unfinished.write_text(picture.draw(pieces, answers))
        unfinished.replace(asked.picture)
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
    heard.add_argument("--picture", type=Path, metavar="SVG", help="draw the answers over the waveform")
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
