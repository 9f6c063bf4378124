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
from exportkit.package.exported_graph import graph_in
from exportkit.package.node_times import NodeTime, Profile, encode_profile
from tests.artifacts import artifact
from tests.report.page_contrast import CONTRASTS
from tests.report.written import call, document, inside, node, package, program

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "</script><img src=http://evil.test/x onerror=owned=1><script>owned=1</script>\u2028\u202e"


# Boxes of nodes that lie on others, and arrows that go up.
OVERLAPS = """() => {
    const boxes = [...document.querySelectorAll(".graph .box:not(.open)")].map((box) => box.getBoundingClientRect());
    boxes.sort((one, other) => one.top - other.top);
    const bad = [];
    boxes.forEach((one, index) => {
        for (let next = index + 1; next < boxes.length && boxes[next].top < one.bottom; next++) {
            if (boxes[next].left < one.right && one.left < boxes[next].right) bad.push([one.x, one.y]);
        }
    });
    for (const arrow of document.querySelectorAll(".graph .arrow")) {
        const length = arrow.getTotalLength();
        if (arrow.getPointAtLength(length).y < arrow.getPointAtLength(0).y) bad.push(arrow.getAttribute("d"));
    }
    return bad;
}"""


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
    """The page of a program with our operators, with times."""
    folder = tmp_path_factory.mktemp("report")
    source = artifact("patches-program")
    graph = graph_in(source)
    count = len(graph.graph.nodes)
    profile = Profile(
        format_version=1,
        graph_sha256=graph.sha256,
        device="a CPU",
        threads=1,
        torch="2.13.0",
        sizes="batch=2",
        runs=5,
        nodes=tuple(NodeTime(1.0 + i, 1.0, 2.0 + i) for i in range(count)),
    )
    (folder / "profile.json").write_bytes(encode_profile(profile))
    given = ["--report", str(folder / "patches.html"), "--profile", str(folder / "profile.json")]
    assert main(["inspect", str(source), *given]) == 0
    return folder / "patches.html"


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of twelve blocks of thirty nodes, where some arrows are long."""
    folder = tmp_path_factory.mktemp("blocks")
    nodes, last, before = [], "x", "x"
    for number in range(360):
        name = "y" if number == 359 else f"n{number}"
        block = f"encoder.blocks{number // 30}"
        trace = f'File "/model.py", line {number}, in forward\n    x = step{number}(x)'
        nodes.append(node(name, last, before, nn_module_stack=inside(block), stack_trace=trace))
        last, before = name, last if number % 7 else before
    source = package(folder / "blocks.pt2", program(document(nodes, ["y"])))
    assert main(["inspect", str(source), "--report", str(folder / "blocks.html")]) == 0
    return folder / "blocks.html"


@pytest.mark.process
def test_nothing_that_an_artifact_says_is_run(browser: Browser, tmp_path: Path):
    said = node("y", "x", target=f"torch.ops.evil.{HOSTILE}", stack_trace=f'File "{HOSTILE}", line 1, in {HOSTILE}')
    said["metadata"]["nn_module_stack"] = f"k,{HOSTILE},{HOSTILE}"
    said["inputs"][0]["name"] = HOSTILE
    said["inputs"].append({"name": "text", "arg": {"as_string": HOSTILE}})
    named = m.MappingNode(keys=(HOSTILE,), items=(m.TensorNode(index=0),))
    plain = call()
    path = package(
        tmp_path / "a.pt2",
        program(document([said], ["y"])),
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
        page.get_by_label("Search nodes, modules, lines").fill("img")
        page.keyboard.press("Enter")
        page.locator(".graph .box.op, .graph .box.custom").first.click()
        assert "<img src=" in page.inner_text(".details")
        assert page.evaluate("typeof owned") == "undefined"
        assert page.evaluate("document.images.length") == 0
        assert page.evaluate("document.scripts.length") == 2
        assert "\u202e" not in page.content()


def test_the_policy_refuses_scripts_handlers_and_requests(browser: Browser, blocks: Path):
    with opened(browser, blocks, refusals=True) as page:
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


def test_a_node_says_where_it_comes_from_and_what_it_costs(browser: Browser, patches: Path):
    with opened(browser, patches) as page:
        custom = page.locator(".graph .box.custom")
        assert custom.count() > 0
        custom.first.click()
        details = page.inner_text(".details")
        assert "Custom operator" in details
        assert "arr_coc::" in details
        assert "of the time" in details
        assert "export_models.py" in details
        page.locator(".details a").first.click()
        assert page.evaluate("document.querySelector(':target').textContent").startswith("◆ arr_coc::")
        slowest = page.locator("#times tbody").first.locator("tr")
        assert slowest.count() > 1
        slowest.first.get_by_role("button").click()
        assert page.locator(".graph .selected").count() == 1


def test_modules_open_and_close_by_mouse_and_by_keys(browser: Browser, blocks: Path):
    with opened(browser, blocks) as page:
        closed = page.locator(".graph .box.closed")
        assert closed.count() == 12
        before = page.locator(".graph .box").count()
        closed.first.dblclick()
        assert page.locator(".graph .box").count() == before + 30
        page.keyboard.press("Enter")
        assert page.locator(".graph .box").count() == before
        page.keyboard.press("ArrowDown")
        assert "encoder.blocks1" in page.inner_text(".details h3")
        page.get_by_role("button", name="Open all").click()
        assert page.locator(".graph .box.op").count() == 360
        assert page.evaluate(OVERLAPS) == []
        page.get_by_role("button", name="Close all").click()
        assert page.locator(".graph .box.closed").count() == 1


def test_search_finds_a_line_of_code_and_shows_its_node(browser: Browser, blocks: Path):
    with opened(browser, blocks) as page:
        page.locator(".graph").focus()
        page.keyboard.press("/")
        page.keyboard.type("step200(")
        assert page.locator(".found button").count() == 1
        page.keyboard.press("Enter")
        assert page.inner_text(".details h3") == "n200"
        assert "x = step200(x)" in page.inner_text(".details")
        box, view = (page.locator(place).bounding_box() for place in (".graph .selected", ".graph"))
        assert view["x"] < box["x"] < view["x"] + view["width"]
        assert view["y"] < box["y"] < view["y"] + view["height"]


def scale(page: Page) -> float:
    return float(page.get_attribute(".graph > g", "transform").split("scale(")[1].rstrip(")"))


def test_the_picture_moves_and_scales(browser: Browser, blocks: Path):
    with opened(browser, blocks) as page:
        view = page.locator(".graph").bounding_box()
        first, place = scale(page), page.get_attribute(".graph > g", "transform")
        page.mouse.move(view["x"] + 20, view["y"] + 20)
        page.mouse.wheel(0, -300)
        assert scale(page) == first  # the page scrolls until the graph was clicked
        page.evaluate("scrollTo(0, 0)")
        view = page.locator(".graph").bounding_box()
        page.mouse.move(view["x"] + 20, view["y"] + 20)
        page.mouse.down()
        page.mouse.move(view["x"] + 90, view["y"] + 80)
        page.mouse.up()
        assert page.get_attribute(".graph > g", "transform") != place
        page.mouse.wheel(0, -300)
        page.wait_for_function(
            f"!document.querySelector('.graph > g').getAttribute('transform').includes('scale({first:.4f})')"
        )
        larger = scale(page)
        assert larger > first
        page.keyboard.press("-")
        assert scale(page) < larger
        page.keyboard.press("0")
        assert page.locator(".graph > g").bounding_box()["height"] <= view["height"]


def test_two_fingers_scale_the_picture(browser: Browser, blocks: Path):
    with opened(browser, blocks, has_touch=True, viewport={"width": 360, "height": 700}) as page:
        page.locator(".graph").scroll_into_view_if_needed()
        view = page.locator(".graph").bounding_box()
        x, y, first = view["x"] + 100, view["y"] + 60, scale(page)
        session = page.context.new_cdp_session(page)

        def touch(kind: str, *points: tuple[float, float]) -> None:
            found = [{"x": a, "y": b, "id": number} for number, (a, b) in enumerate(points)]
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": found})

        touch("touchStart", (x, y), (x + 40, y))
        touch("touchMove", (x - 40, y), (x + 80, y))
        touch("touchEnd")
        assert scale(page) > 1.5 * first


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_can_be_read_on_a_narrow_screen_in_both_schemes(browser: Browser, patches: Path, scheme: str):
    with opened(browser, patches, viewport={"width": 360, "height": 700}, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(map(int, colour.removeprefix("rgb(").rstrip(")").split(","))) > 382
        assert light is (scheme == "light")
        page.locator(".graph .box.custom").first.click()
        assert page.evaluate(CONTRASTS) == []
        page.emulate_media(media="print")
        assert page.locator(".tools").is_hidden()


def test_a_package_of_compiled_code_is_shown_without_a_graph(browser: Browser, tiny_package: Path, tmp_path: Path):
    assert main(["inspect", str(tiny_package), "--report", str(tmp_path / "tiny.html")]) == 0
    with opened(browser, tmp_path / "tiny.html") as page:
        assert "--format program" in page.inner_text("#graph")
        assert page.locator("#cases figure").count() == 3
        assert "batch=4, gh=6" in page.inner_text("#cases")
        assert "compiled code" in page.inner_text("#sizes")
