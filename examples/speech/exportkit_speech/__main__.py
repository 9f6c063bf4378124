"""The command of the example: `exportkit-speech listen voice.wav`."""

import argparse
import sys
from pathlib import Path

from exportkit.errors import ExportkitError

PACKAGE = Path("speech.pt2")


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
    asked = _parser().parse_args()
    try:
        return listen(asked)
    except ExportkitError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except (OSError, ValueError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
