// Matrix: the mean of the heads that are on, a cell for each pair. Drag to move, wheel or pinch to
// zoom; the cell under the pointer is told with the value of each head.

const matrix = {
  view: byId("matrix-view"),
  canvas: byId("matrix"),
  zoom: 1,
  x: 0, // of the first column, from where it stands at rest
  y: 0,
  cell: null, // [row, column]
  pointers: new Map(),
};

const labelFont = () => `${0.85 * emOf(document.body)}px system-ui, sans-serif`;
const boldFont = () => `bold ${labelFont()}`;

function resetZoom() {
  Object.assign(matrix, { zoom: 1, x: 0, y: 0 });
}

// Where cells stand: the size of one, the margins for labels, and the corner of the first.
function geometry() {
  const [, , rows, columns] = attention().sizes;
  const { clientWidth: width, clientHeight: height } = matrix.view;
  const context = matrix.canvas.getContext("2d");
  context.font = boldFont(); // of the cell pointed at
  const left = longest(context, attention().rows, Math.min(150, width * 0.3));
  const top = longest(context, attention().columns, Math.min(130, height * 0.3));
  const atRest = Math.min((width - left - 8) / columns, (height - top - 8) / rows, 60);
  const cell = atRest * matrix.zoom;
  const slack = Math.max(0, (width - left - 8 - columns * atRest) / 2);
  return {
    width, height, left: left + slack, top, cell, rows, columns,
    x: left + slack + matrix.x, y: top + matrix.y,
  };
}

// The room that labels need, up to a limit.
function longest(context, tokens, most) {
  const width = (token) => context.measureText(drawn(token)).width + 10;
  return Math.min(most, tokens.reduce((size, token) => Math.max(size, width(token)), 24));
}

function cellAt(event) {
  const g = geometry();
  const box = matrix.canvas.getBoundingClientRect();
  const [px, py] = [event.clientX - box.left, event.clientY - box.top];
  const [row, column] = [Math.floor((py - g.y) / g.cell), Math.floor((px - g.x) / g.cell)];
  const inside = px >= g.left && py >= g.top && row >= 0 && column >= 0
    && row < g.rows && column < g.columns;
  return inside ? [row, column] : null;
}

// Keeps a part of the matrix in the window.
function holdInWindow() {
  const g = geometry();
  const shown = (size, room) => Math.min(0, room - size);
  matrix.x = Math.min(0, Math.max(matrix.x, shown(g.columns * g.cell, g.width - g.left - 8)));
  matrix.y = Math.min(0, Math.max(matrix.y, shown(g.rows * g.cell, g.height - g.top - 8)));
}

function zoomBy(factor, px, py) {
  const g = geometry();
  const box = matrix.canvas.getBoundingClientRect();
  const [cx, cy] = px === undefined
    ? [(g.left + g.width) / 2, (g.top + g.height) / 2] : [px - box.left, py - box.top];
  const most = Math.max(1, 60 / (g.cell / matrix.zoom));
  const zoom = Math.max(1, Math.min(most, matrix.zoom * factor));
  const grown = zoom / matrix.zoom;
  matrix.x = (matrix.x + g.left - cx) * grown + cx - g.left;
  matrix.y = (matrix.y + g.top - cy) * grown + cy - g.top;
  matrix.zoom = zoom;
  holdInWindow();
  redraw();
}

function setUpMatrix() {
  const { canvas, pointers } = matrix;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, event);
    if (event.pointerType === "touch") pick(cellAt(event));
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) {
      pick(cellAt(event));
      return;
    }
    if (pointers.size === 2) pinch(event);
    else {
      matrix.x += event.clientX - before.clientX;
      matrix.y += event.clientY - before.clientY;
      holdInWindow();
      redraw();
    }
    pointers.set(event.pointerId, event);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, (event) => pointers.delete(event.pointerId));
  }
  canvas.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch") pick(null);
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoomBy(Math.exp(-event.deltaY / 400), event.clientX, event.clientY);
  }, { passive: false });
}

function pinch(event) {
  const [a, b] = [...matrix.pointers.values()];
  const other = a.pointerId === event.pointerId ? b : a;
  const before = matrix.pointers.get(event.pointerId);
  const distance = (p) => Math.hypot(p.clientX - other.clientX, p.clientY - other.clientY);
  zoomBy(
    distance(event) / Math.max(1, distance(before)),
    (event.clientX + other.clientX) / 2, (event.clientY + other.clientY) / 2,
  );
}

function pick(cell) {
  matrix.cell = cell;
  redraw();
}

function moveCell(rows, columns) {
  const [, , T, S] = attention().sizes;
  const [row, column] = matrix.cell || [0, 0];
  const within = (at, size) => Math.max(0, Math.min(size - 1, at));
  pick(matrix.cell ? [within(row + rows, T), within(column + columns, S)] : [0, 0]);
}

