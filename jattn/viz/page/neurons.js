// Neurons: for one query and one head, the elements of the query, of each key and of their product.
// The sum of a product is q·k, from which the softmax makes the weight.

const neurons = { view: byId("neurons-view"), canvas: byId("neurons"), key: null };
const headRows = 2; // the names of the columns, and the query's elements

async function neuronsOf(part, layer, head) {
  const [queries, keys] = part.vectors.map((layers) => layers[layer]);
  const [, heads, rows, columns] = part.sizes;
  const [q, k] = await Promise.all([
    vectorsOf(queries[head], rows),
    vectorsOf(keys[Math.floor((head * keys.length) / heads)], columns),
  ]);
  return { head, q, k };
}

// Where the columns stand: tokens of queries, tokens of keys, strips of elements, two numbers. A
// narrow page has room for one strip, that of the products.
function neuronColumns() {
  const width = neurons.view.clientWidth;
  const em = emOf(neurons.view);
  const context = neurons.canvas.getContext("2d");
  context.font = boldFont();
  const most = Math.min(9 * em, width * 0.2);
  const token = longest(context, attention().rows, most);
  const left = token + longest(context, attention().columns, most) + em;
  const right = width - 9 * em;
  const count = right - left < 20 * em ? 1 : 2;
  const strip = (right - left) / count - em;
  const strips = Array.from({ length: count }, (_, at) => left + at * (strip + em));
  const ends = [width - 4.5 * em, width - 6]; // of the numbers
  return { width, token, left, strip, strips, ends, pitch: 1.6 * em };
}

function setUpNeurons() {
  const { canvas, view } = neurons;
  for (const name of ["pointermove", "pointerdown"]) {
    canvas.addEventListener(name, (event) => {
      const { token, pitch } = neuronColumns();
      const box = canvas.getBoundingClientRect();
      const row = Math.floor((event.clientY - box.top) / pitch);
      const place = row - headRows + firstNeuron(pitch);
      const onQueries = event.clientX - box.left < token;
      const exists = row >= headRows && place < tokensOf(onQueries ? "queries" : "keys").length;
      if (exists && onQueries) state.hovered = { side: "queries", place };
      neurons.key = exists && !onQueries ? place : null;
      redraw();
    });
  }
  canvas.addEventListener("pointerleave", () => { neurons.key = null; redraw(); });
  view.addEventListener("scroll", redraw);
}

const firstNeuron = (pitch) => Math.round(neurons.view.scrollTop / pitch);

function moveNeuron(rows) {
  const key = neurons.key === null ? 0 : neurons.key + rows;
  neurons.key = Math.max(0, Math.min(attention().columns.length - 1, key));
  const { view } = neurons;
  const { pitch } = neuronColumns();
  const lowest = Math.floor(view.clientHeight / pitch) - headRows - 1; // row that is seen whole
  const first = Math.min(neurons.key, Math.max(firstNeuron(pitch), neurons.key - lowest));
  view.scrollTop = first * pitch;
  redraw();
}

function drawNeurons() {
  const { view, canvas, key } = neurons;
  const { width, token, left, strip, strips, ends, pitch } = neuronColumns();
  const { rows, columns } = attention();
  const count = headRows + Math.max(rows.length, columns.length);
  byId("neurons-sheet").style.height = `${count * pitch}px`;
  const context = fit(canvas, width, view.clientHeight);
  if (!loaded.vectors) {
    show("Choose a head to see its queries and keys.");
    return;
  }
  const { head, q, k } = loaded.vectors;
  const pointed = pointedOut();
  const query = pointed && pointed.side === "queries" ? pointed.place : 0;
  const elements = q.row(query);
  const productsOf = (place) => k.row(place).map((value, at) => value * elements[at]);
  let topProduct = 0;
  for (let place = 0; place < columns.length; place++) {
    for (const value of productsOf(place)) topProduct = Math.max(topProduct, Math.abs(value));
  }
  const top = Math.max(q.greatest, k.greatest);
  const drawStrip = (values, greatest, x, y) => {
    const shares = values.map((value) => value / (greatest || 1));
    paste(context, shaded(shares, values.length, true), x, y + 2, strip, pitch - 4);
    context.strokeStyle = palette().edge;
    context.strokeRect(x, y + 2, strip, pitch - 4);
  };
  context.textBaseline = "middle";
  const write = (text, end, y, room, on = false) =>
    label(context, text, end, y + pitch / 2, 0, room, on);
  const names = ["query", "key", ...(strips.length > 1 ? ["k"] : []), "q × k", "q·k", "weight"];
  [token, left - 6, ...strips.map((x) => x + strip), ...ends].forEach((end, at) => {
    write(names[at], end, 0, strip);
  });
  write("q", left - 6, pitch, token);
  drawStrip(elements, top, strips[0], pitch);
  const first = firstNeuron(pitch);
  const last = Math.min(count - headRows, first + Math.ceil(view.clientHeight / pitch));
  for (let place = first; place < last; place++) {
    const y = (place - first + headRows) * pitch;
    if (place < rows.length) write(rows[place], token, y, token - 4, place === query);
    if (place >= columns.length) continue;
    const products = productsOf(place);
    write(columns[place], left - 6, y, left - token - 12, place === key);
    if (strips.length > 1) drawStrip(k.row(place), top, strips[0], y);
    drawStrip(products, topProduct, strips.at(-1), y);
    [fixed(sum(products), 2), weightName(query, place)].forEach((text, at) => {
      write(text, ends[at], y, 5 * pitch, place === key);
    });
  }
  const name = `elements of the query ${rows[query]} and of ${columns.length} keys`;
  canvas.setAttribute("aria-label", `${name}, head ${head + 1}`);
  tellOfNeurons(query, key, key === null ? [] : [...productsOf(key)]);
}

const weightName = (query, key) => (loaded.mask && !loaded.mask.allows(query, key)
  ? "masked" : fixed(loaded.heads[0].weights.value(query, key), 3));

const sum = (values) => values.reduce((total, value) => total + value, 0);

function tellOfNeurons(query, key, products) {
  const { rows, columns } = attention();
  const head = `head ${loaded.vectors.head + 1}`;
  if (key === null) {
    const colours = "Blue: more than 0; orange: less.";
    show("Query ", named(rows, query), `, ${head}. Point at a query or a key. ${colours}`);
    return;
  }
  const greatest = products.map((value, at) => [value, at])
    .sort((a, b) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, 3)
    .map(([value, at]) => `${number(value, 2)} (element ${at + 1})`).join(", ");
  const product = `q·k ${number(sum(products), 2)}, weight ${weightName(query, key)}`;
  const pair = [named(rows, query), " and ", named(columns, key)];
  show(...pair, `, ${head}: ${product}; greatest products ${greatest}`);
}
