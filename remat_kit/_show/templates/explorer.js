// The plan explorer: a slider for the budget, the cheapest plan within it, and the curve that it lies on.

const [WIDE, HIGH, LEFT, BOTTOM, TOP, RIGHT] = [720, 300, 70, 40, 14, 14];
const DOING = { save: "saved", offload: "offloaded", recompute: "recomputed" };

function explorer(main, data) {
  const { plans, values } = data;
  const cost = (x) => (data.minimize === "time" ? format.seconds(x) : format.flops(x));
  const peaks = plans.map((p) => p.peak_bytes);
  const [least, most] = [Math.min(...peaks), Math.max(...peaks)];
  const margin = Math.max(Math.ceil((most - least) / 25), Math.ceil(most / 100));
  const low = Math.max(0, least - margin);
  const open = new Set();
  let before = null; // the plan that was shown last, to tell what changed

  const slider = el("input", {
    type: "range", min: low, max: most + margin, step: Math.max(1, Math.round((most + margin - low) / 400)),
    "aria-label": "Budget: peak bytes on one device", input: () => show(Number(slider.value)),
  });
  const budget = el("output", { class: "budget" });
  const step = (by) => el("button", {
    type: "button", "aria-label": by < 0 ? "Plan with less memory" : "Plan with more memory",
    click: () => {
      const next = Math.min(Math.max(found(Number(slider.value)) + by, 0), plans.length - 1);
      show(plans[next].peak_bytes);
    },
  }, by < 0 ? "◀" : "▶");
  const status = el("p", { class: "status", role: "status", "aria-live": "polite" });
  const figures = el("dl", { class: "cards" });
  const chart = curve(data, cost, (i) => show(plans[i].peak_bytes));
  const body = el("tbody");
  const text = el("pre", { tabindex: "0", "aria-label": "Policy of the plan" });
  const copied = el("span", { role: "status", "aria-live": "polite" });
  const columns = ["block", "values", "policy", "kept", "host", "working", "FLOPs again", "time"];
  main.append(
    el("header", {}, el("h2", {}, data.title), el("dl", {}, ...data.head.flatMap(([label, words]) => [el("dt", {}, label), el("dd", {}, words)]))),
    el("section", { "aria-label": "Budget", class: "slide" }, el("label", {}, "Budget ", budget), step(-1), slider, step(1)),
    status,
    el("div", { class: "side" }, figures, chart.node),
    el("section", { "aria-label": "Blocks" },
      el("h3", {}, "What becomes of each block"),
      el("p", { class: "legend" }, ...Object.entries(DOING).map(([action, word]) => el("span", {}, el("span", { class: `swatch ${action}` }), word))),
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of blocks" },
        el("table", { class: "blocks" },
          el("thead", {}, el("tr", {}, ...columns.map((c, i) => el("th", { scope: "col", class: i > 2 ? "right" : "" }, c)))), body)),
      el("p", { class: "dim" }, "kept, host, working, FLOPs again, time: predicted")),
    el("section", { "aria-label": "Policy" },
      el("h3", {}, "Policy"),
      el("p", {}, data.names_only ? "For rk.remat, rk.apply and the command line:" : "For rk.apply(fn, policies), by block:"),
      el("div", { class: "copy" }, text, el("button", {
        type: "button", click: async () => {
          copied.textContent = (await copy(text.textContent, main)) ? "copied" : "select the text and copy it";
        },
      }, "Copy"), copied)),
  );
  const first = plans.find((p) => p.blocks.some((b) => b.values.length));
  if (first) open.add(first.blocks.find((b) => b.values.length).path);
  show(data.memory_bytes !== null && data.memory_bytes >= least && data.memory_bytes <= most ? data.memory_bytes : plans[Math.floor((plans.length - 1) / 2)].peak_bytes);

  /** The index of the cheapest plan within a budget; -1 for none. Costs fall as peaks rise. */
  function found(bytes) {
    return plans.findLastIndex((p) => p.peak_bytes <= bytes);
  }

  function show(bytes) {
    slider.value = bytes;
    // A slider stops at its steps only: a plan's own peak is never rounded below itself.
    if (found(Number(slider.value)) < found(bytes)) slider.value = bytes + Number(slider.step);
    const at = found(bytes);
    budget.textContent = format.bytes(bytes);
    budget.dataset.bytes = bytes;
    const plan = plans[Math.max(at, 0)];
    const words = at < 0
      ? `No plan keeps within ${format.bytes(bytes)}. The smallest peak found is ${format.bytes(least)}: ${plan.parts}. It is shown.`
      : `Plan ${at + 1} of ${plans.length}: peak ${format.bytes(plan.peak_bytes)} ${plan.peak_is}, ${cost(plan.cost)} of recomputation`;
    status.textContent = words;
    status.className = at < 0 ? "status red" : "status";
    slider.setAttribute("aria-valuetext", `${format.bytes(bytes)}. ${words}`);
    chart.mark(bytes, Math.max(at, 0));
    if (plan === before) return;
    main.dataset.plan = plans.indexOf(plan);
    drawFigures(plan);
    drawBlocks(plan);
    text.textContent = plan.policy;
    copied.textContent = "";
    before = plan;
  }

  function drawFigures(p) {
    const card = (label, key, words, ...remarks) =>
      el("div", { "data-key": key, "data-value": p[key] }, el("dt", {}, label), el("dd", {}, el("strong", {}, words), ...remarks.filter(Boolean).map((r) => el("small", {}, r))));
    const compiled = p.compiled_bytes !== null;
    figures.replaceChildren(
      card("Peak, compiled", "compiled_bytes", compiled ? format.bytes(p.compiled_bytes) : "-", compiled ? "XLA's figure" : "this plan was not compiled"),
      card("Peak, predicted", "corrected_bytes", format.bytes(p.corrected_bytes),
        p.corrected_bytes === p.predicted_bytes ? "" : `${format.bytes(p.predicted_bytes)} before correction by compiled plans`),
      card("Recomputed", "recompute_flops", format.flops(p.recompute_flops), `${format.percent(p.flops ? p.recompute_flops / p.flops : 0)} of the step's, predicted`),
      card("Time of it", "remat_seconds", format.seconds(p.remat_seconds), `${format.percent(p.seconds ? p.remat_seconds / p.seconds : 0)} of the step's, by the roofline`),
      card("Kept in host memory", "host_bytes", format.bytes(p.host_bytes), "predicted"),
      card("From the optimum", "gap", `≤ ${format.percent(p.gap)}`, "of the step, in the model"),
    );
  }

  function drawBlocks(plan) {
    const was = new Map((before ? before.blocks : []).flatMap((b) => b.values.map((i) => [`${b.path}\n${values[i].label}`, values[i].action])));
    body.replaceChildren(...plan.blocks.flatMap((b) => {
      const shown = open.has(b.path);
      const row = el("tr", { "data-block": b.name, "data-kept": b.kept_bytes, "data-host": b.host_bytes, "data-flops": b.flops },
        el("th", { scope: "row" }, b.values.length ? el("button", {
          type: "button", class: "twist", "aria-expanded": String(shown),
          click: () => { open.has(b.path) ? open.delete(b.path) : open.add(b.path); drawBlocks(plan); refocus(b.name); },
        }, b.name) : b.name),
        el("td", {}, strip(b)), el("td", {}, b.treatment),
        ...[format.bytes(b.kept_bytes), b.host_bytes ? format.bytes(b.host_bytes) : "", format.bytes(b.working_bytes), format.flops(b.flops), format.seconds(b.seconds)]
          .map((words) => el("td", { class: "right" }, words)));
      return shown && b.values.length ? [row, el("tr", { class: "detail" }, el("td", { colspan: columns.length }, detail(b, was)))] : [row];
    }));
  }

  function refocus(name) {
    const row = [...body.rows].find((r) => r.dataset.block === name);
    if (row) row.querySelector("button").focus();
  }

  /** The bytes of a block's values by what becomes of them. */
  function strip(b) {
    const sums = {};
    for (const i of b.values) sums[values[i].action] = (sums[values[i].action] || 0) + values[i].bytes;
    const all = Object.values(sums).reduce((x, y) => x + y, 0);
    if (!all) return "";
    const words = Object.keys(DOING).filter((a) => sums[a]).map((a) => `${format.bytes(sums[a])} ${DOING[a]}`).join(", ");
    return el("div", { class: "strip", role: "img", "aria-label": words, title: words },
      ...Object.keys(DOING).filter((a) => sums[a]).map((a) => el("span", { class: a, style: `width:${(100 * sums[a]) / all}%`, "data-action": a, "data-bytes": sums[a] })));
  }

  function detail(b, was) {
    const heads = ["", "value", "bytes", "FLOPs", "time", "why"];
    const rows = b.values.map((i) => {
      const v = values[i];
      const changed = was.get(`${b.path}\n${v.label}`);
      return el("tr", { "data-action": v.action, "data-bytes": v.bytes, "data-label": v.label },
        el("td", {}, el("span", { class: `swatch ${v.action}` }), DOING[v.action], changed && changed !== v.action ? el("small", {}, ` was ${DOING[changed]}`) : ""),
        el("td", {}, v.label), ...[format.bytes(v.bytes), format.flops(v.flops), format.seconds(v.seconds)].map((words) => el("td", { class: "right" }, words)),
        el("td", { class: "dim" }, v.why));
    });
    return el("div", {}, el("code", {}, b.policy), el("table", {},
      el("thead", {}, el("tr", {}, ...heads.map((h, i) => el("th", { scope: "col", class: i > 1 && i < 5 ? "right" : "" }, h)))), el("tbody", {}, ...rows)));
  }
}

