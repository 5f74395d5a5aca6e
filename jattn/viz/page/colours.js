// Colours that colour-blind readers can tell apart: heads after Okabe and Ito (2008), here so dark,
// or on the dark page so light, that the paper's colour on them has a contrast of at least 4.5;
// weights by lightness, differences from orange over the paper to blue.

const palettes = {
  light: {
    heads: ["#00509d", "#b84f00", "#007d5b", "#b0478a", "#7f6400", "#1879a8", "#5d3a9b", "#444444"],
    weights: ["#ffffff", "#c6dbef", "#6baed6", "#2171b5", "#08306b"],
    signed: ["#b34700", "#f7b27a", "#ffffff", "#8fc1ea", "#0a4f94"],
    paper: "#ffffff", ink: "#1b1f24", faint: "#59636e", edge: "#c9cfd6",
    masked: [140, 140, 140], frame: "#d55e00",
  },
  dark: {
    heads: ["#56b4e9", "#ff9440", "#2fd3a0", "#f0a3cc", "#f0e442", "#9ad1ff", "#b79cff", "#dddddd"],
    weights: ["#14171c", "#173a5e", "#2f78b3", "#7fc0ea", "#f2faff"],
    signed: ["#ffb070", "#9a5a1e", "#14171c", "#2a64a0", "#8cc8ff"],
    paper: "#14171c", ink: "#e8ebef", faint: "#a3adb8", edge: "#3d454f",
    masked: [110, 110, 110], frame: "#ff9440",
  },
};

const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
const chosen = { theme: null, tables: new Map() };

const theme = () => chosen.theme || (prefersDark.matches ? "dark" : "light");
const palette = () => palettes[theme()];

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// 256 colours between those named, 3 bytes each.
function table(name) {
  const key = `${theme()} ${name}`;
  if (!chosen.tables.has(key)) {
    const stops = palette()[name].map(channels);
    const bytes = new Uint8Array(3 * 256);
    for (let i = 0; i < 256; i++) {
      const at = (i / 255) * (stops.length - 1);
      const low = Math.min(Math.floor(at), stops.length - 2);
      for (let c = 0; c < 3; c++) {
        bytes[3 * i + c] = stops[low][c] + (at - low) * (stops[low + 1][c] - stops[low][c]);
      }
    }
    chosen.tables.set(key, bytes);
  }
  return chosen.tables.get(key);
}

// The place in `table` of a share: 0 to 1 for weights, −1 to 1 for differences.
const shade = (share, signed) =>
  Math.max(0, Math.min(255, Math.round(255 * (signed ? (share + 1) / 2 : share))));

// An image with a pixel for each share, in rows of a width.
function shaded(shares, width, signed) {
  const image = new ImageData(width, shares.length / width);
  const colours = table(signed ? "signed" : "weights");
  shares.forEach((share, pixel) => {
    const from = 3 * shade(share, signed);
    image.data.set([colours[from], colours[from + 1], colours[from + 2], 255], 4 * pixel);
  });
  return image;
}

const headColour = (head) => palette().heads[head % 8];
const headDashes = (head) => [[], [7, 4], [2, 3], [9, 3, 2, 3]][Math.floor(head / 8) % 4];
const signColour = (value) => palette().signed[value > 0 ? 4 : 0];

function applyTheme() {
  document.documentElement.dataset.theme = theme();
}
