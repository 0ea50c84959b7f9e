// Search within thoughts: every match counted and marked, and a way from one to the next.

class Search {
  constructor(view, onFound) {
    this.view = view;
    this.onFound = onFound;
    this.query = "";
    this.found = [];
    this.at = -1;
  }

  /** Look for `query` in the texts of all thoughts, shown or not, and go to the first match. */
  run(query) {
    const { tree } = this.view;
    this.query = query.toLowerCase();
    const walk = this.query ? tree.walk((node) => node.children) : [];
    this.found = walk.filter((node) => node.text.toLowerCase().includes(this.query));
    this.at = -1;
    this.view.matches = new Set(this.found);
    this.view.forget();
    this.step(1);
  }

  step(by) {
    if (this.found.length) {
      this.at = (this.at + by + this.found.length) % this.found.length;
      this.view.reveal(this.found[this.at]);
    }
    this.onFound(this.query ? (this.found.length ? `${this.at + 1} of ${this.found.length}` : "none") : "");
  }
}
