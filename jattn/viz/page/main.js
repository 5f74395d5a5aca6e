// Controls, keys, and what is loaded and drawn when.

const views = {
  heads: { name: "Heads", draw: drawHeads },
  model: { name: "Model", draw: drawModel },
  matrix: { name: "Matrix", draw: drawMatrix },
  neurons: { name: "Neurons", draw: drawNeurons },
  numbers: { name: "Numbers", draw: drawNumbers },
};
const large = 250000; // pairs of a head from which on only one is opened at first

let loading = 0;
let waiting = false;

// Opens what the state needs, then draws. A later call takes the place of an earlier one.
async function load() {
  const turn = ++loading;
  const part = attention();
  const heads = [...state.heads].sort((a, b) => a - b);
  const wanted = heads.map((head) => weightsOf(part, state.model, state.layer, head));
  const mask = part.mask ? maskOf(part, heads[0] || 0) : null;
  const vectors = part.vectors && heads.length ? neuronsOf(part, state.layer, heads[0]) : null;
  syncControls();
  try {
    const parts = await Promise.all([mask, vectors, ...wanted]);
    if (turn !== loading) return;
    [loaded.mask, loaded.vectors] = parts;
    loaded.heads = parts.slice(2).map((weights, place) => ({ head: heads[place], weights }));
    redraw();
  } catch (error) {
    show(`This page needs a browser of 2023 or later: ${error.message}`);
  }
}

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

let drawing = 0;

async function draw() {
  const turn = ++drawing;
  await views[state.view].draw(() => turn === drawing && state.view === "model");
  if (!document.body.dataset.ready) document.body.dataset.ready = performance.now();
}

// --------------------------------------------------------------------------------------- controls

function switchOf(id, names, chosen, choose) {
  const group = byId(id);
  refill(group, ...names.map((name, place) => {
    const button = element("button", "", { type: "button", "aria-pressed": place === chosen });
    button.append(word(name));
    button.addEventListener("click", () => choose(place));
    return button;
  }));
  group.hidden = names.length < 2;
}

function options(select, names, chosen) {
  select.replaceChildren(...names.map((name, place) => element("option", name, { value: place })));
  select.value = chosen;
}

function makeControls() {
  const part = attention();
  const [layers, heads, rows] = part.sizes;
  byId("title").textContent = document.title = about.title;
  options(byId("sentence"), about.sentences.map(({ name }) => name), state.sentence);
  byId("sentence").hidden = about.sentences.length < 2;
  options(byId("layer"), Array.from({ length: layers }, (_, at) => at + 1), state.layer);
  byId("layer-control").hidden = layers < 2;
  byId("step").max = rows;
  byId("mask-control").hidden = !part.mask;
  byId("heads").replaceChildren(...Array.from({ length: heads }, (_, head) => {
    const chip = element("button", head + 1, {
      type: "button", class: "head", "aria-label": `head ${head + 1}`,
      title: "click: show or hide; double click: this head alone, again: all",
    });
    chip.addEventListener("click", () => toggle(head));
    chip.addEventListener("dblclick", () => isolate(head));
    return chip;
  }));
  byId("heads").hidden = heads < 2;
}

function syncControls() {
  const part = attention();
  const names = viewNames();
  switchOf("view", names.map((name) => views[name].name), names.indexOf(state.view), (at) => {
    chooseView(names[at]);
  });
  switchOf("attention", sentence().attentions.map(({ name }) => name), state.attention, choosePart);
  const both = part.heads.length === 2;
  switchOf("model", both ? [...about.models, "difference"] : [], state.model, (at) => {
    state.model = at;
    load();
  });
  for (const name of Object.keys(views)) byId(`${name}-view`).hidden = name !== state.view;
  const ofAllHeads = ["model", "numbers"].includes(state.view);
  byId("heads").hidden = byId("all-heads").hidden = part.sizes[1] < 2 || ofAllHeads;
  byId("least-control").hidden = state.view !== "heads";
  byId("zoom-control").hidden = state.view !== "matrix";
  byId("contrast-control").hidden = ["numbers", "neurons"].includes(state.view);
  const coloursAreHeads = state.view === "heads" && state.model < 2;
  byId("scale").hidden = coloursAreHeads;
  byId("contrast-name").textContent = coloursAreHeads ? "lines" : "colours";
  byId("mask-control").hidden = !part.mask || state.view !== "matrix";
  byId("step-control").hidden = ofAllHeads;
  byId("layer-control").hidden = part.sizes[0] < 2 || ofAllHeads;
  byId("layer").value = state.layer;
  byId("contrast").value = state.contrast;
  const [absolute, relative] = byId("contrast").options;
  absolute.textContent = state.model === 2 ? "−1 to 1" : "0 to 1";
  relative.textContent = `${state.view === "model" ? "head" : "row"}'s greatest`;
  drawScale();
  makeRoomToTell();
  byId("mask").checked = state.mask;
  byId("mask-key").hidden = byId("mask-control").hidden || !state.mask || !loaded.mask;
  if (loaded.mask) byId("mask-key").textContent = maskKey(loaded.mask);
  for (const [head, chip] of [...byId("heads").children].entries()) {
    const on = state.heads.has(head);
    chip.setAttribute("aria-pressed", on);
    chip.style.borderColor = headColour(head);
    const edge = ["solid", "dashed", "dotted", "double"][Math.floor(head / 8) % 4];
    chip.style.borderStyle = edge;
    chip.style.backgroundClip = edge === "solid" ? "border-box" : "padding-box"; // shows the dashes
    chip.style.backgroundColor = on ? headColour(head) : "transparent";
    chip.style.color = on ? palette().paper : "";
  }
  syncStep();
}

