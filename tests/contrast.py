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
