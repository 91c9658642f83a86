"""What the search's page wears beside the training report's dress, and the script that links its charts."""

from __future__ import annotations

STYLE = """
:root { --done: #0f6f7d; --stopped: #8794a3; --infeasible: #b26a00; --failed: #b3261e; --running: #2f6fc4;
  --best: #b5246f; --worst: #cfd6de; }
@media (prefers-color-scheme: dark) { :root { --done: #5cc7d4; --stopped: #74828f; --infeasible: #f0b45c;
  --failed: #ff8a7d; --running: #82b4f5; --best: #ff8cc3; --worst: #34424f; } }
.done { --c: var(--done); } .stopped { --c: var(--stopped); } .infeasible { --c: var(--infeasible); }
.failed { --c: var(--failed); } .running { --c: var(--running); } .trial.best { --c: var(--best); }
.chart .trial { transition: opacity .12s; }
.chart .trial .near { stroke: transparent; fill: transparent; stroke-width: 9; pointer-events: stroke; }
.chart .point .near { stroke: none; pointer-events: all; }
.chart .point :not(.near) { fill: var(--c); stroke: var(--card); stroke-width: 1; }
.chart .point.stopped :not(.near) { fill: var(--card); stroke: var(--c); stroke-width: 1.6; }
.chart .point.running :not(.near) { fill: var(--card); stroke: var(--c); stroke-width: 1.8; stroke-dasharray: 2.4 1.8; }
.chart .point.failed path:not(.near) { fill: none; stroke: var(--c); stroke-width: 2; }
.chart .point.best :not(.near) { fill: var(--best); stroke: var(--card); }
.chart .way path:not(.near) { stroke: color-mix(in oklab, var(--done) var(--v), var(--worst)); stroke-width: 1.5; }
.chart .way.stopped path:not(.near) { stroke-width: 1.1; }
.chart .way.infeasible path:not(.near) { stroke: var(--infeasible); stroke-dasharray: 5 4; }
.chart .way.failed path:not(.near) { stroke: var(--failed); stroke-dasharray: 1.5 3.5; }
.chart .way.best path:not(.near) { stroke: var(--best); stroke-width: 3; }
.chart .curve path:not(.near) { stroke: var(--c); stroke-width: 1.6; stroke-linejoin: round; }
.chart .curve.stopped path:not(.near) { stroke-width: 1.1; opacity: .6; }
.chart .curve.best path:not(.near) { stroke-width: 2.8; }
.chart .curve.running path:not(.near) { stroke-dasharray: 5 3; }
.chart .curve .end { fill: var(--c); }
.chart .curve.stopped .end { opacity: .7; }
.chart .sofar { stroke: var(--best); stroke-width: 1.6; opacity: .75; }
.chart .span rect { fill: color-mix(in srgb, var(--c) 30%, var(--card)); stroke: var(--c); stroke-width: 1; }
.chart .span text { fill: var(--ink); font-size: 11px; pointer-events: none; }
.chart .span.running rect { stroke-dasharray: 4 3; }
.chart .weight { fill: color-mix(in srgb, var(--accent) 62%, var(--card)); }
.chart .range { stroke: var(--ink); stroke-width: 1.3; opacity: .75; }
.chart text.field, .chart text.share { fill: var(--ink); font-size: 13px; }
.chart text.tick { paint-order: stroke; stroke: var(--card); stroke-width: 3.5px; stroke-linejoin: round; }
.chart .brush { cursor: ns-resize; touch-action: none; outline: none; }
.chart .brush:focus-visible .reach { stroke: var(--accent); stroke-width: 2; }
.chart .brush .reach { fill: transparent; }
.chart .brush:hover .reach { fill: var(--ink); opacity: .045; }
.chart .brush .kept { fill: var(--accent); opacity: .28; stroke: var(--accent); stroke-width: 1.2; }
.chart .brush:not(.on) .kept { display: none; }
.pointed .chart .trial:not(.lit) { opacity: .16; }
.chart .trial.lit { opacity: 1; }
.chart .way.lit path:not(.near) { stroke-width: 3.2; }
.chart .curve.lit path:not(.near) { stroke-width: 3; opacity: 1; }
.chart .span.lit rect { fill: color-mix(in srgb, var(--c) 65%, var(--card)); }
.chart .point.lit { stroke: var(--ink); }
.chart .trial.out { opacity: .06; pointer-events: none; }
.pointed .chart .trial.out.lit { opacity: 1; }
tr.lit > *, .sortable tr.lit > th { background: var(--faint); }
tr[data-trial] { outline-offset: -2px; scroll-margin-top: 60px; }
tr.best th { color: var(--best); }
.sift { display: flex; flex-wrap: wrap; align-items: center; gap: 8px; font-size: 13.5px; margin: 0 0 14px; }
.sift button { font: inherit; color: var(--ink); background: var(--card); border: 1px solid var(--rule);
  border-radius: 99px; padding: 3px 12px; cursor: pointer; display: inline-flex; align-items: center; gap: 7px; }
.sift button:hover { border-color: var(--soft); }
.sift button[aria-pressed=false] { color: var(--soft); text-decoration: line-through; background: var(--faint); }
.sift button[aria-pressed=false] svg { opacity: .3; }
.sift .shown { color: var(--soft); margin-left: auto; }
.sift button[hidden] { display: none; }
.key { width: 14px; height: 14px; flex: none; overflow: visible; }
.key path { fill: none; }
.ramp { width: 62px; height: 6px; border-radius: 3px; display: inline-block;
  background: linear-gradient(to right in oklab, var(--worst), var(--done)); }
.state { display: inline-flex; align-items: center; gap: 6px; }
.fields { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(250px, 100%), 1fr)); gap: 20px 26px; }
.fields h3 { font-size: 13.5px; margin: 0 0 4px; font-weight: 560; overflow-wrap: anywhere; }
.fields .chart { font-size: 11.5px; }
.tip { position: fixed; z-index: 9; pointer-events: none; max-width: min(380px, 90vw); background: var(--card);
  color: var(--ink); border: 1px solid var(--rule); border-radius: 9px; padding: 9px 12px; font-size: 13px;
  line-height: 1.45; white-space: pre-line; overflow-wrap: anywhere; box-shadow: 0 4px 22px rgb(10 20 30 / .18); }
.tip::first-line { font-weight: 620; }
.swatch.slot { background: color-mix(in srgb, var(--c) 30%, var(--card)); border: 1px solid var(--c); }
.sortable tbody th, .sortable thead th:first-child { position: sticky; left: 0; background: var(--card); }
.sortable thead th { white-space: nowrap; }
td.why { min-width: 270px; max-width: 420px; }
.best-fields { font-size: 15px; }
@media print { .sift, .tip { display: none; } }
@media (prefers-reduced-motion: reduce) { .chart .trial { transition: none; } }
"""