// The status has room for a value of each head of a pair. Its height is the same whatever it says:
// the view must not move under the pointer.
function makeRoomToTell() {
  const status = byId("status");
  const along = Math.max(1, Math.floor(status.clientWidth / (12 * emOf(status))));
  const values = state.view === "matrix" ? Math.ceil(state.heads.size / along) : 1;
  const rows = window.innerHeight <= 500
    ? 1 : Math.min(6, values + (status.clientWidth < 600 ? 2 : 1));
  status.style.height = `calc(${1.35 * rows}em + 9px)`;
}

// The colours from least to greatest, beside the choice of what the greatest is.
function drawScale() {
  const signed = state.model === 2;
  const shares = Array.from({ length: 256 }, (_, i) => (signed ? i / 127.5 - 1 : i / 255));
  paste(fit(byId("scale"), 64, 12), shaded(shares, 256, signed), 0, 0, 64, 12);
}

function syncStep() {
  byId("step").value = state.step;
  const parts = state.step ? [`${state.step}: `, word(attention().rows[state.step - 1])] : ["all"];
  byId("step-name").replaceChildren(...parts);
  byId("step").setAttribute("aria-valuetext", byId("step-name").textContent);
}

// Another part of the page has another size: everything is laid out anew.
function lay() {
  syncControls();
  if (state.view === "heads") layOutHeads();
  if (state.view === "matrix") holdInWindow();
  redraw();
}

const viewNames = () => Object.keys(views).filter((x) => x !== "neurons" || attention().vectors);

function chooseView(name) {
  state.view = name;
  state.hovered = neurons.key = null;
  lay();
}

function toggle(head) {
  if (!state.heads.delete(head)) state.heads.add(head);
  load();
}

// Only this head, or, where it is alone already, all of them.
function isolate(head) {
  const alone = state.heads.size === 1 && state.heads.has(head);
  state.heads = alone ? allHeads() : new Set([head]);
  load();
}

const allHeads = () => new Set(Array.from({ length: attention().sizes[1] }, (_, head) => head));

// Another sentence or attention: what belongs to the last one is let go of.
function choosePart(place) {
  const headsBefore = byId("heads").children.length;
  state.attention = place;
  const part = attention();
  const [layers, heads, rows, columns] = part.sizes;
  state.layer = Math.min(state.layer, layers - 1);
  state.model = Math.min(state.model, part.heads.length === 2 ? 2 : 0);
  if (headsBefore !== heads || rows * columns > large) {
    const [layer, head] = part.clearest;
    Object.assign(state, { layer, heads: new Set([head]) });
  }
  if (!viewNames().includes(state.view)) state.view = "heads";
  state.step = 0;
  state.held = state.hovered = matrix.cell = neurons.key = null;
  state.contrast = columns > 64 ? "row" : "one";
  resetZoom();
  loaded.heads = [];
  pairs.view.scrollTop = 0;
  makeControls();
  syncControls();
  if (state.view === "heads") layOutHeads();
  load();
}

function chooseSentence(place) {
  const name = attention().name;
  state.sentence = place;
  const same = sentence().attentions.findIndex((part) => part.name === name);
  choosePart(Math.max(0, same));
}

function setStep(step) {
  const rows = attention().sizes[2];
  state.step = (step + rows + 1) % (rows + 1);
  state.held = state.hovered = null;
  const at = (state.step - 1) * pairs.pitch;
  const { view } = pairs;
  if (state.step && (at < view.scrollTop || at > view.scrollTop + view.clientHeight - 40)) {
    view.scrollTop = at - view.clientHeight / 2;
  }
  syncStep();
  redraw();
}

