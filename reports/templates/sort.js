"use strict";
// Every table with two rows or more can be sorted by each of its columns: rising, falling, as it was.
const NUMBER = /^[+-]?[\d,]*\.?\d+(?=x?%?$)/;

function entry(row, column) {
  const shown = [...row.cells[column].childNodes].filter((node) => node.nodeName !== "SMALL");
  const text = shown.map((node) => node.textContent).join("").trim();
  const number = NUMBER.exec(text);
  return number ? Number(number[0].replaceAll(",", "")) : text;
}

function compare(left, right) {
  const words = [typeof left, typeof right].filter((type) => type === "string").length;
  if (words === 0) return left - right;
  if (words === 2) return left.localeCompare(right, "en", { numeric: true });
  return typeof left === "number" ? -1 : 1;
}

function sorted(rows, column, direction) {
  const entries = new Map(rows.map((row) => [row, entry(row, column)]));
  const known = rows.filter((row) => entries.get(row) !== "–");
  const absent = rows.filter((row) => entries.get(row) === "–");
  known.sort((left, right) => direction * compare(entries.get(left), entries.get(right)));
  return [...known, ...absent];
}

function makeSortable(table) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: null }[head.getAttribute("aria-sort")];
      const order = next === undefined ? "ascending" : next;
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      if (order) head.setAttribute("aria-sort", order);
      table.classList.toggle("sorted", Boolean(order));
      const direction = order === "ascending" ? 1 : -1;
      body.append(...(order ? sorted(original, column, direction) : original));
    });
  });
}

for (const table of document.querySelectorAll("table")) {
  if (table.tHead && table.tBodies[0].rows.length > 1) makeSortable(table);
}