function drawMatrix() {
  const g = geometry();
  const context = fit(matrix.canvas, g.width, g.height);
  matrix.canvas.dataset.cells = [g.x, g.y, g.cell].join(" "); // the first corner, and the size
  if (loaded.heads.length) drawCells(context, g);
  drawMatrixLabels(context, g);
  const size = `${g.rows} queries by ${g.columns} keys`;
  const name = `matrix of the weights of ${namesOfHeads()}, ${size}; arrow keys move the cell`;
  matrix.canvas.setAttribute("aria-label", name);
  tellOfCell();
}

// What the frames of tiles mean. It stays in the page while the status tells of a cell.
function maskKey(mask) {
  const [empty, mixed, full] = mask.counts;
  return `Tiles of ${mask.block.join(" × ")}: ${empty} empty (crossed out), ${mixed} mixed `
    + `(dashed), ${full} full. Grey pairs are masked.`;
}

// Draws the cells in the window: as squares, or, where there are several in a pixel, of these the
// value furthest from 0.
function drawCells(context, g) {
  const ratio = window.devicePixelRatio || 1;
  const per = Math.max(1, Math.ceil(1 / (g.cell * ratio))); // cells along a pixel
  const first = (corner, edge) => Math.max(0, Math.floor((edge - corner) / g.cell / per));
  const last = (corner, edge, size) =>
    Math.min(Math.ceil(size / per), Math.ceil((edge - corner) / g.cell / per));
  const [r0, r1] = [first(g.y, g.top), last(g.y, g.height, g.rows)];
  const [c0, c1] = [first(g.x, g.left), last(g.x, g.width, g.columns)];
  if (r1 <= r0 || c1 <= c0) return;
  const image = new ImageData(c1 - c0, r1 - r0);
  const signed = state.model === 2;
  const colours = table(signed ? "signed" : "weights");
  const shares = new Float32Array(g.columns);
  const mask = state.mask ? loaded.mask : null;
  const best = new Float32Array(c1 - c0);
  const hidden = new Uint8Array(c1 - c0);
  for (let r = r0; r < r1; r++) {
    best.fill(0);
    hidden.fill(1);
    for (let row = r * per; row < Math.min(g.rows, (r + 1) * per); row++) {
      sharesOf(row, shares);
      for (let c = c0; c < c1; c++) {
        for (let column = c * per; column < Math.min(g.columns, (c + 1) * per); column++) {
          const share = shares[column];
          if (Math.abs(share) > Math.abs(best[c - c0])) best[c - c0] = share;
          if (mask && mask.allows(row, column)) hidden[c - c0] = 0;
        }
      }
    }
    for (let c = 0; c < c1 - c0; c++) {
      const at = 3 * shade(best[c], signed);
      const to = 4 * ((r - r0) * (c1 - c0) + c);
      const grey = mask && hidden[c] ? palette().masked : null;
      for (let k = 0; k < 3; k++) {
        image.data[to + k] = grey ? (grey[k] + colours[at + k]) / 2 : colours[at + k];
      }
      image.data[to + 3] = 255;
    }
  }
  context.save();
  context.beginPath();
  const edge = 2; // of the frame of a first cell
  context.rect(g.left - edge, g.top - edge, g.width - g.left + edge, g.height - g.top + edge);
  context.clip();
  const size = g.cell * per;
  paste(context, image, g.x + c0 * size, g.y + r0 * size, (c1 - c0) * size, (r1 - r0) * size);
  drawFrames(context, g, mask);
  context.restore();
}

// The share of the colours of each column of a row: the mean over heads, or, to the row's greatest,
// the mean divided by the greatest mean.
function sharesOf(row, out) {
  out.fill(0);
  const factor = 1 / loaded.heads.length;
  for (const { weights } of loaded.heads) {
    for (const [sign, part] of weights.parts.entries()) {
      const scale = part.scales[row] * factor * (sign ? -1 : 1);
      const from = row * weights.columns;
      for (let s = 0; s < weights.columns; s++) out[s] += scale * part.cells[from + s];
    }
  }
  if (state.contrast === "one") return;
  let top = 0;
  for (const mean of out) top = Math.max(top, Math.abs(mean));
  for (let s = 0; top && s < out.length; s++) out[s] /= top;
}

// The edge of the matrix, the step, the cell, and the tiles of the mask.
function drawFrames(context, g, mask) {
  const box = (row, column, rows, columns) =>
    [g.x + column * g.cell, g.y + row * g.cell, columns * g.cell, rows * g.cell];
  context.strokeStyle = palette().edge;
  context.lineWidth = 1;
  context.strokeRect(...box(0, 0, g.rows, g.columns));
  if (mask) drawTiles(context, g, mask, box);
  if (state.step) {
    context.fillStyle = palette().paper;
    context.globalAlpha = 0.7;
    context.fillRect(...box(state.step, 0, g.rows - state.step, g.columns));
    context.globalAlpha = 1;
    context.strokeStyle = palette().frame;
    context.lineWidth = 2;
    context.strokeRect(...box(state.step - 1, 0, 1, g.columns));
  }
  if (matrix.cell) {
    context.strokeStyle = palette().frame;
    context.lineWidth = 2;
    const [x, y, w, h] = box(...matrix.cell, 1, 1);
    context.strokeRect(x - 1, y - 1, Math.max(3, w) + 2, Math.max(3, h) + 2);
  }
}

