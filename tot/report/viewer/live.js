// Live searches: a list of what runs and what has run, and the tree of one of them while it grows.

const MOVE = 2000; // minimum milliseconds between moves of the view to the newest thought

class Live {
  constructor({ title }) {
    this.title = title;
    this.state = make("output", { id: "state" });
    this.stop = make("button", { id: "stop", type: "button" }, "Stop");
    byId("title").after(this.state, this.stop);
    byId("back").replaceChildren("← Searches");
    this.stop.addEventListener("click", () => {
      this.stop.disabled = true;
      const failed = () => {
        this.stop.disabled = false;
        this.state.replaceChildren("The search could not be stopped.");
      };
      fetch(`runs/${this.run}/stop`, { method: "POST" }).then((reply) => reply.ok || failed(), failed);
    });
    // A redraw would replace the element under a pressed pointer. Selects and menus keep the event of its release.
    addEventListener("pointerdown", ({ button, target }) => (this.pressed = button === 0 && !target.closest?.("select")));
    for (const end of ["pointerup", "pointercancel"]) {
      addEventListener(end, () => {
        this.pressed = false;
        this.later();
      });
    }
    for (const act of ["pointerdown", "wheel", "keydown"]) canvas.addEventListener(act, () => (this.follows = false));
    byId("measure").addEventListener("change", () => (this.coloured = true));
    addEventListener("hashchange", () => this.open());
    this.open();
  }

  /** Open the search that the URL fragment names, or the list. */
  open() {
    this.source?.close();
    this.run = /^#run-(\w+)$/.exec(location.hash)?.[1] ?? "";
    Object.assign(this, { saved: null, status: null, follows: true, coloured: false, changed: new Set() });
    reveal(...(this.run ? [] : ["overview"]));
    byId("back").hidden = !this.run;
    Object.assign(this.stop, { hidden: true, disabled: false });
    this.state.replaceChildren();
    byId("leader").hidden = true;
    name(this.title);
    this.source = new EventSource(`events?run=${this.run}`);
    const listen = (kind, act) => this.source.addEventListener(kind, ({ data }) => act(JSON.parse(data)));
    listen("tree", (patch) => this.apply(patch));
    listen("status", (status) => {
      this.status = status;
      this.later();
    });
    listen("end", (run) => {
      this.source.close();
      this.saved ??= { root: { question: this.status.question }, nodes: [{ id: 0 }] };
      this.saved.run = run;
      this.changed.add(0);
      this.later();
    });
    this.source.onerror = () => {
      const ended = this.source.readyState === EventSource.CLOSED;
      this.state.replaceChildren(ended ? "The server does not have this search any more." : "Connecting again …");
    };
  }

  /** Add a patch to the saved tree. A browser that reconnects sends the id of the last patch, and gets the next one. */
  apply({ more, root, nodes, texts, calls, links }) {
    if (root) this.saved = { root, nodes: [], texts: [], calls: {}, links: [] };
    const first = this.saved.texts.length;
    this.saved.texts.push(...texts);
    for (const [id, about] of Object.entries(calls)) {
      const renumbered = ([role, number]) => [role, first + number];
      this.saved.calls[id] = about.map((call) => ({ ...call, prompt: call.prompt.map(renumbered) }));
      this.changed.add(Number(id));
    }
    for (const fields of nodes) {
      this.saved.nodes[fields.id] = fields;
      this.changed.add(fields.id);
    }
    if (links) {
      this.saved.links = links;
      this.changed.add(0);
    }
    this.partial = more;
    this.later();
  }

  /** Draw soon, and at most a quarter of the time. */
  later() {
    if (this.waiting || this.pressed) return;
    this.waiting = setTimeout(() => {
      const began = performance.now();
      this.draw();
      this.pause = 3 * (performance.now() - began);
      this.waiting = null;
    }, this.pause ?? 0);
  }

  draw() {
    if (this.pressed) return;
    if (!this.run) {
      if (this.status) this.list(this.status);
      return;
    }
    if (this.saved && this.changed.size && !this.partial) this.grow();
    if (!this.status) return;
    const { state, line, answer } = this.status;
    byId("leader").hidden = !answer;
    byId("leader").replaceChildren(state === "running" ? "Answer so far: " : "Answer: ", make("b", {}, visible(answer ?? "")));
    this.stop.hidden = state !== "running";
    this.state.replaceChildren([state, line].filter(Boolean).map((text) => brief(text, 160)).join(" · "));
  }

  /** Draw the tree as it is now. What is expanded, selected and searched for stays. */
  grow() {
    const { changed } = this;
    this.changed = new Set();
    if (view.tree?.saved !== this.saved) {
      showTree(this.saved);
      byId("back").hidden = false;
      return;
    }
    const tree = new Tree(this.saved, view.tree);
    view.update(tree, this.coloured ? view.scale.field : tree.measures()[0]?.[1] ?? "value");
    if (this.follows && (this.saved.run || !(performance.now() - this.moved < MOVE))) {
      this.moved = performance.now();
      view.seek(this.saved.run ? tree.end : view.layout.cards.reduce((last, node) => (node.id > last.id ? node : last)));
    }
    showMeasures();
    if (search.query) {
      search.find();
      search.report();
    }
    let node = view.selected;
    while (node && !changed.has(node.id)) node = node.parent;
    if (!node || panel.element.querySelector("details[open]") || getSelection().type === "Range") return;
    const { scrollTop } = panel.element;
    view.onSelect(view.selected);
    panel.element.scrollTop = scrollTop;
  }

  list(runs) {
    const focused = document.activeElement?.getAttribute("href");
    const heads = ["", "question", "search", "progress"].map((head) => make("th", { scope: "col" }, head));
    const rows = runs.map(({ id, state, question, name, line }) => {
      const flag = make("span", { class: `flag ${state === "running" ? "chosen" : ""}` }, brief(state, 60));
      const link = make("a", { href: `#run-${id}` }, brief(question, 110) || "–");
      const cells = [flag, link, brief(name, 60), brief(line, 160)];
      return make("tr", {}, ...cells.map((cell, i) => make("td", { dir: "auto", class: i === 2 ? "nowrap" : null }, cell)));
    });
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows));
    byId("overview").replaceChildren(runs.length ? make("div", { class: "wide runs" }, table) : make("p", { class: "notice" }, "No search has run yet."));
    if (focused) byId("overview").querySelector(`a[href="${focused}"]`)?.focus();
  }
}

const live = new Live(embedded("live"));
