"""ThoughtTree: the tree of thoughts of a search, which can be saved as JSON.

If equal states are merged, it is a graph of thoughts: every node keeps one parent, and `links` are the other edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, JsonValue, TypeAdapter, ValidationError

from tot.decoders.errors import TaskError, readable
from tot.decoders.files import write_json, write_text
from tot.decoders.registry import declared
from tot.decoders.request import Usage
from tot.tree.calls import Call, calls_from_json, calls_to_json
from tot.tree.saved import FORMAT, VERSION, check_format, read_run
from tot.tree.thought import State, Thought

if TYPE_CHECKING:
    from matplotlib.figure import Figure

USAGE_FIELDS = (
    *("prompt_tokens", "new_tokens", "drafted", "accepted", "reached"),
    *("approximate_tokens", "undecoded_tokens", "forced_tokens", "masked_tokens", "seconds"),
)
"""The parts of a node's usage that are saved."""
_USAGE: TypeAdapter[Usage] = TypeAdapter(Usage)


class Node(BaseModel):
    """A thought in the tree, with its values and costs. The root has no thought."""

    model_config = ConfigDict(extra="forbid")

    id: int
    parent: int | None = None
    depth: int = 0
    index: int = 0
    """Number among its siblings, from 0."""
    thought: Thought | None = None
    world: JsonValue = None
    """The task's own state after the thought, if it has one."""
    cost: float = 0.0
    """The cost of the path to the node, as defined by the task."""
    value: float | None = None
    fast: float | None = None
    """MCTS: the value from the cheap evaluator, used as `q` until the node is visited."""
    prior: float | None = None
    """The model's probability of this thought among its siblings."""
    confidence: float | None = None
    """The share of samples that agreed with the thought, if several were sampled."""
    reward: float | None = None
    """MCTS: value plus the task's reward, set at the first visit."""
    visits: int = 0
    q: float | None = None
    """MCTS: the mean or the maximum of the rewards backpropagated through the node."""
    terminal: bool = False
    goal: bool = False
    """A terminal state that the task accepts as a solution."""
    verified: bool = False
    """A goal whose answer the task has verified."""
    pruned: bool = False
    chosen: bool = False
    """On the path of the answer."""
    answer: str | None = None
    """The answer read at a complete state."""
    share: float | None = None
    """The share of all votes that this answer has."""
    decoder: str | None = None
    """Name of the decoder that wrote the thought."""
    usage: Usage = Usage()
    """The usage of all calls about the node. Shared seconds of parallel samples count once."""
    merged: int = 0
    """Number of other thoughts that led to the same state and were merged into this node."""
    rejected: int = 0
    """Number of next thoughts that were not legal, or returned to an earlier state of the path."""
    parse_failures: int = 0
    """Number of replies about this node that could not be parsed: rejected next thoughts, evaluations."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, with the fields of the usage beside the others."""
        used = {name: value for name in USAGE_FIELDS if (value := getattr(self.usage, name))}
        return self.model_dump(mode="json", exclude={"usage"}, exclude_defaults=True) | used

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Node:
        """Convert the result of `to_json` back. Raises ValidationError if it is invalid."""
        usage = _USAGE.validate_python({name: value for name, value in data.items() if name in USAGE_FIELDS})
        others = {name: value for name, value in data.items() if name not in (*USAGE_FIELDS, "numbered")}
        return cls(usage=usage, **others)  # "numbered" was a field in version 0.2


def link_to_json(tail: Node, head: Node, thought: Thought) -> dict[str, Any]:
    """Return a link as JSON data: another edge to `head`."""
    return {"parent": tail.id, "node": head.id, "thought": thought.model_dump(mode="json", exclude_defaults=True)}


