// Model: a small picture for each head of each layer. A click enlarges one.

async function drawModel(isCurrent) {
  const view = byId("model-view");
  const thumbnails = await thumbnailsOf(attention(), state.model);
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
  for (const thumbnail of thumbnails) {
    const name = `${narrow ? "" : "layer "}${thumbnail.layer + 1}`;
    if (thumbnail.head === 0) grid.append(element("span", name, { class: "name" }));
    grid.append(panel(thumbnail, size));
  }
  refill(view, grid);
  show(`All heads (across) of all layers. A click enlarges one.${signNames()}`);
}

function panel({ layer, head, rows, columns, cells, scale }, size) {
  const name = `layer ${layer + 1}, head ${head + 1}`;
  const button = element("button", "", { type: "button", class: "panel", "aria-label": name });
  button.classList.toggle("on", layer === state.layer && state.heads.has(head));
  const canvas = element("canvas");
  const greatest = Math.max(rows, columns);
  const [width, height] = [columns, rows].map((count) => Math.max(12, (size * count) / greatest));
  const factor = state.contrast === "one" ? scale : 1 / 127;
  const shares = Array.from(cells, (value) => value * factor);
  const image = shaded(shares, columns, state.model === 2);
  paste(fit(canvas, width, height), image, 0, 0, width, height);
  button.append(canvas);
  const tell = () => show(name, ...numbersOf(layer, head));
  button.addEventListener("pointerenter", tell);
  button.addEventListener("focus", tell);
  button.addEventListener("click", () => enlarge(layer, head));
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
