// Light or dark: as the system says, unless the button says otherwise.

const KEY = "exportkit-theme";
const NEXT = { __proto__: null, system: "light", light: "dark", dark: "system" };

/** Makes a button go through the themes, and remembers the choice. */
export function setUpTheme(button) {
  const set = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  let theme = stored();
  set(theme);
  button.addEventListener("click", () => {
    theme = NEXT[theme];
    set(theme);
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // Storage may be forbidden: the choice lasts as long as the page.
    }
  });
}

function stored() {
  try {
    const theme = localStorage.getItem(KEY);
    return theme in NEXT ? theme : "system";
  } catch {
    return "system";
  }
}
