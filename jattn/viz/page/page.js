// What is shown now, and small things that all views need.

const byId = (id) => document.getElementById(id);

const state = {
  view: "heads", // a key of `views`
  sentence: 0,
  attention: 0,
  layer: 0,
  heads: new Set(),
  model: 0, // 2: the first less the second
  step: 0, // 0: all; else the query, counted from 1
  contrast: "one",
  mask: false,
  hovered: null, // {side: "queries" or "keys", place}
  held: null,
};

// What `load` has opened for the state: the weights of the heads that are on, the mask, and the
// queries and keys of the first head.
const loaded = { heads: [], mask: null, vectors: null };

const sentence = () => about.sentences[state.sentence];
const attention = () => sentence().attentions[state.attention];

// Text goes into the page as text, never as markup.
function element(name, text = "", attributes = {}) {
  const part = document.createElement(name);
  part.textContent = text;
  for (const [key, value] of Object.entries(attributes)) part.setAttribute(key, value);
  return part;
}

// Replaces the content of a part of the page. A button that had the focus gives it to the one that
// takes its place.
function refill(part, ...content) {
  const buttons = () => [...part.querySelectorAll("button")];
  const place = buttons().indexOf(document.activeElement);
  part.replaceChildren(...content);
  if (place >= 0) buttons()[place]?.focus();
}

const emOf = (part) => parseFloat(getComputedStyle(part).fontSize);

const word = (token) => element("bdi", token);

// The beginning of a token, as much as is ever drawn or measured: no column has room for more.
// Measuring a token of 100,000 letters takes long enough to hang the page.
function drawn(token) {
  return token.length > 256 ? `${[...token.slice(0, 256)].slice(0, 128).join("")}…` : token;
}

// A token of a list as the status names it: not too long, with its position where others are alike.
function named(tokens, place) {
  const token = tokens[place];
  const letters = [...drawn(token)];
  const short = letters.length > 64 ? `${letters.slice(0, 60).join("")}…` : token;
  const alone = tokens.indexOf(token) === tokens.lastIndexOf(token);
  return word(alone ? short : `${short} (${place + 1})`);
}

function show(...parts) {
  byId("status").replaceChildren(...parts);
}

function number(value, digits = 3) {
  const size = Math.abs(value);
  const text = size >= 10 ** -digits || size === 0
    ? value.toFixed(digits) : value.toExponential(1);
  return text.replaceAll("-", "−");
}

// A value with as many digits as others of its column.
function fixed(value, digits) {
  const text = value.toFixed(digits).replace("-", "−");
  return Number(value.toFixed(digits)) ? text : text.replace("−", "");
}

// A value with what it may be off by, in as many digits as say something.
function withStep(value, halfStep) {
  const digits = halfStep > 0 ? Math.min(9, Math.max(3, 1 - Math.floor(Math.log10(halfStep)))) : 3;
  const sign = state.model === 2 && value > 0 ? "+" : "";
  const rounded = value.toFixed(digits).replace("-", "−");
  return `${sign}${rounded} ± ${halfStep.toFixed(digits)}`;
}

function meanOf(heads, row, column) {
  let sum = 0;
  for (const { weights } of heads) sum += weights.value(row, column);
  return heads.length ? sum / heads.length : 0;
}

// A canvas of a size in the page's pixels, sharp on every screen.
function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// The query that the views point out, or null: under the pointer, held, or the step's.
function pointedOut() {
  const token = state.hovered || state.held;
  if (token) return token;
  return state.step ? { side: "queries", place: state.step - 1 } : null;
}