class ThoughtTree:
    """A tree of nodes, numbered in the order in which they were added; 0 is the root."""

    def __init__(self, root: State) -> None:
        self._nodes = [Node(id=0, world=root.world)]
        self._edges: list[dict[int, Thought | None]] = [{}]
        """By node: its children, with the thought of each link, or None if the node is their parent."""
        self.question = root.question
        self._before = root.thoughts
        self.calls: dict[int, list[Call]] = {}
        """The calls about each node."""

    def add(self, parent: Node, thought: Thought, world: JsonValue = None, **fields: Any) -> Node:
        """Add a child and return it. `world` is the world after the thought; None keeps the parent's."""
        node = Node(
            id=len(self),
            parent=parent.id,
            depth=parent.depth + 1,
            index=sum(link is None for link in self._edges[parent.id].values()),
            thought=thought,
            world=parent.world if world is None else world,
            **fields,
        )
        self._edges.append({})
        self._nodes.append(node)  # before the edge, which another thread may follow
        self._edges[parent.id][node.id] = None
        return node

    def spend(self, node: Node, usage: Usage, calls: Sequence[Call]) -> None:
        """Add the usage and the calls about a node."""
        node.usage += usage
        self.add_calls({node.id: calls})

    def add_calls(self, calls: Mapping[int, Sequence[Call]]) -> None:
        """Add calls by node."""
        for node, new_calls in calls.items():
            if new_calls:
                self.calls.setdefault(node, []).extend(new_calls)

    def link(self, parent: Node, node: Node, thought: Thought) -> None:
        """Add another edge to `node`: `thought` after `parent` leads to an equal state."""
        self._edges[parent.id].setdefault(node.id, thought)

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        """Iterate over a copy of the nodes: another thread may add nodes meanwhile."""
        return iter(list(self._nodes))

    @property
    def root(self) -> Node:
        return self[0]

    def __getitem__(self, node_id: int) -> Node:
        if not 0 <= node_id < len(self._nodes):
            raise KeyError(node_id)
        return self._nodes[node_id]

    def state(self, node: Node) -> State:
        """Return the state of a node: the question, the thoughts on its path, and its world."""
        thoughts = (*self._before, *(step.thought for step in self.path(node) if step.thought is not None))
        return State.model_construct(question=self.question, thoughts=thoughts, world=node.world)

    def children(self, node: Node) -> list[Node]:
        return [self[i] for i in list(self._edges[node.id])]

    def path(self, node: Node) -> list[Node]:
        """Return the nodes from the root to `node`, both included."""
        path = [node]
        while path[-1].parent is not None:
            path.append(self[path[-1].parent])
        return path[::-1]

    def place(self, node: Node) -> str:
        """Return a node's position, independent of the order of expansion: sibling numbers such as "0.2.1"."""
        return ".".join(str(step.index) for step in self.path(node))

    def links(self) -> list[tuple[Node, Node, Thought]]:
        """Return the edges that do not come from a node's parent, as (from, to, thought)."""
        return [
            (tail, self[head], thought)
            for tail in self
            for head, thought in list(self._edges[tail.id].items())
            if thought is not None
        ]

    def leaves(self) -> list[Node]:
        """Return the nodes without children that are not pruned."""
        return [node for node in self if not self._edges[node.id] and not node.pruned]

    def prune(self, node: Node) -> None:
        """Mark a node and its descendants as pruned. They stay in the tree."""
        for descendant in self.below(node):
            descendant.pruned = True

    def below(self, node: Node) -> Iterator[Node]:
        """Yield `node` and its descendants in depth-first preorder."""
        stack = [node]
        while stack:
            current = stack.pop()
            yield current
            stack += [child for child in reversed(self.children(current)) if child.parent == current.id]

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
        """Convert JSON data to a tree. Raises TaskError if it is not a tree or has an unknown version."""
        check_format("this", data, FORMAT)
        try:
            tree = cls(State.model_validate(data["root"]))
            nodes = [Node.from_json(entry) for entry in data["nodes"]]
            for number, node in enumerate(nodes):
                is_root = number == 0
                if node.id != number or (node.parent is None) != is_root or (node.thought is None) != is_root:
                    raise ValueError(f"node {node.id} has no parent, no thought, or is out of order")
            if not nodes:
                raise ValueError("there is no root")
            tree._nodes, tree._edges = nodes, [{} for _ in nodes]
            for node in nodes[1:]:
                if node.parent is None or not 0 <= node.parent < len(nodes):
                    raise ValueError(f"node {node.id} has the parent {node.parent}, which does not exist")
                tree._edges[node.parent][node.id] = None
            if sum(1 for _ in tree.below(tree.root)) < len(nodes):
                raise ValueError("its parents form a cycle")
            for link in data.get("links", []):
                tree.link(tree[link["parent"]], tree[link["node"]], Thought.model_validate(link["thought"]))
            tree.calls = calls_from_json(data.get("texts", []), data.get("calls", {}))
            if unknown := tree.calls.keys() - range(len(nodes)):
                raise ValueError(f"calls are about node {min(unknown)}, which does not exist")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            why = readable(error) if isinstance(error, ValidationError) else error
            raise TaskError(f"the tree is damaged: {why}") from None
        return tree

    def save(self, path: str | Path) -> None:
        """Write JSON atomically: a killed process leaves either the old or the new file."""
        write_json(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> ThoughtTree:
        """Load a saved tree, or the tree of a saved run or trace, finished or not."""
        return cls.from_json(read_run(path)["tree"])

    def __repr__(self) -> str:
        """Return the tree as text, limited to its first thoughts."""
        return str(_render("text", self))

    def _repr_svg_(self) -> str | None:
        """Return a picture for Jupyter, or None if matplotlib is not installed. Jupyter then shows the text."""
        return _render("svg", self) if find_spec("matplotlib") else None

    def plot(self) -> Figure:
        """Return a picture as a matplotlib figure. Raises OptionError if matplotlib is not installed."""
        return _render("figure", self)  # type: ignore[no-any-return]

    def report(self, path: str | Path) -> None:
        """Write the HTML report of `tot report`: one file with every prompt and reply, readable offline.

        Raises TaskError if it can't be written.
        """
        write_text(Path(path), _render("page", self, {}))


def _render(form: str, tree: ThoughtTree, *arguments: Any) -> Any:
    """Render a tree with the function registered as an entry point of the group "tot.displays"."""
    return declared("tot.displays")[form].load()(tree, *arguments)
