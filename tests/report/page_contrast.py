"""What a browser says about the contrast of a report's texts."""

from __future__ import annotations

from tests.contrast import FUNCTIONS

# Texts whose contrast with what is behind them is below WCAG 2.2's AA: 4.5.
CONTRASTS = (
    f"""() => {{{FUNCTIONS}"""
    + """
    const bad = [];
    const check = (text, colour, ground) => {
        const found = contrast(channels(colour), ground);
        if (found < 4.5) bad.push([text, found]);
    };
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
)
