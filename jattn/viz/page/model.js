// Model: a small picture for each head of each layer. A click enlarges one.

async function drawModel(isCurrent) {
  const view = byId("model-view");
  const found = await thumbnailsOf(attention(), state.model);
  if (!isCurrent()) return;
  const [layers, heads] = attention().sizes;
  const narrow = view.clientWidth < 600;
  const room = (view.clientWidth - (narrow ? 50 : 110)) / heads - (narrow ? 9 : 14);
  const most = view.clientHeight / 3;
  const size = Math.max(28, Math.min(most, room, (view.clientHeight - 60) / layers - 14));
  const grid = element("div", "", { class: "layers" });
  grid.style.gridTemplateColumns = `max-content repeat(${heads}, max-content)`;
  grid.append(element("span", "head", { class: "name top" }));
  for (let head = 0; head < heads; head++) {
    grid.append(element("span", head + 1, { class: "name top" }));
  }
  for (const one of found) {
    const name = `${narrow ? "" : "layer "}${one.layer + 1}`;
    if (one.head === 0) grid.append(element("span", name, { class: "name" }));
    grid.append(panel(one, size));
  }
  refill(view, grid);
  show(`All heads (across) of all layers. A click enlarges one.${signNames()}`);
}

function panel(one, size) {
  const name = `layer ${one.layer + 1}, head ${one.head + 1}`;
  const button = element("button", "", { type: "button", class: "panel", "aria-label": name });
  const on = one.layer === state.layer && state.heads.has(one.head);
  button.classList.toggle("on", on);
  const canvas = element("canvas");
  const greatest = Math.max(one.rows, one.columns);
  const [width, height] = [one.columns, one.rows].map((x) => Math.max(12, (size * x) / greatest));
  const context = fit(canvas, width, height);
  const scale = state.contrast === "one" ? one.scale : 1 / 127;
  const colours = table(state.model === 2 ? "signed" : "weights");
  const image = new ImageData(one.columns, one.rows);
  for (let i = 0; i < one.cells.length; i++) {
    const at = 3 * shade(one.cells[i] * scale, state.model === 2);
    image.data.set([colours[at], colours[at + 1], colours[at + 2], 255], 4 * i);
  }
  paste(context, image, 0, 0, width, height);
  button.append(canvas);
  const tell = () => show(name, ...numbersOf(one.layer, one.head));
  button.addEventListener("pointerenter", tell);
  button.addEventListener("focus", tell);
  button.addEventListener("click", () => enlarge(one.layer, one.head));
  return button;
}

// An image in a rectangle of the canvas, its pixels as squares.
function paste(context, image, x, y, width, height) {
  const canvas = document.createElement("canvas");
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(canvas, x, y, width, height);
}

function enlarge(layer, head) {
  state.layer = layer;
  state.heads = new Set([head]);
  chooseView("matrix");
  load();
  matrix.canvas.focus({ focusVisible: false });
}