// The curve --------------------------------------------------------------------------------------------------------

/** Memory against cost: plans as a line of steps, presets as points, what there is of memory, and where one stands. */
function curve(data, cost, pick) {
  const { plans, presets, memory_bytes: memory } = data;
  const [low, high] = around(plans.map((p) => p.peak_bytes));
  const [bottom, top] = around(plans.map((p) => p.cost));
  const near = (p) => p.peak_bytes >= low && p.peak_bytes <= high && p.cost >= bottom && p.cost <= top;
  const x = (bytes) => LEFT + ((bytes - low) / (high - low)) * (WIDE - LEFT - RIGHT);
  const y = (c) => HIGH - BOTTOM - ((c - bottom) / (top - bottom)) * (HIGH - BOTTOM - TOP);
  const layers = el("g");
  for (const n of ticks(low, high, 1024)) layers.append(
    el("line", { class: "grid", x1: x(n), x2: x(n), y1: TOP, y2: HIGH - BOTTOM }),
    el("text", { x: x(n), y: HIGH - BOTTOM + 16, "text-anchor": x(n) > WIDE - 40 ? "end" : "middle" }, format.bytes(n)));
  for (const c of ticks(bottom, top, 1000)) layers.append(
    el("line", { class: "grid", x1: LEFT, x2: WIDE - RIGHT, y1: y(c), y2: y(c) }),
    el("text", { x: LEFT - 6, y: y(c) + 4, "text-anchor": "end" }, cost(c)));
  layers.append(
    el("text", { x: (LEFT + WIDE) / 2, y: HIGH - 6, "text-anchor": "middle", class: "axis" }, "peak memory on one device"),
    el("text", { x: 12, y: HIGH / 2, "text-anchor": "middle", class: "axis", transform: `rotate(-90 12 ${HIGH / 2})` }, "cost of recomputation"));
  if (memory !== null && memory >= low && memory <= high) layers.append(
    el("line", { class: "memory", x1: x(memory), x2: x(memory), y1: TOP, y2: HIGH - BOTTOM }),
    el("text", { x: x(memory) - 4, y: TOP + 10, "text-anchor": "end" }, `memory ${format.bytes(memory)}`));
  let steps = "";
  plans.forEach((p, i) => (steps += i ? `H${x(p.peak_bytes)}V${y(p.cost)}` : `M${x(p.peak_bytes)},${y(p.cost)}`));
  layers.append(el("path", { class: "frontier", d: `${steps}H${x(high)}` }));
  layers.append(...presetPoints({ plans, presets: presets.filter(near) }, x, y, cost));
  plans.forEach((p, i) => layers.append(el("circle", {
    class: `plan ${p.peak_is}`, cx: x(p.peak_bytes), cy: y(p.cost), r: 4.5, "data-peak": p.peak_bytes, "data-cost": p.cost, click: () => pick(i),
  }, el("title", {}, `plan ${i + 1}: ${format.bytes(p.peak_bytes)} ${p.peak_is}, ${cost(p.cost)}`))));
  const here = el("line", { class: "here", y1: TOP, y2: HIGH - BOTTOM });
  const ring = el("circle", { class: "ring", r: 8 });
  layers.prepend(here); // below the labels
  layers.append(ring);
  const svg = el("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": `Memory against cost: ${plans.length} plans and ${presets.length} presets; the table and the slider tell the same` }, layers);
  const legend = el("p", { class: "legend" },
    el("span", {}, el("span", { class: "dot compiled" }), "plan, compiled"), el("span", {}, el("span", { class: "dot predicted" }), "plan, predicted"),
    el("span", {}, el("span", { class: "dot preset" }), "preset, predicted"));
  const far = presets.filter((p) => !near(p)).map((p) => `${p.name} (${format.bytes(p.peak_bytes)}, ${cost(p.cost)})`);
  const rest = far.length ? el("p", { class: "dim far" }, `Presets outside the picture: ${far.join(", ")}`) : null;
  return {
    node: el("figure", {}, svg, el("figcaption", {}, legend, rest)),
    mark(bytes, at) {
      const budget = Math.min(Math.max(x(bytes), LEFT), WIDE - RIGHT);
      here.setAttribute("x1", budget);
      here.setAttribute("x2", budget);
      ring.setAttribute("cx", x(plans[at].peak_bytes));
      ring.setAttribute("cy", y(plans[at].cost));
      svg.dataset.plan = at;
    },
  };
}

