"""ThoughtTree: the tree of thoughts a search grew, on a networkx DiGraph; JSON in and out.

Where equal states are merged it is a graph of thoughts: every node keeps one parent, and `links` are the other ways in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, JsonValue

from tot.decoders.errors import TaskError
from tot.decoders.files import write_json, write_text
from tot.decoders.registry import declared
from tot.decoders.request import Usage
from tot.tree.calls import Call, calls_from_json, calls_to_json
from tot.tree.saved import FORMAT, VERSION, read_run
from tot.tree.thought import State, Thought

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_READABLE = (1, 2)
"""Version 1 had fewer fields, and no links."""


class Node(BaseModel):
    """A thought in the tree, what was learnt there and what it took. The root has no thought."""

    model_config = ConfigDict(extra="forbid")

    id: int
    parent: int | None = None
    depth: int = 0
    index: int = 0
    """Which of its siblings it is."""
    numbered: int = 0
    """How many sibling numbers its children have had, those that moved elsewhere among them."""
    thought: Thought | None = None
    world: JsonValue = None
    """The task's own state after the thought, where it has one."""
    cost: float = 0.0
    """What the path to it costs, by the task."""
    value: float | None = None
    fast: float | None = None
    """MCTS: a cheap judgement of the thought, which stands for `q` until the node is visited."""
    prior: float | None = None
    """The model's probability of this thought among its siblings."""
    confidence: float | None = None
    """The share of samples that agreed with the thought, where several were drawn."""
    reward: float | None = None
    """MCTS: value plus the task's reward, once visited."""
    visits: int = 0
    q: float | None = None
    """MCTS: the mean or the best of the rewards backed up through it."""
    terminal: bool = False
    goal: bool = False
    """A terminal state that the task takes for a solution."""
    verified: bool = False
    """A goal whose answer the task itself has checked."""
    pruned: bool = False
    chosen: bool = False
    """On the path that the answer was asked at."""
    answer: str | None = None
    """The answer of a complete state, if one was read there."""
    share: float | None = None
    """The share of all votes that this answer has."""
    decoder: str | None = None
    """What wrote the thought."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: int = 0
    """Positions of drafts at which all before had been accepted."""
    approximate_tokens: int = 0
    """Of rationales that were cut: tokens guessed and never verified, and tokens never decoded that there was room for.
    `new_tokens` are exact."""
    undecoded_tokens: int = 0
    seconds: float = 0.0
    merged: int = 0
    """Other thoughts that led to the same state, and were folded into this one."""
    rejected: int = 0
    """Thoughts after it that were not legal, or led back to where the path had been."""
    parse_failures: int = 0
    """Replies about this node that could not be read: rejected thoughts of its own making, evaluations."""

    def spend(self, usage: Usage) -> None:
        """Add what a call about this node took."""
        for name in usage.__slots__:
            if name in Node.model_fields:
                setattr(self, name, getattr(self, name) + getattr(usage, name))

    def to_json(self) -> dict[str, Any]:
        """The fields that are not as they are by default."""
        return self.model_dump(mode="json", exclude_defaults=True)


def link_to_json(tail: Node, head: Node, thought: Thought) -> dict[str, Any]:
    """Another way into `head`."""
    return {"parent": tail.id, "node": head.id, "thought": thought.model_dump(mode="json", exclude_defaults=True)}


class ThoughtTree:
    """Nodes are numbered in the order in which they were added; 0 is the root."""

    def __init__(self, root: State) -> None:
        from networkx import DiGraph  # a quarter of a second, which help and refusals do without

        self.graph = DiGraph()
        self._question = root.question
        self._before = root.thoughts
        self.calls: dict[int, list[Call]] = {}
        """By node: what was asked about it."""
        self.graph.add_node(0, node=Node(id=0, world=root.world))

    def add(self, parent: Node, thought: Thought, world: JsonValue = None, **fields: Any) -> Node:
        """A new child. `world` is where the thought leads to, in a task that has one; None stays in the parent's."""
        node = Node(
            id=len(self.graph),
            parent=parent.id,
            depth=parent.depth + 1,
            index=self._next_index(parent),
            thought=thought,
            world=parent.world if world is None else world,
            **fields,
        )
        self.graph.add_node(node.id, node=node)
        self.graph.add_edge(parent.id, node.id)
        return node

    def _next_index(self, parent: Node) -> int:
        """A sibling number that no child has had: seeds are derived from it."""
        parent.numbered += 1
        return parent.numbered - 1

    def spend(self, node: Node, usage: Usage, calls: Sequence[Call]) -> None:
        """Put what was asked about a node, and what it took, on its account."""
        node.spend(usage)
        self.asked({node.id: calls})

    def asked(self, calls: Mapping[int, Sequence[Call]]) -> None:
        """Add calls, by node."""
        for node, some in calls.items():
            if some:
                self.calls.setdefault(node, []).extend(some)

    def link(self, parent: Node, node: Node, thought: Thought) -> None:
        """Another way into `node`: `thought` after `parent` leads to an equal state."""
        if not self.graph.has_edge(parent.id, node.id):
            self.graph.add_edge(parent.id, node.id, thought=thought)

    def move(self, node: Node, parent: Node, thought: Thought) -> None:
        """Make `thought` after `parent` the way to `node`; the old way stays as a link."""
        assert node.parent is not None
        if node.parent != parent.id:
            self.graph.edges[node.parent, node.id]["thought"] = node.thought
            node.index = self._next_index(parent)
            self.graph.add_edge(parent.id, node.id)
            self.graph.edges[parent.id, node.id].pop("thought", None)
        node.parent, node.thought = parent.id, thought
        for below in self.below(node):
            if below.parent is not None:
                below.depth = self[below.parent].depth + 1

    def __len__(self) -> int:
        return len(self.graph)

    def __iter__(self) -> Iterator[Node]:
        """The nodes as they stand: another thread may add some meanwhile."""
        return iter([self.graph.nodes[i]["node"] for i in list(self.graph.nodes)])

    @property
    def root(self) -> Node:
        return self[0]

    def __getitem__(self, node_id: int) -> Node:
        node: Node = self.graph.nodes[node_id]["node"]
        return node

    def state(self, node: Node) -> State:
        """The question, the thoughts on the path to `node`, and the world there."""
        thoughts = (*self._before, *(step.thought for step in self.path(node) if step.thought is not None))
        return State.model_construct(question=self._question, thoughts=thoughts, world=node.world)

    def children(self, node: Node) -> list[Node]:
        return [self[i] for i in self.graph.successors(node.id)]

    def path(self, node: Node) -> list[Node]:
        """From the root to `node`, both included."""
        path = [node]
        while path[-1].parent is not None:
            path.append(self[path[-1].parent])
        return path[::-1]

    def place(self, node: Node) -> str:
        """Where a node stands whatever the order of growth: sibling numbers from the root, such as "0.2.1"."""
        return ".".join(str(step.index) for step in self.path(node))

    def links(self) -> list[tuple[Node, Node, Thought]]:
        """The ways into nodes other than from their parents: (from, to, thought)."""
        edges = self.graph.edges(data="thought")
        return [(self[tail], self[head], thought) for tail, head, thought in edges if thought is not None]

    def leaves(self) -> list[Node]:
        """Nodes that nothing grew from, pruned ones left out."""
        return [node for node in self if self.graph.out_degree(node.id) == 0 and not node.pruned]

    def best(self) -> Node:
        """The most valuable leaf: goals first, then other terminal states; the first of equals."""
        return max(
            self.leaves() or [self.root],
            key=lambda node: (node.goal, node.terminal, float("-inf") if node.value is None else node.value),
        )

    def prune(self, node: Node) -> None:
        """Take a node and what grew from it out of the search. They stay in the tree, marked."""
        for descendant in self.below(node):
            descendant.pruned = True

    def below(self, node: Node) -> Iterator[Node]:
        """`node` and what grew from it, as one reads a tree: each branch to its end, parents before children."""
        waiting = [node]
        while waiting:
            current = waiting.pop()
            yield current
            waiting += [child for child in reversed(self.children(current)) if child.parent == current.id]

    def choose(self, node: Node) -> None:
        """Mark the path to `node` as the chosen one."""
        for other in self:
            other.chosen = False
        for step in self.path(node):
            step.chosen = True

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "root": self.state(self.root).model_dump(mode="json"),
            "nodes": [node.to_json() for node in self],
            "links": [link_to_json(*link) for link in self.links()],
            **(calls_to_json(self.calls) if self.calls else {}),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ThoughtTree:
        """Raises TaskError for data that is not a tree, or of a version this program does not know."""
        from networkx import is_arborescence

        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise TaskError("this is not a tree of thoughts: save one with `tree.save(...)` or `tot solve --out`")
        if data.get("version") not in _READABLE:
            raise TaskError(f"trees of version {data.get('version')!r} are unknown here: this program reads {VERSION}")
        try:
            tree = cls(State.model_validate(data["root"]))
            nodes = [Node.model_validate(entry) for entry in data["nodes"]]
            for number, node in enumerate(nodes):
                rooted = number == 0
                if node.id != number or (node.parent is None) != rooted or (node.thought is None) != rooted:
                    raise ValueError(f"node {node.id} has no parent, no thought, or stands out of order")
                tree.graph.add_node(number, node=node)
            if not nodes:
                raise ValueError("there is no root")
            for node in nodes[1:]:
                if node.parent is None or node.parent not in tree.graph:
                    raise ValueError(f"node {node.id} has the parent {node.parent}, which is not there")
                parent = tree[node.parent]
                tree.graph.add_edge(parent.id, node.id)
                parent.numbered = max(parent.numbered, node.index + 1)
            if not is_arborescence(tree.graph) and len(nodes) > 1:
                raise ValueError("its parents go round in a circle")
            for link in data.get("links", []):
                tree.link(tree[link["parent"]], tree[link["node"]], Thought.model_validate(link["thought"]))
            tree.calls = calls_from_json(data.get("texts", []), data.get("calls", {}))
            if unknown := tree.calls.keys() - tree.graph.nodes:
                raise ValueError(f"calls are about node {min(unknown)}, which is not there")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise TaskError(f"the tree is damaged: {error}") from None
        return tree

    def save(self, path: str | Path) -> None:
        """Write JSON, at once or not at all: a killed process leaves the old file or the new one."""
        write_json(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> ThoughtTree:
        """Read a saved tree, the tree in a saved run, or what a trace holds of a run, finished or not."""
        return cls.from_json(read_run(path)["tree"])

    def __repr__(self) -> str:
        """The tree as text, its first thoughts of many."""
        return str(_displayed("text", self))

    def _repr_svg_(self) -> str | None:
        """A picture, for Jupyter; None where matplotlib is not installed: then the text is shown."""
        return _displayed("svg", self) if find_spec("matplotlib") else None

    def plot(self) -> Figure:
        """A picture as a matplotlib figure. Raises OptionError where matplotlib is not installed."""
        return _displayed("figure", self)  # type: ignore[no-any-return]

    def report(self, path: str | Path) -> None:
        """Write the page that `tot report` makes: one HTML file, with every prompt and reply, that needs no network.

        Raises TaskError where it can't be written.
        """
        write_text(Path(path), _displayed("page", self, {}))


def _displayed(form: str, tree: ThoughtTree, *arguments: Any) -> Any:
    """Render a tree by a function that a report declares as an entry point of the group "tot.displays"."""
    return declared("tot.displays")[form].load()(tree, *arguments)
