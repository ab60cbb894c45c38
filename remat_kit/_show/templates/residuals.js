// The residual report: totals that switch kinds of values on and off, an icicle by module, and a table of values.
// All three show the same selection; `state` says which.

const PAGE = 200; // rows that are drawn before one asks for more
const LEVELS = 5; // of modules in the picture
const SMALLEST = 0.004; // share of the picture's height below which values are drawn as one
const MOST = 400; // boxes in the picture
const TALL = 380; // its height
const WORDS = 15; // height of a box that has room for its name

/** From the columns of the data to one object for each value, and one for each group of identical layers. */
function read(data) {
  const { texts, entries: c, groups } = data;
  const entries = c.bytes.map((bytes, i) => {
    const e = { id: i, bytes, flops: c.flops[i], trips: c.trips[i], kind: data.kinds[c.kind[i]], group: c.group[i], count: 1, members: [] };
    for (const key of data.texted) e[key] = texts[c[key][i]];
    e.what = e.name || e.op;
    return e;
  });
  const folded = groups.map((path) => ({ path: texts[path], members: [] }));
  for (const e of entries) folded[e.group].members.push(e);
  const joined = folded.map(({ path, members }, i) => {
    if (members.length === 1) return members[0];
    const flops = members.some((m) => m.flops === null) ? null : members.reduce((sum, m) => sum + m.flops, 0);
    const bytes = members.reduce((sum, m) => sum + m.bytes, 0);
    return { ...members[0], id: `g${i}`, path, bytes, flops, count: members.length, members };
  });
  for (const e of [...entries, ...joined]) finish(e);
  return { entries, joined };
}

function finish(e) {
  const path = e.path || e.block;
  e.where = path;
  e.worth = e.flops === null ? null : e.flops ? e.bytes / e.flops : Infinity;
  e.place = [...(path ? path.split("/") : []), e.what];
  e.hay = [e.what, e.op, e.shape, path, e.block, e.source, e.needed, e.alias, e.action].join(" ").toLowerCase();
  if (e.members.length) {
    const first = (e.members[0].path || e.members[0].block).split("/");
    e.layer = e.place.findIndex((name, i) => name !== first[i]); // the level of the path that differs
    e.layers = new Set(e.members.map((m) => m.path)).size;
  }
}

/** Modules as a tree of `{name, place, bytes, kinds, times, children}`, children by bytes. */
function tree(items) {
  const node = (name, place) => ({ name, place, bytes: 0, kinds: {}, times: 1, children: new Map(), values: 0 });
  const root = node("all", []);
  for (const e of items) {
    let at = root;
    e.place.forEach((name, level) => {
      add(at, e);
      if (!at.children.has(name)) at.children.set(name, node(name, e.place.slice(0, level + 1)));
      at = at.children.get(name);
      if (level === e.layer && level < e.place.length - 1) at.times = Math.max(at.times, e.layers);
    });
    add(at, e);
  }
  const order = (n) => {
    n.children = [...n.children.values()].sort((a, b) => b.bytes - a.bytes);
    n.children.forEach(order);
  };
  order(root);
  return root;
}

function add(node, e) {
  node.bytes += e.bytes;
  node.values += e.count;
  node.kinds[e.kind] = (node.kinds[e.kind] || 0) + e.bytes;
}

const within = (place, root) => root.every((name, i) => place[i] === name);

