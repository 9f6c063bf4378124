// Puts the page together from the data in it. Text of the artifact becomes text nodes only.

import { fill } from "../../web/static/dom.js";
import { setUpTheme } from "../../web/static/theme.js";
import { callSection, caseSection, headSection, operatorSection, originSection, sizeSection, stateSection, targetSection, verificationSection, weightSection } from "./sections.js";

const page = JSON.parse(document.getElementById("data").textContent);
const sections = [headSection, callSection, stateSection, operatorSection, targetSection, sizeSection, weightSection, caseSection, verificationSection, originSection];

setUpTheme(document.getElementById("theme"));
fill(document.getElementById("report"), ...sections.map((section) => section(page)));
