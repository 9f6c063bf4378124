"""Draws the query's region, the relevance of every patch, the selected patches and their budgets."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from exportkit.arr_coc.model.region import Region
from exportkit.errors import HostError, UsageError
from exportkit.package.atomic import write_whole

if TYPE_CHECKING:
    from PIL.Image import Image

PANEL_WIDTH = 640
MARGIN = 28
TITLE_HEIGHT = 66
LEGEND_HEIGHT = 58

BACKGROUND = (18, 20, 24)
TEXT, FAINT = (236, 238, 242), (160, 166, 176)
QUERY_COLOUR = (0, 229, 255)
# Stops of the budget scale, dark to bright (after matplotlib's plasma), and of the relevance map (after its magma).
BUDGET_STOPS = ((75, 3, 161), (156, 23, 158), (213, 75, 109), (245, 144, 65), (240, 249, 33))
RELEVANCE_STOPS = ((0, 0, 4), (81, 18, 124), (183, 55, 121), (252, 137, 97), (252, 253, 191))


def draw_overlay(
    image: Tensor,
    outputs: Mapping[str, Tensor],
    *,
    patch_size: int,
    region: Region | None = None,
    subject: str = "the query",
) -> Image:
    """Draws four panels: the photograph with the query's region, the relevance map, the kept patches, their budgets.

    Of ARRCOC's outputs for an image in [0, 1], only sample 0 is drawn. `subject` is the query in words.

    Raises:
        HostError: Pillow is not installed.
        UsageError: The outputs belong to another image.
    """
    pixels = _pixels(image)
    rows, columns = pixels.shape[0] // patch_size, pixels.shape[1] // patch_size
    relevance, indices, budgets = (_first(outputs[name]) for name in ("relevance", "indices", "budgets"))
    if len(relevance) != rows * columns:
        raise UsageError(
            f"the outputs have {len(relevance)} patches, the image has {rows} x {columns} of {patch_size} pixels: "
            "they belong to another image or patch size"
        )
    dimmed = _dimmed(pixels, np.array([], dtype=np.int64), patch_size)
    canvas = _Canvas(pixels.shape[0], pixels.shape[1])
    canvas.panel(0, "1  The question", f"Where is more like {subject}?", pixels)
    if region is not None:
        canvas.outline(0, region)
        canvas.key(0, QUERY_COLOUR, "the query: the mean features of this region")
    canvas.panel(
        1,
        "2  How relevant each patch is",
        "it says much, it stands out, it fits the query",
        _colours(_spread(relevance), RELEVANCE_STOPS).reshape(rows, columns, 3),
    )
    canvas.scale(1, RELEVANCE_STOPS, f"{relevance.min():.2f}", f"{relevance.max():.2f}", "relevance")
    kept = f"{len(indices):,} of {len(relevance):,} patches, {len(indices) / len(relevance):.0%}"
    canvas.panel(2, "3  What is kept", kept, _dimmed(pixels, indices, patch_size))
    canvas.note(2, "In colour: kept. Dark and grey: left out.")
    if region is not None:
        canvas.outline(2, region)
    spent = f"{int(budgets.sum()):,} tokens in all, most for the most relevant"
    canvas.panel(3, "4  What each may spend", spent, dimmed)
    canvas.patches(3, indices, _spread(budgets), columns, patch_size)
    canvas.scale(3, BUDGET_STOPS, f"{budgets.min()}", f"{budgets.max()}", "tokens a patch")
    return canvas.image


def save_overlay(picture: Image, path: str | Path) -> None:
    """Writes a PNG atomically."""
    written = io.BytesIO()
    picture.save(written, format="PNG", optimize=True)
    write_whole(Path(path), written.getvalue())


class _Canvas:
    """Two by two panels with titles above and legends below. Positions are in the photograph's pixels."""

    def __init__(self, height: int, width: int) -> None:
        self._pil = _pillow()
        self.scale_factor = PANEL_WIDTH / width
        self.panel_height = round(height * self.scale_factor)
        self._row_height = TITLE_HEIGHT + self.panel_height + LEGEND_HEIGHT
        size = (2 * PANEL_WIDTH + 3 * MARGIN, 2 * (self._row_height + MARGIN))
        self.image: Image = self._pil["Image"].new("RGB", size, BACKGROUND)
        self._draw = self._pil["ImageDraw"].Draw(self.image)
        self._title, self._small = (self._pil["ImageFont"].load_default(size) for size in (21, 15))

    def panel(self, index: int, title: str, caption: str, pixels: np.ndarray) -> None:
        left, top = self._origin(index)
        self._draw.text((left, top - 58), title, fill=TEXT, font=self._title)
        self._draw.text((left, top - 27), caption, fill=FAINT, font=self._small)
        picture = self._pil["Image"].fromarray(pixels)
        small = pixels.shape[1] < PANEL_WIDTH / 4  # one value per patch: keep the squares square
        method = self._pil["Image"].Resampling.NEAREST if small else self._pil["Image"].Resampling.LANCZOS
        self.image.paste(picture.resize((PANEL_WIDTH, self.panel_height), method), (left, top))

    def outline(self, index: int, region: Region) -> None:
        box = self._box(index, region.left, region.top, region.width, region.height)
        left, top, right, bottom = box
        self._draw.rectangle((left - 2, top - 2, right + 2, bottom + 2), outline=(0, 0, 0), width=7)
        self._draw.rectangle(box, outline=QUERY_COLOUR, width=3)

    def patches(self, index: int, indices: np.ndarray, shares: np.ndarray, columns: int, patch_size: int) -> None:
        for patch, colour in zip(indices.tolist(), _colours(shares, BUDGET_STOPS).tolist()):
            row, column = divmod(patch, columns)
            box = self._box(index, column * patch_size, row * patch_size, patch_size, patch_size)
            self._draw.rectangle(box, fill=tuple(colour), outline=BACKGROUND)

    def key(self, index: int, colour: tuple[int, int, int], text: str) -> None:
        left, top = self._legend(index)
        self._draw.rectangle((left, top, left + 26, top + 18), outline=colour, width=3)
        self._draw.text((left + 38, top), text, fill=FAINT, font=self._small)

    def note(self, index: int, text: str) -> None:
        self._draw.text(self._legend(index), text, fill=FAINT, font=self._small)

    def scale(self, index: int, stops: tuple[tuple[int, int, int], ...], low: str, high: str, text: str) -> None:
        left, top = self._legend(index)
        ramp = _colours(np.linspace(0, 1, PANEL_WIDTH), stops)
        bar = self._pil["Image"].fromarray(np.repeat(ramp[None], 18, axis=0))
        self.image.paste(bar, (left, top))
        self._draw.text((left, top + 24), low, fill=TEXT, font=self._small)
        self._draw.text((left + PANEL_WIDTH / 2, top + 24), text, fill=FAINT, font=self._small, anchor="ma")
        self._draw.text((left + PANEL_WIDTH, top + 24), high, fill=TEXT, font=self._small, anchor="ra")

    def _origin(self, index: int) -> tuple[int, int]:
        row, column = divmod(index, 2)
        return MARGIN + column * (PANEL_WIDTH + MARGIN), MARGIN // 2 + TITLE_HEIGHT + row * (self._row_height + MARGIN)

    def _legend(self, index: int) -> tuple[int, int]:
        left, top = self._origin(index)
        return left, top + self.panel_height + 14

    def _box(self, index: int, x: int, y: int, width: int, height: int) -> tuple[int, int, int, int]:
        left, top = self._origin(index)
        right, bottom = (
            min(PANEL_WIDTH, (x + width) * self.scale_factor),
            min(self.panel_height, (y + height) * self.scale_factor),
        )
        x_low, y_low = max(0, x) * self.scale_factor, max(0, y) * self.scale_factor
        return left + round(x_low), top + round(y_low), left + round(right) - 1, top + round(bottom) - 1


