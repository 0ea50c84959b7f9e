// The tree view: pan and zoom over cards and edges. Only visible nodes have elements, so that trees of thousands stay
// fast; when zoomed out, cards become blocks of colour, with or without numbers.

const ZOOM = { least: 0.002, numbers: 0.15, texts: 0.4, first: 0.75, most: 2.5 };

class TreeView {
  constructor(canvas, onSelect) {
    this.canvas = canvas;
    this.cards = canvas.querySelector(".cards");
    this.edges = canvas.querySelector(".edges g");
    this.onSelect = onSelect;
    this.matches = new Set();
    this.elements = new Map();
    this.at = { x: 0, y: 0, zoom: 1 };
    this.paths = {};
    for (const kind of ["plain", "pruned", "linked", "chosen"]) {
      this.paths[kind] = makeSvg("path", { class: kind });
      this.edges.append(this.paths[kind]);
    }
    this.listen();
    new ResizeObserver(() => this.later()).observe(canvas);
  }

  show(tree) {
    this.tree = tree;
    this.matches = new Set();
    this.selected = null;
    this.measure(tree.measures()[0]?.[1] ?? "value");
    this.arrange();
    this.fit();
    this.select(tree.end);
  }

  /** Show a later state of the same tree. The selection and its position in the window stay. */
  update(tree, field) {
    const [before, scale] = [this.tree, this.scale];
    this.tree = tree;
    this.selected = tree.nodes[this.selected.id];
    this.scale = tree.scale(field);
    const coloured = ["field", "low", "high"].every((part) => scale[part] === this.scale[part]);
    const looks = ({ fields, open, children }) => [fields, open, children.length > 0];
    this.arrange(this.selected, (id) => {
      const [was, is] = [looks(before.nodes[id]), looks(tree.nodes[id])];
      return !coloured || was.some((part, i) => part !== is[i]) || (is[2] && !is[1]); // a closed node counts those below
    });
  }

  measure(field) {
    this.scale = this.tree.scale(field);
    this.forget();
    if (this.selected) this.onSelect(this.selected);
  }

  /** Update the layout; `still` keeps its position in the window, and only `stale` cards are redrawn. */
  arrange(still = null, stale = () => true) {
    const before = still && this.toWindow(still);
    this.layout = this.tree.layOut();
    if (before) {
      const after = this.toWindow(still);
      this.at.x += before.x - after.x;
      this.at.y += before.y - after.y;
    }
    this.forget(stale);
  }

  /** Redraw all cards, or the ones whose ids are `stale`. */
  forget(stale = () => true) {
    for (const [id, element] of this.elements) {
      if (stale(id)) {
        element.remove();
        this.elements.delete(id);
      } else place(element, this.tree.nodes[id]);
    }
    this.later();
  }

  toWindow(node) {
    return { x: this.at.x + node.x * this.at.zoom, y: this.at.y + node.y * this.at.zoom };
  }

  // -- pan and zoom ---------------------------------------------------------------------------------------------

  move(x, y) {
    this.at.x += x;
    this.at.y += y;
    this.later();
  }

  zoom(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const zoom = Math.min(ZOOM.most, Math.max(ZOOM.least, this.at.zoom * factor));
    const ratio = zoom / this.at.zoom;
    this.at = { zoom, x: x - (x - this.at.x) * ratio, y: y - (y - this.at.y) * ratio };
    this.later();
  }

  /** Fit the whole tree if it stays readable; otherwise show its beginning. */
  fit(whole = false) {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const margin = 40;
    const zoom = Math.min(1, (width - margin) / this.layout.width, (height - margin) / this.layout.height);
    this.at.zoom = Math.max(whole ? ZOOM.least : ZOOM.first, zoom);
    const free = width - this.layout.width * this.at.zoom;
    this.at.x = Math.max(margin / 2, free / 2);
    this.at.y = (height - this.layout.height * this.at.zoom) / 2;
    if (this.layout.height * this.at.zoom > height) {
      this.at.y = height / 2 - (this.tree.root.y + CARD.height / 2) * this.at.zoom;
    }
    this.later();
  }

  /** Scroll a node into the window. */
  seek(node) {
    const margin = 24;
    const { x, y } = this.toWindow(node);
    const right = this.canvas.clientWidth - CARD.width * this.at.zoom - margin;
    const bottom = this.canvas.clientHeight - CARD.height * this.at.zoom - margin;
    const inside = (value, end) => Math.max(margin, Math.min(value, Math.max(margin, end)));
    this.move(inside(x, right) - x, inside(y, bottom) - y);
  }

  select(node) {
    const known = this.elements.get(this.selected?.id);
    known?.classList.remove("selected");
    known?.setAttribute("aria-selected", "false");
    this.selected = node;
    this.seek(node);
    this.draw();
    this.onSelect(node);
  }

