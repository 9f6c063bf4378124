"""The page works in a browser that opens it from a file: no error, no request, and nothing of an artifact is run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from exportkit.cli import main
from exportkit.package import manifest as m
from tests.artifacts import artifact
from tests.report.page_contrast import CONTRASTS
from tests.report.written import call, package

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "</script><img src=http://evil.test/x onerror=owned=1><script>owned=1</script>\u2028\u202e"


@contextmanager
def opened(browser: Browser, path: Path, *, refusals: bool = False, **context: object) -> Iterator[Page]:
    """Opens a page. At the end there may have been no error, no message, and no request but for the page itself.

    With `refusals`, the test makes what the page's policy refuses, which the console says.
    """
    visitor = browser.new_context(**context)
    page = visitor.new_page()
    trouble: list[str] = []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("console", lambda message: trouble.append(message.text))
    page.on("request", lambda asked: asked.url.startswith("file://") or trouble.append(asked.url))
    try:
        page.goto(path.as_uri())
        page.wait_for_selector("#origin")
        yield page
        assert refusals or trouble == []
    finally:
        visitor.close()


@pytest.fixture(scope="module")
def patches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a program with our operators."""
    page = tmp_path_factory.mktemp("report") / "patches.html"
    assert main(["inspect", str(artifact("patches-program")), "--report", str(page)]) == 0
    return page


@pytest.mark.process
def test_nothing_that_an_artifact_says_is_run(browser: Browser, tmp_path: Path):
    named = m.MappingNode(keys=(HOSTILE,), items=(m.TensorNode(index=0),))
    plain = call()
    path = package(
        tmp_path / "a.pt2",
        call=msgspec.structs.replace(
            plain,
            parameters=(m.Parameter(name="x", kind="positional", value=named),),
            inputs=(msgspec.structs.replace(plain.inputs[0], name=f"x.{HOSTILE}"),),
            result=named,
            outputs=(msgspec.structs.replace(plain.outputs[0], name=HOSTILE),),
        ),
        version=HOSTILE,
        operators=(m.Operator(name="evil::op", schema=f"evil::op(Tensor x) -> Tensor {HOSTILE}"),),
        source=m.Source(model=HOSTILE, model_kwargs={HOSTILE: HOSTILE}, dtype=None, seed=0, state_sha256="0" * 64),
    )
    assert main(["inspect", str(path), "--report", str(tmp_path / "a.html")]) == 0
    with opened(browser, tmp_path / "a.html") as page:
        assert "<img src=" in page.inner_text("#operators")
        assert page.evaluate("typeof owned") == "undefined"
        assert page.evaluate("document.images.length") == 0
        assert page.evaluate("document.scripts.length") == 2
        assert "\u202e" not in page.content()


def test_the_policy_refuses_scripts_handlers_and_requests(browser: Browser, patches: Path):
    with opened(browser, patches, refusals=True) as page:
        refused = page.evaluate(
            """async () => {
                const refused = [];
                document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
                const tried = async (action) => { try { await action(); } catch (error) { refused.push(error.name); } };
                await tried(() => { document.body.innerHTML = "<img src=x>"; });
                const button = document.createElement("button");
                await tried(() => button.setAttribute("onclick", "owned = 1"));
                document.body.append(button);
                button.click();
                new Image().src = "data:image/png;base64,AAAA";
                await tried(() => fetch("file:///etc/passwd"));
                await tried(() => new Worker("data:text/javascript,"));
                await new Promise((resolve) => setTimeout(resolve, 100));
                return refused;
            }"""
        )
        assert page.evaluate("typeof owned") == "undefined"
        assert {"require-trusted-types-for", "img-src", "connect-src"} <= set(refused)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_can_be_read_on_a_narrow_screen_in_both_schemes(browser: Browser, patches: Path, scheme: str):
    with opened(browser, patches, viewport={"width": 360, "height": 700}, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(map(int, colour.removeprefix("rgb(").rstrip(")").split(","))) > 382
        assert light is (scheme == "light")
        assert page.evaluate(CONTRASTS) == []
        page.emulate_media(media="print")
        assert page.locator("#theme").is_hidden()


def test_a_package_of_compiled_code_is_shown(browser: Browser, tiny_package: Path, tmp_path: Path):
    assert main(["inspect", str(tiny_package), "--report", str(tmp_path / "tiny.html")]) == 0
    with opened(browser, tmp_path / "tiny.html") as page:
        assert page.locator("#cases figure").count() == 3
        assert "batch=4, gh=6" in page.inner_text("#cases")
        assert "compiled code" in page.inner_text("#sizes")
