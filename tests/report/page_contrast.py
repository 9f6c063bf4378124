"""What a browser says about the contrast of a report's texts."""

# Texts whose contrast with what is behind them is below WCAG 2.2's AA: 4.5. In the graph that is a box, and over it the
# colour of its share of the time.
CONTRASTS = """() => {
    const channels = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => {
        const [x, y, z] = [r, g, b].map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const contrast = (one, other) => {
        const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    };
    const behind = (element) => {
        for (; element; element = element.parentElement) {
            const colour = channels(getComputedStyle(element).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
    };
    const inBox = (box) => {
        const fill = (rect) => channels(getComputedStyle(rect).fill);
        const shape = fill([...box.querySelectorAll(":scope > .shape")].pop());
        const heat = box.querySelector(":scope > .heat");
        if (!heat) return shape;
        const [over, share] = [fill(heat), Number(heat.getAttribute("fill-opacity"))];
        return shape.map((channel, index) => channel * (1 - share) + over[index] * share);
    };
    const bad = [];
    const check = (text, colour, ground) => {
        const found = contrast(channels(colour), ground);
        if (found < 4.5) bad.push([text, found]);
    };
    for (const text of document.querySelectorAll(".graph .box > text")) {
        check(text.textContent, getComputedStyle(text).fill, inBox(text.parentElement));
    }
    for (const text of document.querySelectorAll(".treemap text")) {
        const cell = text.parentElement.querySelector("rect");
        check(text.textContent, getComputedStyle(text).fill, channels(getComputedStyle(cell).fill));
    }
    for (const text of document.querySelectorAll(".bars text")) {
        check(text.textContent, getComputedStyle(text).fill, behind(text.closest(".card")));
    }
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || element.closest("svg") || !element.checkVisibility()) continue;
        check(walker.currentNode.data, getComputedStyle(element).color, behind(element));
    }
    return bad;
}"""
