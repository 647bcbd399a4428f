// A click on a heading sorts its column: by number if it holds numbers; a second click reverses the order; empty cells come last.
for (const table of document.querySelectorAll("table")) table.querySelectorAll("thead th").forEach((head, column) => head.addEventListener("click", () => {
  const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1, body = table.tBodies[0];
  const key = row => { const cell = row.cells[column]; return cell.dataset.key !== undefined ? +cell.dataset.key : column ? NaN : cell.textContent; };
  const order = (a, b) => typeof a === "string" ? down * a.localeCompare(b) : isNaN(a) - isNaN(b) || down * (a - b) || 0;
  [...body.rows].sort((a, b) => order(key(a), key(b))).forEach(row => body.append(row));
  table.querySelectorAll("th[aria-sort]").forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
}));
// Show the tips of the plots without delay, and on touch screens, too.
const tip = document.getElementById("tip");
for (const mark of document.querySelectorAll("svg .tip")) {
  const title = mark.querySelector("title"), words = title.textContent;
  const show = event => { tip.textContent = words; title.textContent = ""; tip.style.display = "block";
    tip.style.left = Math.max(4, Math.min(event.pageX + 12, document.documentElement.clientWidth - tip.offsetWidth - 8)) + "px"; tip.style.top = event.pageY + 14 + "px"; };
  const hide = () => { tip.style.display = "none"; title.textContent = words; };
  mark.addEventListener("pointerenter", show); mark.addEventListener("pointermove", show); mark.addEventListener("pointerleave", hide);
}
// A table that is wider than its box says that it scrolls.
const boxes = document.querySelectorAll(".scroll");
const mark = () => boxes.forEach(box => box.previousElementSibling.classList.toggle("wide", box.scrollWidth > box.clientWidth + 1));
addEventListener("resize", mark); mark();
