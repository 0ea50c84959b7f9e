// Search within thoughts: count and mark the matches, and step through them.

class Search {
  constructor(view, onFound) {
    this.view = view;
    this.onFound = onFound;
    this.query = "";
    this.found = [];
    this.at = -1;
  }

  /** Search all thoughts, visible or not, for `query`, and select the first match. */
  run(query) {
    this.query = query.toLowerCase();
    this.at = -1;
    this.find();
    this.step(1);
  }

  /** Mark the matches in the current tree. */
  find() {
    const { tree } = this.view;
    const walk = this.query ? tree.walk((node) => node.children) : [];
    this.found = walk.filter((node) => node.text.toLowerCase().includes(this.query));
    this.view.matches = new Set(this.found);
    this.view.forget();
  }

  step(by) {
    if (this.found.length) {
      this.at = (this.at + by + this.found.length) % this.found.length;
      this.view.reveal(this.found[this.at]);
    }
    this.report();
  }

  report() {
    this.onFound(this.query ? (this.found.length ? `${this.at + 1} of ${this.found.length}` : "none") : "");
  }
}
