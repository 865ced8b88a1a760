"""Draw docs/speed.svg from the table under "Benchmarks" in README. With --check: write nothing, and fail where the chart is out of date.

python tools/draw_chart.py [--check]
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "docs" / "speed.svg"
LEFT, BAR, ROW, WIDTH = 250, 12, 42, 720


def figures(readme: str) -> list[tuple[str, float, float]]:
    """Return what was measured, Paceline's figure and llama.cpp's, of each row."""
    found = re.findall(r"^\| ([^|]+, tokens/s) \| ([\d.]+) \| ([\d.]+) \|$", readme, re.MULTILINE)
    return [(label.removesuffix(", tokens/s"), float(ours), float(theirs)) for label, ours, theirs in found]


def draw(rows: list[tuple[str, float, float]]) -> str:
    """Return the chart. Each row has a scale of its own: its faster engine fills the width."""
    body: list[str] = []
    for place, (label, ours, theirs) in enumerate(rows):
        y, scale = 44 + place * ROW, (WIDTH - LEFT - 90) / max(ours, theirs)
        body.append(f'<text x="{LEFT - 12}" y="{y + 16}" text-anchor="end">{escape(label)}</text>')
        for offset, figure, fill in ((0, ours, "#2f9e6e"), (BAR + 2, theirs, "#9aa3b2")):
            length = figure * scale
            body.append(f'<rect x="{LEFT}" y="{y + offset}" width="{length:.0f}" height="{BAR}" rx="2" fill="{fill}"/>')
            body.append(f'<text x="{LEFT + length + 6:.0f}" y="{y + offset + 10}" class="n">{figure:g}</text>')
    height = 52 + ROW * len(rows)
    key = "".join(
        f'<rect x="{x}" y="14" width="{BAR}" height="{BAR}" rx="2" fill="{fill}"/><text x="{x + 18}" y="24">{name}</text>'
        for x, fill, name in ((LEFT, "#2f9e6e", "Paceline"), (LEFT + 110, "#9aa3b2", "llama.cpp"))
    )
    style = "text{font:13px system-ui,sans-serif;fill:#57606a}.n{font-size:11px}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Tokens a second, Paceline and llama.cpp">'
        f"<title>Tokens a second; each row has its own scale</title><style>{style}</style>{key}" + "\n".join(body) + "</svg>\n"
    )


def main() -> int:
    after = draw(figures((ROOT / "README.md").read_text()))
    if "--check" not in sys.argv[1:]:
        CHART.write_text(after)
        return 0
    if not CHART.exists() or CHART.read_text() != after:
        print("docs/speed.svg is not of README's table. Run: python tools/draw_chart.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
