
"use strict";
(() => {
  // Draws the timelines of #data on one canvas each. All text goes in as text, never as HTML.
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const NAMES = { F: "forward", B: "gradient of inputs", W: "gradient of weights", X: "both, fused" };
  const LETTER = { F: "F", B: "B", W: "W", X: "BW" };
  const GUTTER = 92, AXIS = 20, GAP = 6;
  const many = Math.max(...data.views.map((view) => view.ranks.length)) > 24;
  const BAR = many ? 13 : 22, LEVEL = many ? 10 : 18;
  const ONCE = data.views.some((view) => view.ranks.some((rank) => rank.once.length)) ? (many ? 10 : 14) : 0;
  const whole = Math.max(1, ...data.views.map((view) => view.end));
  const state = { from: 0, to: whole, follow: null, path: true, memory: true, theme: "auto" };

  // ---- data ----------------------------------------------------------------------------------------------
  // Times come as gaps and lengths, bytes as changes; here they become starts, ends and sums.
  for (const view of data.views) {
    for (const rank of view.ranks) {
      const n = rank.kind.length;
      rank.start = new Float64Array(n); rank.end = new Float64Array(n); rank.held = new Float64Array(n);
      let time = 0, held = rank.base;
      for (let k = 0; k < n; k++) {
        rank.start[k] = time + rank.gap[k];
        time = rank.end[k] = rank.start[k] + rank.length[k];
        held = rank.held[k] = held + (rank.change[k] || 0);
      }
      rank.critical = new Set(rank.path);
      rank.local = new Map(rank.stages.map((stage, k) => [stage, k]));
    }
  }

  // ---- colours -------------------------------------------------------------------------------------------
  let css = {};
  const readTheme = () => {
    const style = getComputedStyle(document.documentElement);
    css = {};
    for (const name of ["back", "ink", "soft", "line", "row", "level", "near", "over", "held", "dim"]) {
      css[name] = style.getPropertyValue("--" + name).trim();
    }
  };
  const mixed = new Map();
  const colour = (kind, odd, part, parts) => {
    const key = kind + odd + "," + part + "," + parts;
    if (!mixed.has(key)) {
      const [first, last] = data.colours[kind];
      const a = first[odd], b = last[odd], share = parts > 1 ? part / (parts - 1) : 0;
      const channel = (k) => {
        const x = parseInt(a.slice(k, k + 2), 16), y = parseInt(b.slice(k, k + 2), 16);
        return Math.round(x + (y - x) * share);
      };
      mixed.set(key, `rgb(${channel(1)},${channel(3)},${channel(5)})`);
    }
    return mixed.get(key);
  };

  // ---- words ---------------------------------------------------------------------------------------------
  const number = (value, digits) => String(Number(value.toPrecision(digits)));
  const time = (ns) => `${number(ns / data.unit.size, 5)} ${data.unit.name}`;
  const bytes = (count) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let k = 0;
    while (Math.abs(count) >= 1024 && k < 4) { count /= 1024; k++; }
    return `${number(count, 4)} ${units[k]}`;
  };
  const name = (rank, k) => `${rank.stage[k]}${LETTER[rank.kind[k]]}${rank.microbatch[k]}`;
  const describe = (view, rank, k) => {
    const kind = NAMES[rank.kind[k]], gap = k ? rank.start[k] - rank.end[k - 1] : rank.start[k];
    const lines = [
      `${name(rank, k)}: ${kind} of stage ${rank.stage[k]}, microbatch ${rank.microbatch[k]}, on rank ${rank.rank}`,
      `${time(rank.start[k])} to ${time(rank.end[k])}, takes ${time(rank.length[k])}`,
    ];
    if (rank.change[k] !== undefined) {
      const change = rank.change[k];
      const does = change > 0 ? `takes ${bytes(change)}` : change < 0 ? `gives back ${bytes(-change)}` : "keeps what is held";
      lines.push(`${does}; then ${bytes(rank.held[k])} held` + (rank.cap === null ? "" : ` of ${bytes(rank.cap)}`));
    }
    if (gap > 0) {
      lines.push(`before it: ${time(gap)} without work`);
      const cause = rank.wait[k];
      if (cause) {
        const other = view.ranks[cause[0]];
        const end = `${name(other, cause[1])} on rank ${other.rank}, done at ${time(other.end[cause[1]])}`;
        lines.push(cause[2] ? `it waited until what this rank had sent was received: ${end}` : `it waited for ${end}`);
      }
    }
    if (rank.critical.has(k)) lines.push("on the critical path");
    return lines.join("\n");
  };

  // ---- drawing -------------------------------------------------------------------------------------------
  const step = () => BAR + ONCE + GAP + (state.memory ? LEVEL + 2 : 0);
  const firstAfter = (ends, at) => {
    let low = 0, high = ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle] <= at) low = middle + 1; else high = middle;
    }
    return low;
  };
  let drawn = 0;
  const draw = (view) => {
    const canvas = view.canvas, ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = AXIS + view.ranks.length * step();
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = css.back; pen.fillRect(0, 0, width, height);
    const scale = (width - GUTTER) / (state.to - state.from);
    const x = (at) => GUTTER + (at - state.from) * scale;
    axis(pen, width, height, x);
    view.ranks.forEach((rank, row) => {
      const top = AXIS + row * step();
      pen.fillStyle = css.row; pen.fillRect(GUTTER, top, width - GUTTER, BAR);
      bars(pen, rank, top, x, width);
      once(pen, rank, top + BAR, x, width);
      if (state.memory && rank.change.length) levels(pen, rank, top + BAR + ONCE + 2, x, width);
      pen.fillStyle = css.back; pen.fillRect(0, top, GUTTER - 1, step());
      pen.fillStyle = css.ink; pen.textAlign = "left"; pen.textBaseline = "middle";
      pen.font = `${many ? 11 : 13}px system-ui, sans-serif`;
      pen.fillText(`rank ${rank.rank}`, 0, top + BAR / 2);
    });
    if (state.follow !== null) arrows(pen, view, x);
  };
  const axis = (pen, width, height, x) => {
    pen.font = "11px system-ui, sans-serif"; pen.textAlign = "left"; pen.textBaseline = "middle";
    const room = (state.to - state.from) / Math.max(2, Math.floor((width - GUTTER) / 100));
    let size = Math.pow(10, Math.ceil(Math.log10(Math.max(room, 1))));
    if (size / 5 >= room) size /= 5; else if (size / 2 >= room) size /= 2;
    for (let at = Math.ceil(state.from / size) * size; at <= state.to; at += size) {
      pen.fillStyle = css.line; pen.fillRect(x(at), 0, 1, height);
      pen.fillStyle = css.soft; pen.fillText(time(at), x(at) + 3, AXIS / 2);
    }
  };
  const bars = (pen, rank, top, x, width) => {
    pen.textAlign = "center"; pen.textBaseline = "middle";
    pen.font = `${many ? 10 : 12}px system-ui, sans-serif`;
    for (const [start, end] of rank.holds) {
      if (end <= state.from || start >= state.to) continue;
      hatch(pen, Math.max(GUTTER, x(start)), top, Math.min(width, x(end)) - Math.max(GUTTER, x(start)), BAR);
    }
    let last = -1;
    for (let k = firstAfter(rank.end, state.from); k < rank.kind.length && rank.start[k] < state.to; k++) {
      const left = Math.max(GUTTER, x(rank.start[k])), right = Math.min(width, x(rank.end[k]));
      if (right - left < 0.5 && Math.floor(left * 2) === last) continue; // narrower than half a pixel: seen already
      last = Math.floor(left * 2);
      const other = state.follow !== null && rank.microbatch[k] !== state.follow;
      const part = rank.local.get(rank.stage[k]) || 0;
      pen.fillStyle = other ? css.dim : colour(rank.kind[k], rank.microbatch[k] % 2, part, rank.stages.length);
      pen.fillRect(left, top, Math.max(0.5, right - left - (right - left > 4 ? 0.75 : 0)), BAR);
      drawn++;
      if (state.path && rank.critical.has(k) && right - left > 1) {
        pen.fillStyle = css.ink; pen.fillRect(left, top + BAR - 3, right - left, 3);
      }
      const text = LETTER[rank.kind[k]] + rank.microbatch[k];
      if (!other && right - left > 6 * text.length + 6) {
        pen.fillStyle = "#101418"; pen.fillText(text, (left + right) / 2, top + BAR / 2 - (many ? 0 : 1));
      }
    }
  };
  const once = (pen, rank, top, x, width) => {
    for (const [letter, stage, start, end] of rank.once) {
      if (end <= state.from || start >= state.to) continue;
      const left = Math.max(GUTTER, x(start)), right = Math.min(width, x(end));
      pen.fillStyle = colour(data.once[letter][1], 1, 0, 1);
      pen.fillRect(left, top + 1, Math.max(1, right - left - 0.75), ONCE - 1);
      drawn++;
      const text = letter + (stage === null ? "" : stage);
      if (right - left > 6 * text.length + 6) {
        pen.fillStyle = "#101418"; pen.fillText(text, (left + right) / 2, top + ONCE / 2 + 0.5);
      }
    }
  };
  const hatch = (pen, left, top, width, height) => {
    if (width <= 0) return;
    pen.save(); pen.beginPath(); pen.rect(left, top, width, height); pen.clip();
    pen.strokeStyle = css.held; pen.lineWidth = 1.5; pen.beginPath();
    for (let at = left - height; at < left + width; at += 5) { pen.moveTo(at, top + height); pen.lineTo(at + height, top); }
    pen.stroke(); pen.restore();
  };
  const levels = (pen, rank, top, x, width) => {
    const full = rank.cap === null ? rank.most : rank.cap, n = rank.kind.length;
    if (!full) return;
    const at = (k) => (rank.kind[k] === "F" ? rank.start[k] : rank.end[k]);
    let k = Math.max(0, firstAfter(rank.end, state.from) - 1);
    let held = k ? rank.held[k - 1] : rank.base, from = GUTTER;
    for (; k <= n; k++) {
      const to = k < n ? Math.round(Math.min(width, Math.max(GUTTER, x(at(k))))) : width;
      if (to > from) {
        const share = held / full;
        pen.fillStyle = rank.cap !== null && share > 1 ? css.over : rank.cap !== null && share > 0.9 ? css.near : css.level;
        const tall = Math.min(1, share) * (LEVEL - 2);
        pen.fillRect(from, top + LEVEL - tall, to - from, tall);
        from = to;
      }
      if (k === n || (k < n && at(k) > state.to)) break;
      held = rank.held[k];
    }
    pen.fillStyle = rank.cap === null ? css.line : css.ink;
    pen.fillRect(GUTTER, top + 1, width - GUTTER, 1);
  };
  const arrows = (pen, view, x) => {
    const row = new Map(view.ranks.map((rank, k) => [rank.rank, k]));
    pen.strokeStyle = css.ink; pen.lineWidth = 1.2;
    for (const [source, target, microbatch, start, end] of view.messages) {
      if (microbatch !== state.follow || end < state.from || start > state.to) continue;
      const y = (rank) => AXIS + row.get(rank) * step() + BAR / 2;
      pen.beginPath(); pen.moveTo(x(start), y(source)); pen.lineTo(x(end), y(target)); pen.stroke();
    }
  };

  // ---- the page ------------------------------------------------------------------------------------------
  const drawAll = () => {
    drawn = 0;
    readTheme();
    data.views.forEach(draw);
    document.body.dataset.drawn = String(drawn);
    document.body.dataset.from = String(Math.round(state.from));
    document.body.dataset.to = String(Math.round(state.to));
    document.body.dataset.follow = state.follow === null ? "" : String(state.follow);
  };
  let waiting = false;
  const later = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; drawAll(); });
  };
  const look = (from, to) => {
    const least = Math.max(1, whole / 1e6), length = Math.min(whole, Math.max(least, to - from));
    state.from = Math.min(Math.max(0, from), whole - length);
    state.to = state.from + length;
    later();
  };
  const zoom = (factor, at) => {
    const centre = at === undefined ? (state.from + state.to) / 2 : at;
    look(centre - (centre - state.from) * factor, centre + (state.to - centre) * factor);
  };
  const follow = (microbatch) => {
    state.follow = microbatch;
    byId("follow").value = microbatch === null ? "" : microbatch;
    later();
  };
  const timeAt = (view, clientX) => {
    const box = view.canvas.getBoundingClientRect();
    return state.from + ((clientX - box.left - GUTTER) / (box.width - GUTTER)) * (state.to - state.from);
  };
  const actionAt = (view, event) => {
    const row = Math.floor((event.clientY - view.canvas.getBoundingClientRect().top - AXIS) / step());
    const rank = view.ranks[row], at = timeAt(view, event.clientX);
    if (!rank || at < state.from) return null;
    const k = firstAfter(rank.end, at);
    return k < rank.kind.length && rank.start[k] <= at ? [rank, k] : null;
  };
  const onceAt = (view, event) => {
    const y = event.clientY - view.canvas.getBoundingClientRect().top - AXIS, row = Math.floor(y / step());
    const rank = view.ranks[row], at = timeAt(view, event.clientX), below = y - row * step() - BAR;
    if (!rank || at < state.from || below < 0 || below >= ONCE) return null;
    const found = rank.once.find(([, , start, end]) => start <= at && at < end);
    if (!found) return "";
    const [letter, stage, start, end] = found;
    const whose = stage === null ? `rank ${rank.rank}` : `stage ${stage}, on rank ${rank.rank}`;
    return `${data.once[letter][0]} of ${whose}, once a step\n${time(start)} to ${time(end)}, takes ${time(end - start)}`;
  };
  const tip = byId("tip");
  const hover = (view, event) => {
    const lane = onceAt(view, event), found = lane === null ? actionAt(view, event) : null;
    tip.hidden = !found && !lane;
    if (tip.hidden) return;
    tip.textContent = lane || describe(view, found[0], found[1]);
    tip.style.left = Math.max(0, Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)) + "px";
    const below = event.clientY + 18;
    tip.style.top = (below + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 10 : below) + "px";
  };
  const listen = (view) => {
    const canvas = view.canvas;
    let grip = null, moved = false;
    canvas.addEventListener("pointerdown", (event) => { grip = [event.clientX, state.from]; moved = false; });
    canvas.addEventListener("pointermove", (event) => {
      if (grip && Math.abs(event.clientX - grip[0]) > 3) {
        moved = true; tip.hidden = true;
        if (!canvas.hasPointerCapture(event.pointerId)) canvas.setPointerCapture(event.pointerId);
        const perPixel = (state.to - state.from) / (canvas.clientWidth - GUTTER);
        const from = grip[1] - (event.clientX - grip[0]) * perPixel;
        look(from, from + state.to - state.from);
      } else if (!grip) hover(view, event);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (grip && !moved) {
        const found = actionAt(view, event);
        if (found) {
          const microbatch = found[0].microbatch[found[1]];
          follow(microbatch === state.follow ? null : microbatch);
        }
      }
      grip = null;
    });
    canvas.addEventListener("pointercancel", () => { grip = null; });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        zoom(Math.exp(event.deltaY * 0.005), timeAt(view, event.clientX));
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        const by = (event.deltaX || event.deltaY) * (state.to - state.from) / canvas.clientWidth;
        look(state.from + by, state.to + by);
      }
    }, { passive: false });
  };
  const build = () => {
    for (const view of data.views) {
      const section = document.createElement("section"), title = document.createElement("h2");
      title.textContent = view.name;
      section.append(title);
      for (const line of view.head) {
        const text = document.createElement("p");
        text.textContent = line;
        section.append(text);
      }
      view.canvas = document.createElement("canvas");
      view.canvas.className = "view";
      view.canvas.setAttribute("role", "img");
      view.canvas.setAttribute("aria-label", `timeline: ${view.name}; the table below holds its figures`);
      section.append(view.canvas);
      byId("views").append(section);
      listen(view);
    }
  };
  const legend = () => {
    const list = byId("legend");
    list.textContent = "";
    const stages = Math.max(...data.views.flatMap((view) => view.ranks.map((rank) => rank.stages.length)));
    const kinds = Object.keys(NAMES).filter((kind) => data.views.some((v) => v.ranks.some((r) => r.kind.includes(kind))));
    const entries = kinds.map((kind) => [`${LETTER[kind]} ${NAMES[kind]}`, (pen) => {
      pen.fillStyle = colour(kind, 0, 0, 1); pen.fillRect(0, 0, 15, 12);
      pen.fillStyle = colour(kind, 1, 0, 1); pen.fillRect(15, 0, 15, 12);
    }]);
    entries.push(["two shades: even, odd microbatch", null]);
    if (stages > 1) entries.push(["first to last stage of a rank", (pen) => {
      for (let k = 0; k < stages; k++) { pen.fillStyle = colour(kinds[0], 0, k, stages); pen.fillRect(k * 30 / stages, 0, 30 / stages, 12); }
    }]);
    if (data.views.some((v) => v.ranks.some((r) => r.holds.length))) entries.push(["held by a send or an exchange", (pen) => hatch(pen, 0, 0, 30, 12)]);
    for (const [letter, [words, kind]] of Object.entries(data.once)) {
      if (!data.views.some((v) => v.ranks.some((r) => r.once.some(([l]) => l === letter)))) continue;
      entries.push([`${letter} ${words}, once a step`, (pen) => { pen.fillStyle = colour(kind, 1, 0, 1); pen.fillRect(0, 0, 30, 12); }]);
    }
    entries.push(["critical path", (pen) => { pen.fillStyle = colour(kinds[0] || "F", 0, 0, 1); pen.fillRect(0, 0, 30, 12); pen.fillStyle = css.ink; pen.fillRect(0, 9, 30, 3); }]);
    if (data.views.some((v) => v.ranks.some((r) => r.change.length))) {
      entries.push(["memory", (pen) => { pen.fillStyle = css.level; pen.fillRect(0, 4, 30, 8); }]);
      if (data.views.some((v) => v.ranks.some((r) => r.cap !== null))) {
        entries.push(["over 90 % of the cap (the line)", (pen) => { pen.fillStyle = css.near; pen.fillRect(0, 2, 30, 10); pen.fillStyle = css.ink; pen.fillRect(0, 0, 30, 1); }]);
        entries.push(["over the cap", (pen) => { pen.fillStyle = css.over; pen.fillRect(0, 0, 30, 12); }]);
      }
    }
    for (const [words, paint] of entries) {
      const item = document.createElement("li");
      if (paint) {
        const sample = document.createElement("canvas");
        sample.width = 60; sample.height = 24;
        const pen = sample.getContext("2d");
        pen.scale(2, 2); paint(pen);
        item.append(sample);
      }
      item.append(words);
      list.append(item);
    }
  };
  const setTheme = (theme) => {
    state.theme = theme;
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    byId("theme").textContent = "theme: " + theme;
    readTheme(); legend(); later();
  };
  const fromHash = () => {
    // #follow=3&from=NS&to=NS&theme=dark: a view to share.
    const asked = new URLSearchParams(location.hash.slice(1));
    const count = (key) => (/^\d{1,17}$/.test(asked.get(key) || "") ? Number(asked.get(key)) : null);
    if (["dark", "light"].includes(asked.get("theme"))) state.theme = asked.get("theme");
    state.follow = count("follow");
    byId("follow").value = state.follow === null ? "" : state.follow;
    const from = count("from"), to = count("to");
    if (from !== null || to !== null) {
      state.from = Math.min(from || 0, whole - 1);
      state.to = Math.min(whole, Math.max(to === null ? whole : to, state.from + 1));
    }
  };

  build();
  fromHash();
  setTheme(state.theme);
  byId("in").onclick = () => zoom(0.5);
  byId("out").onclick = () => zoom(2);
  byId("whole").onclick = () => look(0, whole);
  byId("follow").oninput = (event) => follow(event.target.value === "" ? null : Number(event.target.value));
  byId("path").onchange = (event) => { state.path = event.target.checked; later(); };
  byId("memory").onchange = (event) => { state.memory = event.target.checked; later(); };
  byId("theme").onclick = () => setTheme({ auto: "dark", dark: "light", light: "auto" }[state.theme]);
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "INPUT" && event.target.type === "number" || event.ctrlKey || event.metaKey) return;
    const by = (state.to - state.from) / 8;
    if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "0") look(0, whole);
    else if (event.key === "ArrowLeft") look(state.from - by, state.to - by);
    else if (event.key === "ArrowRight") look(state.from + by, state.to + by);
    else if (event.key === "Escape") follow(null);
  });
  window.addEventListener("resize", later);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(state.theme));
  drawAll();
  document.body.dataset.ready = "yes";
})();
