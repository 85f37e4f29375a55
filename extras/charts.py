"""Curves of training as small inline SVG: matplotlib draws, and what it wrote is cut down to what a page needs.

Text stays text; colours are the page's CSS variables, so that one drawing serves light and dark; no style attribute is
left, so that a strict Content-Security-Policy holds; ids are unique over all charts of a page.
"""

import io
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from xml.etree import ElementTree

# Arms differ in colour and in the dashes of their line (points on, points off).
DASHES = ((5, 2), (), (1.5, 2), (7, 2, 1.5, 2), (3, 1.5), (9, 3), (1, 1), (4, 2, 1, 2, 1, 2))
PAINTS = ("ink", "grid", *(f"arm-{i}" for i in range(len(DASHES))), "close", "confirm", "reveal_piece", "be_vague",
          "invalid", "ask_clarification", "challenge_solution", "change_mind", "correct", "mixed", "wrong")
WIDTH, HEIGHT, FONT = 400, 220, 11  # points; the page scales them to its columns
numbers = itertools.count()


@dataclass(frozen=True)
class Curve:
    """One arm: its name, its place among the arms (colour and dashes), and {step: value} for each of its seeds."""

    name: str
    style: int
    seeds: list[dict[int, float]]


def paint(name: str) -> str:
    """The colour that stands for a CSS variable while matplotlib draws."""
    return f"#0100{PAINTS.index(name):02x}"


def smooth(values: dict[int, float], window: int) -> dict[int, float]:
    """Running mean over window neighbouring steps, centred; fewer at the ends."""
    steps, half = sorted(values), window // 2
    near = [[values[s] for s in steps[max(i - half, 0):i + half + 1]] for i in range(len(steps))]
    return {step: sum(found) / len(found) for step, found in zip(steps, near, strict=True)}


def spread(seeds: list[dict[int, float]], every: bool = True) -> list[tuple[int, float, float, float]]:
    """(step, mean, lowest, highest) over the seeds, at each step that every (or else any) one of them has got to."""
    rows = []
    for step in sorted((set.intersection if every else set.union)(*map(set, seeds))) if seeds else []:
        found = [seed[step] for seed in seeds if step in seed]
        rows.append((step, sum(found) / len(found), min(found), max(found)))
    return rows


def lines(title: str, curves: list[Curve], window: int = 1, percent: bool = False, marks: bool = False,
          line_at: float | None = None) -> str:
    """A line for each arm, the mean over its seeds, in a band from the lowest seed to the highest.

    window: steps of the running mean, taken of each seed; an arm of one seed has its raw values behind, faint.
    Beyond the last step that all its seeds have got to, those ahead go on as thin lines: a mean over fewer would jump.
    marks: a dot at each value. line_at: a horizontal line to compare with. Returns the <svg> element.
    """
    raw = {curve.name: curve.seeds[0] for curve in curves if len(curve.seeds) == 1 and window > 1}
    curves = [Curve(curve.name, curve.style, [smooth(seed, window) for seed in curve.seeds]) for curve in curves]

    def draw(axes):
        for curve in curves:
            colour, dashes = paint(f"arm-{curve.style % len(DASHES)}"), DASHES[curve.style % len(DASHES)]
            look = {"color": colour, "linestyle": (0, dashes) if dashes else "-", "dash_capstyle": "butt"}
            rows = spread(curve.seeds)
            if rows:
                steps, mean, low, high = map(list, zip(*rows, strict=True))
                if len(curve.seeds) > 1:
                    axes.fill(steps + steps[::-1], low + high[::-1], color=colour, alpha=0.18, linewidth=0)
                mark = "o" if marks or len(steps) == 1 else None
                axes.plot(steps, mean, linewidth=2, marker=mark, markersize=4, **look)
            if curve.name in raw:
                axes.plot(*zip(*sorted(raw[curve.name].items()), strict=True), color=colour, alpha=0.3, linewidth=0.8)
            for seed in curve.seeds:
                ahead = [step for step in sorted(seed) if not rows or step >= rows[-1][0]]
                if len(ahead) > 1:
                    axes.plot(ahead, [seed[step] for step in ahead], linewidth=0.8, **look)
        if line_at is not None:
            axes.axhline(line_at, color=paint("ink"), linewidth=0.8, linestyle=(0, (2, 3)))

    means = {curve.name: {step: float(f"{mean:.4g}") for step, mean, *_ in spread(curve.seeds)} for curve in curves}
    return drawn(title, draw, percent, means)


