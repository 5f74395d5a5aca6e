// Heads: two columns of tokens, and lines between them on a canvas. Of long sequences only the part
// in the window is made and drawn.

const coarse = window.matchMedia("(pointer: coarse)").matches;

const pairs = {
  view: byId("heads-view"),
  sheet: byId("sheet"),
  canvas: byId("lines"),
  sides: { queries: byId("queries"), keys: byId("keys") },
  made: { queries: new Map(), keys: new Map() }, // place -> element
  pitch: 24,
  least: 0.05,
  cell: 0, // width of a head's cell in the strips beside tokens
};

const tokensOf = (side) => (side === "queries" ? attention().rows : attention().columns);

function setUpHeads() {
  for (const side of ["queries", "keys"]) {
    const column = pairs.sides[side];
    const token = (event) => event.target.closest(".token");
    column.addEventListener("pointerover", (event) => {
      if (event.pointerType !== "touch" && token(event)) point(side, token(event));
    });
    column.addEventListener("pointerleave", () => point(side, null));
    column.addEventListener("focusin", (event) => {
      if (event.target.matches(":focus-visible")) point(side, token(event));
    });
    column.addEventListener("focusout", () => point(side, null));
    column.addEventListener("click", (event) => { if (token(event)) hold(side, token(event)); });
  }
  pairs.view.addEventListener("scroll", redraw);
}

function point(side, token) {
  state.hovered = token && { side, place: Number(token.dataset.place) };
  redraw();
}

function hold(side, token) {
  const place = Number(token.dataset.place);
  const same = state.held && state.held.side === side && state.held.place === place;
  state.held = same ? null : { side, place };
  if (same) state.hovered = null;
  redraw();
}

// Which places of a column stand in the window.
function inWindow(size) {
  const { view, pitch } = pairs;
  const first = Math.max(0, Math.floor(view.scrollTop / pitch) - 1);
  return [first, Math.min(size, Math.ceil((view.scrollTop + view.clientHeight) / pitch) + 1)];
}

function sideWidth(side, available) {
  const context = pairs.canvas.getContext("2d");
  context.font = getComputedStyle(pairs.view).font;
  let width = 0;
  for (const token of tokensOf(side)) {
    width = Math.max(width, context.measureText(drawn(token)).width);
  }
  const value = context.measureText(attention().sizes[1] > 1 ? " mean −0.00" : " −0.00").width;
  const strip = pairs.cell * attention().sizes[1];
  return Math.min(width + 18 + strip + (side === "keys" ? value : 0), available * 0.36);
}

function layOutHeads() {
  const { view, sheet } = pairs;
  const [, , rows, columns] = attention().sizes;
  const least = parseFloat(getComputedStyle(view).fontSize) + (coarse ? 14 : 9);
  pairs.pitch = Math.max(least, Math.min(1.6 * least, view.clientHeight / Math.max(rows, columns)));
  sheet.style.height = `${pairs.pitch * Math.max(rows, columns)}px`;
  pairs.width = sheet.clientWidth;
  pairs.cell = Math.min(12, Math.min(64, pairs.width / 12) / attention().sizes[1]);
  pairs.left = sideWidth("queries", pairs.width);
  pairs.right = sideWidth("keys", pairs.width);
  pairs.sides.queries.style.width = `${pairs.left}px`;
  pairs.sides.keys.style.width = `${pairs.right}px`;
  for (const side of ["queries", "keys"]) {
    pairs.sides[side].replaceChildren();
    pairs.made[side].clear();
  }
}

function makeTokens(side) {
  const tokens = tokensOf(side);
  const [first, last] = inWindow(tokens.length);
  const made = pairs.made[side];
  for (const [place, token] of made) {
    if (place < first || place >= last) {
      token.remove();
      made.delete(place);
    }
  }
  for (let place = first; place < last; place++) {
    if (made.has(place)) continue;
    const token = element("button", "", { type: "button", class: "token", dir: "auto" });
    token.append(
      element("span", "", { class: "strip" }), element("bdi", drawn(tokens[place])),
      element("span", "", { class: "value" }),
    );
    token.dataset.place = place;
    token.title = tokens[place];
    token.style.top = `${place * pairs.pitch}px`;
    token.style.height = token.style.lineHeight = `${pairs.pitch}px`;
    made.set(place, token);
    pairs.sides[side].append(token);
  }
}

function drawHeads() {
  // Without all heads on, strips need less room: tokens become narrower, but no letter moves.
  pairs.unused = pairs.cell * (attention().sizes[1] - loaded.heads.length);
  pairs.sheet.style.setProperty("--strip", `${pairs.cell * loaded.heads.length}px`);
  pairs.sheet.style.setProperty("--unused", `${pairs.unused}px`);
  makeTokens("queries");
  makeTokens("keys");
  const token = pointedOut();
  markTokens(token);
  drawLines(token);
  tellOfToken(token);
}

