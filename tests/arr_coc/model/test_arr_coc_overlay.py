"""Asking a photograph about one of its regions, and the picture of the answer."""

from __future__ import annotations

import sys

import pytest
import torch

from exportkit.arr_coc.demo import PHOTOGRAPHS, REGION_MODEL, load_photograph
from exportkit.arr_coc.model import Region, build, region_query
from exportkit.arr_coc.model.overlay import draw_overlay
from exportkit.arr_coc.model.region import region_weights
from exportkit.errors import HostError, UsageError
from tests.arr_coc.model.model_cases import FILTERS_14, answer, inputs

pytest.importorskip("skimage")


def _kept_share(name: str, region: Region) -> tuple[float, float]:
    """Of a region's patches, and of all patches, how many are kept when asking about the photograph's own region."""
    photo, model = load_photograph(name), build(**REGION_MODEL)
    outputs = answer(model, photo.pixels, region_query(model, photo.pixels, photo.region))
    rows, columns = photo.pixels.shape[2] // 16, photo.pixels.shape[3] // 16
    kept = torch.zeros(rows * columns)
    kept[outputs["indices"][0]] = 1
    return float(kept @ region_weights(region, rows, columns, 16)), float(kept.mean())


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_what_was_asked_about_is_kept_far_more_often_than_the_rest(name: str):
    inside, everywhere = _kept_share(name, load_photograph(name).region)
    assert inside > 2 * everywhere


def test_asking_for_the_astronauts_face_keeps_face_and_hair_and_leaves_the_wall():
    face, _ = _kept_share("astronaut", Region(70, 180, 110, 80))
    hair, _ = _kept_share("astronaut", Region(32, 192, 32, 80))
    wall, _ = _kept_share("astronaut", Region(16, 330, 90, 40))
    assert face > 0.9
    assert hair > 0.8
    assert wall == 0


def test_photographs_come_in_whole_patches():
    for patch_size in (14, 16):
        pixels = load_photograph("chelsea", patch_size=patch_size).pixels
        assert pixels.shape[2] % patch_size == pixels.shape[3] % patch_size == 0
        assert 0 <= pixels.min() < pixels.max() <= 1


def test_a_photograph_there_is_not_is_refused():
    with pytest.raises(UsageError, match="photograph must be one of astronaut, chelsea, coffee, got 'mona lisa'"):
        load_photograph("mona lisa")


# --- regions ----------------------------------------------------------------------------------------------------------


def test_a_regions_query_is_the_mean_of_its_patches_by_area():
    model = build()
    image, _ = inputs(model, 2, 4, 5)
    features = model.encode(image)
    torch.testing.assert_close(region_query(model, image, Region(16, 32, 16, 16)), features[:, 7])
    expected = 0.25 * features[:, 0] + 0.75 * features[:, 1]
    torch.testing.assert_close(region_query(model, image, Region(0, 12, 8, 16)), expected)


def test_a_region_may_reach_over_the_border():
    weights = region_weights(Region(-40, -40, 56, 56), 3, 3, 16)
    assert weights.tolist() == [1.0, 0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("region", [Region(64, 0, 5, 5), Region(0, -9, 5, 9), Region(3, 3, 0, 5), Region(3, 3, 5, -1)])
def test_a_region_without_a_pixel_of_the_image_is_refused(region: Region):
    with pytest.raises(UsageError, match=r"lies outside the image of 80 x 64 pixels"):
        region_weights(region, 4, 5, 16)


def test_a_model_that_projects_its_queries_takes_none_from_a_region():
    model = build(**FILTERS_14)
    image, _ = inputs(model, 1, 4, 5)
    with pytest.raises(UsageError, match="takes queries of width 24 and projects them to 64"):
        region_query(model, image, Region(0, 0, 9, 9))


# --- the picture ------------------------------------------------------------------------------------------------------


def _small_picture():
    model = build(k=4)
    image = torch.full((1, 3, 64, 80), 0.2)
    image[:, 0] = 0.9
    image[0, :, 20:30, 20:30] = 0.7
    return image, answer(model, image, region_query(model, image, Region(16, 16, 16, 16)))


def test_kept_patches_stay_in_colour_and_the_rest_is_grey_and_dark():
    image, outputs = _small_picture()
    outputs["indices"] = torch.tensor([[0, 6, 12, 19]])
    picture = draw_overlay(image, outputs, patch_size=16)
    width, height = (side // 2 for side in picture.size)
    panels = [picture.crop((0, top, width, top + height)) for top in (0, height)]
    asked, kept = ({c: n for n, c in panel.getcolors(1 << 20)}[230, 51, 51] for panel in panels)
    assert 0.1 < kept / asked < 0.3


def test_the_query_is_outlined_and_the_size_does_not_depend_on_the_answer():
    image, outputs = _small_picture()
    plain = draw_overlay(image, outputs, patch_size=16)
    outlined = draw_overlay(image, outputs, patch_size=16, region=Region(16, 16, 32, 32), subject="a square")
    assert plain.size == outlined.size
    cyan = (0, 229, 255)
    assert not any(colour == cyan for _, colour in plain.getcolors(1 << 20))
    assert any(colour == cyan and n > 500 for n, colour in outlined.getcolors(1 << 20))


def test_equal_relevances_and_budgets_can_be_drawn():
    image, outputs = _small_picture()
    outputs["relevance"] = torch.full_like(outputs["relevance"], 0.5)
    outputs["budgets"] = torch.full_like(outputs["budgets"], 64)
    assert draw_overlay(image[0], outputs, patch_size=16).mode == "RGB"


def test_outputs_of_another_image_are_refused():
    image, outputs = _small_picture()
    with pytest.raises(UsageError, match="outputs have 20 patches, the image has 4 x 4 of 16 pixels"):
        draw_overlay(image[..., :64], outputs, patch_size=16)
    with pytest.raises(UsageError, match=r"image must be \[1, 3, H, W\] or \[3, H, W\], got shape \[64, 80\]"):
        draw_overlay(image[0, 0], outputs, patch_size=16)


def test_without_pillow_or_scikit_image_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    image, outputs = _small_picture()
    for name in ("PIL", "skimage"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(HostError, match=r"Pillow, which is not installed\n  Run `pip install 'exportkit\[demo\]'`"):
        draw_overlay(image, outputs, patch_size=16)
    with pytest.raises(HostError, match=r"scikit-image, which is not installed\n  Run `pip install"):
        load_photograph()