function residuals(main, data) {
  const { entries, joined } = read(data);
  const present = data.totals.filter((t) => t.values);
  const usual = present.filter((t) => t.usual).map((t) => t.kind);
  const state = {
    kinds: new Set(usual.length ? usual : present.map((t) => t.kind)),
    root: [], words: "", group: "", fold: true, sort: "bytes", down: true, limit: PAGE, open: new Set(),
  };
  const columns = data.columns.filter((c) => c.key === "bar" || says(c.key, entries));

  // The parts of the page ------------------------------------------------------------------------------------------

  const chips = el("div", { class: "chips", role: "group", "aria-label": "Kinds of values to show" });
  for (const t of present.length ? present : data.totals.slice(0, 1)) {
    chips.append(el("button", {
      type: "button", class: `chip ${t.kind}`, "data-kind": t.kind, "data-bytes": t.bytes, "data-values": t.values,
      "aria-pressed": String(state.kinds.has(t.kind)), disabled: !t.values, title: t.remark,
      click: (event) => {
        state.kinds.has(t.kind) ? state.kinds.delete(t.kind) : state.kinds.add(t.kind);
        event.currentTarget.setAttribute("aria-pressed", String(state.kinds.has(t.kind)));
        state.root = [];
        update();
      },
    }, el("span", { class: "swatch" }), el("span", { class: "label" }, t.label), el("strong", {}, format.bytes(t.bytes)),
    el("small", {}, t.remark)));
  }
  const crumbs = el("ol");
  const picture = el("div", { class: "icicle", style: `height:${TALL}px`, role: "tree", "aria-label": "Bytes by module", keydown: (event) => walk(event, picture) });
  const filter = el("input", {
    type: "search", placeholder: "name, path, op, shape, source ...", autocomplete: "off", spellcheck: "false",
    input: () => { state.words = filter.value; state.limit = PAGE; later(); },
  });
  const grouping = el("select", { change: () => { state.group = grouping.value; state.open.clear(); state.limit = PAGE; update(); } });
  for (const [key, label] of data.groupings) grouping.append(el("option", { value: key }, label));
  const fold = el("input", { type: "checkbox", change: () => { state.fold = fold.checked; state.root = []; state.open.clear(); update(); } });
  fold.checked = true;
  const status = el("p", { class: "status", role: "status", "aria-live": "polite" });
  const heads = el("tr");
  const body = el("tbody");
  const more = el("div", { class: "more" });
  for (const c of columns) {
    const sortable = c.key !== "bar";
    heads.append(el("th", { scope: "col", class: c.right ? "right" : "", "data-key": c.key },
      sortable ? el("button", { type: "button", click: () => sortBy(c.key) }, c.title) : el("span", { class: "unseen" }, "share as a bar")));
  }
  main.append(
    el("header", {}, el("h2", {}, data.title), pairs(data.head)),
    chips,
    el("section", { "aria-label": "Modules" }, el("nav", { "aria-label": "Path to the module shown" }, crumbs), picture),
    el("section", { "aria-label": "Values" },
      el("div", { class: "controls" },
        el("label", {}, "Filter ", filter),
        el("label", {}, "Group by ", grouping),
        el("label", {}, fold, " fold identical layers")),
      status,
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of values" },
        el("table", { class: "values" }, el("caption", { class: "unseen" }, "Values that are kept"), el("thead", {}, heads), body)),
      more),
    ...data.notes.map((note) => el("p", { class: "note" }, `note: ${note}`)),
  );
  let waiting = 0;
  const later = () => { clearTimeout(waiting); waiting = setTimeout(update, 60); };
  update();

  // What is shown --------------------------------------------------------------------------------------------------

  function selected() {
    const words = state.words.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (e) => state.kinds.has(e.kind) && words.every((w) => e.hay.includes(w));
    return (state.fold ? joined : entries).filter(fits);
  }

  function update() {
    const items = selected();
    const whole = tree(items);
    let shown = whole;
    for (const name of state.root) shown = shown.children.find((c) => c.name === name) || { ...shown, children: [], bytes: 0, values: 0 };
    drawCrumbs();
    drawPicture(shown);
    drawTable(items.filter((e) => within(e.place, state.root)));
  }

  function zoom(place) {
    state.root = place;
    state.limit = PAGE;
    update();
  }

  function drawCrumbs() {
    crumbs.replaceChildren(...["all modules", ...state.root].map((name, i) => {
      const last = i === state.root.length;
      return el("li", {}, el("button", {
        type: "button", "aria-current": last ? "location" : false,
        click: () => { zoom(state.root.slice(0, i)); crumbs.querySelectorAll("button")[i].focus(); },
      }, name));
    }));
  }

  // The picture: levels from left to right, height is bytes --------------------------------------------------------

  function drawPicture(root) {
    const boxes = [];
    const levels = Math.max(1, Math.min(LEVELS, depth(root)));
    const place = (nodes, level, from) => {
      if (level >= levels || boxes.length > MOST) return;
      const drawn = nodes.filter((n) => n.bytes / root.bytes >= SMALLEST);
      drawn.forEach((node, i) => {
        const height = node.bytes / root.bytes;
        boxes.push(box(node, { level, top: from, height, levels, siblings: drawn.length, at: i + 1 }));
        place(node.children, level + 1, from);
        from += height;
      });
      const small = nodes.filter((n) => n.bytes / root.bytes < SMALLEST);
      const bytes = small.reduce((sum, n) => sum + n.bytes, 0);
      if (bytes) boxes.push(el("div", {
        class: "rest", "aria-hidden": "true", title: `${small.length} smaller, ${format.bytes(bytes)}`, "data-level": level + 1, "data-bytes": bytes,
        style: at_(level, levels, from, bytes / root.bytes),
      }));
    };
    if (root.bytes) place(root.children.length ? root.children : [root], 0, 0);
    const first = boxes.find((b) => b.hasAttribute("role"));
    if (first) first.tabIndex = 0;
    picture.replaceChildren(...boxes);
    picture.hidden = !boxes.length;
  }

  function box(node, { level, top, height, levels, siblings, at }) {
    const times = node.times > 1 ? ` x${node.times}` : "";
    const leaf = !node.children.length;
    const kinds = Object.entries(node.kinds).sort((a, b) => b[1] - a[1]);
    const words = `${node.name}${times}, ${format.bytes(node.bytes)}, ${kinds.map(([k, n]) => `${k} ${format.bytes(n)}`).join(", ")}`;
    const out = el("div", {
      role: "treeitem", tabindex: "-1", class: `box${leaf ? " leaf" : ""}${height * TALL < WORDS ? " thin" : ""}`, title: `${node.place.join("/")}${times}\n${format.bytes(node.bytes)}`,
      "aria-level": level + 1, "aria-setsize": siblings, "aria-posinset": at, "aria-label": words, "aria-expanded": leaf ? false : String(level + 1 < levels),
      "data-bytes": node.bytes, "data-values": node.values, "data-path": node.place.join("/"),
      style: `${at_(level, levels, top, height, leaf)};background:${paint(kinds, node.bytes, leaf)}`,
      click: () => zoom(node.place),
      keydown: (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        zoom(node.place);
        const first = picture.querySelector("[role=treeitem]");
        if (first) first.focus();
      },
    }, el("span", { class: "name" }, node.name + times), el("span", { class: "size" }, format.bytes(node.bytes)));
    return out;
  }

  // The table ------------------------------------------------------------------------------------------------------

  function sortBy(key) {
    const numbers = ["bytes", "share", "flops", "worth", "trips"].includes(key);
    state.down = state.sort === key ? !state.down : numbers;
    state.sort = key;
    update();
  }

  function compare(a, b) {
    const key = state.sort === "share" ? "bytes" : state.sort;
    const [x, y] = [a[key], b[key]];
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : (x ?? -1) === (y ?? -1) ? 0 : (x ?? -1) - (y ?? -1);
    return state.down ? -order : order;
  }

  function drawTable(items) {
    for (const th of heads.children)
      th.setAttribute("aria-sort", th.dataset.key === state.sort ? (state.down ? "descending" : "ascending") : "none");
    const rows = state.group ? grouped(items) : items.sort(compare).map((e) => ({ e, level: 0 }));
    const lines = [];
    for (const row of rows) {
      lines.push(row);
      if (row.e && row.e.members.length && state.open.has(row.e.id))
        for (const e of row.e.members) lines.push({ e, level: row.level + 1 });
    }
    body.replaceChildren(...lines.slice(0, state.limit).map((r) => (r.e ? valueRow(r) : groupRow(r))));
    const values = items.reduce((sum, e) => sum + e.count, 0);
    const bytes = items.reduce((sum, e) => sum + e.bytes, 0);
    const count = values === items.length ? "" : `, ${values} values`;
    status.textContent = `${items.length} ${items.length === 1 ? "row" : "rows"}${count}, ${format.bytes(bytes)}`;
    Object.assign(status.dataset, { rows: items.length, values, bytes });
    const rest = lines.length - state.limit;
    more.replaceChildren(...(rest > 0 ? [
      el("button", { type: "button", click: () => { state.limit += 5 * PAGE; update(); } }, `Show ${Math.min(rest, 5 * PAGE)} more of ${rest} rows`),
    ] : []));
  }

  function grouped(items) {
    const groups = new Map();
    for (const e of items) {
      const key = e[state.group] || `(no ${state.group})`;
      if (!groups.has(key)) groups.set(key, { key, items: [], bytes: 0, values: 0 });
      const g = groups.get(key);
      g.items.push(e);
      g.bytes += e.bytes;
      g.values += e.count;
    }
    const direction = state.sort === "bytes" && !state.down ? -1 : 1;
    const ordered = [...groups.values()].sort((a, b) => direction * (b.bytes - a.bytes));
    return ordered.flatMap((g) => [g, ...(state.open.has(`:${g.key}`) ? g.items.sort(compare).map((e) => ({ e, level: 1 })) : [])]);
  }

  function toggle(id) {
    state.open.has(id) ? state.open.delete(id) : state.open.add(id);
    update();
    const again = [...body.querySelectorAll("button")].find((b) => b.dataset.id === String(id));
    if (again) again.focus();
  }

  function groupRow(g) {
    const id = `:${g.key}`;
    return el("tr", { class: "group", "data-bytes": g.bytes, "data-values": g.values, "data-group": g.key },
      el("td", { class: "right" }, el("strong", {}, format.bytes(g.bytes))),
      el("th", { scope: "rowgroup", colspan: columns.length - 1 },
        el("button", { type: "button", class: "twist", "aria-expanded": String(state.open.has(id)), "data-id": id, click: () => toggle(id) },
          g.key), el("small", {}, `${g.values} ${g.values === 1 ? "value" : "values"}`)));
  }

  function valueRow({ e, level }) {
    const row = el("tr", { class: level ? "inner" : "", "data-bytes": e.bytes, "data-kind": e.kind, "data-count": e.count });
    for (const c of columns) row.append(cell(e, c));
    return row;
  }

  function cell(e, c) {
    const counted = e.kind === "saved" || e.kind === "offloaded";
    if (c.key === "bar")
      return el("td", { class: "bar" }, counted ? el("div", { class: e.kind, style: `width:${(100 * e.bytes) / data.whole}%` }) : "");
    const texts = {
      bytes: () => format.bytes(e.bytes), flops: () => format.flops(e.flops), worth: () => format.ratio(e.worth),
      share: () => (counted ? format.share(e.bytes, data.whole) : ""), trips: () => (e.trips > 1 ? `x${e.trips}` : ""),
    };
    const text = texts[c.key] ? texts[c.key]() : e[c.key] || "";
    const out = el("td", { class: c.right ? "right" : c.key, title: c.right ? false : text, "data-key": c.key }, el("span", {}, text));
    if (c.key === "bytes") out.dataset.value = e.bytes;
    if (c.key === "what") out.prepend(el("span", { class: `swatch ${e.kind}` }));
    if (c.key === "where" && e.count > 1)
      out.append(el("button", {
        type: "button", class: "twist times", "aria-expanded": String(state.open.has(e.id)), "data-id": e.id,
        "aria-label": `the ${e.count} values of this row`, click: () => toggle(e.id),
      }, `x${e.count}`));
    return out;
  }
}