/** Presets at one place are one point; a label is left out where it would lie on another one. */
function presetPoints({ plans, presets }, x, y, cost) {
  const places = new Map();
  for (const p of presets) {
    const key = `${Math.round(x(p.peak_bytes) / 6)},${Math.round(y(p.cost) / 6)}`;
    if (!places.has(key)) places.set(key, []);
    places.get(key).push(p);
  }
  const taken = plans.map((p) => [x(p.peak_bytes) - 5, y(p.cost) - 5, 10, 10]);
  return [...places.values()].map((group) => {
    const [p] = group;
    const [px, py] = [x(p.peak_bytes), y(p.cost)];
    const words = p.name + (group.length > 1 ? ` +${group.length - 1}` : "");
    const right = px > WIDE * 0.7;
    const box = [right ? px - 8 - 6 * words.length : px + 8, py - 6, 6 * words.length, 12];
    const free = taken.every(([a, b, w, h]) => a + w < box[0] || box[0] + box[2] < a || b + h < box[1] || box[1] + box[3] < b);
    if (free) taken.push(box);
    const title = group.map((q) => `${q.name}: ${format.bytes(q.peak_bytes)} predicted, ${cost(q.cost)}`).join("\n");
    return el("g", { class: "preset", "data-names": group.map((q) => q.name).join(" ") },
      el("path", { d: `M${px},${py - 5}l5,5l-5,5l-5,-5z` }, el("title", {}, title)),
      free ? el("text", { x: right ? px - 8 : px + 8, y: py + 4, "text-anchor": right ? "end" : "start" }, words) : null);
  });
}

/** The range of a picture of some numbers: half as much again above them as they span. */
function around(numbers) {
  const [from, to] = [Math.min(...numbers), Math.max(...numbers)];
  const span = to - from || to || 1;
  return [Math.max(0, from - span * 0.15), to + span * 0.5];
}

/** A few round numbers between two, in steps of 1, 2 or 5 of a unit. */
function ticks(low, high, base) {
  const rough = (high - low) / 5;
  if (!(rough > 0)) return [];
  const unit = base === 1024 ? base ** Math.max(0, Math.floor(Math.log(high) / Math.log(base))) : 1;
  const ten = 10 ** Math.floor(Math.log10(rough / unit));
  const size = unit * ten * [1, 2, 5, 10].find((m) => m * ten * unit >= rough);
  const out = [];
  for (let n = Math.ceil(low / size) * size; n <= high; n += size) out.push(base === 1024 ? Math.round(n) : n);
  return out;
}
