"""Two themes, light and dark, as one palette: each colour has a name, and both of its values.

Pictures and cards name colours only through CSS variables (`--ftlab-ink`), with the light value as the way out where
no style sheet arrives. Which theme holds is the page's decision: JupyterLab, Notebook and nbconvert say it on the body,
VS Code, Colab and documentation pages in their own words, and where nobody says anything the system's setting counts.
A card brings its own paper, so the contrast between its colours is ours to keep, whatever page it stands on.
"""

from __future__ import annotations

PALETTE: dict[str, tuple[str, str]] = {  # name: on light paper, on dark paper
    "page": ("#f1f3f5", "#0f1215"),  # around a card, in a file of its own
    "paper": ("#ffffff", "#181c21"),
    "ink": ("#22262b", "#e6e9ec"),
    "soft": ("#59626c", "#a3adb8"),  # words of less weight
    "tick": ("#7c868f", "#77818c"),  # from here on: nothing that has to be read
    "faint": ("#b9c0c7", "#4d5661"),
    "hair": ("#e6e9ec", "#2c333b"),
    "area": ("#cdd5dd", "#3b4652"),
    "quiet": ("#f6f7f8", "#20262d"),  # what is up and has no rank
    "hatch": ("#d6dbe0", "#39424c"),
    "chip": ("#f1f3f5", "#272e36"),
    "red": ("#ae1212", "#ff8078"),
    "green": ("#1a7446", "#4fc38a"),
    "amber": ("#966000", "#e3a94f"),
    "link": ("#2a5d94", "#82b7f0"),
    "good": ("#d9f0e3", "#123d29"),  # behind `good-ink`, and so on
    "good-ink": ("#12603a", "#7fdcae"),
    "fair": ("#fdebc8", "#45320c"),
    "fair-ink": ("#714400", "#f0c274"),
    "bad": ("#fbdcda", "#4d1a19"),
    "bad-ink": ("#8f120e", "#ffa9a3"),
    "plain": ("#e9ecef", "#2c333b"),
    "plain-ink": ("#444c54", "#c3cbd3"),
    # Neighbours differ in lightness as well as hue, for the colour-blind; all can carry the paper's colour as words.
    "generation-1": ("#2f6aa8", "#74aae8"),
    "generation-2": ("#8f5a08", "#d9a860"),
    "generation-3": ("#147a70", "#45b5a8"),
    "generation-4": ("#39414b", "#d5dce4"),
    "generation-5": ("#9a4480", "#cf8abd"),
    "phase-1": ("#4a5160", "#cdd5e1"),
    "phase-2": ("#6f56ab", "#b6a2ee"),
    "phase-3": ("#a3508b", "#e39acb"),
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"

_LIGHT = ("[data-jp-theme-light=true]", ".vscode-light", ".vscode-high-contrast-light", "html[theme=light]",
          "[data-theme=light]", "html.light")
_DARK = ("[data-jp-theme-light=false]", ".vscode-dark", ".vscode-high-contrast:not(.vscode-high-contrast-light)",
         "html[theme=dark]", "[data-theme=dark]", "html.dark")


def colour(name: str) -> str:
    """A colour of the palette as CSS."""
    return f"var(--ftlab-{name},{PALETTE[name][0]})"


def contrast(one: str, other: str) -> float:
    """The contrast of two colours as WCAG 2 defines it: 1 for none, 21 for black on white; words need 4.5."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def theme_css(root: str = ".ftlab") -> str:
    """The variables of both themes, for whatever stands under `root`; an outer page's word beats the system's."""
    light, dark = (_variables(index) for index in (0, 1))
    said_light, said_dark = (",".join(f"{page} {root}" for page in pages) for pages in (_LIGHT, _DARK))
    return (f"{root}{{{light}}}@media (prefers-color-scheme:dark){{{root}{{{dark}}}}}"
            f"{said_light}{{{light}}}{said_dark}{{{dark}}}"
            f"@media print{{{root}{root}{root}{{{light}}}}}")


def _variables(index: int) -> str:
    values = ";".join(f"--ftlab-{name}:{both[index]}" for name, both in PALETTE.items())
    return f"color-scheme:{('light', 'dark')[index]};{values}"


def _luminance(colour: str) -> float:
    shares = (int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
