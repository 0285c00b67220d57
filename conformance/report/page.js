"use strict";
(() => {
  const root = document.documentElement;
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const theme = document.getElementById("theme");
  const maps = [];
  const label = () => { theme.textContent = dark() ? "Light" : "Dark"; theme.setAttribute("aria-label", "Switch to " + theme.textContent.toLowerCase() + " colours"); };
  const redraw = () => { label(); maps.forEach((map) => map.draw()); };
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  label();

  const text = (value) => value === null || value === undefined ? "not compared" : value >= 1e9 ? "∞" : value === 0 ? "0" : value < 0.001 ? value.toExponential(1) : value.toPrecision(3);

  class HeatMap {
    constructor(id) {
      this.data = JSON.parse(document.getElementById(id + "-data").textContent);
      this.box = document.querySelector(`[data-map="${id}"]`);
      this.canvas = this.box.querySelector("canvas");
      this.reading = document.querySelector(`[data-reading="${id}"]`);
      this.picker = document.querySelector(`[data-map-tap="${id}"]`);
      this.columns = Math.ceil(this.data.tokens.length / this.data.group);
      for (const name of [...Object.keys(this.data.taps), ...Object.keys(this.data.outside)]) this.picker.add(new Option(name, name));
      this.picker.addEventListener("change", () => { this.at = null; this.build(); this.draw(); });
      this.canvas.addEventListener("pointermove", (event) => this.point(event));
      this.canvas.addEventListener("pointerdown", (event) => this.point(event));
      this.canvas.addEventListener("keydown", (event) => this.key(event));
      new ResizeObserver(() => this.draw()).observe(this.box);
      this.build();
      this.draw();
    }
    build() {
      const pick = this.picker.value, all = pick === "";
      this.rows = [];
      const fill = (title, sources) => {
        const cells = Array(this.columns).fill(null), names = Array(this.columns).fill("");
        for (const [name, values] of sources) values.forEach((value, column) => {
          if (value !== null && (cells[column] === null || value > cells[column])) { cells[column] = value; names[column] = name; }
        });
        this.rows.push({ title, cells, names, empty: sources.length === 0 });
      };
      for (const [layer, kind] of this.data.layers) {
        const sources = Object.entries(this.data.taps).filter(([name, byLayer]) => (all || name === pick) && byLayer[layer]).map(([name, byLayer]) => [name, byLayer[layer]]);
        fill(`${layer}${kind ? " " + kind : ""}`, sources);
      }
      for (const [name, values] of Object.entries(this.data.outside)) if (all || name === pick) fill(name, [[name, values]]);
      if (!all && this.data.outside[pick]) this.rows = this.rows.filter((row) => !row.empty);
    }
    colour(value) {
      if (value === null) return this.palette.none;
      if (value > 1) return this.palette.x;
      const place = Math.sqrt(Math.max(value, 0)) * 8;
      const low = this.palette.ramp[Math.floor(place)], high = this.palette.ramp[Math.min(Math.floor(place) + 1, 8)], t = place - Math.floor(place);
      return `rgb(${low.map((part, i) => Math.round(part + (high[i] - part) * t)).join(",")})`;
    }
    draw() {
      const style = getComputedStyle(root), read = (name) => style.getPropertyValue(name).trim();
      const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
      this.palette = { none: read("--none"), x: read("--x"), ink: read("--ink"), muted: read("--muted"), mark: read("--x-ink"), ramp: [1, 2, 3, 4, 5, 6, 7, 8, 9].map((i) => rgb(read("--s" + i))) };
      const context = this.canvas.getContext("2d"), font = "12px " + getComputedStyle(document.body).fontFamily;
      context.font = font;
      this.gutter = Math.ceil(Math.max(...this.rows.map((row) => context.measureText(row.title).width), 30)) + 10;
      const room = Math.max(this.box.clientWidth - this.gutter, 120);
      this.cell = Math.max(3, room / this.columns);
      this.line = this.rows.length > 24 ? 14 : 20;
      const width = this.gutter + this.cell * this.columns, height = this.line * this.rows.length + 22, scale = devicePixelRatio || 1;
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.width = width + "px";
      this.canvas.style.height = height + "px";
      context.scale(scale, scale);
      context.font = font;
      context.textBaseline = "middle";
      const gap = this.cell >= 5 ? 1 : 0;
      this.rows.forEach((row, y) => {
        context.fillStyle = this.palette.muted;
        context.textAlign = "right";
        context.fillText(row.title, this.gutter - 8, (y + 0.5) * this.line);
        row.cells.forEach((value, x) => {
          const left = this.gutter + x * this.cell;
          context.fillStyle = this.colour(value);
          context.fillRect(left, y * this.line, this.cell - gap, this.line - 1);
          if (value > 1 && this.cell >= 5) { context.fillStyle = this.palette.mark; context.fillRect(left + (this.cell - gap) / 2 - 1.5, (y + 0.5) * this.line - 2, 3, 3); }
        });
      });
      context.fillStyle = this.palette.muted;
      context.textAlign = "left";
      const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((step) => step * this.cell >= 44) || 2000;
      for (let x = 0; x < this.columns; x += every) context.fillText(String(x * this.data.group), this.gutter + x * this.cell, this.line * this.rows.length + 11);
      if (this.at) { context.strokeStyle = this.palette.ink; context.lineWidth = 2; context.strokeRect(this.gutter + this.at.x * this.cell - 1, this.at.y * this.line - 1, this.cell + 1, this.line + 1); }
    }
    point(event) {
      const place = this.canvas.getBoundingClientRect();
      const x = Math.floor((event.clientX - place.left - this.gutter) / this.cell), y = Math.floor((event.clientY - place.top) / this.line);
      if (x >= 0 && x < this.columns && y >= 0 && y < this.rows.length) this.show(x, y);
    }
    key(event) {
      const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-1e6, 0], End: [1e6, 0] }[event.key];
      if (!move) return;
      event.preventDefault();
      const from = this.at || { x: 0, y: 0 };
      this.show(Math.min(Math.max(from.x + move[0], 0), this.columns - 1), Math.min(Math.max(from.y + move[1], 0), this.rows.length - 1));
    }
    show(x, y) {
      if (this.at && this.at.x === x && this.at.y === y) return;
      this.at = { x, y };
      const row = this.rows[y], first = x * this.data.group, last = Math.min(first + this.data.group, this.data.tokens.length) - 1;
      const where = y < this.data.layers.length && /^\d/.test(row.title) ? "layer " + row.title : row.title;
      const token = first === last ? `position ${first} (id ${this.data.tokens[first]})` : `positions ${first} to ${last}`;
      this.reading.textContent = `${where}, ${token}: ${text(row.cells[x])}${row.names[x] && row.names[x] !== row.title ? " at " + row.names[x] : ""}`;
      this.draw();
    }
  }
  document.querySelectorAll("[data-map]").forEach((box) => maps.push(new HeatMap(box.dataset.map)));

  const value = (row, column) => {
    const cell = row.children[column], raw = cell.dataset.value ?? cell.textContent.trim();
    const number = raw === "inf" ? Infinity : raw === "nan" ? Infinity : Number(raw);
    return raw !== "" && !Number.isNaN(number) ? number : raw;
  };
  document.querySelectorAll("table.sortable").forEach((table) => {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        [...table.tHead.rows[0].cells].forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...table.tBodies[0].rows].map((row) => [value(row, column), row]);
        rows.sort(([a], [b]) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true })) * (down ? -1 : 1));
        table.tBodies[0].append(...rows.map(([, row]) => row));
      });
    });
  });

  document.querySelectorAll("[data-filter]").forEach((input) => {
    const table = document.getElementById(input.dataset.filter), failing = document.querySelector(`[data-failing="${input.dataset.filter}"]`), count = document.querySelector(`[data-count="${input.dataset.filter}"]`), note = count.textContent;
    const apply = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of table.tBodies[0].rows) {
        const content = row.textContent.toLowerCase();
        row.hidden = (failing.checked && row.dataset.failed !== "1") || !words.every((word) => content.includes(word));
        shown += row.hidden ? 0 : 1;
      }
      count.textContent = words.length || failing.checked ? `${shown} of ${table.tBodies[0].rows.length} steps shown.` : note;
    };
    input.addEventListener("input", apply);
    failing.addEventListener("change", apply);
  });
})();