// The token that is pointed out, what it reads or is read by, and what does not exist yet.
function markTokens(token) {
  const mean = loaded.heads.length > 1 ? "mean " : "";
  for (const side of ["queries", "keys"]) {
    const later = state.step && !state.held && !state.hovered
      && (side === "queries" || attention().causal);
    for (const [place, made] of pairs.made[side]) {
      const own = token && token.side === side && token.place === place;
      let value = 0;
      if (token && token.side !== side) {
        value = side === "keys"
          ? meanOf(loaded.heads, token.place, place) : meanOf(loaded.heads, place, token.place);
      }
      const read = Math.abs(value) >= pairs.least;
      made.classList.toggle("held", Boolean(own));
      made.classList.toggle("read", read);
      made.classList.toggle("later", Boolean(later && place >= state.step));
      const text = read && side === "keys" ? ` ${mean}${number(value, 2)}` : "";
      if (made.lastChild.textContent !== text) made.lastChild.textContent = text;
      made.firstChild.style.background = token && (own || token.side !== side)
        ? stripOf(token, place, own) : "";
    }
  }
}

// A strip of colours beside a token, a cell for each head: as strong as its weight to or from the
// token that is pointed out. Beside that token itself, `own`, the colours show which head has which
// cell.
function stripOf(token, place, own) {
  const count = loaded.heads.length;
  const cells = loaded.heads.map(({ head, weights }, at) => {
    const [row, column] = token.side === "queries" ? [token.place, place] : [place, token.place];
    const value = own ? 0 : weights.value(row, column);
    const share = own ? Number(!weights.signed) : strength(weights, row, value);
    const colour = channels(weights.signed ? signColour(value) : headColour(head)).join(" ");
    return `rgb(${colour} / ${share.toFixed(3)}) ${100 * at / count}% ${100 * (at + 1) / count}%`;
  });
  return cells.length ? `linear-gradient(to right, ${cells.join(", ")})` : "";
}

// How strongly a value is drawn, from 0 to 1.
const strength = (weights, row, value) =>
  Math.min(1, Math.abs(value) / (state.contrast === "one" ? 1 : weights.top(row) || 1));

function drawLines(token) {
  const { canvas, view, pitch, least, width } = pairs;
  const [left, right] = [pairs.left - pairs.unused, pairs.right - pairs.unused];
  const context = fit(canvas, width, view.clientHeight);
  const [, , rows, columns] = attention().sizes;
  let [first, last] = inWindow(rows);
  if (token && token.side === "queries") [first, last] = [token.place, token.place + 1];
  const onlyKey = token && token.side === "keys" ? token.place : null;
  if (onlyKey !== null) [first, last] = [0, rows];
  const spread = Math.min(3, (pitch - 8) / Math.max(1, loaded.heads.length));
  let count = 0;
  loaded.heads.forEach(({ head, weights }, order) => {
    const offset = (order - (loaded.heads.length - 1) / 2) * spread + pitch / 2 - view.scrollTop;
    context.strokeStyle = headColour(head);
    for (let t = first; t < last; t++) {
      const from = onlyKey === null ? 0 : onlyKey;
      const to = onlyKey === null ? columns : onlyKey + 1;
      for (let s = from; s < to; s++) {
        const value = weights.value(t, s);
        if (Math.abs(value) < least) continue;
        const share = strength(weights, t, value);
        if (weights.signed) context.strokeStyle = signColour(value);
        context.setLineDash(weights.signed ? (value < 0 ? [6, 4] : []) : headDashes(head));
        context.globalAlpha = 0.12 + 0.88 * share;
        context.lineWidth = 0.6 + 3.4 * share;
        line(context, left, t * pitch + offset, width - right, s * pitch + offset);
        count++;
      }
    }
  });
  context.globalAlpha = 1;
  canvas.setAttribute("aria-label", `${count} lines of ${namesOfHeads()}, ${leastName()} or more`);
}

function line(context, x0, y0, x1, y1) {
  const bend = (x1 - x0) * 0.35;
  context.beginPath();
  context.moveTo(x0 + 2, y0);
  context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1 - 2, y1);
  context.stroke();
}

function namesOfHeads() {
  const names = loaded.heads.map(({ head }) => head + 1).join(", ");
  return loaded.heads.length === 1 ? `head ${names}` : `heads ${names || "none"}`;
}

const leastName = () => number(pairs.least, pairs.least < 0.01 ? 4 : 2);

const firstLessSecond = () => `${about.models[0]} less ${about.models[1]}`;

// Which colour is whose, of a difference.
function signNames() {
  if (state.model < 2) return "";
  const [first, second] = about.models;
  return ` Values: ${firstLessSecond()}. Blue: more in ${first}; orange: more in ${second}.`;
}

// The greatest weights of a token, in words.
function tellOfToken(token) {
  if (!token) {
    show(`Weights below ${leastName()} are hidden. Point at a token.${signNames()}`);
    return;
  }
  const isQuery = token.side === "queries";
  const others = tokensOf(isQuery ? "keys" : "queries");
  const best = others.map((_, place) => [
    isQuery ? meanOf(loaded.heads, token.place, place) : meanOf(loaded.heads, place, token.place),
    place,
  ]).filter(([value]) => value !== 0).sort((a, b) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, 4);
  const parts = [named(tokensOf(token.side), token.place), isQuery ? " reads " : " is read by "];
  best.forEach(([value, place], at) => {
    parts.push(at ? ", " : "", named(others, place), ` ${number(value, 3)}`);
  });
  if (!best.length) parts.push("nothing");
  if (loaded.heads.length > 1) parts.push(` (mean of ${loaded.heads.length} heads)`);
  if (state.model === 2) parts.push(".", signNames());
  show(...parts);
}
