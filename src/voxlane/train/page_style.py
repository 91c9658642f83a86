"""The dress of the report page: its style sheet and its few lines of script."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark;
  --bg: #f6f7f9; --card: #ffffff; --ink: #16202c; --soft: #5a6776; --rule: #e3e7ec; --faint: #eef1f4;
  --accent: #0f6f7d; --warn: #9a5b00; --shade: 0 1px 2px rgb(20 30 45 / .06), 0 6px 20px rgb(20 30 45 / .05); }
@media (prefers-color-scheme: dark) { :root {
  --bg: #0e141b; --card: #161e27; --ink: #e6ebf1; --soft: #97a5b5; --rule: #283441; --faint: #1d2731;
  --accent: #5cc7d4; --warn: #f0b45c; --shade: none; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
main, header > div, footer { max-width: 1180px; margin: 0 auto; padding: 0 24px; }
header { padding: 40px 0 8px; }
.brand { color: var(--accent); font-weight: 650; letter-spacing: .02em; margin: 0 0 6px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 10px; font-weight: 680; }
h2 { font-size: 20px; letter-spacing: -.01em; margin: 0 0 14px; font-weight: 650; }
h3 { font-size: 15px; margin: 0 0 8px; font-weight: 620; }
p { margin: 0 0 12px; max-width: 78ch; }
.lead { font-size: 17px; color: var(--soft); max-width: none; }
.whole { white-space: nowrap; }
.lead b, .said b { color: var(--ink); font-weight: 600; }
.soft, figcaption, caption { color: var(--soft); }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 8px 0 0; font-size: 14px; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; border-radius: 4px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 14px; padding: 24px 26px 26px;
  margin: 20px 0; box-shadow: var(--shade); }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 22px 0 0; }
.tile { flex: 1 1 auto; min-width: 122px;
  background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 14px 16px 12px;
  box-shadow: var(--shade); }
.tile dt { color: var(--soft); font-size: 13px; display: flex; align-items: center; gap: 7px; }
.tile dd { margin: 2px 0 0; font-size: 24px; white-space: nowrap; font-weight: 640; letter-spacing: -.02em;
  line-height: 1.25;  font-variant-numeric: tabular-nums; }
.tile dd small { display: block; font-size: 12.5px; font-weight: 400; letter-spacing: 0; color: var(--soft); }
.tile:first-child dd { color: var(--accent); }
.swatch { width: 11px; height: 11px; border-radius: 3px; display: inline-block; flex: none; }
.swatch.dash { background: none; height: 0; width: 15px; border-top: 2px dashed var(--soft); border-radius: 0; }
.swatch.line { background: #fff; height: 3px; width: 15px; border-radius: 0; outline: 1px solid #8a96a3; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; color: var(--soft); margin: 0 0 10px;
  padding: 0; list-style: none; }
.legend li { display: flex; align-items: center; gap: 7px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 26px 34px; }
.pair > * { min-width: 0; }
@media (min-width: 860px) { .pair.uneven { grid-template-columns: minmax(0, 1.9fr) minmax(0, 1fr); } }
figure { margin: 0; }
.chart { width: 100%; height: auto; display: block; font-size: 12px; }
.across .chart { min-width: 760px; }
.chart text { fill: var(--soft); font-variant-numeric: tabular-nums; }
.chart text.row { fill: var(--ink); font-size: 13.5px; font-weight: 600; }
.chart path { fill: none; }
.chart .grid { stroke: var(--rule); stroke-width: 1; }
.chart .axis { stroke: var(--soft); stroke-width: 1; opacity: .6; }
.chart .mark { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 3 4; }
.chart .line { stroke-linejoin: round; stroke-linecap: round; }
.chart .mean { stroke: var(--ink); stroke-width: 2.4; }
.chart .dot { opacity: .78; stroke: var(--card); stroke-width: 1; }
.chart .hover { fill: transparent; }
.chart .hover:hover { fill: var(--ink); opacity: .07; }
.scroll { overflow-x: auto; margin: 0 -6px; padding: 0 6px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-size: 13px; padding: 0 0 8px; }
th, td { padding: 7px 9px; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { font-weight: 560; color: var(--soft); font-size: 13px; }
th:first-child, td:first-child, .left th, .left td { text-align: left; }
tbody tr:last-child > * { border-bottom: 0; }
tbody tr:hover { background: var(--faint); }
tbody th { color: var(--ink); font-size: 14px; }
tbody th .swatch { margin-right: 8px; }
.sortable { font-size: 13.5px; }
.sortable th, .sortable td { padding: 6px 7px; }
.sortable thead th { font-size: 12.5px; }
tr.total > * { font-weight: 640; }
.group { text-align: center; border-bottom: 0; padding-bottom: 0; color: var(--ink); }
.group .swatch { margin-right: 7px; }
.starts { border-left: 1px solid var(--rule); }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; }
th button:hover { color: var(--ink); }
th button::after { content: " \\2195"; opacity: .35; }
th[aria-sort=ascending] button::after { content: " \\2191"; opacity: 1; }
th[aria-sort=descending] button::after { content: " \\2193"; opacity: 1; }
.bar { display: inline-block; min-width: 62px; padding: 1px 6px; border-radius: 5px;
  --fill: color-mix(in srgb, var(--c) 26%, transparent);
  background: linear-gradient(to right, var(--fill) var(--v), var(--faint) var(--v)); }
.tall + .tall { margin-top: 24px; }
.tall { max-height: 560px; overflow: auto; }
.tall thead { position: sticky; top: 0; background: var(--card); z-index: 1; }
.cases { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(480px, 100%), 1fr)); gap: 22px 24px; }
.cases figure:first-child { grid-column: 1 / -1; }
.cases img { width: 100%; height: auto; display: block; background: #000; border-radius: 9px; }
.cases figcaption { font-size: 13.5px; padding: 8px 2px 0; display: flex; flex-wrap: wrap; gap: 2px 14px; }
.cases figcaption b { color: var(--ink); }
.heads { display: flex; font-size: 12px; color: var(--soft); padding: 0 0 5px; }
.heads span { flex: 1; text-align: center; }
.tag { font-size: 12px; border: 1px solid var(--rule); border-radius: 99px; padding: 0 8px; color: var(--soft); }
.said { font-size: 16px; max-width: none; }
.words { text-align: left; white-space: normal; }
.stack { display: flex; height: 34px; border-radius: 8px; overflow: hidden; gap: 2px; margin: 6px 0 14px; }
.stack > div { min-width: 2px; background: var(--c); color: #fff; font-size: 12.5px; font-weight: 600; overflow: hidden;
  display: flex; align-items: center; justify-content: center; white-space: nowrap; }
.missing { border-left: 3px solid var(--warn); padding: 8px 14px; background: var(--faint); border-radius: 0 8px 8px 0;
  margin: 10px 0; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: 5px 20px; margin: 0; font-size: 14px;
  align-content: start; }
dl.facts dt { color: var(--soft); }
dl.facts dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
pre { background: var(--faint); border: 1px solid var(--rule); border-radius: 9px; padding: 12px 14px; overflow: auto;
  font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; margin: 0 0 16px;
  max-height: 460px; }
pre.command { white-space: pre-wrap; overflow-wrap: anywhere; }
code { font: .93em ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
details { margin: 8px 0 0; }
summary { cursor: pointer; color: var(--accent); }
.gap { margin-top: 24px; }
footer { color: var(--soft); font-size: 13px; padding-bottom: 40px; }
@media (max-width: 560px) { section { padding: 18px 16px; } main, header > div, footer { padding: 0 14px; }
  h1 { font-size: 25px; } dl.facts { grid-template-columns: 1fr; gap: 0; } dl.facts dd { margin-bottom: 8px; } }
@media print { body { background: #fff; } section, .tile { break-inside: avoid; box-shadow: none; }
  nav { display: none; }
  .tall, pre { max-height: none; overflow: visible; } }
"""

SCRIPT = """
for (const table of document.querySelectorAll('table.sortable')) {
  const body = table.tBodies[0];
  for (const button of table.querySelectorAll('thead button')) {
    button.addEventListener('click', () => {
      const head = button.closest('th'), column = Number(head.dataset.column);
      const up = head.getAttribute('aria-sort') !== 'ascending';
      for (const other of table.querySelectorAll('[aria-sort]')) other.removeAttribute('aria-sort');
      head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
      const key = row => row.cells[column].dataset.sort ?? '';
      const rows = [...body.rows].sort((a, b) => {
        const x = key(a), y = key(b);
        if (x === '' || y === '') return (x === '') - (y === '');  // what was not scored stays at the end
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, {numeric: true}) : x - y;
        return up ? order : -order;
      });
      body.append(...rows);
    });
  }
}
"""