// Empty tiles are crossed out, mixed ones have a dashed frame, full ones a plain one.
function drawTiles(context, g, mask, box) {
  const [blockQ, blockKV] = mask.block;
  const [n, m] = mask.tiles;
  if (g.cell * Math.min(blockQ, blockKV) < 6) return;
  context.strokeStyle = palette().frame;
  for (let i = 0; i < n; i++) {
    for (let j = 0; j < m; j++) {
      const kind = mask.kinds[i * m + j];
      const rows = Math.min(blockQ, g.rows - i * blockQ);
      const columns = Math.min(blockKV, g.columns - j * blockKV);
      const [x, y, w, h] = box(i * blockQ, j * blockKV, rows, columns);
      context.lineWidth = kind === 2 ? 1.6 : 1;
      context.setLineDash(kind === 1 ? [4, 3] : []);
      if (kind > 0) context.strokeRect(x + 1.5, y + 1.5, w - 3, h - 3);
      else {
        context.beginPath();
        context.moveTo(x + 3, y + 3);
        context.lineTo(x + w - 3, y + h - 3);
        context.moveTo(x + w - 3, y + 3);
        context.lineTo(x + 3, y + h - 3);
        context.stroke();
      }
    }
  }
  context.setLineDash([]);
}

function drawMatrixLabels(context, g) {
  context.font = labelFont();
  const every = Math.max(1, Math.ceil((parseFloat(context.font) + 1) / g.cell));
  const [row, column] = matrix.cell || [-1, -1];
  context.textBaseline = "middle";
  const labels = (tokens, own, draw) => {
    for (let place = 0; place < tokens.length; place += every) {
      if (place !== own) draw(tokens[place], place, false);
    }
    if (own >= 0) draw(tokens[own], own, true); // over its neighbours
  };
  labels(attention().rows, row, (token, t, on) => {
    const y = g.y + (t + 0.5) * g.cell;
    if (y >= g.top && y <= g.height) label(context, token, g.left - 6, y, 0, g.left - 8, on);
  });
  labels(attention().columns, column, (token, s, on) => {
    const x = g.x + (s + 0.5) * g.cell;
    if (x >= g.left && x <= g.width) {
      label(context, token, x, g.top - 6, -Math.PI / 2, g.top - 8, on);
    }
  });
}

// A token beside its row (angle 0) or above its column, as much of it as there is room for.
function label(context, token, x, y, angle, room, on) {
  context.save();
  context.translate(x, y);
  context.rotate(angle);
  context.textAlign = angle ? "left" : "right";
  context.font = on ? boldFont() : labelFont();
  const text = shortened(context, drawn(token), room);
  if (on) {
    const [width, height] = [context.measureText(text).width + 6, 1.2 * parseFloat(labelFont())];
    context.fillStyle = palette().paper;
    context.fillRect(angle ? -3 : 3 - width, -height / 2, width, height);
  }
  context.fillStyle = on ? palette().ink : palette().faint;
  context.fillText(text, 0, 0);
  context.restore();
}

function shortened(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const letters = [...text];
  const beginning = (count) => `${letters.slice(0, count).join("")}…`;
  let [fits, tooMany] = [1, letters.length];
  while (tooMany - fits > 1) {
    const count = (fits + tooMany) >> 1;
    if (context.measureText(beginning(count)).width <= room) fits = count;
    else tooMany = count;
  }
  return beginning(fits);
}

function tellOfCell() {
  if (!matrix.cell || !loaded.heads.length) {
    show(`Point at a cell, or move it with the arrow keys.${signNames()}`);
    return;
  }
  const [row, column] = matrix.cell;
  const { rows, columns } = attention();
  const parts = [named(rows, row), " reads ", named(columns, column)];
  parts.push(state.model === 2 ? `, ${firstLessSecond()}: ` : ": ");
  if (loaded.heads.length > 1) {
    parts.push(`${number(meanOf(loaded.heads, row, column), 4)} (mean); `);
  }
  const size = ({ weights }) => Math.abs(weights.value(row, column));
  const told = [...loaded.heads].sort((a, b) => size(b) - size(a)).slice(0, 16);
  parts.push(told.map(({ head, weights }) =>
    `head ${head + 1} ${withStep(weights.value(row, column), weights.halfStep(row))}`).join("; "));
  const others = loaded.heads.length - told.length;
  if (others) parts.push(`; ${others} more, none greater`);
  if (loaded.mask && !loaded.mask.allows(row, column)) parts.push("; masked");
  show(...parts);
}
