for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending";
    const value = row => row.cells[head.cellIndex].dataset.value ?? row.cells[head.cellIndex].textContent;
    const compare = (a, b) => head.classList.contains("number")
      ? (a === "" ? 1 : b === "" ? -1 : (a - b) * (down ? -1 : 1))
      : a.localeCompare(b) * (down ? -1 : 1);
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
  });
}