def _pillow() -> dict[str, Any]:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise HostError(
            "drawing needs Pillow, which is not installed", hint="Run `pip install 'exportkit[demo]'`."
        ) from error
    return {"Image": Image, "ImageDraw": ImageDraw, "ImageFont": ImageFont}


def _pixels(image: Tensor) -> np.ndarray:
    if image.dim() == 4:
        image = image[0]
    if image.dim() != 3 or image.shape[0] != 3:
        raise UsageError(f"image must be [1, 3, H, W] or [3, H, W], got shape {list(image.shape)}")
    return (image.detach().float().cpu().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()


def _first(tensor: Tensor) -> np.ndarray:
    sample = tensor[0].detach().cpu()
    return (sample.float() if sample.is_floating_point() else sample).numpy()


def _dimmed(pixels: np.ndarray, indices: np.ndarray, patch_size: int) -> np.ndarray:
    """Returns the photograph with unselected patches grey and dark."""
    rows, columns = pixels.shape[0] // patch_size, pixels.shape[1] // patch_size
    kept = np.zeros(rows * columns, dtype=bool)
    kept[indices] = True
    mask = np.kron(kept.reshape(rows, columns), np.ones((patch_size, patch_size), dtype=bool))[..., None]
    grey = pixels.mean(axis=2, keepdims=True).repeat(3, axis=2) * 0.28
    return np.where(mask, pixels, grey.astype(np.uint8))


def _spread(values: np.ndarray) -> np.ndarray:
    """Scales values linearly to 0 (lowest) to 1 (highest)."""
    low, high = float(values.min()), float(values.max())
    return (values - low) / (high - low) if high > low else np.ones(len(values))


def _colours(shares: np.ndarray, stops: tuple[tuple[int, int, int], ...]) -> np.ndarray:
    """Returns colours uint8 [n, 3] for shares in [0, 1], interpolated between the stops."""
    places = np.linspace(0, 1, len(stops))
    channels = [np.interp(shares, places, [stop[channel] for stop in stops]) for channel in range(3)]
    return np.stack(channels, axis=1).round().astype(np.uint8)