def stack(title: str, layers: dict[str, dict[int, float]]) -> str:
    """Shares that add up to 1 at each step, one on the other, in the paint of their names; the <svg> element."""
    steps = sorted({step for layer in layers.values() for step in layer})

    def draw(axes):
        base = [0.0] * len(steps)
        for name, layer in layers.items():
            top = [b + layer.get(step, 0.0) for b, step in zip(base, steps, strict=True)]
            axes.fill(steps + steps[::-1], base + top[::-1], color=paint(name), linewidth=0.6)
            base = top
        axes.set_ylim(0, 1)
        axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))

    return drawn(title, draw, True, {name: {step: round(value, 3) for step, value in layer.items()}
                                     for name, layer in layers.items()})


def drawn(title: str, draw: Callable, percent: bool, values: dict[str, dict[int, float]]) -> str:
    """A chart of this page's look, filled by draw(axes); values: what it shows by name and step, to be read out."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    ends = [f"{name} from {found[min(found)]:.3g} to {found[max(found)]:.3g}"
            for name, found in values.items() if found]
    label, ink, grid, file = f"{title}: {'; '.join(ends)}", paint("ink"), paint("grid"), io.BytesIO()
    readout = {"percent": percent, "curves": [[name, list(found.items())] for name, found in values.items()]}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "faca", "font.size": FONT, "text.color": ink,
                     "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink, "path.simplify_threshold": 0.3}):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
        axes = figure.add_axes((0.125, 0.18, 0.855, 0.78))
        axes.grid(axis="y", color=grid, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(grid)
        axes.tick_params(length=0, pad=5)
        axes.set_xlabel("step", labelpad=2)
        draw(axes)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        if percent:
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, -0.02), max(min(high, 1.02), 0.02))
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0 if high - low > 0.05 else 1))
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return slim(file.getvalue().decode(), label, readout | {"x": [round(x, 2) for x in axes.get_xlim()]})


def slim(svg: str, label: str, readout: dict) -> str:
    """matplotlib's file as one element: no namespaces, no styles, rounded numbers, the page's colours, ids of its own.

    readout: what the page's script shows of a step that is pointed at, {"x": limits, "percent": ..., "curves": ...}.
    """
    root, prefix = ElementTree.fromstring(svg), f"chart{next(numbers)}-"
    for parent in list(root.iter()):
        parent.tag = parent.tag.rpartition("}")[2]
        for child in list(parent):
            if child.tag.endswith(("metadata", "style")):
                parent.remove(child)
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', svg))
    for element in root.iter():
        given = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        pairs = [pair.split(":", 1) for pair in given.pop("style", "").split(";") if ":" in pair]
        given |= {name.strip(): value.strip() for name, value in pairs}
        if font := given.pop("font", ""):
            given["font-size"] = re.search(r"([\d.]+)px", font)[1]
        if given.get("id") not in used:
            given.pop("id", None)
        element.attrib = {name: fitted(name, value, prefix) for name, value in given.items()}
        element.text, element.tail = (element.text or "").strip(), ""
    root.attrib = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria-label": label, "tabindex": "0",
                   "data-readout": json.dumps(readout, separators=(",", ":"))}
    return ElementTree.tostring(root, encoding="unicode")


def fitted(name: str, value: str, prefix: str) -> str:
    """One attribute: ids prefixed, colours by their variables, numbers to a tenth of a point."""
    if name in ("id", "href", "clip-path"):
        return re.sub(r"^(url\(#|#|)", rf"\g<1>{prefix}", value)
    if value.startswith("#0100"):
        return f"var(--{PAINTS[int(value[-2:], 16)]})"
    if value.startswith("#"):
        return value
    rounded = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.{2 if 'opacity' in name else 1}f}", value)
    return " ".join(rounded.replace(".0 ", " ").split())
