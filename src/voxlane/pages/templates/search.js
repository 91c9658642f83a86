const rows = new Map([...document.querySelectorAll('tr[data-trial]')].map(row => [row.dataset.trial, row]));
const shapes = new Map([...rows.keys()].map(id => [id, []]));
for (const shape of document.querySelectorAll('[data-trial]')) shapes.get(shape.dataset.trial)?.push(shape);
const tip = document.querySelector('.tip');
let highlighted = null;
function highlight(id, x, y) {
  if (id !== highlighted) {
    for (const shape of shapes.get(highlighted) ?? []) shape.classList.remove('lit');
    for (const shape of shapes.get(id) ?? []) shape.classList.add('lit');
    highlighted = id;
    document.body.classList.toggle('pointed', id !== null);
  }
  tip.hidden = id === null || x === undefined;
  if (tip.hidden) return;
  tip.textContent = rows.get(id).dataset.tip;
  const box = tip.getBoundingClientRect(), wide = document.documentElement.clientWidth;
  tip.style.left = Math.max(4, Math.min(x + 16, wide - box.width - 8)) + 'px';
  tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18) + 'px';
}
document.addEventListener('pointermove', event => {
  if (drag) return;
  const shape = event.target.closest?.('[data-trial]');
  if (shape) highlight(shape.dataset.trial, ...(shape.tagName === 'TR' ? [] : [event.clientX, event.clientY]));
  else if (highlighted !== null && !document.activeElement?.dataset?.trial) highlight(null);
});
document.addEventListener('click', event => {
  const shape = event.target.closest?.('svg [data-trial]');
  if (!shape) return;
  const row = rows.get(shape.dataset.trial);
  row.scrollIntoView({block: 'center'});
  row.focus({preventScroll: true});
});
for (const [id, row] of rows) {
  row.addEventListener('focus', () => highlight(id));
  row.addEventListener('blur', () => highlight(null));
}

const selected = new Map(), hiddenStates = new Set();
const traces = [...document.querySelectorAll('.trace')];
const shownCount = document.querySelector('.shown-count'), all = document.querySelector('.all');
function filter() {
  let count = 0;
  for (const [id, row] of rows) {
    const ys = traces.find(trace => trace.dataset.trial === id)?.dataset.y.split(',') ?? [];
    const inside = [...selected].every(([axis, [low, high]]) => ys[axis] !== '' && ys[axis] >= low && ys[axis] <= high);
    const visible = inside && !hiddenStates.has(row.dataset.state);
    count += visible;
    row.hidden = !visible;
    for (const shape of shapes.get(id)) shape.classList.toggle('out', !visible);
  }
  if (shownCount) shownCount.textContent = count === rows.size ? `all ${count} trials` : `${count} of ${rows.size} trials`;
  if (all) all.hidden = count === rows.size;
}
function select(brush, low, high) {
  const box = brush.querySelector('.selection');
  if (low === null) selected.delete(brush.dataset.axis);
  else {
    selected.set(brush.dataset.axis, [low, high]);
    box.setAttribute('y', low);
    box.setAttribute('height', high - low);
  }
  brush.classList.toggle('on', low !== null);
  filter();
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
    highlight(null);
    brush.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  brush.addEventListener('pointermove', event => {
    if (drag !== null) select(brush, Math.min(drag, at(event)), Math.max(drag, at(event)));
  });
  brush.addEventListener('pointerup', event => {
    if (drag !== null && Math.abs(at(event) - drag) < 4) select(brush, null);
    drag = null;
  });
  brush.addEventListener('pointercancel', () => { drag = null; });
  brush.addEventListener('keydown', event => {
    const step = (bottom - top) / 8, before = selected.get(brush.dataset.axis);
    if (event.key === 'Escape' || event.key === 'Delete') select(brush, null);
    else if (event.key === 'ArrowUp' || event.key === 'ArrowDown') {
      const move = event.key === 'ArrowUp' ? -step : step;
      const low = before ? Math.max(top, Math.min(bottom - 2 * step, before[0] + move)) : move < 0 ? top : bottom - 2 * step;
      select(brush, low, low + 2 * step);
      event.preventDefault();
    }
  });
}
for (const button of document.querySelectorAll('.filters [data-only]')) {
  button.addEventListener('click', () => {
    const on = button.getAttribute('aria-pressed') === 'false';
    button.setAttribute('aria-pressed', on);
    hiddenStates[on ? 'delete' : 'add'](button.dataset.only);
    filter();
  });
}
all?.addEventListener('click', () => {
  hiddenStates.clear();
  for (const button of document.querySelectorAll('.filters [data-only]')) button.setAttribute('aria-pressed', true);
  for (const brush of document.querySelectorAll('.brush')) select(brush, null);
});
