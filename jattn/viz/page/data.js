// What the page holds: the description, and blocks that are opened when they are first shown.

const about = JSON.parse(document.getElementById("about").textContent);

const mostBytes = 256e6; // of opened blocks that are kept
const opened = new Map(); // block number -> promise of its bytes, the last used at the end
const lengths = new Map(); // block number -> count of its bytes

async function inflate(number) {
  const letters = atob(document.getElementById(`block-${number}`).textContent);
  const packed = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) packed[i] = letters.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function bytesOf(number) {
  const bytes = opened.get(number) || inflate(number);
  opened.delete(number);
  opened.set(number, bytes);
  bytes.then(({ length }) => { lengths.set(number, length); forget(number); });
  return bytes;
}

// Lets go of the blocks that were last used longest ago, but for the one just opened.
function forget(last) {
  let sum = 0;
  for (const number of opened.keys()) sum += lengths.get(number) || 0;
  for (const number of opened.keys()) {
    if (sum <= mostBytes || number === last) return;
    sum -= lengths.get(number) || 0;
    opened.delete(number);
  }
}

// The weights of one head, or the difference of two models' heads.
class Weights {
  constructor(rows, columns, parts) {
    this.rows = rows;
    this.columns = columns;
    this.parts = parts; // one model, or the first and the second
    this.signed = parts.length === 2;
    this.tops = null;
  }

  value(row, column) {
    const at = row * this.columns + column;
    const [a, b] = this.parts;
    const first = a.scales[row] * a.cells[at];
    return b ? first - b.scales[row] * b.cells[at] : first;
  }

  // By how much a value of the row may be off: half a step of each model.
  halfStep(row) {
    let sum = 0;
    for (const part of this.parts) sum += part.scales[row] / 2;
    return sum;
  }

  // The greatest magnitude of a row.
  top(row) {
    if (!this.signed) return 255 * this.parts[0].scales[row];
    if (!this.tops) this.tops = new Float32Array(this.rows).fill(-1);
    if (this.tops[row] < 0) {
      let top = 0;
      for (let s = 0; s < this.columns; s++) top = Math.max(top, Math.abs(this.value(row, s)));
      this.tops[row] = top;
    }
    return this.tops[row];
  }
}

// `model` is 0 or 1, or 2 for the first less the second.
async function weightsOf(attention, model, layer, head) {
  const [, , rows, columns] = attention.sizes;
  const models = model === 2 ? [0, 1] : [model];
  const parts = await Promise.all(models.map(async (m) => {
    const bytes = await bytesOf(attention.heads[m][layer][head]);
    return {
      scales: new Float32Array(bytes.buffer.slice(0, 4 * rows)),
      cells: bytes.subarray(4 * rows),
    };
  }));
  return new Weights(rows, columns, parts);
}

// The queries or keys of one head: the elements of a row, and the greatest magnitude of all.
async function vectorsOf(number, rows) {
  const { buffer } = await bytesOf(number);
  const [scales, cells] = [new Float32Array(buffer, 0, rows), new Int16Array(buffer, 4 * rows)];
  const size = cells.length / rows;
  const row = (place) => Float32Array.from(
    cells.subarray(place * size, (place + 1) * size), (value) => value * scales[place],
  );
  return { row, greatest: 32767 * scales.reduce((top, scale) => Math.max(top, scale), 0) };
}

async function thumbnailsOf(attention, model) {
  const [layers, heads] = attention.sizes;
  const { block, sizes: [rows, columns], scales } = attention.thumbnails;
  const bytes = await bytesOf(block);
  const size = rows * columns;
  const cells = new Int8Array(bytes.buffer, bytes.byteOffset, bytes.length);
  const thumbnails = [];
  for (let layer = 0; layer < layers; layer++) {
    for (let head = 0; head < heads; head++) {
      const at = ((model * layers + layer) * heads + head) * size;
      thumbnails.push({
        layer, head, rows, columns,
        cells: cells.subarray(at, at + size),
        scale: scales[model][layer][head],
      });
    }
  }
  return thumbnails;
}

// Which pairs a head's mask allows, and the kinds of its tiles: 0 empty, 1 mixed, 2 full.
async function maskOf(attention, head) {
  const { block, heads } = attention.mask;
  const { allowed, kinds: kindsBlock, tiles, counts } = heads[heads.length > 1 ? head : 0];
  const [bits, kinds] = await Promise.all([bytesOf(allowed), bytesOf(kindsBlock)]);
  const width = Math.ceil(attention.sizes[3] / 8);
  return {
    block, kinds, tiles, counts,
    allows: (row, column) => (bits[row * width + (column >> 3)] >> (7 - (column & 7))) & 1,
  };
}
