// Numbers: a row for each head of each layer, sorted by any column. A click enlarges the head.

// Each number as the page calls it, and what it means.
const meanings = {
  head: ["head", "layer.head, so 2.4 is head 4 of layer 2"],
  entropy: ["entropy", "−Σ w ln w of a query's weights w, in nats; the mean over queries"],
  coverage: ["coverage", "Σ over keys of min(1, weight received from all queries), divided by S keys"],
  monotonicity: [
    "mono\u00adtonicity",
    "of the steps from a query to the next, the share in which the mean place read does not move back",
  ],
  distance: ["distance", "Σ w |query's place − key's place|, in tokens; the mean over queries"],
  first: ["first key", "weight on the first key; the mean over queries"],
  previous: ["previous key", "weight on the key just before the query; the mean over queries"],
};
const sorting = { by: "head", downwards: false };

const columns = () => Object.keys(attention().numbers[0]);

// Of a head: those of the model that is shown, or the first's less the second's.
function numberOf(name, layer, head) {
  const of = (model) => attention().numbers[model][name][layer][head];
  if (state.model < 2) return of(state.model);
  return of(0) === null || of(1) === null ? null : of(0) - of(1);
}

function numbersOf(layer, head) {
  return columns().map((name) => {
    const value = numberOf(name, layer, head);
    return `; ${meanings[name][0]} ${value === null ? "–" : fixed(value, 2)}`;
  });
}

function drawNumbers() {
  const [layers, heads] = attention().sizes;
  if (sorting.by !== "head" && !columns().includes(sorting.by)) sorting.by = "head";
  const rows = [];
  for (let layer = 0; layer < layers; layer++) {
    for (let head = 0; head < heads; head++) rows.push({ layer, head });
  }
  const key = ({ layer, head }) =>
    (sorting.by === "head" ? layer * heads + head : numberOf(sorting.by, layer, head));
  rows.sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    return sorting.downwards ? y - x : x - y;
  });
  const statistics = element("table");
  statistics.append(headings(), element("tbody"));
  for (const row of rows) statistics.lastChild.append(rowOf(row));
  refill(byId("numbers-view"), statistics);
  const [name, meaning] = meanings[sorting.by];
  const difference = state.model === 2 ? ` Values: ${firstLessSecond()}.` : "";
  const hint = sorting.by === "head" ? " A click on a name sorts and explains." : "";
  show(`${name}: ${meaning}.${hint}${difference}`);
}

function headings() {
  const head = element("thead");
  const row = head.appendChild(element("tr"));
  for (const name of ["head", ...columns()]) {
    const mark = sorting.by !== name ? "" : sorting.downwards ? " ↓" : " ↑";
    const [label, title] = meanings[name];
    const button = element("button", label + mark, { type: "button", title });
    button.addEventListener("click", () => {
      sorting.downwards = sorting.by === name && !sorting.downwards;
      sorting.by = name;
      redraw();
    });
    const cell = element("th", "", { scope: "col" });
    cell.append(button);
    row.append(cell);
  }
  return head;
}

function rowOf({ layer, head }) {
  const row = element("tr");
  const on = layer === state.layer && state.heads.has(head);
  row.classList.toggle("on", on);
  const name = element("td");
  name.append(element("button", `${layer + 1}.${head + 1}`, {
    type: "button", "aria-label": `layer ${layer + 1}, head ${head + 1}: enlarge`,
  }));
  row.append(name);
  for (const column of columns()) {
    const value = numberOf(column, layer, head);
    row.append(element("td", value === null ? "–" : fixed(value, 3)));
  }
  row.addEventListener("click", () => enlarge(layer, head));
  return row;
}
