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
        if (x === '' || y === '') return (x === '') - (y === '');  // cases without a score stay at the end
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, {numeric: true}) : x - y;
        return up ? order : -order;
      });
      body.append(...rows);
    });
  }
}
