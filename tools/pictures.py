"""Takes the pictures of the documents. Chromium must be installed.

Of the page of `exportkit serve`, from a server that runs. It sends requests for a minute, so that there is something to
see:

    exportkit serve artifacts/arr_coc.pt2 &
    python -m tools.pictures http://127.0.0.1:8000/ arr_coc
"""

from __future__ import annotations

import argparse
import io
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from exportkit.arr_coc.demo import load_photograph
from tools.generated import DOCS

if TYPE_CHECKING:
    import numpy as np
    from playwright.sync_api import Browser, Page

_CLIENTS = 5
_MINUTE = 62  # seconds: the charts show one minute
_SIZES = ((192, 192), (256, 256))  # of the images that the clients send


@contextmanager
def _traffic(url: str, model: str) -> Iterator[None]:
    """Clients that ask, rest and ask again, more and less often in turns."""
    import numpy as np
    from tritonclient.http import InferenceServerClient, InferInput  # type: ignore[import-untyped]  # it has no types

    done = threading.Event()

    def ask(number: int) -> None:
        generator = np.random.default_rng(number)
        client = InferenceServerClient(url.removeprefix("http://").rstrip("/"))
        while not done.is_set():
            image = generator.random((1, 3, *_SIZES[number % len(_SIZES)]), dtype=np.float32)
            query = generator.standard_normal((1, 64), dtype=np.float32)
            inputs = [InferInput(name, tensor.shape, "FP32") for name, tensor in (("image", image), ("query", query))]
            inputs[0].set_data_from_numpy(image)
            inputs[1].set_data_from_numpy(query)
            client.infer(model, inputs)
            done.wait(0.1 * generator.random() * (1 + np.sin(time.monotonic() / 4)))

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(_CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        done.set()
        for client in clients:
            client.join()


def _open(browser: Browser, url: str, scheme: Any, size: tuple[int, int], wanted: str) -> Page:
    width, height = size
    page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()
    page.goto(url)
    page.wait_for_selector(wanted)
    return page


def _busy_page(browser: Browser, url: str) -> bytes:
    """The page after a minute, with the patches of the sample that are like its red balloon."""
    page = _open(browser, url, "light", (1120, 1180), "article")
    page.wait_for_timeout(_MINUTE * 1000)
    page.get_by_role("button", name="Find more like this").click()
    page.wait_for_selector(".said b")
    page.locator(".stage svg").hover(position={"x": 174, "y": 126})
    return page.screenshot()


def _photograph(browser: Browser, url: str) -> bytes:
    """The try-it with a photograph, the patches that were kept, and what is said about one of them."""
    photo = load_photograph("astronaut")
    pixels = (photo.pixels[0].permute(1, 2, 0) * 255).round().byte().numpy()
    page = _open(browser, url, "dark", (1120, 900), "article")
    file = {"name": "astronaut.png", "mimeType": "image/png", "buffer": _png(pixels)}
    page.set_input_files("input[type=file]", file)  # type: ignore[arg-type]  # a dict with the keys of FilePayload
    for name, value in photo.region._asdict().items():
        page.get_by_label(name, exact=True).fill(str(value))
    page.get_by_role("button", name="Find more like this").click()
    page.wait_for_selector(".said b")
    page.get_by_role("radio", name="Kept").check()
    page.get_by_text("The chosen patches as a table").click()
    page.locator(".scroll tbody tr").nth(2).hover()
    return page.locator("section.card:has(.regions)").screenshot()


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _write(screenshot: bytes, name: str, *, colours: int | None) -> None:
    """Writes a picture, in few colours where that takes far fewer bytes and shows no difference."""
    from PIL import Image

    picture = Image.open(io.BytesIO(screenshot)).convert("RGB")
    if colours is not None:
        picture = picture.quantize(colours, dither=Image.Dither.NONE)
    picture.save(DOCS / name, optimize=True)


def main() -> None:
    """Takes the pictures of a server's page."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where the server listens")
    parser.add_argument("model", help="the name by which it serves ARR-COC")
    asked = parser.parse_args()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with _traffic(asked.url, asked.model):
            _write(_busy_page(browser, asked.url), "serving-page.png", colours=None)
            _write(_photograph(browser, asked.url), "serving-try-it.png", colours=256)
        browser.close()


if __name__ == "__main__":
    main()
