"""Draws how likely speech is over the waveform of recordings, as SVG that follows the reader's theme."""

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from torch import Tensor

from exportkit_speech.detector import SAMPLES
from exportkit_speech.listen import Answer
from exportkit_speech.recording import RATE, chunks
from exportkit_speech.speech_times import BEGINS, CHUNK

_WIDTH, _HEIGHT = 880, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 34, 866, 34, 196  # of what is drawn
_BAR = SAMPLES // 4  # samples whose lowest and highest are a bar of the waveform
_STYLE = """\
.speech { --ink: #1f2430; --soft: #5a6475; --wave: #8a94a6; --spoken: #cfe8d8; --line: #b4560c; }
@media (prefers-color-scheme: dark) {
.speech { --ink: #e8ebf0; --soft: #a3adbd; --wave: #6b7587; --spoken: #1f4731; --line: #f2a65a; }
}
.speech text { fill: var(--soft); font-size: 13px; }
.speech .name { fill: var(--ink); }
.speech .wave { stroke: var(--wave); stroke-width: 1; fill: none; }
.speech .spoken { fill: var(--spoken); }
.speech .likely { stroke: var(--line); stroke-width: 2; stroke-linejoin: round; fill: none; }
.speech .of-likely { fill: var(--line); }
.speech .axis { stroke: var(--soft); fill: none; }
.speech .threshold { stroke: var(--soft); stroke-dasharray: 4 4; fill: none; }
"""


def draw(pieces: Sequence[tuple[str, Tensor]], answers: Sequence[Answer]) -> str:
    """Returns the picture.

    Args:
        pieces: Recordings that were heard one after another: their names, and their samples at 16 kHz.
        answers: What was heard in all of them together.
    """
    seconds = len(answers) * CHUNK

    def x(at: float) -> str:
        return f"{_LEFT + (_RIGHT - _LEFT) * at / seconds:.1f}"

    lines = [
        f'<svg class="speech" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        "aria-labelledby=\"speech-title\" font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif\">",
        '<title id="speech-title">How likely speech is, over the waveform of recordings</title>',
        f"<style>\n{_STYLE}</style>",
    ]
    for begin, end in _spoken(answers):
        lines.append(f'<path class="spoken" d="M{x(begin)} {_TOP}H{x(end)}V{_BOTTOM}H{x(begin)}z"/>')
    loudest = max(float(part.abs().max()) for _, part in pieces)
    first, bars = 0, []
    for name, part in pieces:
        at = first / RATE
        lines.append(f'<text class="name" x="{x(at)}" dx="5" y="{_TOP - 12}">{escape(name)}</text>')
        lines.append(f'<path class="axis" d="M{x(at)} {_TOP - 22}V{_TOP}"/>')
        for number, bar in enumerate(chunks(part, _BAR)):
            middle = (first + (number + 0.5) * _BAR) / RATE
            low, high = ((1 + float(edge) / loudest) / 2 for edge in (bar.min(), bar.max()))
            bars.append(f"M{x(middle)} {_y(high)}V{_y(low)}")
        first += len(part)
    points = " ".join(f"{x(answer.at + CHUNK / 2)} {_y(answer.likely)}" for answer in answers)
    lines += [
        f'<path class="wave" d="{"".join(bars)}"/>',
        f'<path class="threshold" d="M{_LEFT} {_y(BEGINS)}H{_RIGHT}"/>',
        f'<path class="likely" d="M{points}"/>',
        f'<path class="axis" d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"/>',
        *(f'<text x="{_LEFT - 7}" y="{float(_y(v)) + 4:.1f}" text-anchor="end">{v:g}</text>' for v in (0, BEGINS, 1)),
        *(f'<text x="{x(at)}" y="{_BOTTOM + 18}" text-anchor="middle">{at} s</text>' for at in range(int(seconds) + 1)),
        f'<text x="{_LEFT}" y="{_HEIGHT - 10}"><tspan class="of-likely">how likely speech is</tspan>'
        " over the waveform; coloured where somebody speaks</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _y(share: float) -> str:
    return f"{_BOTTOM - (_BOTTOM - _TOP) * share:.1f}"


def _spoken(answers: Sequence[Answer]) -> Iterator[tuple[float, float]]:
    """From when to when somebody spoke."""
    begin = None
    for answer in answers:
        if answer.change is not None and answer.change.speech:
            begin = answer.change.at
        elif answer.change is not None and begin is not None:
            yield begin, answer.change.at
            begin = None
    if begin is not None:
        yield begin, answers[-1].at + CHUNK