function says(key, entries) {
  if (key === "trips") return entries.some((e) => e.trips > 1);
  if (key === "flops" || key === "worth") return entries.some((e) => e.flops !== null);
  return key === "share" || entries.some((e) => e[key]);
}

/** How many levels lie below a node. */
const depth = (node) => node.children.reduce((most, child) => Math.max(most, 1 + depth(child)), 0);

/** Where a box lies. A single value has nothing to its right: it reaches to the end. */
const at_ = (level, levels, top, height, leaf = false) =>
  `left:${(100 * level) / levels}%;width:${(100 * (leaf ? levels - level : 1)) / levels}%;top:${100 * top}%;height:${100 * height}%`;

/** One colour, or one below the other where a module holds values of several kinds; modules are paler than values. */
function paint(kinds, bytes, leaf) {
  const color = (kind) => (leaf ? `var(--${kind}-box)` : `color-mix(in srgb, var(--${kind}-box) 55%, var(--bg))`);
  if (kinds.length === 1) return color(kinds[0][0]);
  let from = 0;
  const stops = kinds.map(([kind, n]) => {
    const to = from + (100 * n) / bytes;
    const stop = `${color(kind)} ${from}% ${to}%`;
    from = to;
    return stop;
  });
  return `linear-gradient(${stops.join(",")})`;
}

/** Arrow keys: up and down among what is drawn, right into a module, left out of it, Home and End. */
function walk(event, picture) {
  const all = [...picture.querySelectorAll("[role=treeitem]")];
  const here = all.indexOf(event.target);
  const level = (box) => Number(box.getAttribute("aria-level"));
  const sibling = (step) => {
    for (let i = here + step; all[i] && level(all[i]) >= level(all[here]); i += step) if (level(all[i]) === level(all[here])) return all[i];
    return all[here + step];
  };
  const moves = {
    ArrowDown: () => sibling(1), ArrowUp: () => sibling(-1),
    ArrowRight: () => (all[here + 1] && level(all[here + 1]) > level(all[here]) ? all[here + 1] : null),
    ArrowLeft: () => all.slice(0, here).reverse().find((b) => level(b) < level(all[here])),
    Home: () => all[0], End: () => all[all.length - 1],
  };
  if (here < 0 || !moves[event.key]) return;
  event.preventDefault();
  const next = moves[event.key]();
  if (!next) return;
  all[here].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function pairs(rows) {
  return el("dl", {}, ...rows.flatMap(([label, text]) => [el("dt", {}, label), el("dd", {}, text)]));
}