SCRIPT = """
const rows = new Map([...document.querySelectorAll('tr[data-trial]')].map(row => [row.dataset.trial, row]));
const shapes = new Map([...rows.keys()].map(id => [id, []]));
for (const shape of document.querySelectorAll('[data-trial]')) shapes.get(shape.dataset.trial)?.push(shape);
const tip = document.querySelector('.tip');
let lit = null;
function light(id, x, y) {
  if (id !== lit) {
    for (const shape of shapes.get(lit) ?? []) shape.classList.remove('lit');
    for (const shape of shapes.get(id) ?? []) shape.classList.add('lit');
    lit = id;
    document.body.classList.toggle('pointed', id !== null);
  }
  tip.hidden = id === null || x === undefined;
  if (tip.hidden) return;
  tip.textContent = rows.get(id).dataset.told;
  const box = tip.getBoundingClientRect(), wide = document.documentElement.clientWidth;
  tip.style.left = Math.max(4, Math.min(x + 16, wide - box.width - 8)) + 'px';
  tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18) + 'px';
}
document.addEventListener('pointermove', event => {
  if (drag) return;
  const at = event.target.closest?.('[data-trial]');
  if (at) light(at.dataset.trial, ...(at.tagName === 'TR' ? [] : [event.clientX, event.clientY]));
  else if (lit !== null && !document.activeElement?.dataset?.trial) light(null);
});
document.addEventListener('click', event => {
  const at = event.target.closest?.('svg [data-trial]');
  if (!at) return;
  const row = rows.get(at.dataset.trial);
  row.scrollIntoView({block: 'center'});
  row.focus({preventScroll: true});
});
for (const [id, row] of rows) {
  row.addEventListener('focus', () => light(id));
  row.addEventListener('blur', () => light(null));
}

const kept = new Map(), off = new Set();
const ways = [...document.querySelectorAll('.way')];
const shown = document.querySelector('.shown'), all = document.querySelector('.all');
function sift() {
  let count = 0;
  for (const [id, row] of rows) {
    const ys = ways.find(way => way.dataset.trial === id)?.dataset.y.split(',') ?? [];
    const inside = [...kept].every(([axis, [low, high]]) => ys[axis] !== '' && ys[axis] >= low && ys[axis] <= high);
    const stays = inside && !off.has(row.dataset.state);
    count += stays;
    row.hidden = !stays;
    for (const shape of shapes.get(id)) shape.classList.toggle('out', !stays);
  }
  if (shown) shown.textContent = count === rows.size ? `all ${count} trials` : `${count} of ${rows.size} trials`;
  if (all) all.hidden = count === rows.size;
}
function keep(brush, low, high) {
  const box = brush.querySelector('.kept');
  if (low === null) kept.delete(brush.dataset.axis);
  else {
    kept.set(brush.dataset.axis, [low, high]);
    box.setAttribute('y', low);
    box.setAttribute('height', high - low);
  }
  brush.classList.toggle('on', low !== null);
  sift();
}
let drag = null;
for (const brush of document.querySelectorAll('.brush')) {
  const svg = brush.ownerSVGElement, top = Number(brush.dataset.top), bottom = Number(brush.dataset.bottom);
  const at = event => {
    const y = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).y;
    return Math.max(top, Math.min(bottom, y));
  };
  brush.addEventListener('pointerdown', event => {
    drag = at(event);
    light(null);
    brush.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  brush.addEventListener('pointermove', event => {
    if (drag !== null) keep(brush, Math.min(drag, at(event)), Math.max(drag, at(event)));
  });
  brush.addEventListener('pointerup', event => {
    if (drag !== null && Math.abs(at(event) - drag) < 4) keep(brush, null);
    drag = null;
  });
  brush.addEventListener('pointercancel', () => { drag = null; });
  brush.addEventListener('keydown', event => {
    const step = (bottom - top) / 8, was = kept.get(brush.dataset.axis);
    if (event.key === 'Escape' || event.key === 'Delete') keep(brush, null);
    else if (event.key === 'ArrowUp' || event.key === 'ArrowDown') {
      const move = event.key === 'ArrowUp' ? -step : step;
      const low = was ? Math.max(top, Math.min(bottom - 2 * step, was[0] + move)) : move < 0 ? top : bottom - 2 * step;
      keep(brush, low, low + 2 * step);
      event.preventDefault();
    }
  });
}
for (const button of document.querySelectorAll('.sift [data-only]')) {
  button.addEventListener('click', () => {
    const on = button.getAttribute('aria-pressed') === 'false';
    button.setAttribute('aria-pressed', on);
    off[on ? 'delete' : 'add'](button.dataset.only);
    sift();
  });
}
all?.addEventListener('click', () => {
  off.clear();
  for (const button of document.querySelectorAll('.sift [data-only]')) button.setAttribute('aria-pressed', true);
  for (const brush of document.querySelectorAll('.brush')) keep(brush, null);
});
"""