  /** Expand or collapse a node. */
  toggle(node) {
    if (!node.children.length) return;
    node.open = !node.open;
    const hidden = !node.open && this.isBelow(this.selected, node);
    this.arrange(node);
    if (hidden) this.select(node);
  }

  isBelow(node, top) {
    while (node !== null && node !== top) node = node.parent;
    return node === top;
  }

  /** Select a node, expanding its ancestors. */
  reveal(node) {
    this.tree.reveal(node);
    this.arrange(this.selected);
    this.select(node);
  }

  /** The neighbour at the same depth, above (-1) or below (1). */
  neighbour(node, step) {
    const level = this.layout.cards.filter((other) => other.depth === node.depth);
    return level[level.indexOf(node) + step] ?? null;
  }

  // -- drawing --------------------------------------------------------------------------------------------------

  later() {
    if (this.waiting || !this.tree) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      this.draw();
    });
  }

  draw() {
    const { x, y, zoom } = this.at;
    const detail = zoom < ZOOM.numbers ? "blocks" : zoom < ZOOM.texts ? "numbers" : "texts";
    if (detail !== this.detail) {
      this.detail = detail;
      this.canvas.dataset.detail = detail;
      this.elements.clear();
      this.cards.replaceChildren();
    }
    this.cards.style.transform = `translate(${x}px, ${y}px) scale(${zoom})`;
    this.edges.setAttribute("transform", `translate(${x} ${y}) scale(${zoom})`);
    const margin = 80 / zoom;
    const view = {
      left: -x / zoom - margin,
      top: -y / zoom - margin,
      right: (this.canvas.clientWidth - x) / zoom + margin,
      bottom: (this.canvas.clientHeight - y) / zoom + margin,
    };
    this.drawCards(view);
    this.drawEdges(view);
  }

  drawCards(view) {
    const wanted = new Map();
    const inside = (node) =>
      node.x < view.right && node.x + CARD.width > view.left && node.y < view.bottom && node.y + CARD.height > view.top;
    for (const node of this.layout.cards) {
      if (node === this.selected || inside(node)) wanted.set(node.id, node);
    }
    for (const [id, element] of this.elements) {
      if (wanted.has(id)) continue;
      element.remove();
      this.elements.delete(id);
    }
    const fresh = document.createDocumentFragment();
    for (const [id, node] of wanted) {
      if (this.elements.has(id)) continue;
      const element = this.card(node);
      this.elements.set(id, element);
      fresh.append(element);
    }
    this.cards.append(fresh);
    const chosen = this.elements.get(this.selected?.id);
    chosen?.classList.add("selected");
    chosen?.setAttribute("aria-selected", "true");
    if (chosen) this.canvas.setAttribute("aria-activedescendant", chosen.id);
  }

  card(node) {
    const { fields } = node;
    const card = make("div", {
      id: `thought-${node.id}`,
      class: "card",
      role: "treeitem",
      "aria-level": node.depth + 1,
      "aria-selected": "false",
      "aria-expanded": node.children.length ? String(node.open) : null,
      "aria-label": `${node.parent ? `thought ${placeOf(node)}` : "question"}, value ${shortNumber(fields.value)}: ${brief(node.text, 200)}`,
    });
    card.dataset.id = node.id;
    place(card, node);
    for (const kind of ["chosen", "pruned"]) card.classList.toggle(kind, Boolean(fields[kind]));
    card.classList.toggle("root", node.parent === null);
    card.classList.toggle("match", this.matches.has(node));
    const part = this.scale.of(node);
    if (part === null) card.classList.add("unvalued");
    else card.style.setProperty("--share", `${(100 * part).toFixed(1)}%`);
    if (this.detail === "blocks") return card;
    if (this.detail === "numbers") {
      if (part !== null) card.append(make("b", {}, shortNumber(fields[this.scale.field])));
      return card;
    }
    const answer = fields.answer === undefined ? null : make("b", { class: "answer" }, brief(plainMath(fields.answer), 40), " ");
    card.append(make("p", { dir: "auto" }, answer, brief(plainMath(node.text), 150)), make("footer", {}, ...this.notes(node)));
    if (node.children.length) {
      const label = node.open ? "−" : `+${shortNumber(this.below(node))}`;
      card.append(make("span", { class: "toggle", "aria-hidden": "true" }, label));
    }
    return card;
  }

  notes(node) {
    const { fields } = node;
    const notes = [];
    if (node.parent || fields.value !== undefined) {
      notes.push(make("b", { class: "value" }, shortNumber(fields[this.scale.field] ?? null)));
    }
    if (fields.share !== undefined) notes.push(make("span", { class: "flag" }, `${share(fields.share)} of votes`));
    if (fields.verified) notes.push(make("span", { class: "flag good" }, "verified"));
    else if (fields.terminal) notes.push(make("span", { class: "flag" }, "end"));
    if (fields.pruned) notes.push(make("span", { class: "flag" }, "pruned"));
    if (fields.visits) notes.push(make("span", {}, counted(fields.visits, "visit")));
    if (fields.new_tokens) notes.push(make("span", {}, counted(fields.new_tokens, "token")));
    return notes;
  }

  /** The number of descendants of a node. */
  below(node) {
    let count = 0;
    const waiting = [node];
    while (waiting.length) {
      const { children } = waiting.pop();
      count += children.length;
      for (const child of children) waiting.push(child);
    }
    return count;
  }

  drawEdges(view) {
    const lines = { plain: [], pruned: [], linked: [], chosen: [] };
    const line = (tail, head) => {
      const [left, right] = [tail.x + CARD.width, head.x];
      const [from, to] = [tail.y + CARD.height / 2, head.y + CARD.height / 2];
      if (Math.min(left, right) > view.right || Math.max(left, right) < view.left) return "";
      if (Math.min(from, to) > view.bottom || Math.max(from, to) < view.top) return "";
      const middle = (left + right) / 2;
      return `M${left} ${from}C${middle} ${from} ${middle} ${to} ${right} ${to}`;
    };
    for (const node of this.layout.cards) {
      if (node.parent === null) continue;
      const kind = node.fields.chosen ? "chosen" : node.fields.pruned ? "pruned" : "plain";
      lines[kind].push(line(node.parent, node));
    }
    if (this.tree.links.length) {
      const open = new Set(this.layout.cards);
      for (const { tail, head } of this.tree.links) {
        if (open.has(tail) && open.has(head)) lines.linked.push(line(tail, head));
      }
    }
    for (const [kind, parts] of Object.entries(lines)) this.paths[kind].setAttribute("d", parts.join(""));
  }

  // -- pointer --------------------------------------------------------------------------------------------------

  listen() {
    const { canvas } = this;
    canvas.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        const box = canvas.getBoundingClientRect();
        const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
        this.zoom(Math.exp(-event.deltaY * lines * 0.0015), event.clientX - box.left, event.clientY - box.top);
      },
      { passive: false },
    );
    let from = null;
    const down = new Map(); // pressed pointers, by id
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      down.set(event.pointerId, { x: event.clientX, y: event.clientY });
      from = { x: event.clientX, y: event.clientY, dragged: down.size > 1 };
    });
    canvas.addEventListener("pointermove", (event) => {
      if (from === null || !(event.buttons & 1)) return;
      const before = grip(down);
      if (down.has(event.pointerId)) down.set(event.pointerId, { x: event.clientX, y: event.clientY });
      if (down.size > 1) {
        const now = grip(down);
        const box = canvas.getBoundingClientRect();
        this.move(now.x - before.x, now.y - before.y);
        if (before.span > 0) this.zoom(now.span / before.span, now.x - box.left, now.y - box.top);
        return;
      }
      const [x, y] = [event.clientX - from.x, event.clientY - from.y];
      if (!from.dragged && Math.hypot(x, y) < 4) return;
      if (!from.dragged) canvas.setPointerCapture(event.pointerId);
      from = { x: event.clientX, y: event.clientY, dragged: true };
      canvas.classList.add("dragging");
      this.move(x, y);
    });
    const lift = (event) => {
      down.delete(event.pointerId);
      canvas.classList.remove("dragging");
      const [left] = down.values();
      if (left) from = { ...left, dragged: true };
    };
    canvas.addEventListener("pointerup", lift);
    canvas.addEventListener("pointercancel", lift);
    canvas.addEventListener("click", (event) => {
      const dragged = from?.dragged;
      from = null;
      if (dragged) return;
      const card = event.target.closest(".card");
      if (!card) return;
      const node = this.tree.nodes[card.dataset.id];
      if (event.target.closest(".toggle")) this.toggle(node);
      else this.select(node);
    });
    canvas.addEventListener("dblclick", (event) => {
      const card = event.target.closest(".card");
      if (card && !event.target.closest(".toggle")) this.toggle(this.tree.nodes[card.dataset.id]);
    });
  }
}

function place(card, node) {
  card.style.transform = `translate(${node.x}px, ${node.y}px)`;
}

/** The midpoint and distance of two pointers; for one pointer, its position. */
function grip(pointers) {
  const [one, other = one] = pointers.values();
  if (!one) return null;
  return { x: (one.x + other.x) / 2, y: (one.y + other.y) / 2, span: Math.hypot(one.x - other.x, one.y - other.y) };
}
