"""Measures in a browser the contrast between a text and its background, as WCAG 2.2 defines it."""

# JavaScript: the channels of a colour, the contrast of two, and the colour behind an element.
FUNCTIONS = """
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
"""

# Texts whose contrast with what is behind them is below WCAG 2.2's AA, and lines of charts and fields below 3.
CONTRASTS = (
    f"""() => {{{FUNCTIONS}"""
    + """
    const bad = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        const style = getComputedStyle(element);
        if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
        const found = contrast(channels(style.color), behind(element));
        if (found < 4.5) bad.push([walker.currentNode.data, found]);
    }
    for (const line of document.querySelectorAll(".line")) {
        const found = contrast(channels(getComputedStyle(line).stroke), behind(line.closest(".card")));
        if (found < 3) bad.push(["line", found]);
    }
    for (const field of document.querySelectorAll("input:not([type=radio]), select, button:not(.primary)")) {
        const found = contrast(channels(getComputedStyle(field).borderTopColor), behind(field.parentElement));
        if (found < 3) bad.push([field.outerHTML, found]);
    }
    return bad;
}"""
)
