// What every report does where scripts run: moves into a shadow root, out of reach of the notebook's own style, and
// follows its light or dark theme. Names in the data are a stranger's: they enter the page as text nodes and attribute
// values only, never as markup.

/** Makes an element: attributes by name (false and null leave one out, functions listen), then children. */
function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "circle", "line", "text", "title", "rect"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

// Figures as `remat_kit._units` writes them ------------------------------------------------------------------------

/** toFixed, but a tie goes to the even digit, as in Python. A tie is an odd number of halves of the last digit. */
function fixed(x, digits) {
  const halves = x * 2 ** (digits + 1);
  const floor = Math.floor(x * 10 ** digits);
  const tie = Number.isInteger(halves) && halves % 2 !== 0;
  return tie && floor % 2 === 0 ? (floor / 10 ** digits).toFixed(digits) : x.toFixed(digits);
}

/** Three significant digits, as Python's "g". */
function general(x) {
  if (x === 0) return "0";
  const [digits, exponent] = x.toExponential(2).split("e");
  const e = Number(exponent);
  if (e < -4 || e >= 3) return `${String(Number(digits))}e${e < 0 ? "-" : "+"}${String(Math.abs(e)).padStart(2, "0")}`;
  return String(Number(x.toPrecision(3)));
}

function scaled(value, step, units) {
  let text = "";
  for (const unit of units) {
    value /= step;
    for (const digits of [2, 1, 0]) {
      text = fixed(value, digits);
      if (Number(text) < 10 ** (3 - digits)) return `${text} ${unit}`;
    }
    if (Number(text) < step) return `${text} ${unit}`;
  }
  return `${general(value)} ${units[units.length - 1]}`;
}

const format = {
  bytes: (n) => (n < 0 ? "-" : "") + (Math.abs(n) < 1024 ? `${Math.abs(n)} B` : scaled(Math.abs(n), 1024, ["KiB", "MiB", "GiB", "TiB", "PiB"])),
  flops: (n) => (n === null ? "-" : n < 1000 ? `${n} FLOP` : scaled(n, 1000, ["kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"])),
  ratio: (x) => (x === null ? "-" : x === Infinity ? "free" : general(x)),
  share: (part, whole) => {
    const share = whole ? part / whole : 0;
    return share > 0 && share < 0.01 ? "<1%" : `${fixed(share * 100, 0)}%`;
  },
  percent: (x) => `${fixed(x * 100, 2)}%`,
  seconds: (x) => {
    if (!x) return "0 s";
    const [unit, scale] = x >= 1 ? ["s", 1] : x * 1e3 >= 1 ? ["ms", 1e3] : ["us", 1e6];
    return `${fixed(x * scale, x * scale < 10 ? 2 : x * scale < 100 ? 1 : 0)} ${unit}`;
  },
};

/** Copies text, in pages without a clipboard (plain http) by way of a selection. Says whether it worked. */
async function copy(text, near) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    near.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** The notebook's theme where it has one; otherwise the reader's own, which the style sheet follows by itself. */
function theme() {
  const { body, documentElement: root } = document;
  const jupyter = body.dataset.jpThemeLight;
  if (jupyter) return jupyter === "true" ? "light" : "dark";
  if (body.classList.contains("vscode-light") || body.classList.contains("vscode-high-contrast-light")) return "light";
  if (body.classList.contains("vscode-dark") || body.classList.contains("vscode-high-contrast")) return "dark";
  return ["light", "dark"].includes(root.getAttribute("theme")) ? root.getAttribute("theme") : "";
}

/** Shows a report. What it shows without scripts stays as it is in the page, for those who save or copy that. */
function start(host, css, app) {
  if (host.shadowRoot) return;
  const shadow = host.attachShadow({ mode: "open" });
  const style = el("style");
  style.textContent = css;
  const main = el("div", { class: "report" });
  shadow.append(style, main);
  const data = host.querySelector("script.rk-data");
  if (app && data) app(main, JSON.parse(data.textContent));
  else main.append(...[...host.children].filter((c) => c.localName !== "script").map((c) => c.cloneNode(true)));

  const follow = () => (host.style.colorScheme = theme());
  follow();
  for (const node of [document.body, document.documentElement])
    new MutationObserver(follow).observe(node, { attributeFilter: ["class", "data-jp-theme-light", "theme"] });
  // What is typed here is not for the notebook: it could not tell a text field behind a shadow root.
  host.setAttribute("data-lm-suppress-shortcuts", "true");
  for (const type of ["keydown", "keypress", "keyup"]) host.addEventListener(type, (event) => event.stopPropagation());
}
