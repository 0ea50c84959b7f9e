// A saved tree in memory: which nodes are expanded, and their positions. Independent of the DOM.

const CARD = { width: 248, height: 88, across: 76, down: 16 };
const FIRST = 2000; // maximum number of thoughts shown at first

class Tree {
  /** `before` is an earlier state of the same tree, whose expanded nodes and positions are kept. */
  constructor(saved, before = null) {
    this.saved = saved;
    this.question = saved.root.question;
    this.nodes = saved.nodes.map((fields) => ({
      fields,
      id: fields.id,
      parent: null,
      children: [],
      depth: 0,
      text: fields.thought ? Object.values(fields.thought.parts).join("\n") : saved.root.question,
      open: false,
      ...kept(before?.nodes[fields.id]),
    }));
    for (const node of this.nodes.slice(1)) {
      node.parent = this.nodes[node.fields.parent];
      node.parent.children.push(node);
    }
    this.root = this.nodes[0];
    for (const node of this.walk((node) => node.children)) {
      if (node.parent !== null) node.depth = node.parent.depth + 1;
    }
    this.links = (saved.links ?? []).map((link) => ({ tail: this.nodes[link.parent], head: this.nodes[link.node] }));
    this.end = this.nodes.reduce((end, node) => (node.fields.chosen && node.depth >= end.depth ? node : end), this.root);
    this.openFirst(before);
  }

  /** All nodes reachable from the root, parents before children, in drawing order. */
  walk(children) {
    const order = [];
    const waiting = [this.root];
    while (waiting.length) {
      const node = waiting.pop();
      order.push(node);
      const below = children(node);
      for (let i = below.length - 1; i >= 0; i--) waiting.push(below[i]);
    }
    return order;
  }

  openFirst(before) {
    let count = 1;
    const waiting = [this.root];
    for (const node of waiting) {
      const more = node.children.length;
      const known = before?.nodes[node.id]?.children.length > 0;
      if (more === 0 || (known ? !node.open : count + more > FIRST)) continue;
      node.open = true;
      count += more;
      waiting.push(...node.children);
    }
    this.reveal(this.end);
  }

  shown(node) {
    return node.open ? node.children : [];
  }

  /** Expand the ancestors of a node. */
  reveal(node) {
    for (let child = node; child.parent !== null; child = child.parent) child.parent.open = true;
  }

  /** Set `x` and `y` of every visible node: columns by depth, leaves in rows, parents midway between their children. */
  layOut() {
    const cards = this.walk((node) => this.shown(node));
    let [rows, deepest] = [0, 0];
    for (const node of cards) {
      if (!this.shown(node).length) node.row = rows++;
      deepest = Math.max(deepest, node.depth);
    }
    for (const node of [...cards].reverse()) {
      const below = this.shown(node);
      if (below.length) node.row = (below[0].row + below[below.length - 1].row) / 2;
      node.x = node.depth * (CARD.width + CARD.across);
      node.y = node.row * (CARD.height + CARD.down);
    }
    const width = (deepest + 1) * (CARD.width + CARD.across) - CARD.across;
    return { cards, width, height: rows * (CARD.height + CARD.down) - CARD.down };
  }

  /** The calls about a node, with full prompts: each text is saved as the length shared with the previous one, and the rest. */
  calls(node) {
    const texts = (this.saved.decoded ??= []); // a live tree gets more of them
    for (const [shared, rest] of (this.saved.texts ?? []).slice(texts.length)) {
      texts.push(beginning(texts[texts.length - 1] ?? "", shared) + rest);
    }
    return (this.saved.calls?.[node.id] ?? []).map((call) => ({
      output: "",
      parts: [],
      choices: {},
      ...call,
      prompt: call.prompt.map(([role, number]) => ({ role, content: texts[number] })),
    }));
  }

  /** The measures that nodes can be coloured by, as [name, field], if some node has a finite value. */
  measures() {
    const known = [
      ["value", "value"],
      ["Q", "q"],
      ["reward", "reward"],
      ["visits", "visits"],
      ["prior", "prior"],
      ["confidence", "confidence"],
      ["fast judgement", "fast"],
      ["cost", "cost"],
      ["new tokens", "new_tokens"],
      ["seconds", "seconds"],
    ];
    return known.filter(([, field]) => this.nodes.some((node) => Number.isFinite(node.fields[field])));
  }

  /** A function from a node to its position between the minimum (0) and maximum (1) of a measure; null without a value. */
  scale(field) {
    let low = Infinity;
    let high = -Infinity;
    for (const { fields } of this.nodes) {
      if (!Number.isFinite(fields[field])) continue;
      low = Math.min(low, fields[field]);
      high = Math.max(high, fields[field]);
    }
    const of = (node) => {
      const value = node.fields[field];
      if (!Number.isFinite(value)) return null;
      return high > low ? (value - low) / (high - low) : 1;
    };
    return { field, low, high, of };
  }
}

/** The part of a node that its later states keep. */
function kept(known) {
  return known && { open: known.open, x: known.x, y: known.y };
}

/** A node's position as sibling numbers from the root, such as "0.2.1". */
function placeOf(node) {
  const numbers = [];
  for (let step = node; step !== null; step = step.parent) numbers.unshift(step.fields.index ?? 0);
  return numbers.join(".");
}

/** The first characters of a text, counted as Unicode code points, not UTF-16 units. */
function beginning(text, count) {
  return /[\ud800-\udfff]/.test(text) ? [...text].slice(0, count).join("") : text.slice(0, count);
}