let playing = null;

function play() {
  byId("play").textContent = playing ? "▶" : "❚❚";
  if (playing) {
    clearInterval(playing);
    playing = null;
    return;
  }
  setStep(state.step + 1);
  playing = setInterval(() => {
    if (state.step >= attention().sizes[2]) play();
    else setStep(state.step + 1);
  }, 700);
}

// The slider's least weight goes from 1 to 0.0001 in even steps of its logarithm.
function setLeast(value) {
  pairs.least = 10 ** (-value / 10);
  byId("least").value = value;
  byId("least").setAttribute("aria-valuetext", leastName());
  byId("least-name").textContent = leastName();
}

function chooseTheme() {
  chosen.theme = theme() === "dark" ? "light" : "dark";
  applyTheme();
  syncControls();
  redraw();
}

// ------------------------------------------------------------------------------------------- keys

const next = (at, count) => (at + 1) % count;

const keys = {
  ArrowLeft: () => setStep(state.step - 1),
  ArrowRight: () => setStep(state.step + 1),
  ArrowUp: () => chooseLayer(state.layer - 1),
  ArrowDown: () => chooseLayer(state.layer + 1),
  v: () => {
    const names = viewNames();
    chooseView(names[next(names.indexOf(state.view), names.length)]);
  },
  a: () => choosePart(next(state.attention, sentence().attentions.length)),
  s: () => chooseSentence(next(state.sentence, about.sentences.length)),
  d: () => {
    if (attention().heads.length < 2) return;
    state.model = next(state.model, 3);
    load();
  },
  m: () => {
    if (!attention().mask) return;
    state.mask = !state.mask;
    lay();
  },
  t: chooseTheme,
  f: () => { resetZoom(); redraw(); },
  "+": () => zoomBy(1.5),
  "-": () => zoomBy(1 / 1.5),
  "?": () => {
    byId("help").showModal(); // focuses the button at the end and scrolls to it
    byId("help").scrollTop = 0;
  },
  0: () => { state.heads = allHeads(); load(); },
  Escape: () => {
    if (playing) play();
    state.held = state.hovered = matrix.cell = neurons.key = null;
    setStep(0);
  },
};

const arrows = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

function chooseLayer(layer) {
  if (layer < 0 || layer >= attention().sizes[0]) return;
  state.layer = layer;
  load();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const { target, key } = event;
  const inControl = target.matches("select, input[type=range]");
  if (inControl && (key.startsWith("Arrow") || key.length === 1)) return;
  const digit = event.code.startsWith("Digit") ? Number(event.code.slice(5)) : 0;
  const [rows, steps] = (!event.shiftKey && arrows[key]) || [0, 0];
  if (state.view === "matrix" && (rows || steps)) moveCell(rows, steps);
  else if (state.view === "neurons" && rows) moveNeuron(rows);
  else if (digit && digit <= attention().sizes[1]) {
    (event.shiftKey ? isolate : toggle)(digit - 1);
  } else {
    const action = keys[key] || keys[key.toLowerCase()];
    if (!action) return;
    action();
  }
  event.preventDefault();
}

// ------------------------------------------------------------------------------------------ start

function start() {
  const on = (id, name, then) => byId(id).addEventListener(name, then);
  on("sentence", "change", () => chooseSentence(Number(byId("sentence").value)));
  on("layer", "change", () => chooseLayer(Number(byId("layer").value)));
  on("step", "input", () => setStep(Number(byId("step").value)));
  on("play", "click", play);
  on("least", "input", () => { setLeast(Number(byId("least").value)); redraw(); });
  on("all-heads", "click", keys[0]);
  on("contrast", "change", () => { state.contrast = byId("contrast").value; redraw(); });
  on("mask", "change", keys.m);
  on("zoom-in", "click", keys["+"]);
  on("zoom-out", "click", keys["-"]);
  on("zoom-fit", "click", keys.f);
  on("theme", "click", chooseTheme);
  on("help-button", "click", keys["?"]);
  document.addEventListener("keydown", onKey);
  prefersDark.addEventListener("change", () => { applyTheme(); syncControls(); redraw(); });
  new ResizeObserver(lay).observe(byId("main"));
  setUpHeads();
  setUpMatrix();
  applyTheme();
  setUpNeurons();
  setLeast(attention().sizes[3] > 100 ? 17 : 10);
  choosePart(Math.max(0, sentence().attentions.findIndex((part) => part.cross)));
}

start();
